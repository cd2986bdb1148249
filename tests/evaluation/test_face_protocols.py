"""Published protocols of FaceSim, against their procedure as insightface's networks would run it."""

import cv2
import numpy as np
import pytest
import torch
from conftest import ROOT
from insightface.model_zoo import get_model
from insightface.utils.face_align import norm_crop

from rewardfl import data
from rewardfl.evaluation import face_protocols as protocols
from rewardfl.rewards import face

pytestmark = pytest.mark.slow(5)

PACK = ROOT / "assets" / "tiny_world" / "faces" / "judge"
SIZE = 128  # the tiny world's detector was trained at
NETS = [face.FaceDetector(PACK / "detector.onnx", SIZE), face.FaceRecogniser(PACK / "recogniser.onnx")]


@pytest.fixture(scope="module")
def people():
    """Eight frames of each of two people, uint8 (8, 64, 64, 3)."""
    rows = data.load_metadata(ROOT / "assets" / "tiny_world" / "eval" / "metadata.csv")[:2]
    return [data.to_uint8(data.load_example(row, 64, 64, 9).video)[:8].numpy() for row in rows]


def beside(left, right):
    """Frames (N, 64, 128, 3); None is black: nobody."""
    nobody = np.zeros_like(left if left is not None else right)
    return np.concatenate([nobody if side is None else side for side in (left, right)], 2)


def published(image, frames, count):
    """ConsisID's get_facesim_fid.py and OpenS2V-Eval's get_facesim.py as they are described, by insightface."""
    detector, recogniser = (get_model(str(PACK / f"{name}.onnx"), providers=["CPUExecutionProvider"])
                            for name in ("detector", "recogniser"))  # fmt: skip
    detector.prepare(-1, input_size=(SIZE, SIZE), det_thresh=0.5, nms_thresh=0.4)
    recogniser.prepare(-1)

    def embedding(rgb):
        bgr = np.ascontiguousarray(rgb[..., ::-1])
        height, width = (int(side * 0.25) for side in bgr.shape[:2])
        for shown in (
            bgr,
            cv2.copyMakeBorder(bgr, height, height, width, width, cv2.BORDER_CONSTANT, value=(128,) * 3),
        ):
            boxes, landmarks = detector.detect(shown)
            if len(boxes):
                best = int(((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])).argmax())
                found = recogniser.get_feat(norm_crop(shown, landmarks[best])).ravel()
                return found / np.linalg.norm(found)
        return None

    reference, scores = embedding(image), []
    for i in np.linspace(0, len(frames) - 1, count, dtype=int):
        found = embedding(frames[i])
        if found is not None:
            scores.append(max(0.0, float(reference @ found)))
    return float(np.mean(scores)) if scores else 0.0


def ours(name, image, frames):
    (reference,) = protocols.largest_faces(data.to_float(torch.from_numpy(image[None])).transpose(0, 1), *NETS)
    return protocols.protocol_score(
        protocols.PROTOCOLS[name], data.to_float(torch.from_numpy(frames)), reference, *NETS
    )


@pytest.mark.parametrize("name,count", [("consisid", 16), ("opens2v", 32)])
def test_equals_the_published_procedure(people, name, count):
    """People seen, hidden, replaced by another, two at a time, nobody; a cosine is cut off, a hidden face left out."""
    one, other = people
    clips = {
        "seen": beside(one, None),
        "hidden": np.concatenate([beside(one[:3], None), beside(None, np.zeros_like(one[:3])), beside(one[6:], None)]),
        "replaced": beside(None, other),
        "two": beside(one, other[::-1]),
        "nobody": np.zeros((8, 64, 128, 3), np.uint8),
    }
    found = {}
    for kind, frames in clips.items():
        found[kind] = ours(name, beside(one, None)[0], frames)
        assert found[kind] == pytest.approx(published(beside(one, None)[0], frames, count), abs=0.02), kind
    assert found["nobody"] == 0 and found["seen"] > 0.6 and found["replaced"] < 0.5
    assert found["hidden"] > 0.6  # the fault that is kept: hiding costs nothing


def test_a_frame_without_a_face_is_looked_at_again_within_grey(people):
    """A detector that finds a face in larger frames alone: what it is shown, and what is then embedded."""
    landmarks = torch.tensor([[[30.0, 35.0], [50, 35], [40, 45], [32, 55], [48, 55]]])
    shown = []

    class Shy:
        def detect(self, frames):
            shown.append(frames)
            found = face.Faces(torch.tensor([[20.0, 20, 60, 60]]), torch.ones(1), landmarks)
            nothing = face.Faces(torch.zeros(0, 4), torch.zeros(0), torch.zeros(0, 5, 2))
            return [found if frames.shape[-1] > 64 else nothing for _ in frames]

    frames = data.to_float(torch.from_numpy(people[0][:2])).transpose(0, 1)
    found = protocols.largest_faces(frames, Shy(), NETS[1])
    padded = np.pad(people[0][:2], [(0, 0), (16, 16), (16, 16), (0, 0)], constant_values=128)
    assert np.array_equal(data.to_uint8(shown[1].transpose(0, 1)).numpy(), padded)
    matrix = face.similarity_transform(landmarks, face.ARCFACE_TEMPLATE)
    for frame, embedding in zip(shown[1], found, strict=True):
        assert torch.allclose(NETS[1](face.align(frame[None], matrix))[0], embedding, atol=1e-6)
