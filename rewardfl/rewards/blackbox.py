"""Rewards that need no gradient, and may fail: what one of them does to one sample costs that sample alone.

A reward is often the user's code or somebody's server. Whatever it raises, and whatever it does not answer in time,
makes samples invalid and is counted; nothing waits for ever, and no other sample is lost.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from .base import Reward, RewardOutput
from .terms import Term

Reference = Mapping[str, Tensor] | None


@dataclass(frozen=True)
class Judged:
    """One reward of B samples. failed: (B,) bool, invalid because it raised or was too late; problems: in words."""

    output: RewardOutput
    failed: Tensor
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pending:
    """Rewards of B samples, some of which may still be at work."""

    judging: Sequence[Future]  # of Judged, by term
    count: int
    began: float


def begin(terms: Sequence[Term], video: Tensor, references: Sequence[Sequence[Reference]]) -> Pending:
    """Judge videos (B, 3, F, H, W); references: what the rewards keep of the real clips, by sample and then by term.

    Rewards that are `concurrent` go on in threads of their own; the others have answered when this returns.
    """
    began = time.monotonic()
    calls = [(term.reward, video, [each[i] for each in references]) for i, term in enumerate(terms)]
    judging = [_in_thread(judge, *call) if call[0].concurrent else None for call in calls]
    for i, call in enumerate(calls):
        if judging[i] is None:
            judging[i] = Future()
            judging[i].set_result(judge(*call))
    return Pending(judging, len(video), began)


def finish(pending: Pending, timeout: float) -> list[Judged]:
    """Every term's verdict. timeout: seconds from `begin` after which a reward has failed for these samples."""
    found = []
    for judging in pending.judging:
        try:
            found.append(judging.result(max(0.0, pending.began + timeout - time.monotonic())))
        except TimeoutError:
            found.append(_failed(pending.count, f"no answer within {timeout:g} s"))
    return found


@torch.no_grad()
def judge(reward: Reward, video: Tensor, references: Sequence[Reference]) -> Judged:
    """The reward's output on the CPU. If it raises for a batch, its samples are tried one by one."""
    count = len(video)
    try:
        output = reward(video, references)
    except Exception as error:  # whatever the user's code raises; what stops the process is no Exception
        if count == 1:
            return _failed(1, f"{type(error).__name__}: {error}")
        return _joined([judge(reward, video[i : i + 1], references[i : i + 1]) for i in range(count)])
    parts = {name: part.float().cpu() for name, part in output.parts.items()}
    return Judged(RewardOutput(output.score.float().cpu(), output.valid.cpu(), parts), torch.zeros(count).bool())


def weighed(
    terms: Sequence[Term], judged: Sequence[Judged], part_weights: Mapping[str, float]
) -> tuple[Tensor, Tensor, list[float]]:
    """(rewards (B, R), valid (B,) bool, weights (R,)): what is trained, by reward.

    part_weights: of parts of the first term, each at most 1, which are trained beside it; not measured counts as 0.
    A sample is valid when every reward that is trained has a score for it.
    """
    trained = [(term, one) for term, one in zip(terms, judged, strict=True) if term.weight > 0]
    columns = [one.output.score for _, one in trained]
    valid = torch.stack([one.output.valid for _, one in trained]).all(0)
    for name in part_weights:
        part = judged[0].output.parts.get(name, torch.zeros(len(valid)))
        columns.append(part.nan_to_num(0.0).clamp(max=1))
    weights = [term.weight / term.std for term, _ in trained] + list(part_weights.values())
    return torch.stack(columns, 1), valid, weights


def measured(terms: Sequence[Term], judged: Sequence[Judged]) -> dict[str, Tensor]:
    """For the log, (B,) each, NaN where there is none: every term's score by its label, the first term's parts, and
    `failed`, 1 where a reward raised or was too late."""
    first = judged[0].output
    scores = {
        term.label: one.output.score.where(one.output.valid, torch.nan) for term, one in zip(terms, judged, strict=True)
    }
    failed = torch.stack([one.failed for one in judged]).any(0)
    return scores | first.parts | {"failed": failed.float()}


def _failed(count: int, problem: str) -> Judged:
    return Judged(RewardOutput(torch.zeros(count), torch.zeros(count).bool(), {}), torch.ones(count).bool(), (problem,))


def _joined(singles: Sequence[Judged]) -> Judged:
    names = {name: None for single in singles for name in single.output.parts}
    nothing = torch.tensor([torch.nan])
    return Judged(
        RewardOutput(
            torch.cat([single.output.score for single in singles]),
            torch.cat([single.output.valid for single in singles]),
            {name: torch.cat([single.output.parts.get(name, nothing) for single in singles]) for name in names},
        ),
        torch.cat([single.failed for single in singles]),
        tuple(problem for single in singles for problem in single.problems),
    )


def _in_thread(function: Callable, *arguments: object) -> Future:
    """The function's result, from a daemon thread: one that never answers does not keep the process from ending."""
    future = Future()

    def work() -> None:
        try:
            future.set_result(function(*arguments))
        except BaseException as error:  # handed on to whoever waits
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future
