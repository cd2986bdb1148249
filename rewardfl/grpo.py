"""Group-relative policy optimisation of flow models: advantages, clipped objectives, the check of the ratio.

Flow-GRPO (arXiv 2505.05470) and DanceGRPO (arXiv 2505.07818) treat every SDE step of a rollout as an action of a
Gaussian policy N(mean, std^2). `group_size` rollouts of one row, a prompt AND its image, are a group.

Log-probabilities are means over the latent's D dimensions, as in every published code base; a sum, the true density, is
unstable (flow_grpo issue 143). That shapes the ratio. With rel = rms(mean - old_mean) / std,

    log ratio = rel * z / sqrt(D) - rel^2 / 2,      z ~ N(0, 1).

The second term, below zero for every sample, outgrows the first with D (docs/flow_grpo.md); the objective `guard`
removes it. Clip ranges are not transferable between resolutions or objectives.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from rewardfl import flow
from rewardfl.sde import Step

STD_EPSILON = 1e-4  # added to a standard deviation of rewards (as Flow-GRPO): noise below it is not blown up to |A| = 1


def advantages(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    group_size: int,
    std: Literal["group", "global", "max_group", "none"] = "group",
    combine: Literal["sum", "per_reward"] = "sum",
    weights: Sequence[float] = (1.0,),
    clip: float = 5.0,
    valid: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Return (N,) float32 advantages and statistics to log, from all N samples that all processes rolled out.

        A = clip((r - mean of the group) / (standard deviation + STD_EPSILON), -clip, clip)

    rewards: (N,), or (N, R) for R rewards with R `weights`. group_ids: (N,) integers, any order. valid: (N,) bool,
    False for a sample without a reward (failed, no face): it is left out of every statistic and gets 0. A group whose
    valid rewards are all equal, or fewer than two, gives exactly 0.

    std: the population's deviation. `group`: of the group (DeepSeekMath, arXiv 2402.03300). `global`: of all valid raw
    rewards of the epoch, as in Flow-GRPO's code. `max_group`: the largest of the groups (LongCat, ModelTC/GenRL
    82a867e). In both, groups of small spread weigh little. `none`: no division (Dr. GRPO, arXiv 2503.20783).

    combine: `sum` normalises the weighted sum of rewards, `per_reward` each before the sum (GDPO, arXiv 2601.05242).

    Logged: `reward/mean`, `reward/std_in_group` (of the weighted sum over valid samples; NaN without any),
    `reward/valid_fraction`, `group/zero_variance` (fraction of groups without varying rewards).

    Raise ValueError for incomplete groups (rewards that were not gathered) and a valid reward that is not finite.
    """
    columns = rewards.detach().double().reshape(len(rewards), -1)
    valid = torch.ones_like(group_ids, dtype=torch.bool) if valid is None else valid
    if not columns[valid].isfinite().all():
        bad = int((~columns[valid].isfinite()).any(1).sum())
        raise ValueError(f"{bad} of {int(valid.sum())} valid rewards are not finite; mark such samples valid=False")
    _, index, sizes = torch.unique(group_ids, return_inverse=True, return_counts=True)
    if (sizes != group_size).any():
        raise ValueError(
            f"groups must have {group_size} members, but they have {sizes.tolist()}: gather rewards and group ids from "
            "all processes first"
        )
    weight = columns.new_tensor(weights)
    total = columns @ weight
    parts, weight = {"sum": (total[:, None], weight.new_ones(1)), "per_reward": (columns, weight)}[combine]
    mean, deviation, flat = _group_statistics(parts, index, valid)
    # not a product: an invalid sample may hold NaN
    centred = torch.where(valid[:, None] & ~flat[index], parts - mean[index], 0.0)
    of_all = parts[valid].std(0, correction=0) if valid.any() else deviation.amax(0)  # without a valid sample all are 0
    divisors = {"group": deviation[index], "max_group": deviation.amax(0), "global": of_all}
    if std != "none":
        centred = centred / (divisors[std] + STD_EPSILON)
    _, spread, _ = _group_statistics(total[:, None], index, valid)
    logged = {
        "reward/mean": float(total[valid].mean()),
        "reward/std_in_group": float(spread[index[valid].unique()].mean()),
        "reward/valid_fraction": float(valid.double().mean()),
        "group/zero_variance": float(flat.all(1).double().mean()),
    }
    return (centred @ weight).clamp(-clip, clip).float(), logged


def wide_groups(rewards: Tensor, valid: Tensor, weights: Sequence[float], smallest_spread: float) -> Tensor:
    """Return (groups,) bool: whether the best and worst reward of a group differ by at least `smallest_spread`.

    rewards: (groups, group_size, R), whose sum by R `weights` counts. valid: (groups, group_size) bool; fewer than two
    valid samples differ by 0. DAPO (arXiv 2503.14476, eq. 11) leaves out groups of equal rewards, and samples others.
    """
    total = rewards.double() @ rewards.new_tensor(weights, dtype=torch.float64)
    spread = total.masked_fill(~valid, -torch.inf).amax(1) - total.masked_fill(~valid, torch.inf).amin(1)
    return spread.clamp(min=0) >= smallest_spread


