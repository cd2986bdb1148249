"""The held-out judge: face_identity's figures, and motion and artifacts over the real clip's."""

import math

import pytest
import torch
from face_nets import EMPTY, GENERATED, REAL, SIZE, magenta_pack

from rewardfl import data, rewards
from rewardfl.rewards import FaceIdentityReward
from rewardfl.rewards.face.look import cut_patches, mouth_movement
from rewardfl.rewards.face.reward import PARTS
from rewardfl.rewards.pixels.measures import measure_artifacts, video_motion
from rewardfl.rewards.pixels.optical_flow import damped_flow

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


def test_figures_of_faces_equal_face_identitys(judge, pack):
    reward = FaceIdentityReward(pack, cap="none", det_size=SIZE)
    expected = reward(GENERATED[None], [reward.reference(REAL)])
    output = judge(GENERATED[None].clone().requires_grad_(), [judge.reference(REAL)])
    assert torch.equal(output.score, expected.score.detach()) and torch.equal(output.valid, expected.valid)
    for name in PARTS:
        torch.testing.assert_close(output.parts[name], expected.parts[name], rtol=0, atol=0, equal_nan=True)
    assert not judge.differentiable and not output.score.grad_fn


def test_references_are_cached_by_judge_and_period(judge, pack):
    faces = FaceIdentityReward(pack, cap="none", det_size=SIZE)
    other = rewards.build("face_judge", {"pack_dir": pack, "det_size": SIZE, "grid_period": 16})
    assert judge.fingerprint() != other.fingerprint() != faces.fingerprint()
    assert judge.fingerprint()["weights"] == faces.fingerprint()["weights"]


def test_figures_of_8_bit_frames_are_over_the_real_clips(judge):
    figures, _ = parts(judge, GENERATED, judge.reference(REAL))
    generated, real = (video_motion(data.to_uint8(video).contiguous().numpy()) for video in (GENERATED, REAL))
    for name in ("flow", "pixel_change", "sharpness"):
        assert figures[name] == pytest.approx(generated[name] / real[name], rel=1e-5)
    assert figures["reversals"] == pytest.approx(generated["reversals"] - real["reversals"], abs=1e-5)
    moving = judge.reference(REAL) | {"lk_flow": torch.tensor(0.5), "mouth": torch.tensor(0.5)}
    ratios, landmarks = parts(judge, GENERATED, moving)[0], judge.reference(GENERATED)["landmarks"][0]
    shown = data.to_float(data.to_uint8(GENERATED))
    mouth = mouth_movement(cut_patches(GENERATED.transpose(0, 1), landmarks)["mouth"])
    assert [ratios["lk_flow"], ratios["mouth"]] == pytest.approx([2 * damped_flow(shown), 2 * mouth])


def test_the_real_clip_is_the_unit(judge):
    figures, _ = parts(judge, REAL, judge.reference(REAL))
    assert [figures[name] for name in MEASURED] == pytest.approx([1, 1, 1, 1, 0], abs=1e-6)
    assert [figures[name] for name in CANARIES] == pytest.approx([1, 1, 0, 0, 0], abs=1e-6)


def test_artifacts_are_compared_with_the_real_clips(judge, pack):
    reference, red_film = judge.reference(REAL), torch.tensor([0.2, 0.0, 0.0]).view(3, 1, 1, 1)
    red = (REAL + red_film).clamp(-1, 1)
    figures, _ = parts(judge, red, reference)
    generated, real = (measure_artifacts(data.to_uint8(video).contiguous().numpy(), [PERIOD]) for video in (red, REAL))
    assert figures["red"] == pytest.approx(generated["red"] - real["red"], abs=1e-6) and figures["red"] > 0.05
    assert [figures["green"], figures["blue"]] == pytest.approx([0, 0], abs=1e-6)
    assert figures["saturation"] == pytest.approx(generated["saturation"] / real["saturation"])
    lines = torch.where(torch.arange(REAL.shape[-1]) % PERIOD == 0, 0.1, 0.0)
    assert parts(judge, (REAL + lines).clamp(-1, 1), reference)[0]["grid"] > 2
    without_period = rewards.build("face_judge", {"pack_dir": pack, "cap": "none", "det_size": SIZE})
    assert math.isnan(parts(without_period, REAL, without_period.reference(REAL))[0]["grid"])


def test_what_the_real_or_the_generated_clip_lacks_is_not_measured(judge):
    still = REAL[:, :1].expand_as(REAL).contiguous()
    figures, valid = parts(judge, GENERATED, judge.reference(still))
    assert valid and figures["sharpness"] > 0
    assert all(math.isnan(figures[name]) for name in ("flow", "face_flow", "pixel_change", "reversals"))
    figures, valid = parts(judge, EMPTY, judge.reference(REAL))
    assert not valid and figures["coverage"] == 0 and math.isfinite(figures["pixel_change"])
    assert math.isnan(figures["face_flow"]) and math.isnan(figures["face_score"])


def test_photos_take_their_motion_from_a_clip(judge):
    reference = judge.reference_from_photos(list(REAL[:, 1:].unbind(1)))
    assert all(math.isnan(parts(judge, GENERATED, reference)[0][name]) for name in (*MEASURED, "look"))
    figures, expected = (
        parts(judge, GENERATED, r)[0] for r in (judge.with_motion(reference, REAL), judge.reference(REAL))
    )
    assert [figures[name] for name in MEASURED] == pytest.approx([expected[name] for name in MEASURED])
    assert math.isnan(figures["look"])


def test_a_missing_person_has_no_look(judge):
    reference = judge.reference(REAL)
    face = judge.identity.score(REAL, reference["embeddings"])
    two = {name: value.repeat(2, 1, 1, 1) if name.startswith("look/") else value for name, value in reference.items()}
    assert judge.measured(REAL, [face, None], two)["look"] == pytest.approx(0.5)
