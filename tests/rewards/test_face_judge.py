"""The held-out judge: face_identity's figures, and those of rewards/video_motion.py over the real clip's."""

import math

import pytest
import torch
from face_nets import SIZE, clip, magenta_pack

from rewardfl import data, rewards
from rewardfl.rewards import FaceIdentityReward
from rewardfl.rewards.face.look import cut_patches, mouth_movement
from rewardfl.rewards.face.reward import PARTS
from rewardfl.rewards.pixels.artifacts import measure_artifacts
from rewardfl.rewards.pixels.optical_flow import damped_flow
from rewardfl.rewards.pixels.video_motion import video_motion

MOUTH = [0.0, 0.1, 0.3, 0.2]
REAL = clip([(2, 2), (2, 2), (3, 2), (3, 3)], seed=1, mouth=MOUTH)
GENERATED = clip([(2, 2), (3, 2), None, (4, 2)], seed=2, mouth=MOUTH)
MEASURED = ("flow", "face_flow", "pixel_change", "sharpness", "reversals")
CANARIES = ("grid", "saturation", "red", "green", "blue")
PERIOD = 8


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    return magenta_pack(tmp_path_factory.mktemp("pack"))


@pytest.fixture(scope="module")
def judge(pack):
    return rewards.build("face_judge", {"pack_dir": pack, "cap": "none", "det_size": SIZE, "grid_period": PERIOD})


def parts(judge, video, reference):
    output = judge(video[None], [reference])
    return {name: float(value[0]) for name, value in output.parts.items()}, bool(output.valid[0])


def test_it_says_of_faces_what_face_identity_says(judge, pack):
    reward = FaceIdentityReward(pack, cap="none", det_size=SIZE)
    theirs = reward(GENERATED[None], [reward.reference(REAL)])
    ours = judge(GENERATED[None].clone().requires_grad_(), [judge.reference(REAL)])
    assert torch.equal(ours.score, theirs.score.detach()) and torch.equal(ours.valid, theirs.valid)
    for name in PARTS:
        torch.testing.assert_close(ours.parts[name], theirs.parts[name], rtol=0, atol=0, equal_nan=True)
    assert not judge.differentiable
    assert not judge(GENERATED[None].requires_grad_(), [judge.reference(REAL)]).score.grad_fn


def test_its_cached_clips_are_its_own(judge, pack):
    mine, theirs = judge.fingerprint(), FaceIdentityReward(pack, cap="none", det_size=SIZE).fingerprint()
    assert mine != theirs and mine["weights"] == theirs["weights"]
    assert judge.reference(REAL).keys() >= {*MEASURED, *CANARIES}
    other = rewards.build("face_judge", {"pack_dir": pack, "det_size": SIZE, "grid_period": 16})
    assert other.fingerprint() != mine  # another period is another figure of the real clip


def test_figures_are_of_the_8_bit_frames_over_the_real_clips(judge):
    found, valid = parts(judge, GENERATED, judge.reference(REAL))
    frames = [data.to_uint8(video).contiguous().numpy() for video in (GENERATED, REAL)]
    made, real = (video_motion(one) for one in frames)
    for name in ("flow", "pixel_change", "sharpness"):
        assert found[name] == pytest.approx(made[name] / real[name], rel=1e-5)
    assert found["reversals"] == pytest.approx(made["reversals"] - real["reversals"], abs=1e-5)
    assert valid and math.isfinite(found["face_flow"])
    moving = judge.reference(REAL) | {"lk_flow": torch.tensor(0.5), "mouth": torch.tensor(0.5)}
    ratios, landmarks = parts(judge, GENERATED, moving)[0], judge.reference(GENERATED)["landmarks"][0]
    shown = data.to_float(data.to_uint8(GENERATED))
    mouth = mouth_movement(cut_patches(GENERATED.transpose(0, 1), landmarks)["mouth"])
    assert [ratios["lk_flow"], ratios["mouth"]] == pytest.approx([2 * damped_flow(shown), 2 * mouth])
    levels = ((GENERATED + 1) * 127.5).round()
    nudged = (levels + 0.4 * (torch.rand(levels.shape) - 0.5)).clamp(0, 255) / 127.5 - 1  # nobody could show it
    assert parts(judge, nudged, judge.reference(REAL))[0]["sharpness"] == found["sharpness"]


