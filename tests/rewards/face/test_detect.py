"""The detector against insightface and OpenCV on the same files."""

import functools

import cv2
import numpy as np
import pytest
import torch
from face_nets import SIZE, MiniArcFace, MiniSCRFD, TiedAnchors, bgr, clip, export, picture, tensor, yunet_file
from insightface.model_zoo import get_model

from rewardfl.rewards.face import FaceDetector, FaceRecogniser


@functools.lru_cache(maxsize=1)
def insightface_detector(path, size):
    detector = get_model(str(path), providers=["CPUExecutionProvider"])
    detector.prepare(-1, input_size=(size, size), det_thresh=0.5, nms_thresh=0.4)
    return detector


def assert_insightfaces(faces, path, image, size):
    """Compare with insightface's detections in any order, for equal scores and areas have none."""
    boxes, landmarks = insightface_detector(path, size).detect(bgr(image))
    rows = torch.cat([faces.boxes, faces.scores[:, None], faces.landmarks.flatten(1)], 1)
    expected = torch.cat([torch.from_numpy(array).flatten(1) for array in (boxes, landmarks)], 1)
    assert rows.shape == expected.shape and len(rows) > 0
    difference = (rows[:, None] - expected).abs().amax(-1)
    # 1e-3 px: float32 sums in another order, over boxes of up to 96 pixels
    assert difference.amin(0).max() < 1e-3 and difference.amin(1).max() < 1e-3


@pytest.fixture(scope="module")
def scrfd(tmp_path_factory):
    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("scrfd") / "scrfd.onnx"
    return export(MiniSCRFD(), torch.randn(1, 3, 64, 64), path, dynamic={"x": {2: "h", 3: "w"}})


@pytest.mark.parametrize("height,width", [(72, 96), (96, 40)])
def test_detections_equal_insightface(scrfd, height, width):
    image = picture(height, width, seed=height)
    (faces,) = FaceDetector(scrfd, 96).detect(tensor(image))
    assert 3 < len(faces.boxes) < 300
    assert_insightfaces(faces, scrfd, image, 96)


@pytest.mark.parametrize("height,width", [(150, 200), (200, 120), (40, 56)])
def test_the_networks_input_equals_insightfaces(scrfd, height, width):
    image = picture(height, width)
    (levels,), scale = FaceDetector(scrfd, 96).fit(tensor(image))
    canvas = np.zeros((96, 96, 3), np.uint8)
    h, w = (int(side * 96 / max(height, width)) for side in (height, width))
    assert scale == h / height
    canvas[:h, :w] = cv2.resize(bgr(image), (w, h))
    expected = cv2.dnn.blobFromImage(canvas, 1 / 128, (96, 96), (127.5, 127.5, 127.5), swapRB=True)[0]
    assert np.abs(levels.numpy() - expected).max() < 1e-6  # to the bit; one level is 1/128


@pytest.mark.parametrize("batched,dynamic", [(False, None), (True, {"x": {0: "n", 2: "h", 3: "w"}})])
def test_frames_are_detected_together_as_one_by_one(batched, dynamic, tmp_path):
    torch.manual_seed(3)
    path = export(MiniSCRFD(batched=batched), torch.randn(1, 3, 96, 96), tmp_path / "scrfd.onnx", dynamic=dynamic)
    images = [picture(96, 96, seed) for seed in range(FaceDetector.CHUNK + 1)]
    for image, faces in zip(images, FaceDetector(path, 96).detect(tensor(*images)), strict=True):
        assert_insightfaces(faces, path, image, 96)


def test_the_first_of_equal_scores_remains_as_in_insightface(tmp_path):
    path, image = export(TiedAnchors(), torch.zeros(1, 3, SIZE, SIZE), tmp_path / "tied.onnx"), picture(SIZE, SIZE)
    assert_insightfaces(FaceDetector(path, SIZE).detect(tensor(image))[0], path, image, SIZE)


def test_yunets_faces_equal_opencvs(tmp_path):
    path, frame = yunet_file(tmp_path / "yunet.onnx"), clip([(2, 2)])[:, 0, :48]
    for top, left, colour in ((16, 24, (1.0, -0.95, 1.0)), (40, 48, (1.0, -1.0, 0.6))):  # the first overlaps the clip's
        frame[:, top : top + 8, left : left + 8] = torch.tensor(colour).view(3, 1, 1)
    image = ((frame + 1) * 127.5).round().byte().permute(1, 2, 0).numpy()
    fitted = cv2.copyMakeBorder(bgr(image), 0, SIZE - 48, 0, 0, cv2.BORDER_CONSTANT, value=0)
    _, rows = cv2.FaceDetectorYN.create(str(path), "", (SIZE, SIZE), 0.9, 0.3).detect(fitted)
    rows = rows[(-rows[:, 2] * rows[:, 3]).argsort()]  # the largest first
    (faces,) = FaceDetector(path, SIZE).detect(frame[None])
    assert len(faces.scores) == len(rows) == 2
    corners = np.concatenate([rows[:, :2], rows[:, :2] + rows[:, 2:4]], 1)
    assert faces.boxes.numpy() == pytest.approx(corners, abs=2e-3)
    assert faces.landmarks.flatten(1).numpy() == pytest.approx(rows[:, 4:14], abs=2e-3)
    assert faces.scores.numpy() == pytest.approx(rows[:, 14], abs=1e-5)


def test_a_network_or_size_that_does_not_fit_is_refused(tmp_path):
    fixed = export(MiniSCRFD(), torch.randn(1, 3, 64, 64), tmp_path / "fixed.onnx")
    big = export(MiniArcFace(128), torch.randn(1, 3, 128, 128), tmp_path / "big.onnx")
    for network, arguments, message in (
        (FaceDetector, (fixed,), r"fixed.onnx only takes \[64, 64\] pixels, det_size is 640; set det_size=64"),
        (FaceDetector, (big,), "big.onnx has 1 outputs"),
        (FaceRecogniser, (big,), r"big.onnx takes \[128, 128\] pixels"),
    ):
        with pytest.raises(ValueError, match=message):
            network(*arguments)
