"""What every reward is: a module from videos to one score per sample."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass
class RewardOutput:
    """Scores of B samples. Where `valid` is False the score is 0, with a zero gradient, and means nothing."""

    score: Tensor  # (B,) float32, always finite; with gradient to the video if the reward is differentiable
    valid: Tensor  # (B,) bool
    parts: dict[str, Tensor]  # name -> (B,) for the log, without gradient; NaN where not measured


class Reward(nn.Module):
    """Subclasses set `name` and `differentiable` (has the score a gradient to the video?) and forward."""

    name: str
    differentiable: bool

    def reference(self, video: Tensor) -> dict[str, Tensor] | None:
        """What this reward keeps of a sample's real clip (3, F, H, W) in [-1, 1]; None if it is of no use.

        It is computed once per sample, cached under `fingerprint`, and handed back to `forward`. A reward that needs
        nothing of the real clip keeps an empty dict: every sample is usable.
        """
        return {}

    def fingerprint(self) -> dict[str, object]:
        """All that `reference` depends on beside the clip, as plain JSON values: weights, settings."""
        return {"name": self.name}

    def forward(self, video: Tensor, batch: Sequence[Mapping[str, Tensor] | None]) -> RewardOutput:
        """Score (B, 3, F, H, W) videos in [-1, 1] against one reference each; None makes a sample invalid."""
        raise NotImplementedError
