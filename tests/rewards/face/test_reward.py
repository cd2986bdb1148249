"""The face reward of one person and of several: cap, motion, invalid samples, photos, gradients."""

import copy
import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from face_nets import EMPTY, GENERATED, MOUTH, REAL, SIZE, add_noise, clip, load_person, magenta_pack
from runs import WORLD

from rewardfl import rewards
from rewardfl.rewards import FaceIdentityReward
from rewardfl.rewards.base import PhotoError, RewardError
from rewardfl.rewards.face import ARCFACE_TEMPLATE, align, similarity_transform
from rewardfl.rewards.face.reward import MIN_MOTION, PARTS, ratio
from rewardfl.rewards.face.track import Track


@pytest.fixture(scope="module")
def reward(tmp_path_factory):
    return FaceIdentityReward(magenta_pack(tmp_path_factory.mktemp("pack")), cap="none", det_size=SIZE, chunk=2)


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


def test_only_the_generated_frames_of_valid_samples_carry_gradient(reward):
    pool = reward.reference(REAL)
    assert reward.reference(EMPTY) is None
    broken = GENERATED.clone()
    broken[:, 2] = math.nan
    video = torch.stack([GENERATED, GENERATED, EMPTY, broken]).requires_grad_()
    output = reward(video, [pool, None, pool, pool])
    assert output.valid.tolist() == [True, False, False, False]
    assert output.score[0] != 0 and output.score[1:].tolist() == [0, 0, 0]
    (gradient,) = torch.autograd.grad(output.score.sum(), video)
    per_frame = gradient.abs().sum((1, 3, 4))
    assert (per_frame[0, 1:] > 0).all() and per_frame[0, 0] == 0 and (per_frame[1:] == 0).all()
    assert output.parts["coverage"][:3].tolist() == pytest.approx([2 / 3, math.nan, 0], nan_ok=True)
    assert output.parts["face_score"].isnan().tolist() == [False, True, True, True]


def test_motion_is_relative_to_the_real_clip(reward):
    still, sliding = clip([(2, 2)] * 4, seed=1), clip([(2, 2), (3, 2), (4, 2), (5, 2)], seed=1)
    speaking = clip([(2, 2)] * 4, seed=1, mouth=MOUTH)

    def motion(generated, real):
        parts = reward(generated[None], [reward.reference(real)]).parts
        return [parts[name].item() for name in ("motion_speed", "motion_nonrigid", "motion")]

    assert motion(REAL, REAL) == pytest.approx([1, 1, 1])
    assert motion(still, REAL) == pytest.approx([0, 0, 0], abs=1e-6)
    speed, *others = motion(sliding, REAL)  # a rigid drift has no nonrigid motion
    assert speed > 1 and others == pytest.approx([0, 0], abs=1e-6)
    speed, nonrigid, least = motion(speaking, sliding)  # what the real clip lacks is not measured
    assert math.isnan(nonrigid) and least == speed
    assert all(math.isnan(ratio) for ratio in motion(REAL, still))


def test_a_ratio_over_noise_is_not_measured():
    assert math.isnan(ratio(1.0, 0.9 * MIN_MOTION, MIN_MOTION)) and ratio(1.0, 2.0, MIN_MOTION) == 0.5


def test_photos_are_a_pool(reward):
    """Photos that are frames of a clip give that clip's pool, and its cap; a clip adds its motion."""
    pool = reward.reference(REAL)
    reference = reward.reference_from_photos(list(REAL[:, 1:].unbind(1)))
    assert reference["speed"].isnan() and reward(GENERATED[None], [reference]).parts["motion_speed"].isnan()
    moving = reward.with_motion(reference, REAL)
    for name in ("embeddings", "cap", "speed", "nonrigid"):
        torch.testing.assert_close(moving[name], pool[name])
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


def test_photos_without_the_persons_face_are_named(reward, monkeypatch):
    with pytest.raises(PhotoError) as error:
        reward.reference_from_photos([REAL[:, 1], EMPTY[:, 0], REAL[:, 2]])
    assert error.value.problems == {1: "no face was found in it"}
    vectors = F.normalize(torch.tensor([[1.0, 0.2], [1, 0], [-0.2, 1], [1, -0.2]]))
    faces = iter([*vectors, *vectors[:2]])
    monkeypatch.setattr(reward.identity, "embed_photo", lambda *_: next(faces))
    with pytest.raises(PhotoError, match=f"^photo 2: shows another person .* {vectors[2] @ vectors[1]:.2f} "):
        reward.reference_from_photos([REAL[:, 0]] * 4)
    assert len(reward.reference_from_photos([REAL[:, 0]] * 2)["embeddings"]) == 2


def reward_of(**settings):
    settings = {"pack_dir": WORLD / "faces" / "reward", "det_size": 256, "people": "all"} | settings
    return rewards.build("face_identity", settings)


@pytest.fixture(scope="module")
def everybody():
    return reward_of()


@pytest.fixture(scope="module")
def two():
    return torch.cat([load_person(2), load_person(3)], -1)


def score(reward, video, real):
    output = reward(video[None], [reward.reference(real)])
    return output, {name: float(part[0]) for name, part in output.parts.items()}


def track_side(side, networks, video):
    """Return (embeddings (F, D), track) of the face whose centre is in this half of each frame."""
    embeddings, landmarks, boxes = [], [], []
    for frame, faces in zip(video.transpose(0, 1), networks.detector.detect(video.transpose(0, 1)), strict=True):
        (row,) = [i for i, box in enumerate(faces.boxes) if ((box[0] + box[2]) / 2 > 64) == side]
        crop = align(frame[None], similarity_transform(faces.landmarks[[row]], ARCFACE_TEMPLATE))
        embeddings.append(networks.recogniser(crop)[0].numpy())
        landmarks.append(faces.landmarks[row])
        boxes.append(faces.boxes[row])
    return np.stack(embeddings), Track(torch.stack(landmarks), torch.ones(len(boxes)).bool(), torch.stack(boxes))


