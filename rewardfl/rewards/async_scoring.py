"""Asynchronous scoring with rewards that need no gradient and may fail: a failure invalidates one sample.

A reward is often the user's code or a remote server. A call that raises or exceeds its timeout makes its samples
invalid and is counted. Nothing waits for ever, and no other sample is lost.

`concurrent` rewards run in parallel with the rollouts: `parallel` batches at a time, and as many more in a queue. The
rollouts wait while the queue is full. So a process keeps at most 2 * parallel + 1 batches of what `Reward.held`
returns, in CPU memory.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rewardfl.rewards.base import Reward
from rewardfl.rewards.scoring import Reference, RewardResult, Term, failure, score_safely


@dataclass(eq=False)
class Call:
    """A call of a concurrent reward. work: None once it is done, to free the videos; started: None while it is queued.

    outcome: the result, or the exception that ended it.
    """

    work: Callable[[], RewardResult] | None
    started: float | None = None
    outcome: RewardResult | BaseException | None = None


class WorkerPool:
    """Threads that make the calls of a concurrent reward, `count` at a time, first in, first out.

    timeout: seconds from the start of a call after which it has failed. It occupies its thread until it ends, a daemon
    thread, so that the process can exit. While calls past their timeout occupy all threads, the queued calls fail, too.
    """

    def __init__(self, count: int, timeout: float):
        self.count, self.timeout = count, timeout
        self._changed = threading.Condition()
        self._waiting: deque[Call] = deque()
        self._running: set[Call] = set()
        self._threads = 0

    def submit(self, work: Callable[[], RewardResult]) -> Call | None:
        """Append a call to the queue, once fewer than `count` wait in it. Return None where all threads are overdue."""
        call = Call(work)
        with self._changed:
            while len(self._waiting) >= self.count:
                if not self._wait(self._until_all_are_overdue()):
                    return None
            self._waiting.append(call)
            if self._threads < self.count:
                self._threads += 1
                threading.Thread(target=self._work, daemon=True).start()
        return call

    def result(self, call: Call) -> RewardResult | None:
        """Return the call's result, or None after its timeout. Raise the exception that ended it."""
        with self._changed:
            while call.outcome is None:
                if not self._wait(self._until_all_are_overdue() if call.started is None else self._left(call)):
                    if call.started is None:
                        self._waiting.remove(call)
                    return None
        if isinstance(call.outcome, BaseException):
            raise call.outcome
        return call.outcome

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._threads -= 1
                    return
                call = self._waiting.popleft()
                call.started = time.monotonic()
                self._running.add(call)
                self._changed.notify_all()
            try:
                outcome = call.work()
            except BaseException as error:  # `result` raises it in the thread that waits
                outcome = error
            with self._changed:
                call.outcome, call.work = outcome, None
                self._running.remove(call)
                self._changed.notify_all()

    def _wait(self, seconds: float | None) -> bool:
        """Wait for a change for at most `seconds`, None for no limit; return False without waiting for 0 or less."""
        if seconds is not None and seconds <= 0:
            return False
        self._changed.wait(seconds)
        return True

    def _left(self, call: Call) -> float:
        return call.started + self.timeout - time.monotonic()

    def _until_all_are_overdue(self) -> float | None:
        """Return the seconds until all running calls are past their timeout; None while a thread is free."""
        return max(map(self._left, self._running)) if len(self._running) == self.count else None


@dataclass(frozen=True)
class Pending:
    """Rewards of B samples, some of them still being computed."""

    judging: Sequence[RewardResult | Call | None]  # by term; None where no call could start in time
    where: Sequence[WorkerPool | None]
    count: int


def make_worker_pools(terms: Sequence[Term], timeout: float) -> list[WorkerPool | None]:
    """Return a worker pool for each concurrent term, None for the others. timeout: see WorkerPool."""
    return [WorkerPool(term.reward.parallel, timeout) if term.reward.concurrent else None for term in terms]


def submit(
    terms: Sequence[Term], video: Tensor, references: Sequence[Sequence[Reference]], pools: Sequence[WorkerPool | None]
) -> Pending:
    """Submit videos (B, 3, F, H, W) to all rewards; references: `Reward.reference` of the clips, by sample and term.

    Concurrent rewards are queued in their pools; this waits while a queue is full. The others are computed here.
    """
    calls = [(term.reward, video, [row[i] for row in references]) for i, term in enumerate(terms)]
    # concurrent rewards first, so that they run while the others are computed
    results = [_submit_term(pool, *call) if pool else None for pool, call in zip(pools, calls, strict=True)]
    for i, pool in enumerate(pools):
        if pool is None:
            results[i] = score_safely(*calls[i])
    return Pending(results, pools, len(video))


def collect(pending: Pending) -> list[RewardResult]:
    """Wait for every term's result and return them."""
    results = []
    for result, pool in zip(pending.judging, pending.where, strict=True):
        if isinstance(result, Call):
            result = pool.result(result)
        results.append(result or failure(pending.count, f"no answer within {pool.timeout:g} s (reward.reward_timeout)"))
    return results


@torch.no_grad()
def _submit_term(
    pool: WorkerPool, reward: Reward, video: Tensor, references: Sequence[Reference]
) -> RewardResult | Call | None:
    try:
        inputs = reward.held(video, references)
    except Exception as error:  # the user's code, as in score_safely
        return failure(len(video), f"{type(error).__name__}: {error}")
    return pool.submit(partial(score_safely, reward, *inputs))


def stack_rewards(
    terms: Sequence[Term], results: Sequence[RewardResult], part_weights: Mapping[str, float]
) -> tuple[Tensor, Tensor, list[float]]:
    """Return (rewards (B, R), valid (B,) bool, weights (R,)) of the R rewards with a weight.

    part_weights: of parts of the first term, each clamped to at most 1; a part that was not measured counts as 0.
    A sample is valid when all terms with a weight have a score for it.
    """
    weighted = [(term, result.output) for term, result in zip(terms, results, strict=True) if term.weight > 0]
    columns = [output.score for _, output in weighted]
    valid = torch.stack([output.valid for _, output in weighted]).all(0)
    for name in part_weights:
        part = results[0].output.parts.get(name, torch.zeros(len(valid)))
        columns.append(part.nan_to_num(0.0).clamp(max=1))
    weights = [term.weight / term.std for term, _ in weighted] + list(part_weights.values())
    return torch.stack(columns, 1), valid, weights
