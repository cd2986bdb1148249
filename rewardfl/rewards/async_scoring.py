"""Asynchronous scoring with rewards that need no gradient and may fail: a failure or timeout invalidates one sample.

`concurrent` rewards run in parallel with the rollouts: `parallel` batches at a time, and as many more in a queue. The
rollouts wait while the queue is full. So a process keeps at most 2 * parallel + 1 batches of what `Reward.held`
returns, in CPU memory.
"""

import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from rewardfl.rewards.base import Reward
from rewardfl.rewards.scoring import Reference, RewardResult, Term, failure, score_safely

Work = Callable[[], RewardResult]


class Call(Future[RewardResult]):
    """A reward of `count` samples, done or not. since: the time.monotonic() of its start, or of its queueing."""

    def __init__(self, count: int, timeout: float):
        super().__init__()
        self.count, self.timeout, self.since = count, timeout, time.monotonic()

    def wait(self) -> RewardResult:
        """Return the result, a failure after the timeout. Raise the exception that ended the call."""
        while not self.done():
            left = self.since + self.timeout - time.monotonic()
            if left <= 0:
                self.cancel()
                return failure(self.count, f"no answer within {self.timeout:g} s")
            with suppress(TimeoutError):
                self.result(left)
        return self.result()


class WorkerPool:
    """Daemon threads that make the calls of a concurrent reward, `count` at a time, first in, first out.

    timeout: seconds from the start of a call after which it has failed. It occupies its thread until it ends; calls
    that find no thread fail, too.
    """

    def __init__(self, count: int, timeout: float):
        self.timeout = timeout
        self._queue: queue.Queue[tuple[Call, Work]] = queue.Queue(count)
        self._stuck = False  # did a call find no place in time, and did no call end since?
        for _ in range(count):
            threading.Thread(target=self._work, daemon=True).start()

    def submit(self, count: int, work: Work) -> Call:
        """Append a call for `count` samples to the queue, once it has a place; the call fails without one in time."""
        call = Call(count, self.timeout)
        try:
            self._queue.put((call, work), timeout=0 if self._stuck else self.timeout)
            call.since = time.monotonic()
        except queue.Full:
            self._stuck, call.since = True, -math.inf
        return call

    def _work(self) -> None:
        while True:
            call, work = self._queue.get()
            if call.set_running_or_notify_cancel():
                call.since = time.monotonic()
                try:
                    call.set_result(work())
                except BaseException as error:  # `wait` raises it in the thread that waits
                    call.set_exception(error)
                self._stuck = False
            del call, work  # the videos


def make_worker_pools(terms: Sequence[Term]) -> list[WorkerPool | None]:
    """Return a worker pool for each concurrent term, None for the others."""
    rewards = [term.reward for term in terms]
    return [WorkerPool(each.parallel, each.call_timeout) if each.concurrent else None for each in rewards]


def submit(
    terms: Sequence[Term], video: Tensor, references: Sequence[Sequence[Reference]], pools: Sequence[WorkerPool | None]
) -> list[Call]:
    """Submit videos (B, 3, F, H, W) to all rewards; references: `Reward.reference` of the clips, by sample and term.

    Concurrent rewards are queued in their pools; this waits while a queue is full. The others are computed here, after
    them, so that both run at a time.
    """
    inputs = [(term.reward, video, [row[i] for row in references]) for i, term in enumerate(terms)]
    queued = [_submit_term(pool, *each) if pool else None for pool, each in zip(pools, inputs, strict=True)]
    return [call or _make_done(score_safely(*each)) for call, each in zip(queued, inputs, strict=True)]


def collect(calls: Sequence[Call]) -> list[RewardResult]:
    """Wait for every term's result and return them."""
    return [call.wait() for call in calls]


@torch.no_grad()
def _submit_term(pool: WorkerPool, reward: Reward, video: Tensor, references: Sequence[Reference]) -> Call:
    try:
        inputs = reward.held(video, references)
    except Exception as error:  # the user's code, as in score_safely
        return _make_done(failure(len(video), f"{type(error).__name__}: {error}"))
    return pool.submit(len(video), partial(score_safely, reward, *inputs))


def _make_done(result: RewardResult) -> Call:
    call = Call(len(result.failed), 0)
    call.set_result(result)
    return call


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
