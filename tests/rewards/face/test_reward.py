"""The face reward of one person: cap, motion, invalid samples, gradients."""

import copy
import math

import pytest
import torch
from face_nets import SIZE, clip, magenta_pack

from rewardfl.rewards import FaceIdentityReward
from rewardfl.rewards.base import PhotoError, RewardError
from rewardfl.rewards.face.reward import MIN_MOTION

MOUTH = [0.0, 0.1, 0.3, 0.2]
REAL = clip([(2, 2), (2, 2), (3, 2), (3, 3)], seed=1, mouth=MOUTH)
GENERATED = clip([(2, 2), (3, 2), None, (4, 2)], seed=2, mouth=MOUTH)
EMPTY = clip([None] * 4, seed=3)


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    return magenta_pack(tmp_path_factory.mktemp("pack"))


@pytest.fixture(scope="module")
def reward(pack):
    return FaceIdentityReward(pack, cap="none", det_size=SIZE, chunk=2)


def with_cap(reward, cap):
    other = copy.copy(reward)
    other.cap = cap
    return other


def test_the_cap_stops_score_and_gradient_but_not_the_part(reward):
    pool = reward.reference(REAL)
    video = GENERATED[None].clone().requires_grad_()
    free = reward(video, [pool])
    mean = free.score.item()
    (gradient,) = torch.autograd.grad(free.score.sum(), video)
    assert gradient.abs().sum() > 0
    for cap, paid in ((mean - 0.1, mean - 0.1), (min(mean + 1e-4, 1.0), mean)):
        output = with_cap(reward, cap)(video, [pool])
        (below,) = torch.autograd.grad(output.score.sum(), video)
        assert output.score.item() == pytest.approx(paid) and output.valid.all()
        torch.testing.assert_close(below, gradient * (cap > mean))
        assert output.parts["face_score"].item() == pytest.approx(mean)
        assert output.parts["cap"].item() == pytest.approx(cap)


def test_self_similarity_caps_at_the_real_clips_own(reward):
    pool = reward.reference(REAL)
    own = pool["cap"].item()
    assert 0 < own < 1
    capped = with_cap(reward, "self_similarity")
    # the real clip frozen at a frame of its own pool is more alike than its frames are among each other
    frozen = REAL[:, 2:3].repeat(1, 4, 1, 1)
    output = capped(torch.stack([frozen, GENERATED]), [pool, pool])
    assert output.parts["face_score"][0] > own
    torch.testing.assert_close(output.score[0].item(), own)
    assert output.parts["cap"].tolist() == pytest.approx([own] * 2)


def test_only_the_generated_frames_of_valid_samples_carry_gradient(reward):
    pool = reward.reference(REAL)
    assert reward.reference(EMPTY) is None
    video = torch.stack([GENERATED, GENERATED, EMPTY]).requires_grad_()
    output = reward(video, [pool, None, pool])
    assert output.valid.tolist() == [True, False, False]
    assert output.score[0] != 0 and output.score[1:].tolist() == [0, 0]
    (gradient,) = torch.autograd.grad(output.score.sum(), video)
    per_frame = gradient.abs().sum((1, 3, 4))
    assert (per_frame[0, 1:] > 0).all() and per_frame[0, 0] == 0 and (per_frame[1:] == 0).all()
    assert output.parts["coverage"].nan_to_num(nan=-1).tolist() == pytest.approx([2 / 3, -1, 0])
    assert output.parts["face_score"].isnan().tolist() == [False, True, True]


@pytest.mark.parametrize("where", [1, 2])
def test_nan_pixels_make_a_sample_invalid_and_leak_nowhere(reward, where):
    broken = GENERATED.clone()
    broken[:, where] = math.nan
    video = torch.stack([broken, GENERATED]).requires_grad_()
    pool = reward.reference(REAL)
    output = reward(video, [pool, pool])
    assert output.valid.tolist() == [False, True] and output.score[0] == 0
    (gradient,) = torch.autograd.grad(output.score.sum(), video)
    assert gradient.isfinite().all() and gradient[1].abs().sum() > 0
    none_valid = reward(video, [pool, None])
    (gradient,) = torch.autograd.grad(none_valid.score.sum(), video)
    assert none_valid.score.tolist() == [0, 0] and torch.equal(gradient, torch.zeros_like(video))


