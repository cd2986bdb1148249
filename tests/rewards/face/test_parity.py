"""The start-up check against insightface, and networks in the published graphs' form on its own picture."""

import sys

import cv2
import numpy as np
import pytest
import torch
from face_nets import SIZE, TiedAnchors, clip, export, magenta_pack, published_pack
from insightface.data import get_image
from insightface.model_zoo import get_model
from insightface.model_zoo.retinaface import RetinaFace
from insightface.model_zoo.scrfd import SCRFD as SCRFD_OF_INSIGHTFACE

from rewardfl.rewards.face import FaceIdentity, FaceRecogniser, align
from rewardfl.rewards.face import parity as face_parity
from rewardfl.rewards.face.parity import FaceParityError, check, check_packs

pytestmark = pytest.mark.slow(20)

BGR = get_image("t1")  # 886 x 1280, six people
PICTURE = torch.from_numpy(BGR[..., ::-1].copy()).permute(2, 0, 1) / 127.5 - 1
CPU = ["CPUExecutionProvider"]


@pytest.fixture(scope="module")
def narrow(tmp_path_factory):
    folder = published_pack(tmp_path_factory.mktemp("narrow"), PICTURE, det_size=320)
    return FaceIdentity(folder, det_size=320)


@pytest.mark.parametrize("height,width", [(480, 832), (720, 404), (300, 300)])
def test_other_frames(narrow, height, width):
    bgr = cv2.resize(BGR, (width, height))
    frame = torch.from_numpy(bgr[..., ::-1].copy()).permute(2, 0, 1) / 127.5 - 1
    detector = get_model(str(narrow.files[0]), providers=CPU)
    detector.prepare(-1, input_size=(320, 320), det_thresh=0.5, nms_thresh=0.4)
    boxes, landmarks = detector.detect(bgr)
    (faces,) = narrow.detector.detect(frame[None])
    assert 1 < len(boxes) == len(faces.boxes)
    for box, points in zip(faces.boxes.numpy(), faces.landmarks.numpy(), strict=True):
        i = np.abs(boxes[:, :4] - box).max(1).argmin()
        assert np.abs(boxes[i, :4] - box).max() < 0.01 and np.abs(landmarks[i] - points).max() < 0.01
    assert "cosine distance" in check(narrow, frame[:, None])


@pytest.fixture(scope="module")
def magenta(tmp_path_factory):
    return FaceIdentity(magenta_pack(tmp_path_factory.mktemp("pack")), SIZE)


VIDEO = clip([None, None, (2, 2), (4, 4)], seed=1)


def test_the_first_frame_with_a_face_is_taken(magenta, monkeypatch):
    seen = []
    monkeypatch.setattr(face_parity, "align", lambda frame, matrices: seen.append(frame) or align(frame, matrices))
    result = check(magenta, VIDEO)
    torch.testing.assert_close(seen[0], VIDEO[None, :, 2], atol=0.5 / 127.5 + 1e-6, rtol=0)
    levels = (seen[0] + 1) * 127.5
    torch.testing.assert_close(levels, levels.round(), atol=1e-3, rtol=0)  # as the bytes that insightface gets
    assert "box and landmarks 0.000 px, cosine distance" in result


def test_clips_without_a_face_are_not_compared(magenta):
    for video in (VIDEO[:, :2], VIDEO[:, :0]):
        assert check(magenta, video) == "face parity with insightface: skipped, no face was found in the clip"


def test_without_insightface_nothing_is_compared(magenta, monkeypatch):
    monkeypatch.setitem(sys.modules, "insightface.model_zoo", None)
    assert "skipped, insightface cannot be imported" in check(magenta, VIDEO)


class WrongRange(FaceRecogniser):
    def forward(self, crops):
        return super().forward(-crops)


def test_another_embedding_is_refused(magenta, tmp_path):
    identity = FaceIdentity(magenta.files[0].parent, SIZE)
    identity.recogniser = WrongRange(identity.files[1])
    with pytest.raises(
        FaceParityError,
        match=r"reward.x: .*cosine distance [1-9]\S*e-0[0-2], where at most 0.001 is allowed, .*rec.onnx",
    ):
        check_packs({"reward.ok": magenta, "reward.x": identity}, VIDEO)
    identity.recogniser.forward = lambda crops: torch.full((1, 16), torch.nan)
    with pytest.raises(FaceParityError, match="cosine distance nan"):
        check(identity, VIDEO)


def test_a_face_that_insightface_does_not_see_is_refused(magenta):
    identity = FaceIdentity(magenta.files[0].parent, SIZE)
    fit = identity.detector.fit
    identity.detector.fit = lambda frames: fit(VIDEO[None, :, 2])
    with pytest.raises(FaceParityError, match=r"insightface finds no face where rewardfl finds one \(score 1\.0.*det"):
        check(identity, VIDEO[:, :2])


@pytest.mark.parametrize("nms", [SCRFD_OF_INSIGHTFACE.nms, RetinaFace.nms])
def test_of_equal_scores_either_may_be_kept(nms, tmp_path, monkeypatch):
    """The first is kept by insightface's SCRFD, the last by its RetinaFace and by its SCRFD before version 2."""
    monkeypatch.setattr(SCRFD_OF_INSIGHTFACE, "nms", nms)
    folder = magenta_pack(tmp_path)
    export(TiedAnchors(), torch.zeros(1, 3, SIZE, SIZE), folder / "det.onnx")
    assert "cosine distance" in check(FaceIdentity(folder, SIZE), VIDEO)


def test_a_face_at_the_threshold_does_not_decide(magenta):
    """Ours sees it just above the threshold, insightface just below."""
    identity = FaceIdentity(magenta.files[0].parent, SIZE)
    (theirs,) = identity.detector.detect(VIDEO[None, :, 2])
    fit = identity.detector.fit
    identity.detector.fit = lambda frames: (fit(frames)[0] * 1.002, 1.0)
    (ours,) = identity.detector.detect(VIDEO[None, :, 2])
    identity.detector.threshold = (ours.scores[0] + theirs.scores[0]).item() / 2
    assert ours.scores[0] > identity.detector.threshold > theirs.scores[0]
    assert "cosine distance" in check(identity, VIDEO)
