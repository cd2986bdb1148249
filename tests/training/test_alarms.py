"""What a script tells of itself."""

import math

import pytest
import torch

from rewardfl.training.alarms import alarms, broken_guards, early_stop, recent_mean, score_for_best, suspects
from rewardfl.training.shard import Shard
from rewardfl.training.timer import Timer


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


def test_a_data_loss_that_rises_by_more_than_a_tenth_breaks_a_guard():
    """It is there in a few lines alone; without any there is nothing to say."""
    first, rest = [{"step": 1, "actor/data_loss": 0.5}, {"step": 2}], [{"step": 3}]
    assert broken_guards(first, [*rest, {"step": 4, "actor/data_loss": 0.54}], 0.8) == []
    assert broken_guards(first, rest, 0.8) == []
    (line,) = broken_guards(first, [*rest, {"step": 4, "actor/data_loss": 0.56}], 0.8)
    assert "actor/data_loss went from 0.500 to 0.560 (factor 1.120, allowed 0 to 1.1): data" in line


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5])
def test_every_process_has_as_many_rounds(count):
    shares = [Shard(rank, 4).padded(range(count)) for rank in range(4)]
    assert {len(share) for share in shares} == {-(-count // 4)}
    assert sorted(item for share in shares for item, mine in share if mine) == list(range(count))
    assert [[item for item, mine in share if mine] for share in shares] == [
        Shard(r, 4).take(range(count)) for r in range(4)
    ]


def test_the_processes_of_a_clip_have_the_same_rounds():
    shares = [Shard(rank, 4, processes_per_clip=2).padded("abc") for rank in range(4)]
    assert shares == [
        [("a", True), ("c", True)], [("a", False), ("c", False)], [("b", True), ("a", False)],
        [("b", False), ("a", False)],
    ]  # fmt: skip


def told(motion, score, judge, count):
    """Metrics of `count` updates, in which motion, face score and judge go from the first value to the second."""

    def at(ends, i):
        return ends[0] + (ends[1] - ends[0]) * i / (count - 1)

    ends = {"reward/motion": motion, "actor/face_score": score, "reward/held_out": judge}
    return [{"step": i + 1} | {key: at(values, i) for key, values in ends.items()} for i in range(count)]


FREEZES = told((1.0, 0.2), (0.5, 0.5), (0.5, 0.5), 30)
HACKED = told((1.0, 1.0), (0.5, 0.8), (0.5, 0.55), 30)
HEALTHY = told((1.0, 0.9), (0.5, 0.8), (0.5, 0.75), 30)
BEFORE = [{"step": 0, "eval/score": 0.5}]  # the evaluation before the first update


@pytest.mark.parametrize("first", [[], BEFORE], ids=["alone", "evaluated"])
def test_alarms_sound_after_each_window_from_the_second_on(first):
    sounded = {}
    for name, history in (("freezes", FREEZES), ("hacked", HACKED), ("healthy", HEALTHY)):
        heard = [(n, list(alarms(first + history[:n], 0.8))) for n in range(1, 31)]
        sounded[name] = [(n, warnings) for n, warnings in heard if warnings]
    assert [n for n, _ in sounded["freezes"]] == [20, 30] and not sounded["healthy"]
    assert "reward.motion_alarm 0.8" in sounded["freezes"][0][1][0]
    assert [n for n, _ in sounded["hacked"]] == [20, 30] and "held-out judge" in sounded["hacked"][0][1][0]


@pytest.mark.parametrize(
    "part,values,loud",
    [
        ("flow", (0.9, 0.6), True), ("flow", (0.9, 0.8), False), ("flow", (0.4, 0.4), False),
        ("motion", (0.6, 0.4), True), ("sharpness", (0.9, 0.6), True), ("sharpness", (0.9, 1.4), False),
        ("reversals", (0.0, 0.2), True), ("reversals", (0.5, 0.45), False), ("reversals", (-0.1, -0.05), False),
        ("coverage", (1.0, 0.7), True), ("coverage", (0.9, 0.8), False),
        ("grid", (0.9, 1.4), True), ("grid", (0.9, 1.3), False), ("grid", (1.4, 0.9), False),
        ("saturation", (1.0, 1.3), True), ("saturation", (1.0, 0.75), True), ("saturation", (0.9, 1.1), False),
        ("red", (0.01, 0.07), True), ("blue", (0.0, -0.06), True), ("green", (0.06, 0.02), False),
    ],
)  # fmt: skip
def test_the_judge_compares_with_the_first_updates(part, values, loud):
    """Each alone: at reward.motion_alarm 0.8, of the means over the first and the last ten of thirty updates."""
    key = f"reward/held_out/{part}"
    history = [line | {key: values[0] if line["step"] <= 10 else values[1]} for line in HEALTHY]
    warnings = list(alarms(history, 0.8))
    assert len(warnings) == loud and all(key in warning for warning in warnings)


def test_a_reward_that_falls_is_said():
    """Below the first ten updates by more than they differ: 0.9, 1.1, 0.9, ... has a standard deviation of 0.1."""
    for low, loud in ((0.95, False), (0.91, False), (0.89, True), (0.2, True)):
        history = [line | {"reward/mean": 0.9 + 0.2 * (line["step"] % 2)} for line in HEALTHY[:10]]
        history += [line | {"reward/mean": low} for line in HEALTHY[10:20]]
        warnings = list(alarms(history, 0.8))
        assert len(warnings) == loud, low
        assert not loud or (f"reward/mean is {low:.3f}, it was 1.000" in warnings[0] and "unlearns" in warnings[0])


def test_a_judge_that_falls_is_said():
    """By more than its first updates differ: 0.45, 0.55, 0.45, ... has a standard deviation of 0.05."""
    first = [{"step": i, "reward/held_out": 0.45 + 0.1 * (i % 2)} for i in range(10)]
    for low, loud in ((0.46, False), (0.44, True)):
        found = broken_guards(first, [{"step": 20, "reward/held_out": low}], 0.8)
        assert len(found) == loud and all("reward/held_out went from 0.500 to 0.440" in line for line in found)


RULE = {"window": 3, "patience": 2, "motion": 0.8, "grid": 1.5}


def with_flow(*windows, window=3):
    """Updates whose judge sees this much flow, window by window, after an evaluation of the base model."""
    values = [value for value in windows for _ in range(window)]
    return [{"step": 0, "eval/score": 0.1}, *({"step": i + 1, "reward/held_out/flow": v} for i, v in enumerate(values))]


def stops_at(history, **rule):
    """The step after which early_stop first ends a run that goes through this history."""
    ended = [line["step"] for i, line in enumerate(history) if early_stop(history[: i + 1], **RULE | rule)]
    return ended[0] if ended else None


def test_a_run_ends_after_windows_in_a_row_that_break_a_guard():
    assert stops_at(with_flow(0.9, 0.5, 0.5, 0.5)) == 9 and stops_at(with_flow(0.9, 0.5)) is None
    assert stops_at(with_flow(0.9, 0.5, 0.9, 0.5, 0.5)) == 15  # in between all was well
    assert stops_at(with_flow(0.9, 0.5), patience=1) == 6 and stops_at(with_flow(0.9, 0.5, 0.5), patience=3) is None
    assert stops_at(with_flow(0.9, 0.5, 0.5), motion=0.5) is None and stops_at(with_flow(0.9, 0.8, 0.8)) is None
    grid = [{"step": i + 1, "reward/held_out/grid": 1.0 if i < 3 else 1.4} for i in range(9)]
    assert stops_at(grid) is None and stops_at(grid, grid=1.3) == 9
    assert stops_at(HEALTHY, window=10) is None and stops_at(HACKED, window=10) == 30
    assert stops_at([]) is None and stops_at(with_flow(math.nan, 0.5, 0.5)) is None


def test_what_ended_a_run_is_said_with_figures_and_steps():
    line = early_stop(with_flow(0.9, 0.5, 0.4), **RULE)
    assert "steps 4 to 9" in line and "reward/held_out/flow went from 0.900 to 0.400" in line and "\n" not in line


def test_a_checkpoint_with_a_broken_guard_does_not_become_the_best():
    keys = ["reward/held_out", "reward/mean"]
    for name, history in (("hacked", HACKED), ("healthy", HEALTHY)):
        score, broken = score_for_best(history, 20, keys, motion=0.8)
        assert (score is None) == bool(broken) == (name == "hacked")
        assert score in (None, recent_mean(history, 20, keys))
    assert score_for_best(HACKED[:10], 0, keys, motion=0.8)[0] is not None  # nothing to be compared with
    froze = with_flow(*[0.9] * 5, *[0.3] * 3)[1:]  # 15 updates, and 9 that move less
    assert score_for_best(froze[:16], 15, keys, motion=0.8)[1] == []  # one in ten
    assert score_for_best(froze, 23, keys, motion=0.8)[1] and score_for_best(froze, 15, keys, motion=0.8)[1]
    assert score_for_best(froze, 15, keys, motion=0.0)[1] == []
    soon = with_flow(0.9, 0.3, 0.3)  # in the first ten updates, which train.early_stop cuts into windows
    assert score_for_best(soon, 0, keys, window=3, motion=0.8)[1] and not score_for_best(soon, 0, keys, motion=0.8)[1]


def test_alarms_of_what_is_not_measured_keep_silent():
    missing = [line | {"reward/motion": math.nan, "reward/held_out": None, "reward/mean": None} for line in FREEZES]
    missing = [line | {"reward/held_out/flow": math.nan, "reward/held_out/reversals": None} for line in missing]
    assert not list(alarms(missing, 0.8)) and not list(alarms([], 0.8))


def test_a_timer_waits_for_the_runs_own_device(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    for device in (torch.device("cpu"), torch.device("cuda", 1)):
        with Timer(device)("decode"):
            pass
    assert waited == [torch.device("cuda", 1)]
