"""Recogniser, pools and scores against insightface."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from face_nets import SIZE, add_noise, bgr, clip, load_person, magenta_pack, picture, tensor
from insightface.app import FaceAnalysis
from insightface.model_zoo import get_model
from runs import WORLD
from test_onnx_module import node, write

from rewardfl.rewards.face import FaceIdentity, FaceRecogniser, Faces
from rewardfl.rewards.face.identity import self_similarity

CPU = ["CPUExecutionProvider"]
PACK = WORLD / "faces" / "reward"


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
    embedding = get_model(str(path), providers=CPU).get_feat(bgr(crop))[0]
    np.testing.assert_allclose(recogniser(tensor(crop))[0], embedding / np.linalg.norm(embedding), atol=1e-4)


@pytest.fixture(scope="module")
def identity(tmp_path_factory):
    return FaceIdentity(magenta_pack(tmp_path_factory.mktemp("pack")), SIZE, chunk=2)


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


def test_no_pool_without_a_face_after_frame_0(identity):
    assert identity.pool(clip([None] * 3)) is None and identity.pool(clip([(2, 2), None, None])) is None
    late = identity.pool(clip([None, None, (2, 2)]))
    assert late.embeddings.shape == (1, 16) and late.cap == 1.0


def test_scores_equal_insightface_end_to_end(identity):
    app = FaceAnalysis(name=str(identity.files[0].parent), providers=CPU)
    app.prepare(ctx_id=-1, det_size=(SIZE, SIZE))
    videos = [clip([(2, 2), (3, 2), (3, 3), (4, 4)], seed, mouth=[0, 0.1, 0.3, 0.2]) for seed in (1, 2)]
    videos = [((video + 1) * 127.5).round() / 127.5 - 1 for video in videos]

    def embed(video):
        frames = ((video + 1) * 127.5).round().byte().permute(1, 2, 3, 0).numpy()
        return np.stack([app.get(bgr(frame))[0].normed_embedding for frame in frames])

    real, generated = map(embed, videos)
    expected = generated[1:] @ real[1:].T
    pool = identity.pool(videos[0])
    score = identity.score(videos[1], pool.embeddings)
    # the crop is rounded to uint8 by cv2
    np.testing.assert_allclose(score.per_frame, expected.mean(1), atol=2e-3)
    assert score.mean.item() == pytest.approx(expected.mean(), abs=2e-3)
    assert pool.speed > 0.05 and pool.nonrigid > 0.01
    assert (score.speed, score.nonrigid) == pytest.approx((pool.speed, pool.nonrigid))


def test_every_frame_but_the_first_has_gradient(identity):
    pool = identity.pool(REAL)
    video = clip([(2, 2), (2, 2), None, (3, 2)], seed=2).requires_grad_()
    score = identity.score(video, pool.embeddings)
    score.mean.backward()
    per_frame = video.grad.abs().sum((0, 2, 3))
    assert per_frame[0] == 0 and (per_frame[1:] > 1e-4).all()
    assert score.detected.tolist() == [True, True, False, True] and score.coverage == pytest.approx(2 / 3)
    # a frame without a detection is cut at the last landmarks
    lost, before = (video.grad[:, j].abs().sum(0).nonzero().aminmax(dim=0) for j in (2, 1))
    assert torch.equal(lost.min, before.min) and torch.equal(lost.max, before.max)


def test_scores_are_float32_for_any_video(identity):
    pool, half = identity.pool(REAL), REAL.bfloat16().requires_grad_()
    score = identity.score(half, pool.embeddings)
    assert score.mean.dtype == torch.float32
    score.mean.backward()
    assert half.grad.dtype == torch.bfloat16 and half.grad.any()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(identity.score(half.float(), pool.embeddings).per_frame, score.per_frame)


def test_embeddings_that_are_not_finite_count_as_zero(identity, monkeypatch):
    monkeypatch.setattr(identity, "_recognise", lambda crops: torch.full((len(crops), 16), torch.nan))
    faces = [Faces(torch.zeros(n, 4), torch.ones(n), torch.rand(n, 5, 2)) for n in (2, 0, 1)]
    vectors = identity._embeddings(torch.zeros(3, 3, 64, 64), faces)
    assert [rows.tolist() for rows in vectors] == [[[0.0] * 16] * n for n in (2, 0, 1)]


@pytest.mark.slow(5)
def test_two_recognisers_give_the_mean_of_their_cosines():
    video = torch.cat([load_person(2), load_person(3)], -1)
    judge = WORLD / "faces" / "judge"
    first, second, both = (FaceIdentity(*pack) for pack in ((PACK, 256), (judge, 256), (PACK, 256, 8, judge)))
    second.detector = first.detector  # detector and landmarks are the first pack's
    generated, pools = add_noise(video), both.pools(video, everybody=True)
    separate = [networks.pools(video, everybody=True) for networks in (first, second)]
    scores = [
        networks.scores(generated, [pool.embeddings for pool in of_all])
        for networks, of_all in zip((both, first, second), (pools, *separate), strict=True)
    ]
    for pool, a, b in zip(pools, *separate, strict=True):
        assert pool.cap == pytest.approx((a.cap + b.cap) / 2, abs=1e-5)
    for score, a, b in zip(*scores, strict=True):
        torch.testing.assert_close(score.per_frame, (a.per_frame + b.per_frame) / 2, rtol=0, atol=1e-5)
        assert (a.per_frame - b.per_frame).abs().max() > 0.01
