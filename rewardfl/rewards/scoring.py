"""Several rewards at a time: a weighted sum to train on, and others that only measure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rewardfl.rewards.base import Reward, RewardError, RewardOutput, Unavailable
from rewardfl.rewards.contract import ContractError

Reference = Mapping[str, Tensor] | None


@dataclass(frozen=True)
class Term:
    """weight * (score - mean) / std of one reward; weight 0 only measures. key: where the configuration names it."""

    key: str
    label: str
    reward: Reward
    weight: float
    mean: float
    std: float


@dataclass(frozen=True)
class RewardResult:
    """One reward of B samples. failed: (B,) bool, invalid because it raised or was too late; problems: of each, why."""

    output: RewardOutput
    failed: Tensor
    problems: tuple[str, ...] = ()

    def at_rest(self) -> "RewardResult":
        """The same in float32 on the CPU and without a graph, as what is logged."""
        parts = {name: part.detach().float().cpu() for name, part in self.output.parts.items()}
        output = RewardOutput(self.output.score.detach().float().cpu(), self.output.valid.cpu(), parts)
        return RewardResult(output, self.failed, self.problems)


def check_reward(term: Term, video: Tensor, reference: Reference, count: int, with_gradient: bool) -> str:
    """What the reward raises for a video (3, F, H, W), `count` times, in words, or nothing.

    RewardError where it breaks its contract.
    """
    try:
        with torch.set_grad_enabled(with_gradient):
            term.reward(video.repeat(count, 1, 1, 1, 1).requires_grad_(with_gradient), [reference] * count)
    except ContractError as error:  # no later call would keep it
        raise RewardError(f"{term.key}: {error}") from error
    except Exception as error:  # whatever the user's code raises
        return f"{type(error).__name__}: {error}"
    return ""


def score_terms(terms: Sequence[Term], video: Tensor, references: Sequence[Sequence[Reference]]) -> list[RewardResult]:
    """Every term of videos (B, 3, F, H, W): with its gradient where it has a weight, else as `judge` has it.

    So one that only measures costs nothing but its own numbers when it raises; one that is trained on raises here.
    references: what the rewards keep of the real clips, by sample and then by term.
    """
    judged = []
    for i, term in enumerate(terms):
        batch = [reference[i] for reference in references]
        if term.weight == 0:
            judged.append(score_safely(term.reward, video, batch))
            continue
        try:
            judged.append(RewardResult(term.reward(video, batch), torch.zeros(len(video)).bool()))
        except RewardError as error:
            raise RewardError(f"{term.key}: {error}") from error
    return judged


@torch.no_grad()
def score_safely(reward: Reward, video: Tensor, references: Sequence[Reference]) -> RewardResult:
    """The reward's output, at rest. If it raises for a batch, its samples are tried one by one where that may help."""
    count = len(video)
    try:
        output = reward(video, references)
    except Unavailable as error:
        return failure(count, f"{type(error).__name__}: {error}")
    except Exception as error:  # whatever the user's code raises; what stops the process is no Exception
        if count == 1:
            return failure(1, f"{type(error).__name__}: {error}")
        return concat_results([score_safely(reward, video[i : i + 1], references[i : i + 1]) for i in range(count)])
    return RewardResult(output, torch.zeros(count).bool()).at_rest()


def failure(count: int, problem: str) -> RewardResult:
    """What is known of `count` samples for which a reward has failed."""
    output = RewardOutput(torch.zeros(count), torch.zeros(count).bool(), {})
    return RewardResult(output, torch.ones(count).bool(), (problem,) * count)


def concat_results(judged: Sequence[RewardResult]) -> RewardResult:
    """One reward of several batches, at rest, as one of all their samples; parts are NaN where a batch has none."""
    names = dict.fromkeys(name for one in judged for name in one.output.parts)
    nothing = [torch.full_like(one.output.score, torch.nan) for one in judged]
    parts = {
        name: torch.cat([one.output.parts.get(name, nan) for one, nan in zip(judged, nothing, strict=True)])
        for name in names
    }
    output = RewardOutput(
        torch.cat([one.output.score for one in judged]), torch.cat([one.output.valid for one in judged]), parts
    )
    failed = torch.cat([one.failed for one in judged])
    return RewardResult(output, failed, tuple(problem for one in judged for problem in one.problems))
