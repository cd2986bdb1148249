"""Rewards that fail: what one of them does to a sample costs that sample alone."""

import threading
import time

import pytest
import torch

from rewardfl.rewards import Reward, RewardOutput, async_scoring
from rewardfl.rewards.base import attach_checks
from rewardfl.rewards.scoring import Term

VIDEO = torch.arange(4.0).view(4, 1, 1, 1, 1).expand(4, 3, 2, 2, 2)  # a video's score is its number


class Number(Reward):
    def __init__(self, raises=(), nan=(), *, parts=True):
        super().__init__()
        self.raises, self.nan, self.parts, self.batches = raises, nan, parts, []

    def forward(self, video, batch):
        self.batches.append(len(video))
        score = video.flatten(1).mean(1)
        for bad in self.raises:
            if bad in score:
                raise OSError(f"no {bad}")
        for bad in self.nan:
            score = score.where(score != bad, torch.nan)
        return RewardOutput(score, torch.ones(len(video)).bool(), {"half": score / 2} if self.parts else {})


def term(reward, label="score", weight=1.0, std=1.0):
    return Term(key=label, label=label, reward=attach_checks(reward), weight=weight, mean=0.0, std=std)


def judged(*terms, timeout=5.0):
    where = async_scoring.make_worker_pools(terms, timeout)
    return async_scoring.collect(async_scoring.submit(terms, VIDEO, [[{} for _ in terms]] * 4, where))


def test_samples_that_raise_and_samples_that_are_nan():
    reward = Number(raises=(1.0, 3.0), nan=(2.0,))
    (one,) = judged(term(reward))
    assert one.output.score.tolist() == [0, 0, 0, 0] and one.output.valid.tolist() == [True, False, False, False]
    assert one.failed.tolist() == [False, True, False, True]  # nan is counted by `nonfinite`
    assert one.output.parts["nonfinite"].nan_to_num(-1).tolist() == [0, -1, 1, -1]
    assert one.problems == ("OSError: no 1.0", "OSError: no 3.0")
    assert reward.batches == [4, 1, 1, 1, 1]  # tried one by one only when the batch fails
    (again,) = judged(term(Number(nan=(0.0,))))  # and has the same names as a batch that does not
    assert set(one.output.parts) == set(again.output.parts) == {"half", "nonfinite"}


def test_what_is_weighed_and_what_is_only_measured():
    terms = [
        term(Number(nan=(1.0,))),
        term(Number(raises=(3.0,)), "other", 0.0),
        term(Number(nan=(2.0,)), "third", 4.0, std=2.0),
    ]
    found = judged(*terms)
    rewards, valid, weights = async_scoring.stack_rewards(terms, found, {"half": 0.5})
    assert weights == [1.0, 2.0, 0.5] and valid.tolist() == [True, False, False, True]
    assert rewards[valid].tolist() == [[0, 0, 0], [3, 3, 1]]  # a part counts up to 1


def test_a_part_that_is_not_there_counts_as_nothing():
    terms = [term(Number(parts=False))]
    rewards, valid, _ = async_scoring.stack_rewards(terms, judged(*terms), {"coverage": 1.0})
    assert rewards[:, 1].tolist() == [0, 0, 0, 0] and valid.all()


class Waits(Number):
    """Answers once its event is set."""

    concurrent, parallel = True, 2

    def __init__(self, event):
        super().__init__()
        self.event = event

    def forward(self, video, batch):
        assert not torch.is_grad_enabled()  # a thread starts with gradients on
        assert self.event.wait(60)
        return super().forward(video, batch)