def _group_statistics(parts: Tensor, index: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (mean, population std, whether all are equal), each (groups, R), of parts (N, R) over valid samples."""
    groups = index[valid, None].expand(-1, parts.shape[1])
    values = parts[valid]
    zeros = parts.new_zeros(int(index.max()) + 1, parts.shape[1])
    mean = zeros.scatter_reduce(0, groups, values, "mean", include_self=False)
    variance = zeros.scatter_reduce(0, groups, (values - mean[index[valid]]) ** 2, "mean", include_self=False)
    highest = zeros.scatter_reduce(0, groups, values, "amax", include_self=False)
    lowest = zeros.scatter_reduce(0, groups, values, "amin", include_self=False)
    return mean, variance.sqrt(), highest == lowest  # exact: sums of equal numbers may not average to that number


def log_ratio(
    objective: Literal["clip", "guard"], log_prob: Tensor, mean: Tensor, step: Step, kind: flow.Kind = "flow"
) -> Tensor:
    """Return (B,) the logarithm of the ratio to clip, of one stochastic step that is scored again.

    log_prob (B,) and mean (B, ...): today's, from `sde.score`, with graph. step: the rollout's. kind: of sde. The
    objective `clip` is PPO's ratio (arXiv 1707.06347 eq. 7; unequal ranges: DAPO, arXiv 2503.14476):

        log r = log_prob - old_log_prob.

    `guard`, GRPO-Guard (arXiv 2510.22319: RatioNorm), removes the second term and scales by std, so that steps share a
    clip range:

        log r = (log_prob - old_log_prob + KL(mean, old_mean)) * std  =  mean_over_dims((mean - old_mean) * noise),

    with the rollout's draw noise = (x_next - old_mean) / std. The caller divides its loss by |dt|, since each step's
    gradient is proportional to |dt|. At r = 1 the gradient of -A r is -A * grad log_prob for `clip` and
    -A * std * grad log_prob for `guard`. CPS scores -(x_next - mean)^2 without 1 / (2 std^2), which `guard` restores.
    """
    difference = log_prob - step.log_prob
    if objective == "clip":
        return difference
    if objective != "guard":
        raise ValueError(f"objective must be clip or guard, got {objective!r}")
    assert step.mean is not None, "guard needs sde.rollout(keep_means=True)"
    score = difference / (2 * step.std**2) if kind == "cps" else difference
    return (score + flow.transition_kl(mean, step.mean, step.std)) * step.std


def clip_mask(ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Return (N,) bool: where the clip to 1 - clip_low .. 1 + clip_high zeroes the gradient of max(-Ar, -A clip(r))."""
    return (advantage > 0) & (ratio > 1 + clip_high) | (advantage < 0) & (ratio < 1 - clip_low)


def policy_statistics(samples: Mapping[str, Tensor]) -> dict[str, float]:
    """Return an update's metrics, from (N,) tensors of all its steps and processes, concatenated.

    samples: advantage, ratio, clipped, kl (of the transitions, from the reference), log_prob and old_log_prob.
    policy/approximate_kl is half the mean square of the log-ratio of the scores: Schulman's second estimator.
    policy/clip_fraction_positive and _negative are of the samples with an advantage above and below 0 (0 without any).
    If the two differ much, the ratio is biased and only one sign learns.
    """
    is_clipped, advantage = samples["clipped"].double(), samples["advantage"]

    def clip_fraction(selected: Tensor) -> float:
        return float(is_clipped[selected].mean()) if selected.any() else 0.0

    return {
        "policy/ratio": float(samples["ratio"].double().mean()),
        "policy/ratio_std": float(samples["ratio"].double().std(correction=0)),
        "policy/clip_fraction": float(is_clipped.mean()),
        "policy/clip_fraction_positive": clip_fraction(advantage > 0),
        "policy/clip_fraction_negative": clip_fraction(advantage < 0),
        "policy/approximate_kl": float(((samples["log_prob"] - samples["old_log_prob"]).double() ** 2 / 2).mean()),
        "policy/kl": float(samples["kl"].double().mean()),
    }


class RatioError(RuntimeError):
    """The policy before its first update differs from the policy of the rollout."""


def ratio_tolerance(clip_range: float, *, exact: bool) -> float:
    """Return check_ratio's tolerance: 0 for `exact` (float32, blocks not compiled), else 0.1 * clip_range."""
    return 0.0 if exact else 0.1 * clip_range


def check_ratio(log_prob: Tensor, old_log_prob: Tensor, tolerance: float, steps: Tensor) -> dict[int, float]:
    """Return {step: largest |log_prob - old_log_prob|}, before any update.

    Raise RatioError for a difference above `tolerance`. All arguments: (N,), `steps` the indices in the schedule.
    """
    differences = (log_prob - old_log_prob).detach().abs()
    largest = {int(i): float(differences[steps == i].amax()) for i in steps.unique()}
    if all(difference <= tolerance for difference in largest.values()):  # False for NaN
        return largest
    listed = ", ".join(f"step {i}: {difference:.3g}" for i, difference in largest.items())
    raise RatioError(
        f"before the first update the ratio must be 1, but |log_prob - old_log_prob| is {listed} (tolerance "
        f"{tolerance:g}). Rollout and replay differ. Likely: dropout (train() against eval()), batches of another "
        f"size or order, another dtype or autocast, latents stored in a narrower dtype than was scored, guidance "
        f"(CFG) on in one of them, another adapter state (reference or EMA weights, a merged adapter), or on a GPU "
        f"another attention kernel where a graph is kept: model.attention_backend: _native_flash avoids it"
    )
