"""Means with bootstrap intervals. What is resampled are people (or prompts): one person's clips are not independent."""

import functools

import torch
from torch import Tensor

Interval = dict[str, float]  # mean, low, high: the ends of the 95 % interval

NOTHING = "nothing to measure"


def format_interval(value: Interval | None, percent: bool = False) -> str:
    """mean [low, high], or in per cent with a sign."""
    if value is None:
        return NOTHING
    mean, low, high = (value[key] * (100 if percent else 1) for key in ("mean", "low", "high"))
    return f"{mean:+.1f}% [{low:+.1f}, {high:+.1f}]" if percent else f"{mean:.3f} [{low:.3f}, {high:.3f}]"


RESAMPLES = 10_000

LEAST = 1e-9  # what a ratio is divided by at least


@functools.lru_cache(maxsize=4)
def resampled(count: int) -> Tensor:
    """(RESAMPLES, count) indices drawn with replacement, always the same."""
    return torch.randint(0, count, (RESAMPLES, count), generator=torch.Generator().manual_seed(0))


def interval(values: Tensor) -> Interval:
    """Mean of (n,) values and the ends of its 95 % bootstrap interval."""
    return _ends(values.mean(), values[resampled(len(values))].mean(1))


def ratio_interval(mine: Tensor, theirs: Tensor, least: float = LEAST) -> Interval:
    """The mean of (n,) values over that of others, which is taken as `least` at least, with its interval."""
    rows = resampled(len(mine))
    ratios = mine[rows].mean(1) / theirs[rows].mean(1).clamp(min=least)
    return _ends(mine.mean() / theirs.mean().clamp(min=least), ratios)


def _ends(mean: Tensor, means: Tensor) -> Interval:
    low, high = means.quantile(torch.tensor([0.025, 0.975])).tolist()
    return {"mean": float(mean), "low": low, "high": high}
