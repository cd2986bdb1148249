"""Rewards that fail or are slow: which samples they cost, and what waits for whom."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

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
        for number in self.raises:
            if number in score:
                raise OSError(f"no {number}")
        for number in self.nan:
            score = score.where(score != number, torch.nan)
        return RewardOutput(score, torch.ones(len(video)).bool(), {"half": score / 2} if self.parts else {})


def make_term(reward, label="score", weight=1.0, std=1.0):
    return Term(key=label, label=label, reward=attach_checks(reward), weight=weight, mean=0.0, std=std)


def score(*terms, timeout=5.0):
    for term in terms:
        term.reward.call_timeout = timeout
    pools = async_scoring.make_worker_pools(terms)
    return async_scoring.collect(async_scoring.submit(terms, VIDEO, [[{} for _ in terms]] * 4, pools))


def test_a_failure_or_nan_costs_one_sample():
    reward = Number(raises=(1.0, 3.0), nan=(2.0,))
    (result,) = score(make_term(reward))
    output = result.output
    assert output.score.tolist() == [0, 0, 0, 0] and output.valid.tolist() == [True, False, False, False]
    assert result.failed.tolist() == [False, True, False, True]  # nan is counted by `nonfinite`
    assert output.parts["nonfinite"].nan_to_num(-1).tolist() == [0, -1, 1, -1]
    assert result.problems == ("OSError: no 1.0", "OSError: no 3.0")
    assert reward.batches == [4, 1, 1, 1, 1]  # tried one by one only if the batch fails
    assert set(output.parts) == {"half", "nonfinite"}


def test_weighted_rewards_and_parts_are_stacked():
    terms = [
        make_term(Number(nan=(1.0,))),
        make_term(Number(raises=(3.0,)), "other", 0.0),
        make_term(Number(nan=(2.0,)), "third", 4.0, std=2.0),
    ]
    rewards, valid, weights = async_scoring.stack_rewards(terms, score(*terms), {"half": 0.5})
    assert weights == [1.0, 2.0, 0.5] and valid.tolist() == [True, False, False, True]
    assert rewards[valid].tolist() == [[0, 0, 0], [3, 3, 1]]  # a part counts up to 1
    terms = [make_term(Number(parts=False))]
    rewards, valid, _ = async_scoring.stack_rewards(terms, score(*terms), {"coverage": 1.0})
    assert rewards[:, 1].tolist() == [0, 0, 0, 0] and valid.all()  # a missing part counts as 0


class Waits(Number):
    """Score once its event is set."""

    concurrent, parallel = True, 2

    def __init__(self, event):
        super().__init__()
        self.event = event

    def forward(self, video, batch):
        assert not torch.is_grad_enabled()  # a thread starts with gradients on
        assert self.event.wait(60)
        return super().forward(video, batch)


def test_a_late_reward_fails_and_the_others_are_scored():
    event = threading.Event()
    terms = [make_term(Waits(event)), make_term(Number(), "quick")]
    terms[0].reward.call_timeout = 0.2
    pools = async_scoring.make_worker_pools(terms)
    pending = async_scoring.submit(terms, VIDEO, [[{}, {}]] * 4, pools)  # returns before the event is set
    late, quick = async_scoring.collect(pending)
    assert late.failed.all() and not late.output.valid.any()
    assert late.problems == ("no answer within 0.2 s",) * 4
    assert quick.output.valid.all()
    event.set()
    in_time, _ = score(*terms, timeout=60)
    assert in_time.output.score.tolist() == [0, 1, 2, 3] and not in_time.failed.any()


def test_as_many_calls_wait_as_run():
    """Two run and two wait; a fifth is submitted once one of them is done."""
    pool, release = async_scoring.WorkerPool(2, 60), threading.Event()
    calls = [pool.submit(1, lambda: release.wait(30)) for _ in range(4)]
    with ThreadPoolExecutor(1) as threads:
        fifth = threads.submit(pool.submit, 1, release.wait)
        with pytest.raises(TimeoutError):
            fifth.result(0.2)
        release.set()
        assert [call.wait() for call in (*calls, fifth.result())] == [True] * 5


def test_the_timeout_counts_from_the_calls_turn():
    pool = async_scoring.WorkerPool(1, 1.0)
    calls = [pool.submit(1, lambda: time.sleep(0.6)) for _ in range(2)]
    assert [call.wait() for call in calls] == [None, None]  # the second ends after 1.2 s


def test_calls_that_hang_hold_only_their_places():
    """Two that hang are late, the two behind them have no turn, and no more are taken until one ends."""
    pool, hang, starts = async_scoring.WorkerPool(2, 0.2), threading.Event(), []
    calls = [pool.submit(3, lambda: starts.append(1) or hang.wait(30)) for _ in range(4)]
    start = time.monotonic()
    calls += [pool.submit(3, hang.wait) for _ in range(5)]  # the first waits for a place, the others do not
    assert 0.2 <= time.monotonic() - start < 0.8
    assert [call.wait().failed.tolist() for call in calls] == [[True] * 3] * 9
    hang.set()
    while pool._queue.full():
        time.sleep(0.01)
    pool.timeout = 60
    assert pool.submit(3, lambda: 5).wait() == 5 and len(starts) == 2, "late calls are not scored later"


def test_a_queued_call_keeps_what_the_reward_holds():
    inputs, event = [], threading.Event()
    event.set()

    class Small(Waits):
        def held(self, video, batch):
            return video[:, :, :1].half(), batch

        def forward(self, video, batch):
            inputs.append((video.dtype, video.shape))
            return super().forward(video.float(), batch)

    class Refuses(Waits):
        def held(self, video, batch):
            raise OSError("no room")

    small, refused = score(make_term(Small(event)), make_term(Refuses(event)))
    assert inputs == [(torch.float16, (4, 3, 1, 2, 2))] and small.output.valid.all()
    assert refused.failed.all() and refused.problems == ("OSError: no room",) * 4
