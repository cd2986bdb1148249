"""tools/sweep.py: what is on the front, what a grid is, what a sweep skips, resumes and refuses."""

import csv
import itertools
import json
import math
import subprocess
import sys

import pytest
from conftest import ROOT

from rewardfl import config
from rewardfl_tools import _sweep, sweep

EVAL = "assets/tiny_world/eval/metadata.csv"


def report(gain, flow, reversals=0.0, command=()):
    """What evaluate writes, as far as it is read here."""

    def figure(mean, reach=0.05):
        return {"mean": mean, "low": mean - reach, "high": mean + reach}

    amounts = {key: figure(0.9) for key in ("face_flow", "pixel_change", "sharpness")} | {"flow": figure(flow)}
    moved = {"speed": figure(0.8), "nonrigid": figure(0.7)}
    judge = {"gain": {"relative": figure(gain, 0.1)}, "motion_after_to_before": moved}
    fooled = {"gain": {"relative": figure(9.0)}, "motion_after_to_before": moved}
    motion = {"after_to_before": amounts, "reversals": {"before": 0.1, "after": 0.1 + reversals, "real": 0.0}}
    return {
        "recognisers": {"reward": fooled, "held_out": judge},
        "motion": motion,
        "command": ["evaluate.py", *command],
    }


def call(monkeypatch, capsys, out, *arguments):
    monkeypatch.chdir(ROOT)
    command = ["sweep.py", "--config", "configs/tiny_face.yaml", "--data", EVAL, "--out", str(out), *arguments]
    monkeypatch.setattr(sys, "argv", command)
    code = sweep.main()
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.fixture
def commands(monkeypatch):
    """What a sweep starts, instead of starting it: a run leaves its run.json, an evaluation a report.

    The gain is a tenth of kl_weight and a hundredth of the seed; a run with seed 13 fails.
    """
    started = []

    def fake(command, stdout, **_):
        started.append(command)
        if "rewardfl_tools.evaluate" in command:
            arguments = command[command.index("rewardfl_tools.evaluate") + 1 :]
            folder = _sweep.Path(arguments[1])
            cfg = json.loads((folder / "run.json").read_text())["config"]
            weight = cfg["reward"]["kl_weight"]
            (folder / "evaluation").mkdir(exist_ok=True)
            content = report(weight / 10 + cfg["run"]["seed"] / 100, 1 - weight / 10, command=arguments)
            (folder / "evaluation" / "report.json").write_text(json.dumps(content))
        else:
            start = command.index("--config")
            cfg = config.load(command[start + 1], command[start + 2 :])
            if cfg.run.seed == 13:
                return subprocess.CompletedProcess(command, 2)
            folder = _sweep.Path(cfg.run.output_dir)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "run.json").write_text(json.dumps({"config": config.to_dict(cfg)}))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(_sweep.subprocess, "run", fake)
    return started


def test_front_against_every_pair():
    """By its definition, over all orders of a few places; more motion than before counts as 1."""
    places = [(0.2, 0.9), (0.5, 0.8), (0.5, 0.7), (0.1, 0.95), (0.4, 0.6), (0.1, 0.95)]
    for order in itertools.permutations(range(len(places))):
        shuffled = [places[i] for i in order]
        found = [shuffled[i] for i in _sweep.front(shuffled)]
        assert found == [(0.1, 0.95), (0.1, 0.95), (0.2, 0.9), (0.5, 0.8)]
    assert _sweep.front([(0.3, 1.4), (0.4, 1.0)]) == [1]  # trembling is not better
    assert _sweep.front([(math.nan, 1.0), (0.1, 0.5), (0.9, math.nan)]) == [1]


def test_a_grid_is_a_product():
    weights, caps = (_sweep.grid_values(text) for text in ("reward.kl_weight=1, 2", "reward.cap=none"))
    grid = _sweep.product([_sweep.Point("", ())], [weights, caps])
    assert [point.name for point in grid] == ["kl_weight=1,cap=none", "kl_weight=2,cap=none"]
    assert grid[1].overrides == ("reward.kl_weight=2", "reward.cap=none")
    lists = _sweep.grid_values("sample.active=[4,5],[6, 7]")
    assert [point.overrides for point in lists] == [("sample.active=[4,5]",), ("sample.active=[6, 7]",)]
    assert [point.name for point in _sweep.product([_sweep.Point("", ())], [])] == ["base"]


