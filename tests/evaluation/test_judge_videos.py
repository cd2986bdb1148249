"""What tools/evaluate.py refuses, and the settings that its records depend on."""

import json
import shutil

import pytest
import torch
from conftest import ROOT, run_tool
from evaluation_records import ARMS

from rewardfl import config, data
from rewardfl.evaluation.judge_videos import make_settings
from rewardfl.evaluation.records import describe_difference
from rewardfl_tools import evaluate

WORLD = ROOT / "assets" / "tiny_world"


def test_a_run_that_cannot_be_judged_is_refused_with_the_way_out(tmp_path):
    settings = ["reward.terms.score.name=motion", "reward.reward_model_path=null", "reward.held_out_model_path=null"]
    settings += ["reward.motion_weight=0", "data.num_frames=5", f"model.model_paths={WORLD}/pipeline"]
    cfg = config.load(str(ROOT / "configs" / "tiny_flow_grpo.yaml"), settings, config.FlowGrpoConfig)
    sections = config.to_dict(cfg)
    sections["train"]["keep_attention"] = False  # as a run of an earlier version
    (tmp_path / "run.json").write_text(json.dumps({"config": sections}))
    shutil.copytree(WORLD / "supervised", tmp_path / "checkpoints" / "latest")
    data.write_video(tmp_path / "grey.mp4", torch.full((5, 64, 64, 3), 90, dtype=torch.uint8), 8)
    (tmp_path / "metadata.csv").write_text("video,prompt\ngrey.mp4,x\n")
    command = ["--run", tmp_path, "--data", tmp_path / "metadata.csv", "--device", "cpu"]
    for options, problem in (
        ([], "--judge NAME=FOLDER"),
        ([f"reward.held_out_model_path={WORLD}/faces/judge"], "line 2: no face was found in"),
        (["--strengths", "0.5", "--adapter", "x:2"], "--strengths"),
        (["--adapter", "nowhere"], "name a checkpoint with --adapter"),
        (["--device", "cuda:99"], "error: --device"),
    ):
        assert problem in run_tool(evaluate.main, *command, *options, expect=2)


@pytest.mark.parametrize(
    "options",
    [
        ["--strengths", "inf"], ["--steps", "0"], ["--seeds", "0"], ["--batch", "0"], ["--periods", "8,,16"],
        ["--periods", "1"], ["--adapter", "x:1e999"], ["--config", "x"], ["--judge", "a=x", "--judge", "a=y"],
    ],
)  # fmt: skip
def test_options_that_cannot_be_are_refused_at_once(options):
    source = [] if options[0] == "--config" else ["--run", "x"]
    (line,) = run_tool(evaluate.main, "--data", "x", *source, *options, expect=2).splitlines()
    assert line.startswith("error: ") and options[0] in line


@pytest.mark.parametrize("content", [None, "[1]", '{"conf', "\xff"])
def test_a_missing_or_damaged_run_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "run.json").write_bytes(content.encode("latin-1"))
    error = run_tool(evaluate.main, "--data", "x", "--run", tmp_path, "--device", "cpu", expect=2)
    assert error.startswith(f"error: {tmp_path}/run.json")


def test_settings_depend_on_the_rows():
    rows = data.load_metadata(WORLD / "eval" / "metadata.csv")[:2]
    values = {"sample.shift": "5.0", "sample.verdict.tau": "1", "sample.verdict": "None", "train.max_steps": "3"}
    settings, other = (make_settings(values, part, ARMS[:1], {}, {}) for part in (rows, rows[:1]))
    assert settings["sampling"] == {"sample.shift": "5.0"}
    assert describe_difference(settings, other).startswith("data: --data was")
