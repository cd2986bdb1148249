"""The statistics of tools/evaluate.py on clips whose answers are known; what it refuses."""

import json
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT

from rewardfl import config, data
from rewardfl.rewards import face
from rewardfl_tools import _evaluate, evaluate


def score(value, frames=9, coverage=1.0, speed=0.02, nonrigid=0.01):
    per_frame = torch.full((frames - 1,), value)
    return face.FaceScore(per_frame, per_frame.mean(), torch.ones(frames, dtype=torch.bool), speed, nonrigid, coverage)


def clip(person, seed, before, after, after_speed=0.02):
    row = data.Row(0, 2, person, Path("x.mp4"), "a person")
    scores = {"before": before, "after": after}
    scores = {arm: s if s is None or isinstance(s, face.FaceScore) else score(s) for arm, s in scores.items()}
    if isinstance(after, float):
        scores["after"] = score(after, speed=after_speed)
    frames = torch.zeros(9, 16, 16, 3, dtype=torch.uint8)
    return _evaluate.Clip(row, seed, frames, {"before": frames, "after": frames}, {"held_out": scores})


def pools(*people):
    return {"held_out": {p: face.FacePool(torch.eye(2), 0.9, 0.02, 0.01, 1.0, torch.zeros(9, 4)) for p in people}}


def test_gain_is_paired_and_relative():
    clips = [clip("a", 0, 0.4, 0.6), clip("b", 0, 0.6, 0.8)]
    figures = _evaluate.summarise(clips, pools("a", "b"))["recognisers"]["held_out"]
    assert figures["gain"]["absolute"] == {
        "mean": pytest.approx(0.2), "low": pytest.approx(0.2), "high": pytest.approx(0.2),
    }  # fmt: skip
    assert figures["gain"]["relative"]["mean"] == pytest.approx(0.7 / 0.5 - 1)
    assert figures["gain"]["people_improved"] == 1.0
    assert figures["before"]["face_sim"]["mean"] == pytest.approx(0.5)
    assert figures["after"]["per_frame"] == [pytest.approx(0.7)] * 8


def test_more_noises_of_the_same_people_do_not_narrow_the_interval():
    values = torch.linspace(0.3, 0.8, 6)
    once = [clip(str(i), 0, float(v), float(v)) for i, v in enumerate(values)]
    twice = once + [clip(str(i), 1, float(v), float(v)) for i, v in enumerate(values)]
    people = pools(*map(str, range(6)))
    intervals = [_evaluate.summarise(c, people)["recognisers"]["held_out"]["before"]["face_sim"] for c in (once, twice)]
    assert intervals[0] == pytest.approx(intervals[1])
    spread = float(values.std()) / 6**0.5
    assert intervals[0]["high"] - intervals[0]["low"] == pytest.approx(2 * 1.96 * spread, rel=0.25)


def test_a_clip_without_a_face_counts_as_zero():
    clips = [clip("a", 0, 0.5, None), clip("b", 0, 0.5, 0.5)]
    figures = _evaluate.summarise(clips, pools("a", "b"))["recognisers"]["held_out"]
    assert figures["after"]["face_sim"]["mean"] == pytest.approx(0.25)
    assert figures["after"]["coverage"]["mean"] == pytest.approx(0.5)
    assert figures["gain"]["absolute"]["mean"] < 0


def test_motion_ratios_see_a_frozen_face():
    clips = [clip(p, 0, 0.5, 0.9, after_speed=0.002) for p in "ab"]
    figures = _evaluate.summarise(clips, pools("a", "b"))["recognisers"]["held_out"]
    assert figures["motion_after_to_before"]["speed"]["mean"] == pytest.approx(0.1)
    assert figures["motion_after_to_real"]["speed"]["median_per_clip"] == pytest.approx(0.1)
    assert figures["motion_after_to_real"]["nonrigid"]["mean"] == pytest.approx(1.0)


def test_table_and_pictures(tmp_path):
    clips = [clip(p, s, 0.5, 0.6) for p in "ab" for s in (0, 1)]
    report = _evaluate.summarise(clips, pools("a", "b"))
    text = _evaluate.table(report)
    assert "2 people, 4 clips" in text and "held-out judge" in text and "+20.0% [+20.0, +20.0] relative" in text
    _evaluate.draw_curves(report, tmp_path / "curves.png")
    _evaluate.draw_grid(clips, tmp_path / "grid.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000 and (tmp_path / "grid.png").stat().st_size > 500


def test_batches_hold_clips_of_one_size():
    rows = [data.Row(i, i + 2, str(i), Path("x.mp4"), "a person") for i in range(5)]
    jobs = [(row, seed) for seed in (0, 1) for row in rows]
    assert _evaluate.batches(jobs, dict.fromkeys("01234", (64, 64)), 4) == [jobs[:4], jobs[4:8], jobs[8:]]
    sizes = {"0": (64, 64), "1": (64, 80), "2": (64, 64), "3": (64, 80), "4": (64, 64)}
    mixed = _evaluate.batches(jobs, sizes, 4)
    assert sorted(map(jobs.index, sum(mixed, []))) == list(range(10))
    assert [len(batch) for batch in mixed] == [4, 2, 4]
    assert all(len({sizes[row.id] for row, _ in batch}) == 1 for batch in mixed)


def test_refuses_what_is_no_run(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"run\.json is missing; name the output_dir of a training run"):
        _evaluate.run_config(tmp_path, [])


def test_a_run_with_another_reward_names_the_way_out(tmp_path, monkeypatch, capsys):
    """A judge that the run had not, given as an override."""
    world = ROOT / "assets" / "tiny_world"
    settings = ["reward.name=colour", "reward.reward_model_path=null", "reward.held_out_model_path=null"]
    settings += ["reward.motion_weight=0", "data.num_frames=5"]
    cfg = config.load(str(ROOT / "configs" / "tiny_flow_grpo.yaml"), settings, config.FlowGrpoConfig)
    (tmp_path / "run.json").write_text(json.dumps({"config": config.to_dict(cfg)}))
    data.write_video(tmp_path / "nobody.mp4", torch.full((5, 64, 64, 3), 90, dtype=torch.uint8), 16)
    (tmp_path / "metadata.csv").write_text("video,prompt\nnobody.mp4,x\n")
    command = ["evaluate.py", "--run", str(tmp_path), "--data", str(tmp_path / "metadata.csv"), "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", command)
    assert evaluate.main() == 2 and "reward.held_out_model_path=FOLDER" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", [*command, f"reward.held_out_model_path={world}/faces/judge"])
    assert evaluate.main() == 2 and "shows a face" in capsys.readouterr().err  # it has looked for one