def test_points_of_a_file_each_take_the_grid(tmp_path):
    file = tmp_path / "points.yaml"
    file.write_text("- {name: plain, overrides: []}\n- {name: a/b, overrides: [reward.cap=none]}\n")
    grid = _sweep.product(_sweep.read_points(file), [_sweep.grid_values("reward.kl_weight=1,2")])
    assert [p.name for p in grid] == [f"{name},kl_weight={w}" for name in ("plain", "a_b") for w in (1, 2)]
    assert grid[3].overrides == ("reward.cap=none", "reward.kl_weight=2")


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["--grid", "reward.kl_weight"], "reward.kl_weight"),
        (["--grid", "reward.kl_weight=1,,2"], "1,,2"),
        (["--grid", "reward.kl_weight=1,-1"], "-1"),
        (["--grid", "reward.kl_weigt=1"], "kl_weigt"),
        (["--grid", "reward.kl_weight=1,1"], "kl_weight=1"),
        (["--seeds", "1,x"], "1,x"),
        (["--seeds", "1,1"], "1,1"),
        (["--points", "no/such.yaml"], "no/such.yaml"),
        (["--data", "no/such.csv"], "no/such.csv"),
        (["reward.name=colour", "reward.motion_weight=0", "reward.reward_model_path=null",
          "reward.held_out_model_path=null"], "held_out_model"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_nothing_is_trained(arguments, named, tmp_path, monkeypatch, capsys, commands):
    code, _, error = call(monkeypatch, capsys, tmp_path / "out", *arguments)
    assert code == 2 and named in error and error.count("\n") == 1 and not commands
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["{a: 1}", "[]", "- {name: x}", "- {name: x, overrides: [1]}", "- [", "- x"])
def test_a_file_that_lists_no_points(text, tmp_path, monkeypatch, capsys, commands):
    (tmp_path / "p.yaml").write_text(text)
    code, _, error = call(monkeypatch, capsys, tmp_path / "out", "--points", str(tmp_path / "p.yaml"))
    assert code == 2 and "p.yaml" in error and error.count("\n") == 1 and not commands


def test_a_sweep_is_drawn_and_goes_on(tmp_path, monkeypatch, capsys, commands):
    """Means over seeds and the worst; what is judged is not run again, another --noises judges again."""
    grid = ["--grid", "reward.kl_weight=1,2", "--seeds", "1,3"]
    code, out, _ = call(monkeypatch, capsys, tmp_path, *grid)
    assert code == 0 and len(commands) == 8 and "kl_weight=2" in out
    assert (tmp_path / "front.png").stat().st_size > 1000
    with (tmp_path / "front.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == ["kl_weight=1", "kl_weight=2"] and rows[0]["seeds"] == "1 3"
    assert [float(rows[0][f"gain_{part}"]) for part in ("mean", "low", "high", "worst")] == pytest.approx(
        [0.12, 0.02, 0.22, 0.11]  # 0.1 + a hundredth of the seed, +- 0.1, by the held-out judge
    )
    assert float(rows[1]["flow_mean"]) == pytest.approx(0.8) and rows[0]["front"] == rows[1]["front"] == "1"
    assert "+12.0 % (+11.0 %)" in (tmp_path / "front.md").read_text()

    commands.clear()
    assert call(monkeypatch, capsys, tmp_path, *grid)[0] == 0 and not commands
    (tmp_path / "kl_weight=1" / "seed3" / "evaluation" / "report.json").unlink()  # as one that was cut off
    assert call(monkeypatch, capsys, tmp_path, *grid)[0] == 0
    assert len(commands) == 2 and "run.seed=3" in commands[0] and "reward.kl_weight=1" in commands[0]
    commands.clear()
    assert call(monkeypatch, capsys, tmp_path, *grid, "--noises", "1")[0] == 0 and len(commands) == 8

    commands.clear()  # the same folder for other settings
    code, _, error = call(monkeypatch, capsys, tmp_path, *grid, "train.learning_rate=1e-5")
    assert code == 2 and "train.learning_rate" in error and not commands


def test_a_run_that_fails_does_not_stop_the_others(tmp_path, monkeypatch, capsys, commands):
    code, _, error = call(monkeypatch, capsys, tmp_path, "--seeds", "13,1", "--jobs", "2")
    assert code == 1 and "seed13" in error and error.count("\n") == 1
    with (tmp_path / "front.csv").open() as file:
        assert [row["seeds"] for row in csv.DictReader(file)] == ["1"]


def test_a_dry_run_starts_nothing(tmp_path, monkeypatch, capsys, commands):
    code, out, _ = call(monkeypatch, capsys, tmp_path / "out", "--seeds", "1,2", "--dry-run", "--launch=--quiet")
    assert code == 0 and out.count("train_reward_fl.py") == out.count("--quiet") == 2 and not commands


def test_what_could_not_be_measured_is_nan(tmp_path):
    content = report(0.1, 0.9)
    content["motion"]["after_to_before"]["face_flow"] = content["motion"]["reversals"]["after"] = None
    (tmp_path / "evaluation").mkdir()
    (tmp_path / "evaluation" / "report.json").write_text(json.dumps(content))
    figures = _sweep.read_figures(tmp_path)
    assert math.isnan(figures["face_flow"].mean) and math.isnan(figures["reversals"].mean)
    assert figures["gain"].mean == 0.1 and figures["speed"].mean == 0.8
    result = _sweep.combined(_sweep.Point("a", ()), {1: figures, 2: figures})
    assert math.isnan(result.worst["face_flow"]) and result.worst["flow"] == 0.9
    assert "nan" in _sweep.table([result], [0])
