"""A pack of YuNet and SFace, held against OpenCV's own FaceDetectorYN and FaceRecognizerSF on the same files."""

import cv2
import numpy as np
import pytest
import torch
from face_nets import MiniArcFace, export, yunet_file
from insightface.data import get_image
from torch import nn

from rewardfl.files import sha256
from rewardfl.rewards.face import FaceDetector, FaceIdentity
from rewardfl.rewards.face import pack as pack_of_files
from rewardfl.rewards.face import parity as face_parity
from rewardfl.rewards.face.pack import pack_files

SIZE = 256
BGR = cv2.resize(get_image("t1"), (SIZE, 160))  # six people; wider than high, so that the detector pads
PICTURE = torch.from_numpy(BGR[..., ::-1].copy()).permute(2, 0, 1) / 127.5 - 1


def fitted():
    return cv2.copyMakeBorder(BGR, 0, SIZE - 160, 0, 0, cv2.BORDER_CONSTANT, value=0)


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    folder = tmp_path_factory.mktemp("opencv")
    torch.manual_seed(0)
    levels = torch.from_numpy(fitted()[..., ::-1].copy()).permute(2, 0, 1)[None].float()
    yunet_file(folder / "face_detection_yunet_2023mar.onnx", levels)
    inside = nn.Sequential(Normalise(), MiniArcFace(dimension=128))
    export(inside, torch.zeros(1, 3, 112, 112), folder / "face_recognition_sface_2021dec.onnx")
    return folder


class Normalise(nn.Module):
    """In one operation that insightface's rule does not know: what tells SFace is its hash."""

    def forward(self, x):
        return nn.functional.batch_norm(x, torch.full((3,), 127.5), torch.full((3,), 128.0**2), eps=0.0)


@pytest.fixture
def published(pack, monkeypatch):
    """The pack, its recogniser taken for the published one."""
    monkeypatch.setattr(pack_of_files, "SFACE", sha256(pack_files(pack)[1]))
    return pack


def found_by_opencv(pack, threshold=0.9):
    theirs = cv2.FaceDetectorYN.create(str(pack_files(pack)[0]), "", (SIZE, SIZE), threshold, 0.3)
    _, rows = theirs.detect(fitted())
    rows = rows[(-rows[:, 2] * rows[:, 3]).argsort()]  # the largest first
    corners = np.concatenate([rows[:, :2], rows[:, :2] + rows[:, 2:4]], 1)
    return corners, rows[:, 4:14].reshape(-1, 5, 2), rows[:, 14]


def test_faces_are_those_of_opencv(pack):
    boxes, landmarks, scores = found_by_opencv(pack)
    (faces,) = FaceDetector(pack_files(pack)[0], SIZE).detect(PICTURE[None])
    assert len(faces.scores) == len(scores) >= 3
    assert faces.boxes.numpy() == pytest.approx(boxes, abs=2e-3)
    assert faces.landmarks.numpy() == pytest.approx(landmarks, abs=2e-3)
    assert faces.scores.numpy() == pytest.approx(scores, abs=1e-5)


def test_the_gradient_of_a_landmark_is_the_networks(pack):
    detector = FaceDetector(pack_files(pack)[0], SIZE)
    frame = (((PICTURE[None] + 1) * 127.5).round() / 127.5 - 1).requires_grad_()
    (faces,) = detector.trace(frame, 1)
    (gradient,) = torch.autograd.grad(faces.landmarks[faces.scores.argmax(), 2, 0], frame)
    levels = nn.functional.pad((PICTURE[None] + 1) * 127.5, (0, 0, 0, SIZE - 160)).round().flip(1).requires_grad_()
    outputs = dict(zip(detector.net.output_names, detector.net(levels), strict=True))
    scores = {stride: (outputs[f"cls_{stride}"] * outputs[f"obj_{stride}"]).flatten() for stride in (8, 16, 32)}
    stride = max(scores, key=lambda stride: scores[stride].max())
    nose = outputs[f"kps_{stride}"].view(-1, 5, 2)[scores[stride].argmax(), 2, 0] * stride
    (theirs,) = torch.autograd.grad(nose, levels)
    wanted = 127.5 * theirs.flip(1)[:, :, :160]
    assert wanted.abs().max() > 0 and gradient.numpy() == pytest.approx(wanted.numpy(), rel=1e-3, abs=1e-5)


def test_the_start_up_check_compares_with_opencv(published):
    identity = FaceIdentity(published, SIZE)
    parity = face_parity.check(identity, PICTURE[:, None])
    assert parity.startswith("face parity with OpenCV: box and landmarks 0.0")
    identity.recogniser.wants_bytes = False
    with pytest.raises(face_parity.FaceParityError, match="face parity with OpenCV"):
        face_parity.check(identity, PICTURE[:, None])


def test_another_recogniser_beside_it_is_insightfaces(pack):
    """Such as AuraFace's: where the hash is not SFace's, insightface's rule decides, and insightface is asked."""
    identity = FaceIdentity(pack, SIZE)
    assert not identity.recogniser.wants_bytes
    assert "cosine distance" in face_parity.check(identity, PICTURE[:, None])
