"""The verdict on an arm: identity, motion, warnings."""

import json

import pytest
from conftest import ROOT
from evaluation_records import ARMS, JUDGE, changed, finished, pair, record, summary

from rewardfl.evaluation.arms import Arm
from rewardfl.evaluation.report.report_page import figure_cell
from rewardfl.evaluation.report.verdicts import FEW, verdict

NAMES = "abcdefghi"  # people enough for no warning of few


def judge(report):
    return verdict(report, report["arms"][-1])


@pytest.mark.parametrize(
    "low, high, person, words",
    [
        (0.05, 0.2, 1, "latest keeps the person more than base: FaceSim by the held-out judge changes by +0.100 [+0"),
        (-0.2, -0.1, -1, "latest keeps the person less than base: "),
        (-0.1, 0.1, 0, "Whether latest keeps the person more than base cannot be told: "),
        (0.0, 0.2, 0, "Whether"), (1e-6, 0.2, 1, "latest"), (-0.2, 0.0, 0, "Whether"),
    ],
)  # fmt: skip
def test_the_person_is_kept_if_the_interval_is_on_one_side_of_0(low, high, person, words):
    report = changed()
    report["arms"][1]["compared"][f"{JUDGE}/face_sim"]["difference"] |= {"low": low, "high": high}
    result = judge(report)
    assert result.person == person and result.sentences[0].startswith(words) and "9 people" in result.sentences[0]
    assert result.moves and "The motion is kept" in result.sentences[1] and result.warnings == ()


def test_motion_of_a_base_that_stands_still_is_not_judged():
    still = {"speed": 0.0, "nonrigid": 0.0, "flow": 0.0, "face_flow": 0.0}
    clips = [record(name, arm, **still) for name in NAMES for arm in ("base", "latest")]
    assert judge(finished(summary(*clips))).moves is None


def test_a_run_is_judged_by_what_it_adds_to_its_start():
    start = Arm(name="start", steps=8, adapter="adapter", origin="sft")
    clips = [line for name in NAMES for line in pair(name, 0, 0.4, 0.6)]
    clips += [record(name, "start", face_sim=0.58) for name in NAMES]
    report = finished(summary(*clips, arms=[ARMS[0], start, ARMS[1]]))
    words = "latest keeps the person more than the run's start, sft: FaceSim by the held-out judge changes by +0.0200 ["
    assert judge(report).sentences[0].startswith(words)
    assert "more than base" in verdict(report, report["arms"][1]).sentences[0]
    changes = report["arms"][2]["over_start"][f"{JUDGE}/face_sim"]["difference"]
    changes |= {"mean": -0.01, "low": -0.02, "high": -0.001}
    assert judge(report).person == -1 and "less than the run's start" in judge(report).sentences[0]
    assert "start" not in judge(changed()).sentences[0] and "over_start" not in changed()["arms"][1]


@pytest.mark.parametrize(
    "figure, healthy, unhealthy, words",
    [
        (f"{JUDGE}/speed", 0.0187, 0.0185, "Landmark speed is 0.925"),
        ("motion/flow", 0.951, 0.949, "Optical flow is 0.949 of"),
        ("motion/sharpness", 50 * 0.951, 50 * 0.949, "Sharpness is 0.949 of the base's (healthy: 0.95 and more"),
        ("motion/reversals", -0.781, -0.779, "Reversals is +0.021 from the base's (healthy: 0.02 at most"),
        ("motion/pixel_change", 0.1099, 0.1101, "Pixel change is 1.101"),
        ("motion/pixel_change", 0.0901, 0.0899, "Pixel change"), ("canary/red", 0.549, 0.551, "Mean red"),
    ],
)  # fmt: skip
def test_figures_outside_their_healthy_range_are_marked(figure, healthy, unhealthy, words):
    """Two of them decide whether the motion is kept."""
    _, key = figure.split("/")
    good, bad = (changed(**{key: value}) for value in (healthy, unhealthy))
    assert judge(good).moves and figure_cell(good["arms"][1], figure, [JUDGE]).problem == ""
    assert figure_cell(bad["arms"][1], figure, [JUDGE]).problem.startswith(words)
    is_motion = key in ("speed", "flow")
    assert judge(bad).sentences[1].startswith("Motion is lost: " if is_motion else "The motion is kept")
    assert judge(bad).moves != is_motion and judge(bad).warnings == ()


@pytest.mark.parametrize("frozen, people, marked", [(1, NAMES, False), (2, NAMES, True), (2, NAMES + "j", False)])
def test_frozen_clips_are_marked(frozen, people, marked):
    """Two noises each: 1/18 and 2/18; 2/20 is the border, and 0.1 in float32 is more."""
    clips = [
        pair(name, seed, 0.5, 0.6, nonrigid=0.004 if i < frozen and not seed else 0.0105)
        for i, name in enumerate(people)
        for seed in (0, 1)
    ]
    arm = finished(summary(*sum(clips, [])))["arms"][1]
    assert ("healthy" in figure_cell(arm, "frozen_share", [JUDGE]).problem) == marked


def test_few_people_and_a_trained_recogniser_are_warned_of():
    assert judge(changed(people=NAMES[:FEW])).warnings == ()
    (warning,) = judge(changed(people=NAMES[: FEW - 1])).warnings
    assert f"{FEW - 1} people are few, and intervals over fewer than {FEW}" in warning
    assert f"With {FEW} to 24 people they cover only 90 to 93 %." in (ROOT / "docs" / "evaluate.md").read_text()
    (warning,) = judge(json.loads(json.dumps(changed()).replace(JUDGE, "reward"))).warnings
    assert "no held-out judge" in warning


@pytest.mark.parametrize(
    "trained, held_out, hacked",
    [(0.06, 0.029, True), (0.06, 0.031, False), (0.049, 0.01, False), (0.051, 0.01, True)],
)
def test_a_gain_of_which_the_judge_sees_less_than_half_is_warned_of(trained, held_out, hacked):
    report = changed(0.02, 0.001)
    report["real"]["per_frame"] = {name: report["real"]["per_frame"][JUDGE] for name in ("reward", JUDGE)}
    changes = report["arms"][1]["compared"]
    changes["reward/face_sim"] = {"difference": {"mean": trained}}
    changes[f"{JUDGE}/face_sim"]["difference"]["mean"] = held_out
    assert any("may be hacked" in line for line in judge(report).warnings) == hacked
