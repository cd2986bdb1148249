"""The report of an image model, from records."""

import json

import pytest
import torch
from evaluation_records import ARMS

from rewardfl import data
from rewardfl.evaluation.arms import Arm
from rewardfl.evaluation.figures import make_table
from rewardfl.evaluation.image_report import ImageReport
from rewardfl.evaluation.report.report_page import render
from rewardfl.rewards import Reward
from rewardfl.rewards.scoring import Term


def make_report(records, arms, *second_opinion):
    reward = Reward()
    reward.second_opinion = second_opinion
    term = Term(key="reward.terms.score.name", label="score", reward=reward, weight=1.0, mean=0.0, std=1.0)
    table = make_table(records, [arm.name for arm in arms])
    return ImageReport(table=table, arms=arms, prompts={"0": "0 balls", "1": "1 balls"}, terms=[term])


def record(row, seed, arm, score, **parts):
    figures = {"rewards/score": score, **{f"rewards/score/{name}": value for name, value in parts.items()}}
    place = {"row": str(row), "line": row + 2, "index": row, "person": str(row), "arm": arm, "seed": seed, "steps": 8}
    return place | {"decoded": False, "file": f"{arm}{row}.png", "figures": figures, "curves": {}, "detected": {}}


def pair(row, seed, before, after):
    return [record(row, seed, "base", before), record(row, seed, "latest", after)]


def test_a_tie_is_half_a_win_and_a_missing_score_is_left_out():
    pairs = [pair(0, 0, 1.0, 2.0), pair(0, 1, 1.0, 1.0), pair(1, 0, 3.0, 2.0), pair(1, 1, None, 2.0)]
    report = make_report(sum(pairs, []), ARMS).summarise()
    figures = report["figures"]["score"]
    assert figures["win_rate"]["mean"] == (0.75 + 0) / 2 and figures["left_out"] == 1 and figures["trained"]
    assert figures["before"]["mean"] == 2 and figures["gain"]["mean"] == pytest.approx((0.5 - 1) / 2)
    assert report["prompts"] == 2 and report["pairs"] == 4 and report["arms"][0]["against"] == "base"
    scores = {"score/before": None, "score/after": 2.0}
    assert report["per_pair"][3] == {"line": 3, "prompt": "1 balls", "seed": 1} | scores
    assert "1 pairs left out" in render("images.txt", {"report": json.loads(json.dumps(report, allow_nan=False))})


def test_each_arm_is_compared_with_the_base_of_its_steps_and_drawn(tmp_path):
    """Disagreements are counted by arm, and drawn of the first; a missing reading is not one."""
    arms = [*ARMS, Arm(name="base_4steps", steps=4), Arm(name="latest_4steps", steps=4, adapter=tmp_path)]
    records = [
        record(row, 0, arm.name, i + row, one=float(i % 2), other=None if arm.name == "base" else 0.5)
        for i, arm in enumerate(arms)
        for row in (0, 1)
    ]
    report = make_report(records, arms, "one", "other")
    first, second = report.summarise()["arms"]
    assert (first["against"], second["against"]) == ("base", "base_4steps")
    assert first["disagreements"] == {"score/one above score/other": {"before": 0, "after": 2}}
    assert second["disagreements"]["score/other above score/one"] == {"before": 2, "after": 0}
    for line in records:
        data.write_picture(tmp_path / line["file"], torch.zeros(3, 1, 16, 32))
    report.draw(tmp_path)
    grid, sheet = (data.read_picture(tmp_path / name).shape for name in ("grid.png", "disagreements.png"))
    assert grid[1] >= 4 * 32 * 6 > sheet[1] >= 32 * 6  # four arms, and one picture
    make_report(records, arms).draw(tmp_path)
    assert not (tmp_path / "disagreements.png").exists()
