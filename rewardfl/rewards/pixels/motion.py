"""Amount of motion compared with the real clip, for any content, differentiable."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rewardfl.rewards.base import Reward, RewardOutput, score_clips

MIN_CHANGE = 0.5 / 255  # a real clip whose pixels change by less than half a level of 255 per frame gives no ratio


class MotionReward(Reward):
    """min(r, 1 / r) with r = mean |x_(t+1) - x_t| of the generated clip over the real clip's.

    1 when both move equally, 0 for a still clip, less than 1 for a clip that moves more, so that trembling does not
    pay. It measures the amount of change, not what moves: use it next to another reward, against freezing. Parts:
    motion_ratio, r; NaN for invalid samples, whose real clip stands still or has one frame.
    """

    name = "motion"
    differentiable = True
    fewest_frames = 2
    licence = "this project's"
    range = "[0, 1]"
    has_cap = True
    nothing_found = "nothing moves in"
    compares_with = "motion"

    def reference(self, video: Tensor, prompt: str = "") -> dict[str, Tensor] | None:
        """Return the real clip's `motion`; None for a still clip or a single frame."""
        motion = mean_change(video)
        return {"motion": motion} if motion >= MIN_CHANGE else None

    def forward(self, video: Tensor, batch: Sequence[Mapping[str, Tensor] | None]) -> RewardOutput:
        return score_clips(video, batch, self._sample, ("motion_ratio",))

    def _sample(self, video: Tensor, reference: Mapping[str, Tensor]) -> tuple[Tensor | None, dict[str, float]]:
        ratio = mean_change(video) / reference["motion"].to(video)
        return (symmetric_ratio(ratio), {"motion_ratio": ratio.item()}) if ratio.isfinite() else (None, {})


def symmetric_ratio(ratio: Tensor) -> Tensor:
    """Return () min(r, 1 / r) of a () ratio r >= 0, in [0, 1], with gradient."""
    return ratio if ratio <= 1 else 1 / ratio  # not torch.minimum: 1 / r of a still clip has an infinite gradient


def mean_change(video: Tensor, where: Tensor | None = None) -> Tensor:
    """Return the () mean absolute change of a (3, F, H, W) video's pixels per frame, in [0, 1]; NaN for one frame.

    where: (F - 1, H, W) bool, the pixels of each step to average; NaN without any.
    """
    change = (video[:, 1:] - video[:, :-1]).abs()
    if where is None:
        return change.mean() / 2
    return torch.where(where, change.mean(0), 0).sum() / where.sum() / 2
