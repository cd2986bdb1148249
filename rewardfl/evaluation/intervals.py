"""Means with bootstrap intervals. People (or prompts) are resampled: one person's clips are not independent."""

import functools

import torch
from torch import Tensor

Interval = dict[str, float]  # mean, low, high: the ends of the 95 % interval

RESAMPLES = 10_000
_LEAST = 1e-9  # smallest denominator of a ratio


def format_interval(value: Interval) -> str:
    """Format an interval as mean [low, high]."""
    return f"{value['mean']:.3f} [{value['low']:.3f}, {value['high']:.3f}]"


@functools.lru_cache(maxsize=4)
def resampled(count: int) -> Tensor:
    """Draw (RESAMPLES, count) indices with replacement, always the same."""
    return torch.randint(0, count, (RESAMPLES, count), generator=torch.Generator().manual_seed(0))


def interval(values: Tensor) -> Interval:
    """Return the mean of (n,) values and the ends of its 95 % bootstrap interval."""
    return _ends(values.mean(), values[resampled(len(values))].mean(1))


def ratio_interval(numerator: Tensor, denominator: Tensor, least: float = _LEAST) -> Interval:
    """Return the ratio of two means of (n,) values with its interval. The denominator is clamped to `least`."""
    rows = resampled(len(numerator))
    ratios = numerator[rows].mean(1) / denominator[rows].mean(1).clamp(min=least)
    return _ends(numerator.mean() / denominator.mean().clamp(min=least), ratios)


def _ends(mean: Tensor, means: Tensor) -> Interval:
    low, high = means.quantile(torch.tensor([0.025, 0.975])).tolist()
    return {"mean": float(mean), "low": low, "high": high}
