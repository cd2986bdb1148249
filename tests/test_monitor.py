"""What a script tells of itself."""

import math

import pytest

from rewardfl.monitor import recent_mean


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
