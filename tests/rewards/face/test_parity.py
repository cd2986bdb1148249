"""The start-up check against insightface, and full-size networks in the published graphs' form on its own picture."""

import shutil
import sys
from collections import Counter

import cv2
import numpy as np
import onnx
import pytest
import torch
from face_nets import SCRFD, SIZE, TiedAnchors, clip, export, magenta_pack, published_pack
from insightface.data import get_image
from insightface.model_zoo import get_model
from insightface.model_zoo.retinaface import RetinaFace
from insightface.model_zoo.scrfd import SCRFD as SCRFD_OF_INSIGHTFACE
from insightface.utils.face_align import norm_crop

from rewardfl.rewards.face import ARCFACE_TEMPLATE, FaceIdentity, FaceRecogniser, align, similarity_transform
from rewardfl.rewards.face import parity as face_parity
from rewardfl.rewards.face.pack import pack_files
from rewardfl.rewards.face.parity import FaceParityError, check, check_packs

pytestmark = pytest.mark.slow(80)

BGR = get_image("t1")  # 886 x 1280, six people
PICTURE = torch.from_numpy(BGR[..., ::-1].copy()).permute(2, 0, 1) / 127.5 - 1
CPU = ["CPUExecutionProvider"]


# ---- full size ----


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """R100 and SCRFD-10G at full size with random weights, 277 MB, for all tests of this file."""
    folder = published_pack(tmp_path_factory.mktemp("antelopev2"), PICTURE)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def identity(published):
    return FaceIdentity(published)


@pytest.mark.long
def test_the_graphs_are_those_of_the_published_files(published):
    """Counts and names as in antelopev2 (reference/rewardfl.md); parameters as published."""
    detector, recogniser = (onnx.load(file).graph for file in pack_files(published))
    counts = Counter(node.op_type for node in recogniser.node)
    assert {**counts, "Identity": 0} == {
        "Conv": 103, "PRelu": 50, "BatchNormalization": 51, "Add": 49, "Flatten": 1, "Gemm": 1, "Identity": 0,
    }  # fmt: skip
    counts = Counter(node.op_type for node in detector.node)
    wanted = {"Conv": 58, "Relu": 36, "Add": 16, "MaxPool": 1, "AveragePool": 3, "Resize": 2, "Sigmoid": 3, "Mul": 3}
    wanted |= {"Transpose": 9, "Reshape": 9}
    assert wanted.items() <= counts.items()
    assert [value.name for graph in (recogniser, detector) for value in (*graph.input, *graph.output)] == [
        *("input.1", "1333", "input.1", "448", "471", "494", "451", "474", "497", "454", "477", "500")
    ]
    axes = [[axis.dim_param or axis.dim_value for axis in g.input[0].type.tensor_type.shape.dim]
            for g in (recogniser, detector)]  # fmt: skip
    assert axes == [["None", 3, 112, 112], [1, 3, "?", "?"]]
    count = sum(parameter.numel() for parameter in SCRFD().parameters())
    assert count == pytest.approx(4.23e6, rel=0.01)


@pytest.mark.long
def test_detection_crop_and_embedding_on_insightfaces_own_picture(published, identity):
    """Every face that insightface finds, through its own classes. Measured: boxes and landmarks 2e-4 px, crops 0.22 of
    255 on average and 0.51 at most (cv2 rounds them to bytes), embeddings 1e-4 to 3e-4 from a cosine of 1, all of it
    from that rounding: random networks amplify it, and on equal crops the distance is 1e-11.
    """
    detector, recogniser = (get_model(str(file), providers=CPU) for file in pack_files(published))
    detector.prepare(-1, input_size=(640, 640), det_thresh=0.5, nms_thresh=0.4)
    boxes, landmarks = detector.detect(BGR)
    (faces,) = identity.detector.detect(PICTURE[None])
    assert 5 < len(boxes) == len(faces.boxes) < 60
    order = [np.abs(boxes[:, :4] - box.numpy()).max(1).argmin() for box in faces.boxes]
    assert sorted(order) == list(range(len(boxes)))
    assert np.abs(boxes[order, :4] - faces.boxes.numpy()).max() < 0.01  # of 1 px allowed
    assert np.abs(landmarks[order] - faces.landmarks.numpy()).max() < 0.01
    assert np.abs(boxes[order, 4] - faces.scores.numpy()).max() < 1e-5

    theirs = [norm_crop(BGR, landmarks[i]) for i in order[:4]]
    crops = align(PICTURE.expand(4, -1, -1, -1), similarity_transform(faces.landmarks[:4], ARCFACE_TEMPLATE))
    levels = (crops.flip(1).permute(0, 2, 3, 1).numpy() + 1) * 127.5
    assert np.abs(levels - np.stack(theirs)).mean() < 0.3
    assert np.abs(levels - np.stack(theirs)).max() < 2.5  # some versions of cv2 interpolate at 1/32 pixel
    expected = torch.from_numpy(recogniser.get_feat(theirs))
    with torch.no_grad():
        cosine = torch.cosine_similarity(identity.recogniser(crops), expected)
    assert cosine.min() > 0.999
    same = torch.from_numpy(np.stack(theirs)[..., ::-1].copy()).permute(0, 3, 1, 2) / 127.5 - 1
    with torch.no_grad():
        assert torch.cosine_similarity(identity.recogniser(same), expected).min() > 1 - 1e-6
    # the networks tell faces apart: a wrong crop would show
    assert torch.cosine_similarity(expected[:1], expected[1:]).max() < 0.9


# ---- the same graphs, an eighth as wide: other sizes of frames ----


@pytest.fixture(scope="module")
def narrow(tmp_path_factory):
    folder = published_pack(tmp_path_factory.mktemp("narrow"), PICTURE, scale=8, blocks=(1, 2, 2, 1), det_size=320)
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


# ---- the start-up check ----


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
    assert "box 0.000 px, landmarks 0.000 px, crop 0." in result


def test_clips_without_a_face_are_not_compared(magenta):
    assert check(magenta, VIDEO[:, :2]) == "face parity with insightface: skipped, no face was found in the clip"


def test_without_insightface_nothing_is_compared(magenta, monkeypatch):
    monkeypatch.setitem(sys.modules, "insightface.model_zoo", None)
    assert "skipped, insightface cannot be imported" in check(magenta, VIDEO)


class WrongChannels(FaceRecogniser):
    def forward(self, crops):
        return super().forward(crops.flip(1))


def test_another_embedding_is_refused(magenta, tmp_path):
    identity = FaceIdentity(magenta.files[0].parent, SIZE)
    identity.recogniser = WrongChannels(identity.files[1])
    with pytest.raises(
        FaceParityError,
        match=r"reward.x: .*cosine distance [1-9]\S*e-0[0-2], where at most 0.001 is allowed, .*rec.onnx",
    ):
        check_packs({"reward.ok": magenta, "reward.x": identity}, VIDEO)


def test_a_nan_is_refused(magenta):
    identity = FaceIdentity(magenta.files[0].parent, SIZE)
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


def test_all_packs_are_reported(magenta):
    lines = check_packs({"reward.a": magenta, "reward.b": magenta}, VIDEO)
    assert [line.split(": face parity with insightface: box")[0] for line in lines] == ["reward.a", "reward.b"]
