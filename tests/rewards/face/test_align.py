"""Alignment of faces against insightface's."""

import numpy as np
import pytest
import torch
from face_nets import picture, placed, tensor
from insightface.utils.face_align import arcface_dst, norm_crop

from rewardfl.rewards.face import ARCFACE_TEMPLATE, align, similarity_transform


def test_the_template_equals_insightfaces():
    np.testing.assert_array_equal(ARCFACE_TEMPLATE.numpy(), arcface_dst)


def test_landmarks_on_one_spot_stay_finite():
    matrices = similarity_transform(torch.full((1, 5, 2), 7.0), ARCFACE_TEMPLATE)
    assert matrices.isfinite().all() and align(torch.zeros(1, 3, 32, 32), matrices).isfinite().all()


PLACES = {
    "large": placed(0.7, 0.1, 56, 48),
    "small": placed(0.3, -0.4, 70, 40),
    "upside down": placed(0.5, 3.0, 60, 48),
    "half outside": placed(0.8, 0.2, 5, 90),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("height,width", [(96, 128), (100, 101)])
def test_the_crop_equals_insightfaces(place, height, width):
    image, landmarks = picture(height, width), PLACES[place]
    expected = norm_crop(image, landmarks.numpy())
    crop = align(tensor(image), similarity_transform(landmarks[None], ARCFACE_TEMPLATE))[0]
    crop = (crop.permute(1, 2, 0) + 1) * 127.5
    # cv2 rounds to uint8 (0.5) and interpolates at 1/32 pixel; a shift of half a pixel gives about 10
    assert np.abs(crop.numpy() - expected.astype(np.float32)).max() < 2.5
    assert (expected.min() == 0) == (place == "half outside")
