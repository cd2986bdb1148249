"""The face pipeline against insightface, cv2 and skimage, stage by stage and whole; tracking; packs."""

import functools

import cv2
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from face_nets import SIZE, MiniArcFace, MiniSCRFD, TiedAnchors, clip, export, magenta_pack
from insightface.app import FaceAnalysis
from insightface.model_zoo import get_model
from insightface.utils.face_align import arcface_dst, norm_crop
from skimage.transform import SimilarityTransform
from test_onnx_module import node, write

from rewardfl.rewards.face import (
    ARCFACE_TEMPLATE,
    FaceDetector,
    FaceIdentity,
    FaceRecogniser,
    Faces,
    align,
    similarity_transform,
    track_largest,
)
from rewardfl.rewards.face.identity import self_similarity
from rewardfl.rewards.face.track import Track

CPU = ["CPUExecutionProvider"]


def picture(height, width, seed=0, rough=12):
    """(H, W, 3) uint8 RGB, nowhere black, with detail of about `rough` pixels in three different channels."""
    noise = torch.rand(1, 3, height // rough + 2, width // rough + 2, generator=torch.Generator().manual_seed(seed))
    smooth = F.interpolate(noise, (height, width), mode="bicubic").clamp(0, 1)
    return (40 + smooth[0] * 215).byte().permute(1, 2, 0).numpy()


def tensor(*pictures):
    """uint8 (H, W, 3) RGB pictures -> (N, 3, H, W) in [-1, 1]."""
    return torch.stack([torch.from_numpy(p.copy()).permute(2, 0, 1) for p in pictures]) / 127.5 - 1


def bgr(picture):
    return np.ascontiguousarray(picture[..., ::-1])


def placed(scale, angle, x, y):
    """The template's landmarks shrunk, rotated and moved: (5, 2) in frame pixels."""
    cos, sin = scale * np.cos(angle), scale * np.sin(angle)
    rotation = torch.tensor([[cos, -sin], [sin, cos]], dtype=torch.float32)
    return (ARCFACE_TEMPLATE - 56) @ rotation.T + torch.tensor([x, y])


@functools.lru_cache(maxsize=1)
def insightface_detector(path, size):
    detector = get_model(str(path), providers=CPU)
    detector.prepare(-1, input_size=(size, size), det_thresh=0.5, nms_thresh=0.4)
    return detector


def found_by_insightface(path, image, size):
    boxes, landmarks = insightface_detector(path, size).detect(bgr(image))
    return boxes, landmarks


def assert_same_faces(faces, boxes, scores, landmarks, tolerance):
    """The same detections in any order, for equal scores and areas have none."""
    ours = torch.cat([faces.boxes, faces.scores[:, None], faces.landmarks.flatten(1)], 1)
    theirs = torch.cat([torch.as_tensor(a).reshape(len(boxes), -1) for a in (boxes, scores, landmarks)], 1)
    assert ours.shape == theirs.shape and len(ours) > 0
    apart = (ours[:, None] - theirs).abs().amax(-1)
    assert apart.amin(0).max() < tolerance and apart.amin(1).max() < tolerance


@pytest.fixture(scope="module")
def scrfd(tmp_path_factory):
    torch.manual_seed(3)
    path = tmp_path_factory.mktemp("scrfd") / "scrfd.onnx"
    return export(MiniSCRFD(), torch.randn(1, 3, 64, 64), path, dynamic={"x": {2: "h", 3: "w"}})


@pytest.mark.parametrize("height,width", [(96, 96), (72, 96), (96, 40)])
def test_detections_equal_insightface(scrfd, height, width):
    image = picture(height, width, seed=height)
    boxes, landmarks = found_by_insightface(scrfd, image, 96)
    (faces,) = FaceDetector(scrfd, 96).detect(tensor(image))
    assert 3 < len(boxes) < 300
    # 1e-3 px: float32 sums in another order, over boxes of up to 96 pixels
    assert_same_faces(faces, boxes[:, :4], boxes[:, 4], landmarks, 1e-3)


@pytest.mark.parametrize("height,width", [(150, 200), (200, 120), (40, 56), (192, 192), (96, 70), (64, 64)])
def test_the_detector_sees_what_insightfaces_sees(scrfd, height, width):
    image = picture(height, width)
    (seen,), scale = FaceDetector(scrfd, 96).fit(tensor(image))
    canvas = np.zeros((96, 96, 3), np.uint8)
    h, w = (int(side * 96 / max(height, width)) for side in (height, width))
    assert scale == h / height
    canvas[:h, :w] = cv2.resize(bgr(image), (w, h))
    expected = cv2.dnn.blobFromImage(canvas, 1 / 128, (96, 96), (127.5, 127.5, 127.5), swapRB=True)[0]
    assert np.abs(seen.numpy() - expected).max() < 1e-6  # to the bit; one level is 1/128


@pytest.mark.parametrize("dynamic", [None, {"x": {0: "n", 2: "h", 3: "w"}}], ids=["fixed", "any size and batch"])
@pytest.mark.parametrize("batched", [False, True])
def test_frames_are_detected_together_as_one_by_one(batched, dynamic, tmp_path):
    torch.manual_seed(3)
    net = MiniSCRFD(batched=batched)
    path = export(net, torch.randn(1, 3, 96, 96), tmp_path / "scrfd.onnx", dynamic=dynamic)
    images = [picture(96, 96, seed) for seed in range(FaceDetector.CHUNK + 1)]
    detector = FaceDetector(path, 96)
    together = detector.detect(tensor(*images))
    for image, faces in zip(images, together, strict=True):
        boxes, landmarks = found_by_insightface(path, image, 96)
        assert_same_faces(faces, boxes[:, :4], boxes[:, 4], landmarks, 1e-3)
    (alone,) = detector.detect(tensor(images[-1]))
    assert_same_faces(together[-1], alone.boxes, alone.scores, alone.landmarks, 1e-3)


def test_nothing_found(scrfd):
    detector = FaceDetector(scrfd, 96)
    detector.threshold = 1.1
    (faces,) = detector.detect(tensor(picture(96, 96)))
    assert faces.boxes.shape == (0, 4) and faces.scores.shape == (0,) and faces.landmarks.shape == (0, 5, 2)


def test_of_equal_scores_the_same_is_kept_as_by_insightface(tmp_path):
    path = export(TiedAnchors(), torch.zeros(1, 3, SIZE, SIZE), tmp_path / "tied.onnx")
    image = picture(SIZE, SIZE)
    boxes, landmarks = found_by_insightface(path, image, SIZE)
    (faces,) = FaceDetector(path, SIZE).detect(tensor(image))
    assert_same_faces(faces, boxes[:, :4], boxes[:, 4], landmarks, 1e-3)


def test_networks_that_do_not_fit_are_refused(scrfd, tmp_path):
    for det_size in (0, 100, -32):
        with pytest.raises(ValueError, match=f"multiple of 32, the coarsest stride, got {det_size}"):
            FaceDetector(scrfd, det_size)
    fixed = export(MiniSCRFD(), torch.randn(1, 3, 64, 64), tmp_path / "fixed.onnx")
    with pytest.raises(ValueError, match=r"fixed.onnx only takes \[64, 64\] pixels, det_size is 640; set det_size=64"):
        FaceDetector(fixed)
    big = export(MiniArcFace(128), torch.randn(1, 3, 128, 128), tmp_path / "big.onnx")
    with pytest.raises(ValueError, match="big.onnx has 1 outputs"):
        FaceDetector(big)
    with pytest.raises(ValueError, match=r"big.onnx takes \[128, 128\] pixels"):
        FaceRecogniser(big)


def faces_at(*boxes):
    """Faces at (centre x, centre y, width), in the order given; landmarks carry the centre."""
    rows = torch.tensor(boxes, dtype=torch.float32).view(-1, 3)
    centre, half = rows[:, :2], rows[:, 2:] / 2
    return Faces(torch.cat([centre - half, centre + half], 1), torch.ones(len(rows)), centre[:, None].repeat(1, 5, 1))


def centres(track):
    return track.landmarks[:, 0].tolist()


def test_the_track_does_not_hop_to_a_larger_stranger():
    frames = [
        faces_at((50, 50, 40), (150, 50, 20)),
        faces_at((150, 50, 80), (55, 50, 40)),
        faces_at((150, 50, 90)),  # the face is hidden, the stranger is there
        faces_at((150, 50, 90), (58, 52, 38)),
    ]
    track = track_largest(frames)
    assert track.detected.tolist() == [True, True, False, True]
    assert centres(track) == [[50, 50], [55, 50], [55, 50], [58, 52]]
    assert track.width.tolist() == [40, 40, 40, 38]


def test_the_track_starts_at_the_largest_face_of_the_first_frame_with_one():
    track = track_largest([faces_at(), faces_at(), faces_at((80, 20, 30), (20, 20, 10)), faces_at()])
    assert track.detected.tolist() == [False, False, True, False]
    assert centres(track) == [[80, 20]] * 4 and track.width.tolist() == [30] * 4
    assert track_largest([faces_at(), faces_at()]) is None


@pytest.mark.parametrize(
    "candidates,chosen",
    [
        ([(70, 50, 40), (54, 50, 40)], (54, 50)),  # more overlap
        ([(50, 50, 21), (56, 50, 40)], (56, 50)),  # more overlap beats a nearer centre
        ([(50, 88, 30), (86, 50, 30)], (86, 50)),  # no overlap: nearer centre
        ([(89, 50, 40)], (89, 50)),  # within a face width
        ([(91, 50, 40)], None),  # beyond
        ([(50, 50, 19)], None),  # less than half as wide
        ([(50, 50, 81)], None),  # more than twice as wide
    ],
)
def test_which_detection_is_the_same_face(candidates, chosen):
    track = track_largest([faces_at((50, 50, 40)), faces_at(*candidates)])
    assert track.detected[1].item() is (chosen is not None)
    assert centres(track)[1] == list(chosen or (50, 50))


def moving(*landmarks, detected=None, width=50.0):
    detected = torch.tensor([True] * len(landmarks) if detected is None else detected)
    boxes = torch.tensor([0.0, 0.0, width, width]).expand(len(landmarks), 4)
    return Track(torch.stack(landmarks), detected, boxes)


def landmark_motion(track):
    return track.speed, track.nonrigid


def test_a_drifting_face_moves_but_not_by_itself():
    still = placed(0.5, 0.0, 50, 50)
    assert landmark_motion(moving(still, still, still)) == (0.0, 0.0)
    speed, nonrigid = landmark_motion(moving(still, still + torch.tensor([3.0, 4.0]), still))
    assert speed == pytest.approx(5 / 50) and nonrigid == pytest.approx(0, abs=1e-6)
    # turning in the plane and coming nearer are rigid too
    speed, nonrigid = landmark_motion(moving(still, placed(0.6, 0.3, 52, 50)))
    assert speed > 0.02 and nonrigid == pytest.approx(0, abs=1e-6)


def test_an_opening_mouth_is_nonrigid():
    still = placed(0.5, 0.0, 50, 50)
    mouth = still + torch.tensor([[0.0, 0], [0, 0], [0, 0], [-2, 0], [2, 0]])
    speed, nonrigid = landmark_motion(moving(still, mouth))
    assert speed == pytest.approx(4 / 5 / 50)
    fit = SimilarityTransform.from_estimate(still.numpy(), mouth.numpy())
    residual = np.linalg.norm(fit(still.numpy()) - mouth.numpy(), axis=1).mean() / 50
    assert nonrigid == pytest.approx(residual, rel=1e-4) and residual > 0.01


def test_motion_counts_consecutive_detections_only():
    still, away = placed(0.5, 0.0, 50, 50), placed(0.5, 0.0, 90, 50)
    assert landmark_motion(moving(still, still, away, detected=[True, True, False])) == (0.0, 0.0)
    assert landmark_motion(moving(still, still, away, detected=[True, False, True])) == (0.0, 0.0)
    assert landmark_motion(moving(still, still, away, detected=[False, True, True]))[0] == pytest.approx(40 / 50)


def test_the_template_is_insightfaces():
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
def test_the_crop_is_insightfaces(place, height, width):
    image, landmarks = picture(height, width), PLACES[place]
    expected = norm_crop(image, landmarks.numpy())
    crop = align(tensor(image), similarity_transform(landmarks[None], ARCFACE_TEMPLATE))[0]
    crop = (crop.permute(1, 2, 0) + 1) * 127.5
    # cv2 rounds to uint8 (0.5) and interpolates at 1/32 pixel; a shift of half a pixel gives about 10
    assert np.abs(crop.numpy() - expected.astype(np.float32)).max() < 2.5
    assert (expected.min() == 0) == (place == "half outside")


@pytest.fixture(scope="module")
def arcface(tmp_path_factory):
    torch.manual_seed(4)
    path = tmp_path_factory.mktemp("arcface") / "arcface.onnx"
    return export(MiniArcFace(), torch.randn(1, 3, 112, 112), path, dynamic={"x": {0: "n"}})


def embedded_by_insightface(path, crop):
    embedding = get_model(str(path), providers=CPU).get_feat(bgr(crop))[0]
    return embedding / np.linalg.norm(embedding)


@pytest.mark.parametrize("names,wants_bytes", [(("Sub0", "Mul0"), True), (("a", "b"), False), (("Sub0", "b"), False)])
def test_recognisers_that_normalise_inside_get_bytes(tmp_path, names, wants_bytes):
    constants = {"mean": np.float32(127.5), "scale": np.float32(1 / 128)}
    constants["w"] = np.random.default_rng(0).normal(size=(3 * 7 * 7, 8)).astype(np.float32)
    nodes = [
        node("Sub", "x mean", "s", name=names[0]),
        node("Mul", "s scale", "m", name=names[1]),
        node("AveragePool", "m", "p", kernel_shape=[16, 16], strides=[16, 16]),
        node("Flatten", "p", "f"),
        node("MatMul", "f w"),
    ]
    path = write(tmp_path / "mx.onnx", nodes, constants, shape=("n", 3, 112, 112))
    recogniser, crop = FaceRecogniser(path), picture(112, 112)
    assert recogniser.wants_bytes is wants_bytes
    np.testing.assert_allclose(recogniser(tensor(crop))[0], embedded_by_insightface(path, crop), atol=1e-4)


def test_chunks_change_neither_embeddings_nor_gradient(arcface):
    crops = tensor(*(picture(112, 112, seed) for seed in range(5))).requires_grad_()
    weight = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    results = []
    for chunk in (1, 2, 8):
        embeddings = FaceRecogniser(arcface, chunk)(crops)
        results.append((embeddings, *torch.autograd.grad((embeddings * weight).sum(), crops)))
    torch.testing.assert_close(results[0], results[2], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(results[1], results[2], atol=1e-5, rtol=1e-4)
    assert (results[0][1].abs().sum((1, 2, 3)) > 0).all()


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    return magenta_pack(tmp_path_factory.mktemp("pack"))


@pytest.fixture(scope="module")
def identity(pack):
    return FaceIdentity(pack, SIZE, chunk=2)


REAL = clip([(2, 2), (2, 2), (3, 2), (3, 3)], seed=1)


def test_self_similarity_leaves_out_the_diagonal():
    rows = F.normalize(torch.randn(6, 8, generator=torch.Generator().manual_seed(0)))
    pairs = [torch.dot(a, b).item() for i, a in enumerate(rows) for j, b in enumerate(rows) if i != j]
    assert self_similarity(rows) == pytest.approx(np.mean(pairs), abs=1e-6)
    assert self_similarity(rows[:1]) == 1.0


def test_the_pool_leaves_out_frame_0_and_frames_without_a_face(identity):
    video = clip([(2, 2), (2, 2), None, (3, 2)], seed=1)
    pool = identity.pool(video)
    assert pool.embeddings.shape == (2, 16) and pool.coverage == pytest.approx(2 / 3)
    assert pool.cap == pytest.approx((pool.embeddings[0] @ pool.embeddings[1]).item(), abs=1e-6)
    repainted = video.clone()
    repainted[:, 0] = clip([(2, 2)], seed=9)[:, 0]
    torch.testing.assert_close(identity.pool(repainted).embeddings, pool.embeddings, rtol=0, atol=0)
    repainted[:, 1] = clip([(2, 2)], seed=9)[:, 0]
    assert (identity.pool(repainted).embeddings - pool.embeddings).abs().max() > 1e-3


def test_no_pool_without_a_face_after_frame_0(identity):
    assert identity.pool(clip([None, None, None])) is None
    assert identity.pool(clip([(2, 2), None, None])) is None
    late = identity.pool(clip([None, None, (2, 2)]))
    assert late.embeddings.shape == (1, 16) and late.cap == 1.0


def test_scores_equal_insightface_end_to_end(pack, identity):
    app = FaceAnalysis(name=str(pack), providers=CPU)
    app.prepare(ctx_id=-1, det_size=(SIZE, SIZE))
    videos = [clip([(2, 2), (3, 2), (3, 3), (4, 4)], seed, mouth=[0, 0.1, 0.3, 0.2]) for seed in (1, 2)]
    videos = [((video + 1) * 127.5).round() / 127.5 - 1 for video in videos]

    def embeddings(video):
        frames = ((video + 1) * 127.5).round().byte().permute(1, 2, 3, 0).numpy()
        return np.stack([app.get(bgr(frame))[0].normed_embedding for frame in frames])

    real, generated = map(embeddings, videos)
    expected = generated[1:] @ real[1:].T
    pool = identity.pool(videos[0])
    score = identity.score(videos[1], pool.embeddings)
    # the crop is rounded to uint8 by cv2
    np.testing.assert_allclose(score.per_frame, expected.mean(1), atol=2e-3)
    assert score.mean.item() == pytest.approx(expected.mean(), abs=2e-3)
    assert pool.speed > 0.05 and pool.nonrigid > 0.01
    assert (score.speed, score.nonrigid) == pytest.approx((pool.speed, pool.nonrigid))


def test_every_generated_frame_carries_gradient_but_the_given_one(identity):
    pool = identity.pool(REAL)
    video = clip([(2, 2), (2, 2), None, (3, 2)], seed=2).requires_grad_()
    score = identity.score(video, pool.embeddings)
    score.mean.backward()
    per_frame = video.grad.abs().sum((0, 2, 3))
    assert per_frame[0] == 0 and (per_frame[1:] > 1e-4).all()
    assert score.detected.tolist() == [True, True, False, True] and score.coverage == pytest.approx(2 / 3)
    assert score.per_frame.shape == (3,) and score.mean.item() == pytest.approx(score.per_frame.mean().item())
    # the frame without a detection is looked at where the face last was
    bounds = video.grad[:, 2].abs().sum(0).nonzero().aminmax(dim=0)
    earlier = video.grad[:, 1].abs().sum(0).nonzero().aminmax(dim=0)
    assert torch.equal(bounds.min, earlier.min) and torch.equal(bounds.max, earlier.max)


def test_float32_whatever_the_video(identity):
    pool = identity.pool(REAL)
    half = REAL.bfloat16().requires_grad_()
    score = identity.score(half, pool.embeddings)
    assert score.mean.dtype == torch.float32
    torch.testing.assert_close(score.mean, identity.score(half.float(), pool.embeddings).mean, rtol=0, atol=0)
    score.mean.backward()
    assert half.grad.dtype == torch.bfloat16 and half.grad.abs().sum() > 0
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = identity.score(half.float(), pool.embeddings)
    torch.testing.assert_close(under_autocast.per_frame, score.per_frame, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(3, 1, 64, 64), (3, 4, 64), (1, 3, 4, 64, 64), (4, 3, 64, 64)])
def test_what_is_not_a_video_is_refused(identity, shape):
    with pytest.raises(ValueError, match=r"a video is \(3, F, H, W\) with at least 2 frames"):
        identity.pool(torch.zeros(shape))
