"""The differentiable flow against shifted pictures, OpenCV's, and finite differences."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from torch.autograd import gradcheck

from rewardfl import data, rewards
from rewardfl.rewards.pixels import optical_flow
from rewardfl.rewards.pixels.measures import flow_fields, mean_flow, reversals
from rewardfl.rewards.pixels.optical_flow import FLOW_SIDE, lucas_kanade, mean_length, mean_reversal

WORLD = ROOT / "assets" / "tiny_world" / "eval"


def texture(height, width, seed=0, rough=6):
    noise = torch.rand(1, 3, height // rough + 2, width // rough + 2, generator=torch.Generator().manual_seed(seed))
    return F.interpolate(noise, (height, width), mode="bicubic").clamp(0, 1)[0] * 1.6 - 0.8


def moved(places, height=48, width=64, margin=16, seed=0):
    """(3, F, H, W) of a texture at `places`, (x, y) in integer pixels of a larger picture."""
    picture = texture(height + 2 * margin, width + 2 * margin, seed)
    frames = [picture[:, margin - y : margin - y + height, margin - x : margin - x + width] for x, y in places]
    return torch.stack(frames, 1)


def clips():
    rows = data.load_metadata(WORLD / "metadata.csv")[:6]
    return [data.load_example(row, 64, 64, 9).video for row in rows]


def test_flow_of_a_texture_that_is_shifted():
    for x, y in ((1, 0), (0, -1), (1, 1)):
        field = lucas_kanade(moved([(0, 0), (x, y)]))[0, :, 8:-8, 8:-8]
        assert field.mean((1, 2)).tolist() == pytest.approx([x, y], abs=0.1)


def test_large_frames_are_shrunk():
    small = moved([(0, 0), (1, 0)], 60, FLOW_SIDE)
    large = F.interpolate(small.transpose(0, 1), scale_factor=4, mode="bilinear").transpose(0, 1)  # 4 pixels a frame
    field = lucas_kanade(large)
    assert field.shape == (1, 2, 60, FLOW_SIDE)
    assert field[0, 0, 8:-8, 8:-8].mean() == pytest.approx(1, abs=0.1)


def test_a_flat_picture_has_no_flow():
    video = torch.zeros(3, 2, 32, 32)
    video[:, 1] = 0.1  # all of it brighter
    assert lucas_kanade(video).abs().max() < 1e-6


def test_the_judges_flow_is_that_of_less_contrast():
    video, contrast = moved([(0, 0), (1, 0), (1, 1)]), math.sqrt(optical_flow.FLAT / optical_flow.DAMPED)
    paler = mean_length(lucas_kanade(video * contrast)).item()
    assert optical_flow.damped_flow(video) == pytest.approx(paler, rel=1e-4)
    assert paler < 0.95 * mean_length(lucas_kanade(video))


def test_the_flow_follows_opencvs():
    videos = [clip[:, frames] for clip in clips() for frames in (range(9), [0, 1, 2, 1, 2, 3, 2, 3, 4], range(0, 9, 2))]
    flow, opencv = [], []
    for video in videos:
        fields, opencv_fields = lucas_kanade(video), flow_fields(data.to_uint8(video).numpy())
        flow.append([mean_length(fields).item(), mean_reversal(fields).item()])
        opencv.append([mean_flow(opencv_fields), reversals(opencv_fields)])
    for values, opencv_values in zip(np.transpose(flow), np.transpose(opencv), strict=True):
        assert np.corrcoef(values, opencv_values)[0, 1] > 0.9


def test_steady_motion_and_trembling():
    steady = lucas_kanade(moved([(i, 0) for i in range(5)]))
    trembling = lucas_kanade(moved([(i % 2, 0) for i in range(5)]))
    assert mean_reversal(steady) < -0.9 and mean_reversal(trembling) > 0.9
    assert mean_reversal(steady * 1e-3).abs() < 0.01  # what hardly moves has no direction
    assert mean_reversal(steady[:1]).isnan()


def scored(video, real, **settings):
    reward = rewards.build("optical_flow", settings)
    return reward(video[None], [reward.reference(real)])


def test_the_score_is_the_ratio_less_reversals():
    real, trembling = moved([(i, 0) for i in range(5)]), moved([(i % 2, 0) for i in range(5)])
    still, slow = moved([(0, 0)] * 5), moved([(0, 0), (0, 0), (1, 0), (1, 0), (2, 0)])
    assert scored(real, real).score.item() == pytest.approx(1)
    assert scored(still, real, reversals=0).score.item() < 0.02
    ratio = scored(slow, real, reversals=0).score.item()
    assert ratio == pytest.approx(0.5, abs=0.1)
    assert scored(real, slow, reversals=0).score.item() == pytest.approx(ratio)  # 1 / r: more is not better
    plain, priced = (scored(trembling, real, reversals=weight) for weight in (0, 1))
    assert plain.score - priced.score == pytest.approx(priced.parts["reversals"])
    assert plain.score.item() > 0.8 and priced.parts["reversals"].item() > 1.8
    steadier = [scored(real, trembling, reversals=weight).score.item() for weight in (0, 1)]
    assert steadier[0] == steadier[1]  # less trembling than the real clip gains nothing


def test_clips_without_motion_are_invalid():
    reward, real = rewards.build("optical_flow", {}), moved([(i, 0) for i in range(3)])
    assert reward.reference(moved([(0, 0)] * 3)) is None and reward.reference(real[:, :1]) is None
    output = reward(real[None], [None])
    assert not output.valid and output.score == 0 and math.isnan(output.parts["ratio"])
    pair = reward(real[None, :, :2], [reward.reference(real[:, :2])])  # two frames: nothing can reverse
    assert pair.valid and pair.score.item() == pytest.approx(1) and pair.parts["reversals"].isnan()


def test_wanted_motion_replaces_the_real_clips():
    real, video = moved([(i, 0) for i in range(5)]), moved([(0, 0), (0, 0), (1, 0), (1, 0), (2, 0)])
    from_clip = rewards.build("optical_flow", {})
    reference = from_clip.reference(real)
    settings = {"wanted_flow": reference["flow"].item(), "wanted_reversals": reference["reversals"].item()}
    reward = rewards.build("optical_flow", settings)
    output = reward(video[None], [reward.reference(torch.zeros(3, 0, 48, 64))])
    assert output.score.item() == pytest.approx(scored(video, real).score.item())
    assert reward.compares_with == "nothing" and from_clip.compares_with == "motion"
    assert reward.fingerprint() != from_clip.fingerprint()
    with pytest.raises(ValueError, match="give both or none"):
        rewards.build("optical_flow", {"wanted_flow": 1.0})


def test_the_gradient_equals_finite_differences():
    real = moved([(i, 0) for i in range(4)], 20, 24).double()
    video = moved([(0, 0), (0, 0), (1, 0), (0, 1)], 20, 24, seed=1).double()[None].requires_grad_()
    reward = rewards.find_reward("optical_flow")()
    reference = reward.reference(real)
    parts = reward(video, [reference]).parts
    assert parts["reversals"] > 0.1 and parts["ratio"] < 0.9  # both terms take part
    assert gradcheck(lambda x: reward(x, [reference]).score, video, eps=1e-5, atol=0, rtol=1e-5, fast_mode=True)
