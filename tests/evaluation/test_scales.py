"""tools/reward_scales.py: gradients by closed forms and by autograd, what is left out, and the table."""

import math

import numpy as np
import pytest
import torch
from conftest import ROOT, run_tool
from runs import COLOUR, CONFIG, FAST

from examples.toys import Colour
from rewardfl.evaluation.scales import equal_weight, format_scales, measure_scales, shares
from rewardfl.rewards import Reward, RewardOutput
from rewardfl.rewards.pixels.motion import MotionReward, mean_change
from rewardfl.rewards.scoring import Term
from rewardfl_tools import reward_scales


def term(reward, label="score", weight=1.0, std=1.0):
    return Term(key=f"reward.terms.{label}", label=label, reward=reward, weight=weight, mean=0.0, std=std)


def videos(count, frames=5, size=8):
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(3, frames, size, size, generator=generator) * 1.8 - 0.9 for _ in range(count)]


def measured(*terms, clips, real):
    references = [[term.reward.reference(clip) for term in terms] for clip in real]
    return measure_scales(terms, clips, references)


def test_colour_pulls_as_hard_as_its_formula_says():
    """The mean of c . (x + 1) / 2 over n pixels, none of frame 0, has the gradient c / 2n, of norm |c| / (2 sqrt n)."""
    (scale,) = measured(term(Colour(0.5, -2.0, 1.0), weight=3.0, std=0.5), clips=videos(3), real=videos(3))
    expected = math.sqrt(0.25 + 4 + 1) / (2 * math.sqrt(4 * 8 * 8))
    assert scale.norms.tolist() == pytest.approx([expected] * 3, rel=1e-5)
    assert scale.pull == pytest.approx(3.0 * expected / 0.5, rel=1e-5)
    channels = torch.tensor([0.5, -2.0, 1.0])
    scores = [float(((clip[:, 1:] + 1) / 2).mean((1, 2, 3)) @ channels) for clip in videos(3)]
    assert scale.scores.tolist() == pytest.approx(scores, rel=1e-4)
    assert format_scales([scale]).splitlines()[1].split()[1:3] == [
        f"{x:.3g}" for x in (np.mean(scores), np.std(scores, ddof=1))
    ]


def test_motion_and_its_cosine_equal_autograd_by_hand():
    clips, real = videos(2), [2 * clip / 1.8 for clip in reversed(videos(2))]
    colour, motion = measured(term(Colour(), std=0.1), term(MotionReward(), "m"), clips=clips, real=real)
    for i, clip in enumerate(clips):
        x = clip.clone().requires_grad_()
        ratio = mean_change(x) / mean_change(real[i])
        (by_motion,) = torch.autograd.grad(torch.minimum(ratio, 1 / ratio), x)
        by_colour = torch.zeros_like(x)
        by_colour[:, 1:] = torch.tensor([1, -0.5, -0.5])[:, None, None, None]
        assert float(motion.norms[i]) == pytest.approx(float(by_motion.norm()), rel=1e-5)
        angle = torch.nn.functional.cosine_similarity(by_motion.flatten(), by_colour.flatten(), dim=0)
        assert float(motion.cosines[i]) == pytest.approx(float(angle), abs=1e-6)
    assert colour.cosines.tolist() == pytest.approx([1, 1])


def test_equal_weight_gives_equal_shares():
    terms = [term(Colour(), weight=0.2, std=0.1), term(MotionReward(), "m", weight=0.7, std=3.0)]
    scales = measured(*terms, clips=videos(2), real=videos(4)[2:])
    pulls = [scale.pull for scale in scales]
    assert shares(scales) == pytest.approx([pull / sum(pulls) for pull in pulls])
    weight = equal_weight(scales[1], scales[0])
    again = measured(terms[0], term(MotionReward(), "m", weight=weight, std=3.0), clips=videos(2), real=videos(4)[2:])
    assert shares(again) == pytest.approx([0.5, 0.5])


class NoGradient(Reward):
    name = "no_gradient"

    def forward(self, video, batch):
        return RewardOutput(video.detach().mean((1, 2, 3, 4)), torch.ones(len(video)).bool(), {})


def test_what_cannot_be_judged_is_left_out():
    """A real clip that stands still gives motion no reference; a reward without gradient has only a score."""
    still = torch.zeros(3, 5, 8, 8)
    terms = [term(MotionReward()), term(NoGradient(), "n", weight=0.0)]
    scales = measured(*terms, clips=videos(3), real=[*videos(2), still])
    assert scales[0].scores.isnan().tolist() == scales[0].norms.isnan().tolist() == [False, False, True]
    assert not scales[1].scores.isnan().any() and scales[1].norms.isnan().all()
    text = format_scales(scales)
    assert "score (2 of 3 clips)" in text and "nan" not in text
    assert shares(scales) == [1.0, 0.0]


def test_the_table_of_clips_of_the_tiny_world(monkeypatch):
    others = f"reward.others={{change: {{name: motion, weight: 0.3}}, red: {{name: {COLOUR}}}}}"
    monkeypatch.chdir(ROOT)
    options = ["--trust-code", "--rows", "2", "--device", "cpu"]
    head, *rows = run_tool(reward_scales.main, "--config", CONFIG, *FAST, others, *options).splitlines()[-5:]
    assert head.split()[:3] == ["reward", "mean", "std"]
    assert [row.split()[0] for row in rows] == ["score", "held_out", "change", "red"]
