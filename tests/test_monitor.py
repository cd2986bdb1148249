"""What a script tells of itself."""

import math

import pytest

from rewardfl.monitor import recent_mean, suspects
from rewardfl.prepare import Share


def test_recent_mean():
    history = [
        {"step": 1, "reward/mean": 1.0, "reward/held_out": 9.0},
        {"step": 2, "reward/mean": 2.0, "reward/held_out": None},
        {"step": 3, "reward/mean": 4.0, "reward/held_out": math.nan},
    ]
    assert recent_mean(history, 1, ["reward/mean"]) == pytest.approx(3.0)
    assert recent_mean(history, 0, ["reward/held_out", "reward/mean"]) == 9.0
    assert recent_mean(history, 1, ["reward/held_out", "reward/mean"]) == pytest.approx(3.0)  # no judge saw a face
    assert recent_mean(history, 3, ["reward/mean"]) is None and recent_mean(history, 0, ["eval/score"]) is None


def test_suspects_are_named_once():
    assert suspects(["a", "b", "a", "c"], [False, True, False, False]) == "before the backward pass, of a, c"
    assert suspects(["a", "b", "a"], [True] * 3) == "in the backward pass of a, b"


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5])
def test_every_process_has_as_many_rounds(count):
    shares = [Share(rank, 4).rounds(range(count)) for rank in range(4)]
    assert {len(share) for share in shares} == {-(-count // 4)}
    assert sorted(item for share in shares for item, mine in share if mine) == list(range(count))
    assert [[item for item, mine in share if mine] for share in shares] == [
        Share(r, 4).of(range(count)) for r in range(4)
    ]