def test_the_real_clip_is_the_unit(judge):
    found, _ = parts(judge, REAL, judge.reference(REAL))
    assert [found[name] for name in MEASURED] == pytest.approx([1, 1, 1, 1, 0], abs=1e-6)
    assert [found[name] for name in CANARIES] == pytest.approx([1, 1, 0, 0, 0], abs=1e-6)


def test_canaries_are_the_generated_clips_beside_the_real_ones(judge, pack):
    reference = judge.reference(REAL)
    film = torch.tensor([0.2, 0.0, 0.0]).view(3, 1, 1, 1)
    red, _ = parts(judge, (REAL + film).clamp(-1, 1), reference)
    frames = data.to_uint8((REAL + film).clamp(-1, 1)).contiguous().numpy()
    made, real = (
        measure_artifacts(frames, [PERIOD]),
        measure_artifacts(data.to_uint8(REAL).contiguous().numpy(), [PERIOD]),
    )
    assert red["red"] == pytest.approx(made["red"] - real["red"], abs=1e-6) and red["red"] > 0.05
    assert [red["green"], red["blue"]] == pytest.approx([0, 0], abs=1e-6)
    assert red["saturation"] == pytest.approx(made["saturation"] / real["saturation"])
    lines = torch.where(torch.arange(REAL.shape[-1]) % PERIOD == 0, 0.1, 0.0)
    assert parts(judge, (REAL + lines).clamp(-1, 1), reference)[0]["grid"] > 2
    untold = rewards.build("face_judge", {"pack_dir": pack, "cap": "none", "det_size": SIZE})
    found, _ = parts(untold, REAL, untold.reference(REAL))
    assert math.isnan(found["grid"]) and found["saturation"] == pytest.approx(1)


@pytest.mark.parametrize("period", [7, -2])
def test_a_period_that_no_model_has_is_refused(pack, period):
    with pytest.raises(ValueError, match=f"grid_period .*{period}"):
        rewards.build("face_judge", {"pack_dir": pack, "grid_period": period})


def test_a_real_clip_that_stands_still_gives_no_ratio(judge):
    still = REAL[:, :1].expand_as(REAL).contiguous()
    found, valid = parts(judge, GENERATED, judge.reference(still))
    assert valid and found["sharpness"] > 0
    assert all(math.isnan(found[name]) for name in ("flow", "face_flow", "pixel_change", "reversals"))


def test_a_clip_without_a_face_has_flow_and_no_face_flow(judge):
    found, valid = parts(judge, clip([None] * 4, seed=3), judge.reference(REAL))
    assert not valid and found["coverage"] == 0 and math.isnan(found["face_flow"]) and math.isnan(found["face_score"])
    assert math.isfinite(found["pixel_change"])
    assert all(math.isnan(value) for name, value in parts(judge, REAL, None)[0].items() if name != "nonfinite")


def test_photos_take_their_motion_from_a_clip(judge):
    reference = judge.reference_from_photos(list(REAL[:, 1:].unbind(1)))
    assert all(math.isnan(parts(judge, GENERATED, reference)[0][name]) for name in (*MEASURED, "look"))
    found, expected = (
        parts(judge, GENERATED, r)[0] for r in (judge.with_motion(reference, REAL), judge.reference(REAL))
    )
    assert [found[name] for name in MEASURED] == pytest.approx([expected[name] for name in MEASURED])
    assert math.isnan(found["look"])


def test_a_missing_person_has_no_look(judge):
    reference = judge.reference(REAL)
    face = judge.identity.score(REAL, reference["embeddings"])
    patches = cut_patches(REAL.transpose(0, 1), face.landmarks)
    two = {name: value.repeat(2, 1, 1, 1) if name.startswith("look/") else value for name, value in reference.items()}
    assert judge._look([face, None], [patches], two) == pytest.approx(0.5)
