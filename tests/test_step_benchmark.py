"""benchmarks/step.py as a user runs it, on the tiny world's configuration and the CPU."""

import json
import re
import sys

import pytest
from conftest import ROOT

from benchmarks import step
from rewardfl import backbones, config
from rewardfl.estimate import needs
from rewardfl.estimate.measure import measure
from rewardfl.run import start, work

CONFIG = str(ROOT / "configs" / "tiny_face.yaml")
FAST = [
    "sample.num_inference_steps=2", "sample.mid_timestep=1", "sample.final_timestep=1", "lora.lora_rank=4",
    "data.height=32", "data.width=32", "data.num_frames=5", "train.per_device_train_batch_size=2",
]  # fmt: skip
CACHED = "experts.untrained=boundary_cache,sample.noises_per_sample=4,train.decode_caches=segment"
HOST = (
    "experts.untrained=cpu_swap,experts.trained=cpu_swap,train.active_graphs=keep_on_host,train.decode_caches=offload,train.use_gradient_checkpointing=true,"
    "train.use_gradient_checkpointing_offload=true"
)


@pytest.mark.long
def test_variants_stand_beside_the_plan_and_each_other(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(ROOT)  # the configuration's paths are relative to it
    cfg = config.load(CONFIG, FAST)
    backbone = backbones.describe(cfg.model.model_name, start.model_source(cfg))
    costs = measure(work.work_of(cfg, backbone, None, None, 1).video)
    monkeypatch.setattr(step, "measure_costs", lambda video: costs)  # the same for all variants
    file = tmp_path / "step.json"
    arguments = ["--config", CONFIG, "--steps", "1", "--json", str(file), "--compare", CACHED, "--compare", HOST, *FAST]
    monkeypatch.setattr(sys, "argv", ["step.py", *arguments])
    step.main()
    out, report = capsys.readouterr().out, json.loads(file.read_text())
    assert all(f"- {key}: {value}\n" in out for key, value in report.items() if key != "variants")
    assert {"command", "device", "torch", "diffusers", "peft", "commit", "seed"} < report.keys()
    plain, cached, host = report["variants"]
    for variant, more in ((plain, []), (cached, CACHED.split(",")), (host, HOST.split(","))):
        flops = needs.flops(costs, work.work_of(config.load(CONFIG, FAST + more), backbone, None, None, 1))
        parts = {name: 2 * flops[name] for name in ("rollout", "decode", "decode VJP")}  # of two clips
        parts |= {"replay": 2 * sum(flops.values()) - sum(parts.values()), "optimizer": 0}
        assert {row["phase"]: row["plan_flops"] for row in variant["rows"]} == parts | {
            "update": 2 * sum(flops.values())
        }
    assert plain["norm"] == host["norm"] != 0  # where things live changes nothing
    assert cached["rows"][0]["plan_flops"] < plain["rows"][0]["plan_flops"]
    printed = re.findall(r"^\| ([\w ]+) \| \S+ \| (\S+) \| (\S+) \| \S+ \| - \| - \| \S+ \| - \|$", out, re.M)
    assert [cells[0] for cells in printed] == 3 * ["rollout", "decode", "decode VJP", "replay", "optimizer", "update"]
    assert all(cells[1] == "1.00" for cells in printed[:6])  # the first variant, beside itself
    assert [cells[2] for cells in printed[:6]] == [
        f"{row['plan_flops'] / 1e12:.4g}" if row["plan_flops"] else "-" for row in plain["rows"]
    ]