@pytest.mark.slow(2)
def test_the_score_is_the_mean_of_people_capped_each(everybody, two):
    output, parts = score(everybody, add_noise(two), two)
    assert set(parts) == {*PARTS, "people", "worst_person", "nonfinite"} and output.valid.all()
    means, caps, speeds, motions = [], [], [], []
    for side in (0, 1):  # frame by frame the face on this side, and cosine by cosine
        (embeddings, track), (pool, real) = (
            track_side(side, everybody.identity, video) for video in (add_noise(two), two)
        )
        means.append(np.mean([a @ b for a, b in itertools.product(embeddings[1:], pool[1:])]))
        caps.append(np.mean([a @ b for a, b in itertools.permutations(pool[1:], 2)]))
        speeds.append(track.speed / real.speed)
        motions.append(min(speeds[-1], track.nonrigid / real.nonrigid))
    assert parts["people"] == 2 and abs(means[0] - means[1]) > 0.01 and abs(caps[0] - caps[1]) > 0.01
    assert parts["face_score"] == pytest.approx(sum(means) / 2, abs=1e-4)
    assert parts["worst_person"] == pytest.approx(min(means), abs=1e-4)
    assert parts["cap"] == pytest.approx(sum(caps) / 2, abs=1e-4)
    assert output.score.item() == pytest.approx(sum(map(min, means, caps)) / 2, abs=1e-4)
    assert parts["motion_speed"] == pytest.approx(sum(speeds) / 2, rel=1e-3)
    assert parts["motion"] == pytest.approx(sum(motions) / 2, rel=1e-3)
    # a clip is more similar to its own pools than their frames are to each other: each person reaches the cap
    assert score(everybody, two, two)[0].score.item() == pytest.approx(sum(caps) / 2, abs=1e-4)
    capped = score(reward_of(cap=sum(means) / 2), add_noise(two), two)[0]
    assert capped.score.item() == pytest.approx((min(means) + sum(means) / 2) / 2, abs=1e-4)


def test_one_person_scores_the_same_with_both_settings(everybody):
    single, largest = F.pad(load_person(2)[..., 12:-12], (4, 84), value=-0.2), reward_of(people="largest")
    (output, parts), (expected, expected_parts) = (score(r, add_noise(single), single) for r in (everybody, largest))
    assert torch.equal(output.score, expected.score) and parts["people"] == 1
    assert parts == expected_parts | {"people": 1, "worst_person": parts["face_score"]}
    prints = [r.fingerprint() for r in (everybody, largest, reward_of(people="largest", min_face_size=9))]
    assert all(a != b for a, b in itertools.combinations(prints, 2))  # references are cached apart


def test_a_missing_person_scores_0(everybody, two):
    left = two.clone()
    left[..., 64:] = -0.2
    output, parts = score(everybody, left, two)
    assert output.valid.all() and parts["people"] == 2 and parts["worst_person"] == 0
    assert 0.3 < parts["face_score"] <= 0.5 and parts["coverage"] == 0.5 and 0 <= parts["motion"] < 0.8
    # both hide after the first frame: they are cut where they were
    hidden = torch.cat([two[:, :1], torch.full_like(two[:, 1:], -1.0)], 1).requires_grad_()
    output = everybody(hidden[None], [everybody.reference(two)])
    assert output.valid.all() and output.score.item() < 0.4 and output.parts["coverage"].item() == 0
    (gradient,) = torch.autograd.grad(output.score.sum(), hidden)
    assert gradient[:, 1:].isfinite().all() and gradient[..., :64].any() and gradient[..., 64:].any()


def test_small_faces_of_the_real_clip_are_left_out(everybody, two):
    plain = everybody.reference(two)
    wide, narrow = sorted(float(boxes[0, 2] - boxes[0, 0]) for boxes in plain["boxes"])[::-1]
    first, none = reward_of(min_face_size=(wide + narrow) / 2), reward_of(min_face_size=wide + 0.1)
    assert torch.equal(first.reference(two)["boxes"], plain["boxes"][:1])
    assert none.reference(two) is None and "min_face_size" in none.nothing_found


@pytest.mark.parametrize("settings", [{}, {"second_pack_dir": WORLD / "faces" / "judge"}])
@pytest.mark.slow(5)
def test_the_gradient_equals_finite_differences(monkeypatch, two, settings):
    """It is taken for two people, with detection held still, which has no gradient."""
    ours, step = reward_of(cap="none", **settings), 1e-3
    reference, video = ours.reference(two), add_noise(two, 0.1)
    faces = ours.identity.detector.detect(video.transpose(0, 1))
    monkeypatch.setattr(ours.identity.detector, "detect", lambda frames: faces)
    direction = F.interpolate(torch.randn(9, 3, 8, 16, generator=torch.Generator().manual_seed(3)), (64, 128))
    direction = direction.transpose(0, 1)
    up, centre, down = (video + sign * step * direction for sign in (1, 0, -1))
    centre.requires_grad_()
    (gradient,) = torch.autograd.grad(ours(centre[None], [reference]).score.sum(), centre)
    up, down = (ours(side[None].requires_grad_(), [reference]).score.item() for side in (up, down))
    slope = (gradient * direction).sum().item()
    assert abs(slope) > 1e-3 and slope == pytest.approx((up - down) / (2 * step), rel=0.03)
