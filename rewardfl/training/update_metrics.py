"""Metrics of one update, over all samples of all processes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rewardfl import grpo
from rewardfl.rewards import metrics as reward_metrics
from rewardfl.rewards.scoring import RewardResult, Term
from rewardfl.training import invariants
from rewardfl.training.plan import ForwardRlPlan
from rewardfl.training.timer import peak_memory_gb


@dataclass(kw_only=True)
class Outcome:
    """The samples (B,) of one pass of reward feedback learning."""

    row: Tensor  # indices of samples
    replaced: Tensor  # bool, whether another clip replaces one whose cache entries are lost
    signal: Tensor  # bool, whether the sample has a gradient
    finite: Tensor  # bool, whether its values before the backward passes are finite


@dataclass(kw_only=True)
class Rewarded:
    """The rewards of the same samples (B,), which supervised fine-tuning has not."""

    reward: Tensor
    kl: Tensor
    cotangent: Tensor  # (B, K) norms of the cotangents of the sample's own loss, by active step
    valid: Tensor  # whether the first reward is valid
    sample_norm: Tensor  # norm of the reward's gradient by the frames


@dataclass(kw_only=True)
class ForwardOutcome:
    """The videos (B,) of one draw of forward-process reinforcement."""

    row: Tensor
    weight: Tensor  # in the mean over the update's samples; 0 if it is left out
    loss: Tensor
    advantage: Tensor
    misfit: Tensor  # the velocity's mean squared error
    from_old: Tensor  # mean squared distances of the velocity from other policies', 0 without them
    from_base: Tensor
    ratio: Tensor  # ratio of AWM's likelihoods
    reference: Tensor  # misfit of DPO's reference, 0 without one
    logit: Tensor  # DPO's of the sample's pair, 0 without one


@dataclass(kw_only=True)
class GrpoOutcome:
    """The samples (B,) of one stochastic step of Flow-GRPO."""

    row: Tensor
    weight: Tensor  # in the mean over the update's samples; 0 if it is left out
    denoising_step: Tensor
    advantage: Tensor
    ratio: Tensor
    clipped: Tensor  # bool
    kl: Tensor  # KL of the transition, from the reference
    log_prob: Tensor
    old_log_prob: Tensor  # the rollout's


def common_metrics(
    device: torch.device, step: int, norm: float, rate: float, replaced: Tensor, signal: Tensor
) -> dict[str, float]:
    """Return the metrics that all scripts log: gradient norm, learning rate, replaced samples, peak memory.

    replaced, signal: (N,) bool, whether a sample replaces another, and whether it had a gradient. Raise
    GradientMissing where the norm is 0 although a sample had one.
    """
    return {
        "grad_norm": norm,
        "lr": rate,
        "data/replaced": float(replaced.sum()),
        "train/no_signal": invariants.no_signal(step, norm, signal),
        "memory/peak_gb": peak_memory_gb(device),
    }


def reward_fl_metrics(
    anchor_metrics: Mapping[str, float],
    terms: Sequence[Term],
    results: Sequence[Sequence[RewardResult]],
    samples: Rewarded,
    active: Sequence[int],
    kl_weight: float,
) -> dict[str, float]:
    """Return the metrics of an update of reward feedback learning.

    anchor_metrics: of Anchors.metrics; the policy's loss is added to its actor/loss. results: by batch and term.
    """
    policy_loss = float(kl_weight * samples.kl.mean() - samples.reward.mean())
    metrics = dict(anchor_metrics) | {
        "actor/loss": anchor_metrics["actor/loss"] + policy_loss,
        "actor/kl_loss": float(samples.kl.mean()),
        "reward/valid_fraction": float(samples.valid.mean()),
        "reward/failed": reward_metrics.failed_fraction(results),
        "train/sample_norm": float(samples.sample_norm.median()),
    }
    metrics |= reward_metrics.means(terms, results, "reward", metrics, score="mean")
    norms = samples.cotangent.mean(0).tolist()
    return metrics | {f"grad_norm/step_{i}": norm for i, norm in zip(active, norms, strict=True)}


def forward_rl_metrics(
    anchor_metrics: Mapping[str, float], samples: ForwardOutcome, deviation: float, plan: ForwardRlPlan
) -> dict[str, float]:
    """Return the metrics of an update of forward-process reinforcement.

    policy/misfit_positive and _negative are the
    velocity's mean squared error for videos of advantage above and below 0 (0 without any): the first should fall
    against the second. For dpo also policy/chosen_change and rejected_change, these minus the reference's, and
    policy/pair_accuracy, the share of pairs in which the first is below the second.
    """
    misfit, chosen, rejected = samples.misfit, samples.advantage > 0, samples.advantage < 0
    means = {"policy/misfit_positive": _mean(misfit, chosen), "policy/misfit_negative": _mean(misfit, rejected)}
    metrics = dict(anchor_metrics) | means | {"policy/deviation": deviation}
    metrics["actor/loss"] += float((samples.weight * samples.loss).mean())
    if plan.group.objective == "dpo":
        metrics["policy/pair_accuracy"] = _mean(samples.logit > 0, chosen)
        change = misfit - samples.reference
        metrics |= {"policy/chosen_change": _mean(change, chosen), "policy/rejected_change": _mean(change, rejected)}
    means = {name: float((samples.weight * getattr(samples, name)).mean()) for name in plan.measured}
    return metrics | {f"policy/{name}": mean for name, mean in means.items()}


def _mean(values: Tensor, chosen: Tensor) -> float:
    """Return the mean of the values (N,) where `chosen` (N,) is true, 0 where it never is."""
    return float(values[chosen].double().mean()) if chosen.any() else 0.0


def flow_grpo_metrics(
    anchor_metrics: Mapping[str, float], policy_loss: float, samples: GrpoOutcome
) -> dict[str, float]:
    """Return the metrics of a Flow-GRPO update. policy_loss: the mean loss of its samples and steps."""
    loss = anchor_metrics["actor/loss"] + policy_loss
    trained = (samples.weight > 0) | ~samples.weight.any()  # without any, all of them
    columns = {name: column[trained] for name, column in vars(samples).items()}
    return dict(anchor_metrics) | {"actor/loss": loss} | grpo.policy_statistics(columns)
