"""benchmarks/reward_step.py as a user runs it, on the tiny world's configuration and the CPU."""

import json
import sys

import pytest
from conftest import ROOT

from benchmarks import reward_step
from rewardfl import backbones, config
from rewardfl.training import plan, setup_model, workload

CONFIG = str(ROOT / "tests" / "face.yaml")
FAST = [
    "sample.num_inference_steps=4", "sample.mid_timestep=2", "sample.final_timestep=3", "lora.lora_rank=4",
    "data.height=32", "data.width=32", "data.num_frames=9", "train.per_device_train_batch_size=2",
    "experts.untrained=cpu_swap", "train.decode_caches=offload",
]  # fmt: skip
MODES = ["full_graph", "replay", "keep_on_host", "swap"]


def run(monkeypatch, capsys, *arguments):
    """(what is printed, the report)."""
    monkeypatch.chdir(ROOT)  # the configuration's paths are relative to it
    monkeypatch.setattr(sys, "argv", ["reward_step.py", "--config", CONFIG, "--steps", "1", *map(str, arguments)])
    reward_step.main()
    return capsys.readouterr().out


@pytest.mark.long
def test_modes_stand_side_by_side(monkeypatch, capsys, tmp_path):
    out = run(monkeypatch, capsys, "--json", tmp_path / "a.json", *FAST)
    report = json.loads((tmp_path / "a.json").read_text())
    assert all(f"- {key}: {value}\n" in out for key, value in report.items() if key != "sizes")
    (size,) = report["sizes"]
    found = {one["mode"]: one for one in size["modes"]}
    assert list(found) == ["full_graph", "replay", "keep_on_host", "swap"] and size["active_steps"] == 2
    # the same gradient to the last bit, and stock autograd's
    assert all(one["gradient_difference"] == 0 for one in found.values()), found
    peaks = {mode: one["rows"][-1]["peak"] for mode, one in found.items()}
    assert peaks["replay"] < 0.6 * peaks["full_graph"] and peaks["swap"] < peaks["replay"]
    # what comes into the device: the untrained expert's blocks at its steps, and the decoder's caches once
    cfg = config.load(CONFIG, [*FAST, *reward_step.RESIDENT])
    backbone = backbones.describe(cfg.model.model_name, setup_model.model_source(cfg))
    costs = reward_step.measure_costs(workload.make_workload(cfg, backbone, None, None, 1).video)
    expert, chunks = costs.experts["high_noise"], 2 * sum(chunk.caches_in for chunk in costs.chunks)
    passes = plan.make_schedule(cfg, backbone).experts.count("high_noise")
    copied = passes * (expert.weights - expert.other_weights) + chunks
    assert found["replay"]["copied_in"] == pytest.approx(copied, rel=0.02)
    assert found["replay"]["copied_out"] == pytest.approx(chunks, rel=0.02)


def test_a_mode_that_is_not_there(monkeypatch, capsys):
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, capsys, "--modes", "replay,fast")
    assert stop.value.code == 2 and "'fast' is none of full_graph, replay" in capsys.readouterr().err
