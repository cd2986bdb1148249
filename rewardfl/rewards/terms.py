"""Several rewards at a time: a weighted sum to train on, and others that only measure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rewardfl.config import WantedReward

from . import build
from .base import Reward, RewardOutput


class RewardError(ValueError):
    """A reward that cannot be had. The message names its place in the configuration."""


@dataclass(frozen=True)
class Term:
    """weight * (score - mean) / std of one reward; weight 0 only measures. key: where the configuration names it."""

    key: str
    label: str
    reward: Reward
    weight: float
    mean: float
    std: float


def build_terms(wanted: Sequence[WantedReward], device: torch.device) -> list[Term]:
    """The rewards, on the device. RewardError for an unknown one, or settings or weights that do not fit it."""
    terms = []
    for one in wanted:
        try:
            reward = build(one.name, one.settings).to(device)
        except ValueError as error:
            raise RewardError(f"{one.key}: {error}") from error
        terms.append(Term(one.key, one.label, reward, one.weight, one.mean, one.std))
    return terms


def check_trainable(terms: Sequence[Term]) -> None:
    """RewardError when a reward that is to be trained on has no gradient, or none has a weight."""
    for term in terms:
        if term.weight > 0 and not term.reward.differentiable:
            raise RewardError(
                f"{term.key}: {term.reward.name} has no gradient; measure it (weight 0), or train on it by policy "
                "gradient (train_flow_grpo.py)"
            )
    if not any(term.weight > 0 for term in terms):
        raise RewardError("reward.reward_weight is 0, and so are the weights of reward.others: nothing is trained")


def score(
    terms: Sequence[Term], video: Tensor, references: Sequence[Sequence[Mapping[str, Tensor] | None]]
) -> list[RewardOutput]:
    """Every term's output for videos (B, 3, F, H, W), without gradient where the weight is 0.

    references: what the rewards keep of the real clips, by sample and then by term.
    """
    outputs = []
    for i, term in enumerate(terms):
        with torch.set_grad_enabled(term.weight > 0 and torch.is_grad_enabled()):
            outputs.append(term.reward(video, [reference[i] for reference in references]))
    return outputs


def total(terms: Sequence[Term], outputs: Sequence[RewardOutput]) -> Tensor:
    """(B,) what is trained, with gradient; a term whose score is not valid for a sample adds nothing to it."""
    parts = [
        term.weight * (output.score - term.mean) / term.std * output.valid
        for term, output in zip(terms, outputs, strict=True)
        if term.weight > 0
    ]
    return torch.stack(parts).sum(0)
