"""Rewards that fail: what one of them does to a sample costs that sample alone."""

import threading
import time

import pytest
import torch

from rewardfl.rewards import Reward, RewardOutput, blackbox
from rewardfl.rewards.checked import checked
from rewardfl.rewards.terms import Term

VIDEO = torch.arange(4.0).view(4, 1, 1, 1, 1).expand(4, 3, 2, 2, 2)  # a video's score is its number


class Number(Reward):
    def __init__(self, raises=(), nan=(), parts=True):
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


def term(reward, label="score", weight=1.0):
    return Term(label, label, checked(reward), weight, 0.0, 1.0)


def judged(*terms, timeout=5.0):
    return blackbox.finish(blackbox.begin(terms, VIDEO, [[{} for _ in terms]] * 4), timeout)


def test_samples_that_raise_and_samples_that_are_nan():
    reward = Number(raises=(1.0, 3.0), nan=(2.0,))
    (one,) = judged(term(reward))
    assert one.output.score.tolist() == [0, 0, 0, 0] and one.output.valid.tolist() == [True, False, False, False]
    assert one.failed.tolist() == [False, True, False, True]  # nan is counted by `nonfinite`
    assert one.output.parts["nonfinite"].nan_to_num(-1).tolist() == [0, -1, 1, -1]
    assert one.problems == ("OSError: no 1.0", "OSError: no 3.0")
    assert reward.batches == [4, 1, 1, 1, 1]  # tried one by one only when the batch fails


def test_what_is_weighed_and_what_is_only_measured():
    terms = [
        term(Number(nan=(1.0,))),
        term(Number(raises=(3.0,)), "other", 0.0),
        term(Number(nan=(2.0,)), "third", 2.0),
    ]
    found = judged(*terms)
    rewards, valid, weights = blackbox.weighed(terms, found, {"half": 0.5})
    assert weights == [1.0, 2.0, 0.5] and valid.tolist() == [True, False, False, True]
    assert rewards[valid].tolist() == [[0, 0, 0], [3, 3, 1]]  # a part counts up to 1
    measured = blackbox.measured(terms, found)
    assert measured["score"].nan_to_num(-1).tolist() == [0, -1, 2, 3]
    assert measured["other"].nan_to_num(-1).tolist() == [0, 1, 2, -1]
    assert measured["failed"].tolist() == [0, 0, 0, 1] and measured["half"].nan_to_num(-1).tolist() == [0, -1, 1, 1.5]


def test_a_part_that_is_not_there_counts_as_nothing():
    terms = [term(Number(parts=False))]
    rewards, valid, _ = blackbox.weighed(terms, judged(*terms), {"coverage": 1.0})
    assert rewards[:, 1].tolist() == [0, 0, 0, 0] and valid.all()


class Waits(Number):
    concurrent = True

    def __init__(self, event):
        super().__init__()
        self.event = event

    def forward(self, video, batch):
        assert not torch.is_grad_enabled()  # a thread starts with gradients on
        self.event.wait()
        return super().forward(video, batch)


def test_concurrent_rewards_go_on_meanwhile_and_late_ones_have_failed():
    event = threading.Event()
    terms = [term(Waits(event)), term(Number(), "quick")]
    pending = blackbox.begin(terms, VIDEO, [[{}, {}]] * 4)  # returns, although nobody has set the event
    began = time.monotonic()
    late, quick = blackbox.finish(pending, 0.2)
    assert 0.1 < time.monotonic() - began < 4
    assert late.failed.all() and not late.output.valid.any() and late.problems == ("no answer within 0.2 s",)
    assert quick.output.valid.all()
    event.set()
    in_time, _ = judged(*terms)
    assert in_time.output.score.tolist() == [0, 1, 2, 3] and not in_time.failed.any()


def test_what_ends_the_process_is_not_swallowed():
    class Stops(Reward):
        def forward(self, video, batch):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        judged(term(Stops()))
