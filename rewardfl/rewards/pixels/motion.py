"""Does the generated clip move as much as the real one? For any picture, no face needed; differentiable."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rewardfl.rewards.base import Reward, RewardOutput, by_sample

# A real clip whose pixels change by less than half a level of 255 from frame to frame stands still: no ratio.
MIN_CHANGE = 0.5 / 255


class MotionReward(Reward):
    """min(r, 1 / r) with r = mean |x_(t+1) - x_t| of the generated clip over that of the real one.

    1 when both move equally, 0 for a still clip, and less than 1 again for one that moves more: trembling is not
    paid for. It sees only how much pixels change, not what moves where: to be used beside another reward, against
    freezing. Parts: motion_ratio, r; NaN for invalid samples, whose real clip stands still or has one frame.
    """

    name = "motion"
    differentiable = True
    fewest_frames = 2
    licence = "this project's"
    range = "[0, 1]"
    nothing_found = "nothing moves in"

    def reference(self, video: Tensor, prompt: str = "") -> dict[str, Tensor] | None:
        """The real clip's `motion`; None for one that stands still or has a single frame."""
        motion = mean_change(video)
        return {"motion": motion} if motion >= MIN_CHANGE else None

    def forward(self, video: Tensor, batch: Sequence[Mapping[str, Tensor] | None]) -> RewardOutput:
        return by_sample(video, batch, self._sample, ("motion_ratio",))

    def _sample(self, video: Tensor, reference: Mapping[str, Tensor]) -> tuple[Tensor | None, dict[str, float]]:
        """Score and ratio of one clip (3, F, H, W)."""
        ratio = mean_change(video) / reference["motion"].to(video)
        return (alike(ratio), {"motion_ratio": ratio.item()}) if ratio.isfinite() else (None, {})


def alike(ratio: Tensor) -> Tensor:
    """() min(r, 1 / r) of a () ratio r >= 0, in [0, 1], with its gradient."""
    # the smaller one alone: the reciprocal of a still clip's ratio has no gradient worth having
    return ratio if ratio <= 1 else 1 / ratio


def mean_change(video: Tensor, where: Tensor | None = None) -> Tensor:
    """() mean absolute change of a (3, F, H, W) video's pixels from frame to frame, in [0, 1]; NaN for one frame.

    where: (F - 1, H, W) bool, the pixels of each step that count; NaN for none.
    """
    change = (video[:, 1:] - video[:, :-1]).abs()
    if where is None:
        return change.mean() / 2
    return torch.where(where, change.mean(0), 0).sum() / where.sum() / 2
