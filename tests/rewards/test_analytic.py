"""Frames and pooling, and the rewards without a network: closed forms and gradients."""

import io
import math

import pytest
import torch
from conftest import ROOT
from PIL import Image
from torch.autograd import gradcheck

from rewardfl import rewards
from rewardfl.data import to_uint8
from rewardfl.rewards.frames import FrameReward, pool, select_frames
from rewardfl.rewards.pixels.motion import MIN_CHANGE, mean_change


def random_video(seed=0, frames=5, size=24):
    return 1.8 * torch.rand(3, frames, size, size, generator=torch.Generator().manual_seed(seed)) - 0.9


VIDEO = random_video()
TOYS = ROOT / "examples" / "toys.py"
COLOUR = f"{TOYS}:Colour"
pytestmark = pytest.mark.usefixtures("trusts_code")


def test_frames_are_selected_evenly():
    assert select_frames(5, "all", first_frame=False) == [1, 2, 3, 4]
    assert select_frames(81, "first_middle_last", first_frame=False) == [1, 40, 80]
    assert select_frames(81, 5, first_frame=False) == [1, 21, 40, 60, 80]
    assert select_frames(81, 1, first_frame=False) == [40] and select_frames(81, 2, first_frame=True) == [0, 80]
    assert select_frames(4, 9, first_frame=False) == [1, 2, 3]
    assert select_frames(1, "all", first_frame=False) == select_frames(1, 3, first_frame=False) == [0]  # an image


def test_scores_of_frames_are_pooled():
    scores = torch.tensor([3.0, 1.0, 2.0, 6.0])
    assert [pool(scores, pooling).item() for pooling in ("mean", "min", "worst-2", "worst-9")] == [3, 1, 1.5, 3]


def test_bad_frame_settings_are_refused():
    for setting, message in (
        ({"frames": "some"}, "settings.frames must be 'all' or 'first_middle_last' or a whole number, got 'some'"),
        ({"pooling": "worst-0"}, "settings.pooling must be mean, min or worst-k with a number k, .* got 'worst-0'"),
        ({"first_frame": 1}, "settings.first_frame must be true or false, got 1"),
    ):
        with pytest.raises(ValueError, match=message):
            rewards.build(COLOUR, setting)


def test_chunks_change_only_the_memory():
    """The network runs once per chunk forward, and once more in the backward pass."""

    class Squares(FrameReward):
        name, differentiable = "squares", True

        def score_frames(self, frames, reference):
            sizes.append(len(frames))
            return frames.square().mean((1, 2, 3)) * reference["scale"]

    video = torch.stack([VIDEO, random_video(1)]).requires_grad_()
    batch = [{"scale": torch.tensor(2.0)}, {"scale": torch.tensor(3.0)}]
    expected = video[:, :, 1:].square().mean((1, 2, 3, 4)) * torch.tensor([2.0, 3.0])
    for chunk, chunks in ((3, [3, 1] * 2), (8, [4, 4])):
        sizes = []
        score = Squares("all", "mean", chunk=chunk)(video, batch).score
        assert sizes == chunks
        gradients = [torch.autograd.grad(s.sum(), video, retain_graph=True)[0] for s in (score, expected)]
        assert sorted(sizes) == sorted(2 * chunks)
        torch.testing.assert_close(score, expected)
        torch.testing.assert_close(*gradients)
    with torch.no_grad():
        assert not Squares("all", "mean")(video, batch).score.requires_grad


def test_colour_is_a_mean_over_channels():
    video = torch.full((1, 3, 3, 8, 8), -1.0)
    video[:, 0] = 1.0  # red
    video[:, :, 0] = 0.0  # the given frame
    assert rewards.build(COLOUR, {"red": 0.25, "blue": -4.0})(video, [{}]).score.item() == pytest.approx(0.25)
    output = rewards.build(COLOUR, {"red": 1, "green": 1, "blue": 1})(VIDEO[None], [{}])
    assert output.score.item() == pytest.approx(((VIDEO[:, 1:] + 1) / 2).mean().item() * 3, rel=1e-5)


def test_jpeg_size_is_pils():
    sizes = []
    for frame in to_uint8(VIDEO)[1:]:
        Image.fromarray(frame.numpy()).save(file := io.BytesIO(), format="jpeg", quality=80)
        sizes.append(len(file.getvalue()) / 1000)
    reward = rewards.build(f"{TOYS}:JpegSize", {"quality": 80})
    output = reward(VIDEO[None].requires_grad_(), [{}])
    assert output.score.item() == pytest.approx(-sum(sizes) / len(sizes)) and not output.score.requires_grad


def test_samples_without_reference_or_finite_score_are_invalid():
    broken = VIDEO.clone()
    broken[:, 2] = math.inf
    video = torch.stack([VIDEO, broken, VIDEO]).requires_grad_()
    output = rewards.find_reward(COLOUR)()(video, [{}, {}, None])
    (gradient,) = torch.autograd.grad(output.score.sum(), video)
    assert gradient.isfinite().all() and (gradient[1:] == 0).all() and (gradient[0, :, 1:] != 0).all()
    assert output.valid.tolist() == [True, False, False]


def test_motion_is_best_at_the_real_clips_motion():
    reward = rewards.build("motion", {})
    reference = reward.reference(VIDEO, "ignored")
    middle = VIDEO.mean(1, keepdim=True)
    speeds = torch.tensor([0.0, 0.5, 1.0, 2.0])
    video = torch.stack([middle + speed * (VIDEO - middle) for speed in speeds]).requires_grad_()
    output = reward(video, [reference] * 4)
    torch.testing.assert_close(output.score, torch.tensor([0.0, 0.5, 1.0, 0.5]), atol=1e-4, rtol=0)
    torch.testing.assert_close(output.parts["motion_ratio"], speeds, atol=1e-4, rtol=0)
    (gradient,) = torch.autograd.grad(output.score.sum(), video)
    assert gradient.isfinite().all() and output.valid.all()
    along = (gradient * (VIDEO - middle)).sum((1, 2, 3, 4))
    assert along[1] == pytest.approx(1, rel=1e-3) and along[3] == pytest.approx(-0.25, rel=1e-3)


def test_motion_needs_a_real_clip_that_moves():
    reward = rewards.find_reward("motion")()
    assert reward.reference(VIDEO[:, :1]) is None  # one frame
    barely = torch.zeros(3, 2, 4, 4)
    barely[:, 1] = 2.02 * MIN_CHANGE
    assert reward.reference(barely) is not None and reward.reference(barely * 0.98) is None
    assert mean_change(torch.stack([-torch.ones(3, 4, 4), torch.ones(3, 4, 4)], 1)) == 1
    broken = VIDEO.clone()
    broken[0, 0, 0, 0] = math.nan
    output = reward(torch.stack([VIDEO, broken]), [None, reward.reference(VIDEO)])
    assert not output.valid.any() and output.score.tolist() == [0, 0] and output.parts["motion_ratio"].isnan().all()


@pytest.mark.parametrize("name", [COLOUR, "motion"])
def test_gradients_equal_finite_differences(name):
    reward = rewards.build(name, {})
    reference = reward.reference(random_video(3).double())
    video = VIDEO[None].double().requires_grad_()
    assert gradcheck(lambda x: reward(x, [reference]).score, video, eps=1e-6, atol=0, rtol=1e-5, fast_mode=True)
