"""Alarms, early stop and the score of `best`, from histories of metrics."""

import math

import pytest

from rewardfl.training.alarms import alarms, broken_guards, early_stop, recent_mean, score_for_best, suspects


def test_the_recent_mean_is_of_the_first_metric_with_values():
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


def updates(motion, score, judge, count=30):
    """Return metrics of updates in which motion, face score and judge go from the first value to the second."""
    ends = {"reward/motion": motion, "actor/face_score": score, "reward/held_out": judge}
    return [
        {"step": i + 1} | {key: first + (last - first) * i / (count - 1) for key, (first, last) in ends.items()}
        for i in range(count)
    ]


FREEZES = updates((1.0, 0.2), (0.5, 0.5), (0.5, 0.5))
HACKED = updates((1.0, 1.0), (0.5, 0.8), (0.5, 0.55))
HEALTHY = updates((1.0, 0.9), (0.5, 0.8), (0.5, 0.75))
EVALUATION = {"step": 0, "eval/score": 0.5}  # before the first update


@pytest.mark.parametrize("before", [[], [EVALUATION]], ids=["updates", "evaluated"])
@pytest.mark.parametrize("history, words", [
    (FREEZES, "below 0.8"), (HACKED, "held-out judge"), (HEALTHY, None),
])  # fmt: skip
def test_alarms_sound_after_each_window_from_the_second_on(before, history, words):
    sounded = {n: list(alarms(before + history[:n])) for n in range(31)}
    assert [n for n, warnings in sounded.items() if warnings] == ([20, 30] if words else [])
    assert words is None or words in sounded[20][0]


@pytest.mark.parametrize(
    "part, first, last, breaks",
    [
        ("flow", 0.9, 0.6, True), ("flow", 0.9, 0.8, False), ("motion", 0.6, 0.4, True), ("sharpness", 0.9, 0.6, True),
        ("coverage", 1.0, 0.7, True), ("reversals", 0.0, 0.2, True), ("reversals", 0.5, 0.45, False),
        ("grid", 0.9, 1.4, True), ("grid", 0.9, 1.3, False), ("saturation", 1.0, 1.3, True),
        ("saturation", 1.0, 0.75, True), ("saturation", 0.9, 1.1, False), ("look", 0.5, 0.46, True),
        ("red", 0.01, 0.07, True), ("blue", 0.0, -0.06, True), ("green", 0.06, 0.02, False),
    ],
)  # fmt: skip
def test_the_judge_compares_with_the_first_updates(part, first, last, breaks):
    """At 0.8, of the means over the first and the last ten of thirty updates."""
    key = f"reward/held_out/{part}"
    history = [line | {key: first if line["step"] <= 10 else last} for line in HEALTHY]
    warnings = list(alarms(history))
    assert len(warnings) == breaks and all(key in warning for warning in warnings)


def test_a_verdict_that_accepts_no_move_is_an_alarm():
    history = [line | {"verdict/accepted": 0.0 if line["step"] > 20 else 0.5} for line in HEALTHY]
    assert not list(alarms(history[:20]))
    (warning,) = alarms(history)
    assert "not one move was accepted" in warning


def test_a_data_loss_that_rises_by_more_than_a_tenth_breaks_a_guard():
    """Only some lines have it."""
    first, last = [{"step": 1, "actor/data_loss": 0.5}, {"step": 2}], [{"step": 3}]
    assert broken_guards(first, [*last, {"step": 4, "actor/data_loss": 0.54}], 0.8) == []
    assert broken_guards(first, last, 0.8) == []
    (line,) = broken_guards(first, [*last, {"step": 4, "actor/data_loss": 0.56}], 0.8)
    assert "actor/data_loss went from 0.500 to 0.560 (factor 1.120, allowed 0 to 1.1): data" in line


