"""Scoring with several rewards: terms of a weighted sum, and rewards of weight 0 that are only measured."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rewardfl.rewards.base import ContractError, Reference, Reward, RewardError, RewardOutput, Unavailable


@dataclass(frozen=True, kw_only=True)
class Term:
    """One reward's weight * (score - mean) / std; weight 0 only measures. key: its key in the configuration.

    guards: whether a verdict refuses a move that lowers it (sample.verdict.pareto).
    """

    key: str
    label: str
    reward: Reward
    weight: float
    mean: float
    std: float
    guards: bool = False

    @property
    def decides(self) -> bool:
        """Return whether the training depends on the reward."""
        return self.weight > 0 or self.guards


@dataclass(frozen=True)
class RewardResult:
    """One reward's output for B samples. failed: (B,) bool, it raised or timed out; problems: a message for each."""

    output: RewardOutput
    failed: Tensor
    problems: tuple[str, ...] = ()

    def at_rest(self) -> "RewardResult":
        """Return the result in float32 on the CPU, detached, for the log: one copy from a GPU."""
        output = self.output
        values = (output.score, output.valid, *output.parts.values())
        rows = torch.stack([value.detach().float().to(output.score.device) for value in values]).cpu()
        parts = dict(zip(output.parts, rows[2:], strict=True))
        return RewardResult(RewardOutput(rows[0], rows[1].bool(), parts), self.failed, self.problems)


def check_reward(term: Term, video: Tensor, reference: Reference, count: int, *, with_gradient: bool) -> str:
    """Score `count` copies of a video (3, F, H, W); return the message of the reward's exception, "" for none.

    Raise RewardError if it breaks its contract, since every later call would.
    """
    try:
        with torch.set_grad_enabled(with_gradient):
            term.reward(video.repeat(count, 1, 1, 1, 1).requires_grad_(with_gradient), [reference] * count)
    except ContractError as error:
        raise RewardError(f"{term.key}: {error}") from error
    except Exception as error:  # the user's code may raise anything
        return f"{type(error).__name__}: {error}"
    return ""


def score_terms(terms: Sequence[Term], video: Tensor, references: Sequence[Sequence[Reference]]) -> list[RewardResult]:
    """Score videos (B, 3, F, H, W) with every term; references: `Reward.reference` of the clips, by sample and term.

    A term with a weight keeps its gradient, and its exceptions are raised. A term without one is scored safely.
    """
    results = []
    for i, term in enumerate(terms):
        batch = [row[i] for row in references]
        if term.weight == 0:
            results.append(score_safely(term.reward, video, batch))
            continue
        try:
            results.append(RewardResult(term.reward(video, batch), torch.zeros(len(video)).bool()))
        except RewardError as error:
            raise RewardError(f"{term.key}: {error}") from error
    return results


@torch.no_grad()
def score_safely(reward: Reward, video: Tensor, references: Sequence[Reference]) -> RewardResult:
    """Return the reward's detached output on the CPU. If it raises for a batch, score the samples one by one."""
    count = len(video)
    try:
        output = reward(video, references)
    except Unavailable as error:
        return failure(count, f"{type(error).__name__}: {error}")
    except Exception as error:  # the user's code may raise anything; KeyboardInterrupt and the like are no Exception
        if count == 1:
            return failure(1, f"{type(error).__name__}: {error}")
        return concat_results([score_safely(reward, video[i : i + 1], references[i : i + 1]) for i in range(count)])
    return RewardResult(output, torch.zeros(count).bool()).at_rest()


def failure(count: int, problem: str) -> RewardResult:
    """Return the result of `count` samples for which a reward failed."""
    output = RewardOutput(torch.zeros(count), torch.zeros(count).bool(), {})
    return RewardResult(output, torch.ones(count).bool(), (problem,) * count)


def concat_results(results: Sequence[RewardResult]) -> RewardResult:
    """Concatenate one reward's detached results of several batches; parts are NaN where a batch lacks them."""
    outputs = [result.output for result in results]
    parts = {
        name: torch.cat([output.parts.get(name, torch.full_like(output.score, torch.nan)) for output in outputs])
        for name in dict.fromkeys(name for output in outputs for name in output.parts)
    }
    score, valid = torch.cat([output.score for output in outputs]), torch.cat([output.valid for output in outputs])
    failed = torch.cat([result.failed for result in results])
    problems = tuple(problem for result in results for problem in result.problems)
    return RewardResult(RewardOutput(score, valid, parts), failed, problems)