def test_motion_is_relative_to_the_real_clip(reward):
    still = clip([(2, 2)] * 4, seed=1)
    sliding = clip([(2, 2), (3, 2), (4, 2), (5, 2)], seed=1)
    speaking = clip([(2, 2)] * 4, seed=1, mouth=MOUTH)

    def motion(generated, real):
        parts = reward(generated[None], [reward.reference(real)]).parts
        return [parts[name].item() for name in ("motion_speed", "motion_nonrigid", "motion")]

    assert motion(REAL, REAL) == pytest.approx([1, 1, 1])
    assert motion(still, REAL) == pytest.approx([0, 0, 0], abs=1e-6)
    # a face that drifts rigidly does not pass for a living one
    speed, nonrigid, least = motion(sliding, REAL)
    assert speed > 1 and nonrigid == pytest.approx(0, abs=1e-6) and least == nonrigid
    # a real clip that moves in one way only gives that ratio, one that stands still gives none
    assert motion(speaking, sliding)[1:] == [pytest.approx(math.nan, nan_ok=True), motion(speaking, sliding)[0]]
    assert all(math.isnan(ratio) for ratio in motion(REAL, still))
    assert reward.reference(still)["speed"] < MIN_MOTION


def test_photos_are_a_pool(reward):
    """Photos that are frames of a clip give that clip's pool, and its cap; a clip adds its motion."""
    pool = reward.reference(REAL)
    photos = list(REAL[:, 1:].unbind(1))
    reference = reward.reference_from_photos(photos)
    torch.testing.assert_close(reference["embeddings"], pool["embeddings"])
    torch.testing.assert_close(reference["cap"], pool["cap"])
    assert reference["speed"].isnan() and reward(GENERATED[None], [reference]).parts["motion_speed"].isnan()
    moving = reward.with_motion(reference, REAL)
    torch.testing.assert_close([moving[name] for name in ("speed", "nonrigid")], [pool["speed"], pool["nonrigid"]])
    output, expected = reward(GENERATED[None], [moving]), reward(GENERATED[None], [pool])
    torch.testing.assert_close((output.score, output.parts), (expected.score, expected.parts), equal_nan=True)
    assert reward.with_motion(reference, EMPTY) is reference


def test_one_photo_takes_the_median_cap(reward):
    single, references = reward.reference_from_photos([REAL[:, 1]]), [reward.reference(REAL), None]
    assert single["cap"].isnan()
    capped = with_cap(reward, "self_similarity")
    others = [references[0] | {"cap": torch.tensor([cap])} for cap in (0.5, 0.9, 0.6)]
    completed = capped.complete([single, *others, None])
    assert completed[0]["cap"].item() == pytest.approx(0.6) and completed[1:] == [*others, None]
    with pytest.raises(RewardError, match="reward.cap: self_similarity takes two photos of a person"):
        capped.complete([single, single])
    assert with_cap(reward, 0.8).complete([single]) == [single]


def test_photos_of_nobody_and_of_another_person_are_named(reward, monkeypatch):
    with pytest.raises(PhotoError) as error:
        reward.reference_from_photos([REAL[:, 1], EMPTY[:, 0], REAL[:, 2]])
    assert error.value.problems == {1: "no face was found in it"}
    vectors = torch.nn.functional.normalize(torch.tensor([[1.0, 0.2], [1, 0], [-0.2, 1], [1, -0.2]]))
    faces = iter([*vectors, *vectors[:2]])
    monkeypatch.setattr(reward.identity, "embed_photo", lambda *_: next(faces))
    with pytest.raises(PhotoError) as error:
        reward.reference_from_photos([REAL[:, 0]] * 4)
    median = vectors[2] @ vectors[1]
    assert error.value.problems == {2: f"shows another person (median cosine {median:.2f} with the other photos)"}
    assert len(reward.reference_from_photos([REAL[:, 0]] * 2)["embeddings"]) == 2
