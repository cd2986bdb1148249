"""Rewards that need no gradient, and may fail: what one of them does to one sample costs that sample alone.

A reward is often the user's code or somebody's server. Whatever it raises, and whatever it does not answer in time,
makes samples invalid and is counted; nothing waits for ever, and no other sample is lost.

Rewards that are `concurrent` are called beside the rollouts, `parallel` batches at a time, and as many batches more
wait for their turn; the rollouts wait when there are more. So a process holds at most 2 * parallel + 1 batches of what
`Reward.held` keeps of their videos, in CPU memory, whatever the reward does.
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
    """A call of a concurrent reward. work: None once it is done, so that the videos go; began: when its turn came."""

    work: Callable[[], RewardResult] | None
    began: float | None = None
    found: RewardResult | BaseException | None = None


class WorkerPool:
    """Where the calls of a concurrent reward are made: `count` at a time, in the order in which they came.

    timeout: seconds from the moment when a call's turn comes, after which it has failed. It keeps its place until it
    ends, in a daemon thread, which does not keep the process from ending; when all places are held for so long, the
    calls that wait for one have failed, too.
    """

    def __init__(self, count: int, timeout: float):
        self.count, self.timeout = count, timeout
        self._changed = threading.Condition()
        self._waiting: deque[Call] = deque()
        self._running: set[Call] = set()
        self._threads = 0

    def submit(self, work: Callable[[], RewardResult]) -> Call | None:
        """The call, which waits for its turn; None where no place comes free. Waits while `count` others do."""
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
        """What the call found; None when it is too late. Raises what is no Exception and ended it."""
        with self._changed:
            while call.found is None:
                if not self._wait(self._until_all_are_overdue() if call.began is None else self._left(call)):
                    if call.began is None:
                        self._waiting.remove(call)
                    return None
        if isinstance(call.found, BaseException):
            raise call.found
        return call.found

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._threads -= 1
                    return
                call = self._waiting.popleft()
                call.began = time.monotonic()
                self._running.add(call)
                self._changed.notify_all()
            try:
                found = call.work()
            except BaseException as error:  # handed on to whoever waits
                found = error
            with self._changed:
                call.found, call.work = found, None
                self._running.remove(call)
                self._changed.notify_all()

    def _wait(self, seconds: float | None) -> bool:
        """Until something has changed, or the seconds are over; False where there are none left."""
        if seconds is not None and seconds <= 0:
            return False
        self._changed.wait(seconds)
        return True

    def _left(self, call: Call) -> float:
        return call.began + self.timeout - time.monotonic()

    def _until_all_are_overdue(self) -> float | None:
        """Seconds until every place is held by a call that is too late; None while one is free."""
        return max(map(self._left, self._running)) if len(self._running) == self.count else None


@dataclass(frozen=True)
class Pending:
    """Rewards of B samples, some of which may still be at work."""

    judging: Sequence[RewardResult | Call | None]  # by term; None where no place came free
    where: Sequence[WorkerPool | None]
    count: int


def make_worker_pool(terms: Sequence[Term], timeout: float) -> list[WorkerPool | None]:
    """Where the calls of each term are made; None for one that is not concurrent. timeout: see Places."""
    return [WorkerPool(term.reward.parallel, timeout) if term.reward.concurrent else None for term in terms]


def submit(
    terms: Sequence[Term], video: Tensor, references: Sequence[Sequence[Reference]], where: Sequence[WorkerPool | None]
) -> Pending:
    """Judge videos (B, 3, F, H, W); references: what the rewards keep of the real clips, by sample and then by term.

    The concurrent ones are called in `where`, their places, beside all that follows; this waits while too many others
    wait for their turn. The others have answered when it returns.
    """
    calls = [(term.reward, video, [each[i] for each in references]) for i, term in enumerate(terms)]
    judging = [_submit_term(own, *call) if own else None for own, call in zip(where, calls, strict=True)]
    for i, own in enumerate(where):
        if own is None:
            judging[i] = score_safely(*calls[i])
    return Pending(judging, where, len(video))


def collect(pending: Pending) -> list[RewardResult]:
    """Every term's verdict."""
    found = []
    for judging, own in zip(pending.judging, pending.where, strict=True):
        if isinstance(judging, Call):
            judging = own.result(judging)
        found.append(judging or failure(pending.count, f"no answer within {own.timeout:g} s (reward.reward_timeout)"))
    return found


@torch.no_grad()
def _submit_term(
    pool: WorkerPool, reward: Reward, video: Tensor, references: Sequence[Reference]
) -> RewardResult | Call | None:
    try:
        kept = reward.held(video, references)
    except Exception as error:  # the user's code, as in score_safely
        return failure(len(video), f"{type(error).__name__}: {error}")
    return pool.submit(partial(score_safely, reward, *kept))


def stack_rewards(
    terms: Sequence[Term], judged: Sequence[RewardResult], part_weights: Mapping[str, float]
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
