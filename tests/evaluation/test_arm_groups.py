"""tools/compare_runs.py --first --second: two groups of arms, from records; nothing is sampled."""

import pytest
from conftest import run_tool
from test_identity_scale import PEOPLE, through_vae
from test_judging import ARMS, JUDGE, real, record, summary

from rewardfl.evaluation.records import Writer
from rewardfl_tools import compare_runs

PRICES = dict(zip(PEOPLE, range(1, 11), strict=True))  # a figure that differs between people


def face_flow(person, arm, seed=0, gain=0.0):
    return record(person, arm, seed, face_flow=PRICES[person] + gain, face_sim=0.03 * PRICES[person])


def write(folder, records):
    for line in [*through_vae(), *map(real, PEOPLE), *records]:
        Writer(folder, 0).add(line)
    return folder


def read_table(folder, first, second):
    text = run_tool(compare_runs.main, folder, "--first", first, "--second", second)
    return {line.split(" | ")[0].strip("| "): line for line in text.splitlines()}


def test_people_are_paired_by_name_and_who_is_left_out_is_printed(tmp_path):
    """Arms that lack different people: the others are equal, so every difference is 0."""
    arms = {"base": "", "a": "d", "b": "g"}
    records = [face_flow(person, arm) for arm, gone in arms.items() for person in PEOPLE if person not in gone]
    rows = read_table(write(tmp_path, records), "a", "b")
    assert rows["motion/face_flow over the base's"].endswith("| 1.000 | 1.000 | +0.000 [+0.000, +0.000] |")
    assert rows[f"identity kept ({JUDGE})"].endswith("| +0.000 [+0.000, +0.000] |")
    assert [name for name in rows if "left out" in name and "d, g (motion/face_flow" in name]


def test_groups_are_averaged_and_agree_with_the_report(tmp_path):
    records = [face_flow(person, "base") for person in PEOPLE]
    seeds = [face_flow(person, "latest", gain=1.0) for person in PEOPLE]
    seeds += [face_flow(person, "other", gain=0.5) for person in PEOPLE]
    rows = read_table(write(tmp_path, records + seeds), "latest,other", "base")
    assert "| 1.136 | 1.000 | +0.136 [" in rows["motion/face_flow over the base's"]  # 0.75 of a mean of 5.5
    alone = read_table(tmp_path, "latest", "base")
    report = summary(*through_vae(), *map(real, PEOPLE), *records, *seeds[:10], arms=ARMS)["arms"][1]["compared"]
    for name, figure in (
        ("motion/reversals", report["motion/reversals"]["difference"]),
        (f"identity kept ({JUDGE})", report[f"{JUDGE}/identity_kept"]["difference"]),
    ):
        assert f"{figure['mean']:+.3f} [{figure['low']:+.3f}, {figure['high']:+.3f}]" in alone[name]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--first", "a"], "give both"), (["--first", "a", "--second", "b", "--out", "x"], "give both"),
        (["--first", "gone", "--second", "base"], "has no arm gone"),
        (["--first", "b", "--second", "c"], "no person in common"),
    ],
)  # fmt: skip
def test_groups_that_cannot_be_compared(tmp_path, words, said):
    clips = [("base", PEOPLE), ("b", "ab"), ("c", "cd")]
    write(tmp_path, [face_flow(person, arm) for arm, people in clips for person in people])
    error = run_tool(compare_runs.main, tmp_path, *words, expect=2)
    assert error.startswith("error: --first, --second: ") and said in error and error.count("\n") == 1