@pytest.mark.parametrize("low, breaks", [(0.95, False), (0.91, False), (0.89, True), (0.2, True)])
def test_a_score_may_fall_by_its_first_deviation(low, breaks):
    """The first updates' scores 0.9, 1.1, 0.9, ... have a standard deviation of 0.1."""
    scores = [0.9 + 0.2 * (i % 2) for i in range(10)] + [low] * 10
    (*warnings,) = alarms([line | {"reward/mean": mean} for line, mean in zip(HEALTHY, scores, strict=False)])
    assert len(warnings) == breaks
    assert all(f"reward/mean is {low:.3f}, it was 1.000" in line and "unlearns" in line for line in warnings)
    judged = [{"step": i, "reward/held_out": score} for i, score in enumerate(scores)]
    lines = broken_guards(judged[:10], judged[10:], 0.8)
    assert len(lines) == breaks and all(f"reward/held_out went from 1.000 to {low:.3f}" in line for line in lines)


def with_flow(*windows, window=3):
    """Return updates whose judge sees this much flow, window by window, after an evaluation of the base model."""
    values = [value for value in windows for _ in range(window)]
    return [EVALUATION, *({"step": i + 1, "reward/held_out/flow": value} for i, value in enumerate(values))]


def stops_at(history, **rule):
    """Return the step after which early_stop first ends a run that goes through this history."""
    rule = {"window": 3, "patience": 2, "motion": 0.8, "grid": 1.5} | rule
    return next((line["step"] for i, line in enumerate(history) if early_stop(history[: i + 1], **rule)), None)


def test_a_run_ends_after_windows_in_a_row_that_break_a_guard():
    assert stops_at(with_flow(0.9, 0.5, 0.5, 0.5)) == 9 and stops_at(with_flow(0.9, 0.5)) is None
    assert stops_at(with_flow(0.9, 0.5, 0.9, 0.5, 0.5)) == 15  # in between all was well
    assert stops_at(with_flow(0.9, 0.5), patience=1) == 6 and stops_at(with_flow(0.9, 0.5, 0.5), patience=3) is None
    assert stops_at(with_flow(0.9, 0.5, 0.5), motion=0.5) is None and stops_at(with_flow(0.9, 0.8, 0.8)) is None
    grid = [{"step": i + 1, "reward/held_out/grid": 1.0 if i < 3 else 1.4} for i in range(9)]
    assert stops_at(grid) is None and stops_at(grid, grid=1.3) == 9
    assert stops_at(HEALTHY, window=10) is None and stops_at(HACKED, window=10) == 30
    assert stops_at([]) is None and stops_at(with_flow(math.nan, 0.5, 0.5)) is None
    line = early_stop(with_flow(0.9, 0.5, 0.4), window=3, patience=2, motion=0.8, grid=1.5)
    assert "steps 4 to 9" in line and "reward/held_out/flow went from 0.900 to 0.400" in line and "\n" not in line


def test_a_checkpoint_with_a_broken_guard_does_not_become_the_best():
    keys = ["reward/held_out", "reward/mean"]
    for history, is_broken in ((HACKED, True), (HEALTHY, False)):
        score, broken = score_for_best(history, 20, keys, motion=0.8)
        assert (score is None) == bool(broken) == is_broken and score in (None, recent_mean(history, 20, keys))
    assert score_for_best(HACKED[:10], 0, keys, motion=0.8)[0] is not None  # nothing to be compared with
    froze = with_flow(*[0.9] * 5, *[0.3] * 3)[1:]  # 15 updates, and 9 that move less
    assert score_for_best(froze[:16], 15, keys, motion=0.8)[1] == []  # one in ten
    assert score_for_best(froze, 23, keys, motion=0.8)[1] and score_for_best(froze, 15, keys, motion=0.8)[1]
    assert score_for_best(froze, 15, keys, motion=0.0)[1] == []
    soon = with_flow(0.9, 0.3, 0.3)  # in the first ten updates, which train.early_stop cuts into windows
    assert score_for_best(soon, 0, keys, window=3, motion=0.8)[1] and not score_for_best(soon, 0, keys, motion=0.8)[1]


def test_a_metric_without_values_breaks_no_guard():
    keys = ("reward/motion", "reward/held_out", "reward/mean", "reward/held_out/flow")
    for missing in (math.nan, None):
        assert not list(alarms([line | dict.fromkeys(keys, missing) for line in FREEZES], 0.8))
    assert not list(alarms([], 0.8))
