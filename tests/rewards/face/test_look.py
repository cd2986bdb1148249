"""The look of a face against OpenCV and numpy, and its fall with a blur."""

import cv2
import numpy as np
import pytest
import torch
from runs import WORLD

from rewardfl import data
from rewardfl.rewards.face import ARCFACE_TEMPLATE, FaceIdentity
from rewardfl.rewards.face.look import PATCHES, compare_look, cut_patches, mouth_movement, similarity


@pytest.fixture(scope="module")
def clip():
    """Return a real clip (3, F, H, W) and its landmarks (F, 5, 2)."""
    row = data.load_metadata(WORLD / "eval" / "metadata.csv")[0]
    video = data.load_example(row, 80, 80, 9).video
    pool = FaceIdentity(WORLD / "faces" / "judge", det_size=128).pool(video)
    return video, pool.landmarks


def test_patches_equal_opencvs(clip):
    video, landmarks = clip
    patches = cut_patches(video.transpose(0, 1), landmarks)
    grey = ((video.mean(0) + 1) * 127.5).numpy()
    for i in (0, 4, 8):
        matrix, _ = cv2.estimateAffinePartial2D(landmarks[i].numpy(), ARCFACE_TEMPLATE.numpy(), method=cv2.LMEDS)
        expected = cv2.warpAffine(grey[i], matrix, (112, 112))
        for name, (rows, columns) in PATCHES.items():
            assert np.abs(patches[name][i].numpy() - expected[rows, columns]).mean() < 4  # levels


def test_similarity_equals_the_formula():
    random = np.random.default_rng(0)
    a, b = random.uniform(0, 255, (2, 5, 6)), random.uniform(0, 255, (3, 5, 6))
    table = similarity(torch.tensor(a), torch.tensor(b))
    for i, first in enumerate(a):
        for j, second in enumerate(b):
            covariance = np.mean((first - first.mean()) * (second - second.mean()))
            assert table[i, j] == pytest.approx(2 * covariance / (first.var() + second.var()), abs=1e-5)
    assert torch.allclose(similarity(torch.tensor(a), torch.tensor(a) + 20).diagonal(), torch.ones(2))


def test_a_mouth_moves_as_far_as_brightness_returns():
    patches = torch.full((4, 30, 52), 200, dtype=torch.uint8)
    for levels, moves in (([200, 120, 120, 180], 60), ([100, 140, 140, 60], 40), ([200, 90, 80, 70], 0)):
        patches[:, :, 17:34] = torch.tensor(levels, dtype=torch.uint8)[:, None, None]
        assert mouth_movement(patches) == mouth_movement(patches // 2) == pytest.approx(moves / 200)


def test_a_real_frame_scores_1_and_a_blur_less(clip):
    video, landmarks = clip
    pictures = video.permute(1, 2, 3, 0).numpy()
    blurs = [np.stack([cv2.GaussianBlur(picture, (w, w), 0) for picture in pictures]) for w in (1, 3, 7, 11)]
    patches = [cut_patches(torch.from_numpy(blur).permute(0, 3, 1, 2), landmarks) for blur in blurs]
    looks = [compare_look(blurred, patches[0]) for blurred in patches]
    assert looks[0] == pytest.approx(1) and looks[0] > looks[1] > looks[2] > looks[3] > 0


def test_the_first_half_is_ignored(clip):
    video, landmarks = clip
    real = cut_patches(video.transpose(0, 1), landmarks)
    generated = {name: torch.cat([torch.zeros_like(patches[:4]), patches[4:]]) for name, patches in real.items()}
    assert compare_look(generated, real) == pytest.approx(1)
