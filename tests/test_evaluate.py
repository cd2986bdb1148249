"""The statistics of tools/evaluate.py on clips whose answers are known; what it refuses."""

import dataclasses
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT

from rewardfl import config, data
from rewardfl.rewards import face
from rewardfl.rewards.video_motion import VideoMotion, video_motion
from rewardfl_tools import _arms, _evaluate, evaluate


def score(value, frames=9, coverage=1.0, speed=0.02, nonrigid=0.01):
    per_frame = torch.full((frames - 1,), value)
    seen, boxes = torch.ones(frames, dtype=torch.bool), torch.zeros(frames, 4)
    return face.FaceScore(per_frame, per_frame.mean(), seen, speed, nonrigid, coverage, boxes)


MOVES = VideoMotion(flow=1.0, face_flow=2.0, pixel_change=0.1, sharpness=50.0, reversals=-0.8)


def clip(person, seed, before, after, after_speed=0.02, **after_moves):
    row = data.Row(0, 2, person, Path("x.mp4"), "a person")
    scores = {"before": before, "after": after}
    scores = {arm: s if s is None or isinstance(s, face.FaceScore) else score(s) for arm, s in scores.items()}
    if isinstance(after, float):
        scores["after"] = score(after, speed=after_speed)
    frames = torch.zeros(9, 16, 16, 3, dtype=torch.uint8)
    motion = {
        "real": dataclasses.replace(MOVES, flow=4.0),
        "before": MOVES,
        "after": dataclasses.replace(MOVES, **after_moves),
    }
    return _evaluate.Clip(row, seed, frames, {"before": frames, "after": frames}, {"held_out": scores}, motion)


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


def test_motion_without_a_network_is_a_ratio_of_means_over_people():
    clips = [clip("a", 0, 0.5, 0.6, flow=0.5), clip("a", 1, 0.5, 0.6, flow=0.7), clip("b", 0, 0.5, 0.6, reversals=-0.6)]
    figures = _evaluate.summarise(clips, pools("a", "b"))["motion"]
    assert [figures[arm]["flow"] for arm in ("real", "before", "after")] == pytest.approx([4, 1, 0.8])  # 0.6 and 1
    assert figures["after_to_before"]["flow"] == pytest.approx({"mean": 0.8, "low": 0.6, "high": 1.0})
    assert figures["after_to_before"]["sharpness"] == pytest.approx({"mean": 1, "low": 1, "high": 1})
    assert figures["after"].keys() == figures["after_to_before"].keys() == {*_evaluate.AMOUNTS}
    reversals = figures["reversals"]
    assert [reversals[arm] for arm in ("real", "before", "after")] == pytest.approx([-0.8, -0.8, -0.7])
    assert reversals["after_minus_before"] == pytest.approx({"mean": 0.1, "low": 0.0, "high": 0.2})


def test_who_has_no_face_flow_is_left_out_of_it_alone():
    clips = [clip("a", 0, 0.5, None, face_flow=math.nan, flow=0.5), clip("b", 0, 0.5, 0.6, face_flow=1.0)]
    report = _evaluate.summarise(clips, pools("a", "b"))
    assert report["motion"]["after_to_before"]["face_flow"]["mean"] == pytest.approx(0.5)
    assert report["motion"]["after_to_before"]["flow"]["mean"] == pytest.approx(0.75)
    assert report["per_clip"][0]["motion"]["after"]["face_flow"] is None
    alone = _evaluate.summarise(clips[:1], pools("a"))
    assert alone["motion"]["after_to_before"]["face_flow"] is alone["motion"]["after"]["face_flow"] is None
    assert "nothing to measure" in _evaluate.table(alone)
    json.dumps(alone, allow_nan=False)  # other readers of JSON know no NaN


def test_the_real_clips_motion_is_taken_of_its_own_frames():
    world = ROOT / "assets" / "tiny_world"
    video = data.load_example(data.load_metadata(world / "eval" / "metadata.csv")[0], 64, 64, 9).video
    detector = face.FaceDetector(world / "faces" / "judge" / "detector.onnx", 128)
    found = _evaluate.motion_of_real(detector, video, "cpu")
    (box, *_) = face.track_largest(detector.detect(video.transpose(0, 1))).boxes.split(1)
    frames = data.to_uint8(video).contiguous().numpy()
    assert dataclasses.replace(found, face_flow=0) == dataclasses.replace(video_motion(frames), face_flow=0)
    assert found.face_flow == pytest.approx(video_motion(frames, box.expand(9, 4).numpy()).face_flow, rel=0.2)
    nobody = _evaluate.motion_of_real(detector, torch.zeros(3, 9, 64, 64), "cpu")
    assert math.isnan(nobody.face_flow)


def test_table_and_pictures(tmp_path):
    clips = [clip(p, s, 0.5, 0.6) for p in "ab" for s in (0, 1)]
    report = _evaluate.summarise(clips, pools("a", "b"))
    text = _evaluate.table(report)
    (flow,) = [line for line in text.splitlines() if line.strip().startswith("flow")]
    assert "real 4 " in flow and "after / before 1.000 [1.000, 1.000]" in flow
    assert "2 people, 4 clips" in text and "held-out judge" in text and "+20.0% [+20.0, +20.0] relative" in text
    _evaluate.draw_curves(report, tmp_path / "curves.png")
    _evaluate.draw_grid(clips, tmp_path / "grid.png")
    assert (tmp_path / "curves.png").stat().st_size > 1000 and (tmp_path / "grid.png").stat().st_size > 500


def test_batches_hold_clips_of_one_size():
    rows = [data.Row(i, i + 2, str(i), Path("x.mp4"), "a person") for i in range(5)]
    jobs = [(row, seed) for seed in (0, 1) for row in rows]
    assert _arms.batches(jobs, dict.fromkeys("01234", (64, 64)), 4) == [jobs[:4], jobs[4:8], jobs[8:]]
    sizes = {"0": (64, 64), "1": (64, 80), "2": (64, 64), "3": (64, 80), "4": (64, 64)}
    mixed = _arms.batches(jobs, sizes, 4)
    assert sorted(map(jobs.index, sum(mixed, []))) == list(range(10))
    assert [len(batch) for batch in mixed] == [4, 2, 4]
    assert all(len({sizes[row.id] for row, _ in batch}) == 1 for batch in mixed)


def test_refuses_what_is_no_run(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"run\.json is missing; name the output_dir of a training run"):
        _arms.run_config(tmp_path, [])


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
