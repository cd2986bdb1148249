"""The denoising steps that are stochastic and trained in an epoch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from rewardfl.noise import noise_seed


@dataclass(frozen=True, kw_only=True)
class Windows:
    """The steps of a schedule that may be stochastic and trained.

    rule: `list`, the given `steps`. `random`: `size` steps in a row (Flow-GRPO-Fast). `fraction`: that share of the
    steps, rounded and at least one, not necessarily in a row (DanceGRPO draws 0.6). Both draw in each epoch from
    bounds[0] <= step < bounds[1], by default all steps. usable: the steps with std > 0, without the last, whose noise
    would only stay in the sample; every published recipe leaves it out.
    """

    rule: Literal["list", "random", "fraction"]
    usable: Sequence[int]
    steps: Sequence[int] = ()
    size: int = 1
    bounds: Sequence[int] | None = None
    fraction: float = 0.6

    @property
    def drawable(self) -> tuple[int, ...]:
        """Return the steps that some epoch's window may have, ascending."""
        if self.rule == "list":
            return tuple(sorted(self.steps))
        low, high = self.bounds or (0, math.inf)
        return tuple(step for step in sorted(self.usable) if low <= step < high)


def draw_window(windows: Windows, epoch: int, seed: int) -> tuple[int, ...]:
    """Return the SDE steps of an epoch, ascending: the same on every process.

    Raise ValueError for a window that fits nowhere, and for listed steps that are not usable.
    """
    candidates, usable = windows.drawable, sorted(windows.usable)
    if windows.rule == "list":
        if not candidates or len(set(candidates) & set(usable)) < len(candidates):
            raise ValueError(f"steps must be some of the usable {usable}, each once, got {list(windows.steps)}")
        return candidates
    generator = torch.Generator().manual_seed(noise_seed(seed, epoch, "window"))
    size = windows.size if windows.rule == "random" else 1
    starts = [s for s in candidates if set(range(s, s + size)) <= set(candidates)]
    if not starts:
        raise ValueError(
            f"no {size} steps in a row among the usable {list(candidates)} within the bounds; take a smaller window or "
            "wider bounds"
        )
    if windows.rule == "random":
        start = starts[int(torch.randint(len(starts), (), generator=generator))]
        return tuple(range(start, start + size))
    count = max(1, round(windows.fraction * len(candidates)))
    drawn = torch.randperm(len(candidates), generator=generator)[:count].tolist()
    return tuple(sorted(candidates[i] for i in drawn))
