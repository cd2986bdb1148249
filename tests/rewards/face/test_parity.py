"""The comparison with insightface and OpenCV at the start."""

import sys

import pytest
import torch
from face_nets import SIZE, MiniArcFace, TiedAnchors, clip, export, magenta_pack, yunet_file
from insightface.model_zoo.retinaface import RetinaFace
from insightface.model_zoo.scrfd import SCRFD
from torch import nn

from rewardfl.files import sha256
from rewardfl.rewards.face import FaceIdentity, align
from rewardfl.rewards.face import pack as face_pack
from rewardfl.rewards.face import parity as face_parity
from rewardfl.rewards.face.parity import FaceParityError, check, check_packs

pytestmark = pytest.mark.slow(20)


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


def test_nothing_is_compared_without_a_face_or_insightface(magenta, monkeypatch):
    assert check(magenta, VIDEO[:, :2]) == "face parity with insightface: skipped, no face was found in the clip"
    monkeypatch.setitem(sys.modules, "insightface.model_zoo", None)
    assert "skipped, insightface cannot be imported" in check(magenta, VIDEO)


def test_a_different_embedding_is_refused(magenta):
    identity = FaceIdentity(magenta.files[0].parent, SIZE)
    forward = identity.recogniser.forward
    identity.recogniser.forward = lambda crops: forward(-crops)
    message = r"reward.x: .*cosine distance [1-9]\S*e-0[0-2], where at most 0.001 is allowed, .*rec.onnx"
    with pytest.raises(FaceParityError, match=message):
        check_packs({"reward.ok": magenta, "reward.x": identity}, VIDEO)
    identity.recogniser.forward = lambda crops: torch.full((1, 16), torch.nan)
    with pytest.raises(FaceParityError, match="cosine distance nan"):
        check(identity, VIDEO)


def test_a_face_that_insightface_does_not_find_is_refused(magenta):
    identity = FaceIdentity(magenta.files[0].parent, SIZE)
    fit = identity.detector.fit
    identity.detector.fit = lambda frames: fit(VIDEO[None, :, 2])
    with pytest.raises(FaceParityError, match=r"insightface finds no face where rewardfl finds one \(score 1\.0.*det"):
        check(identity, VIDEO[:, :2])


@pytest.mark.parametrize("nms", [SCRFD.nms, RetinaFace.nms])
def test_either_of_two_equal_scores_may_remain(nms, tmp_path, monkeypatch):
    """insightface's SCRFD keeps the first, its RetinaFace and its SCRFD before version 2 the last."""
    monkeypatch.setattr(SCRFD, "nms", nms)
    folder = magenta_pack(tmp_path)
    export(TiedAnchors(), torch.zeros(1, 3, SIZE, SIZE), folder / "det.onnx")
    assert "cosine distance" in check(FaceIdentity(folder, SIZE), VIDEO)


def test_a_score_at_the_threshold_is_not_refused(magenta):
    """Our score is just above the threshold, insightface's just below."""
    identity = FaceIdentity(magenta.files[0].parent, SIZE)
    (expected,) = identity.detector.detect(VIDEO[None, :, 2])
    fit = identity.detector.fit
    identity.detector.fit = lambda frames: (fit(frames)[0] * 1.002, 1.0)
    (faces,) = identity.detector.detect(VIDEO[None, :, 2])
    identity.detector.threshold = (faces.scores[0] + expected.scores[0]).item() / 2
    assert faces.scores[0] > identity.detector.threshold > expected.scores[0]
    assert "cosine distance" in check(identity, VIDEO)


class Normalise(nn.Module):
    """Normalise in one operation, of which insightface's rule does not know: only the hash shows SFace."""

    def forward(self, x):
        return nn.functional.batch_norm(x, torch.full((3,), 127.5), torch.full((3,), 128.0**2), eps=0.0)


@pytest.fixture(scope="module")
def opencv_pack(tmp_path_factory):
    folder = tmp_path_factory.mktemp("opencv")
    yunet_file(folder / "face_detection_yunet_2023mar.onnx")
    network = nn.Sequential(Normalise(), MiniArcFace(dimension=128))
    export(network, torch.zeros(1, 3, 112, 112), folder / "face_recognition_sface_2021dec.onnx")
    return folder


def test_yunet_and_sface_are_compared_with_opencv(opencv_pack, monkeypatch):
    assert not FaceIdentity(opencv_pack, SIZE).recogniser.wants_bytes  # by its hash it is not SFace
    monkeypatch.setattr(face_pack, "SFACE", sha256(opencv_pack / "face_recognition_sface_2021dec.onnx"))
    identity = FaceIdentity(opencv_pack, SIZE)
    assert check(identity, VIDEO).startswith("face parity with OpenCV: box and landmarks 0.0")
    identity.recogniser.wants_bytes = False
    with pytest.raises(FaceParityError, match="face parity with OpenCV"):
        check(identity, VIDEO)