def test_concurrent_rewards_go_on_meanwhile_and_late_ones_have_failed():
    event = threading.Event()
    terms = [term(Waits(event)), term(Number(), "quick")]
    pools = async_scoring.make_worker_pools(terms, 0.2)
    pending = async_scoring.submit(terms, VIDEO, [[{}, {}]] * 4, pools)  # returns, although nobody has set the event
    late, quick = async_scoring.collect(pending)
    assert late.failed.all() and not late.output.valid.any()
    assert late.problems == ("no answer within 0.2 s (reward.reward_timeout)",) * 4
    assert quick.output.valid.all()
    event.set()
    in_time, _ = judged(*terms, timeout=60)
    assert in_time.output.score.tolist() == [0, 1, 2, 3] and not in_time.failed.any()


def test_no_more_calls_at_a_time_than_places_and_no_more_wait():
    """Two are at work and two wait; who brings a fifth batch waits until one of them is done."""
    pool, calls = async_scoring.WorkerPool(2, 60), []
    go, begun = threading.Event(), threading.Semaphore(0)

    def bring():
        for _ in range(5):
            calls.append(pool.submit(1, lambda: begun.release() or go.wait(30)))

    bringer = threading.Thread(target=bring, daemon=True)
    bringer.start()
    assert begun.acquire(timeout=30) and begun.acquire(timeout=30)
    bringer.join(0.2)
    assert len(calls) == 4 and bringer.is_alive() and not begun.acquire(timeout=0.1)
    go.set()
    bringer.join(30)
    assert [call.wait() for call in calls] == [True] * 5


def test_a_call_is_not_late_while_it_waits_for_its_turn(monkeypatch):
    """The second of one place is brought at 0 s, has its turn at 50 s, and is at work at 100 s; the timeout is 60 s."""
    now, left = [0.0], []
    monkeypatch.setattr(async_scoring.time, "monotonic", lambda: now[0])
    pool = async_scoring.WorkerPool(1, 60.0)
    begun, go = threading.Semaphore(0), threading.Semaphore(0)
    first, second = (pool.submit(1, lambda: begun.release() or go.acquire(timeout=30)) for _ in range(2))
    for turn, call in ((0.0, first), (50.0, second)):
        assert begun.acquire(timeout=30) and call.since == turn
        now[0] = turn + 50.0
        result = call.result
        monkeypatch.setattr(
            call, "result", lambda *seconds, ends=result: left.append(seconds) or go.release() or ends()
        )
        assert call.wait() is True
    assert left[0] == left[2] == (10,)


def test_calls_that_never_answer_hold_their_places_and_nothing_else():
    """Two that hang are late, the two behind them never had a turn, and no more are taken in; one that ends is."""
    pool, hang, begun = async_scoring.WorkerPool(2, 0.2), threading.Event(), []
    calls = [pool.submit(3, lambda: begun.append(1) or hang.wait(30)) for _ in range(4)]
    start = time.monotonic()
    calls += [pool.submit(3, hang.wait) for _ in range(5)]  # the first waits for a place, the others do not
    assert 0.2 <= time.monotonic() - start < 0.8
    assert [call.wait().failed.tolist() for call in calls] == [[True] * 3] * 9
    hang.set()
    while pool._queue.full():
        time.sleep(0.01)
    pool.timeout = 60
    assert pool.submit(3, lambda: 5).wait() == 5 and len(begun) == 2, "what waited in vain is not scored later"


def test_what_waits_is_on_the_cpu_and_as_small_as_the_reward_says():
    seen = []

    class Small(Waits):
        def held(self, video, batch):
            return video[:, :, :1].half(), batch

        def forward(self, video, batch):
            seen.append((video.dtype, video.shape))
            return super().forward(video.float(), batch)

    event = threading.Event()
    event.set()
    (one,) = judged(term(Small(event)))
    assert seen == [(torch.float16, (4, 3, 1, 2, 2))] and one.output.score.tolist() == [0, 1, 2, 3]

    class Refuses(Waits):
        def held(self, video, batch):
            raise OSError("no room")

    (one,) = judged(term(Refuses(event)))
    assert one.failed.all() and one.problems == ("OSError: no room",) * 4


def test_what_ends_the_process_is_not_swallowed():
    class Stops(Reward):
        def forward(self, video, batch):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        judged(term(Stops()))
