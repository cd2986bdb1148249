"""Whole updates on a pretend GPU (tests/support/pretend_gpu.py): the CPU's numbers, no mixed devices, no hazards.

`make pretend` runs this file. LIMITS are the waits and copies that two updates take; a change that adds one goes red.
"""

import collections
import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT

pytestmark = pytest.mark.pretend
SUPPORT = ROOT / "tests" / "support"
REWARD_FL = ["train_reward_fl.py", "--config", "tests/golden/reward_fl.yaml"]
FLOW_GRPO = ["train_flow_grpo.py", "--config", "tests/golden/flow_grpo.yaml", "grpo.inner_epochs=1"]
LOW_NOISE = ["model.trainable_models=dit2", "sample.active_steps=[2, 3]"]
SWAP = ["experts.trained=cpu_swap", "experts.untrained=cpu_swap", "train.use_gradient_checkpointing=true"]
OFFLOAD = ["train.use_gradient_checkpointing=true", "train.use_gradient_checkpointing_offload=true"]
CASES = {
    "reward_fl": REWARD_FL,
    "reward_fl swap": [*REWARD_FL, *LOW_NOISE, *SWAP],
    "reward_fl offload": [*REWARD_FL, *OFFLOAD, "train.decode_caches=offload"],
    "reward_fl kept graphs": [*REWARD_FL, *OFFLOAD, "train.active_graphs=keep_on_host"],
    "reward_fl boundary cache": [
        *REWARD_FL, *LOW_NOISE, "experts.untrained=boundary_cache", "sample.noises_per_sample=2",
    ],
    "reward_fl bfloat16": [*REWARD_FL, "model.dtype=bfloat16"],
    "flow_grpo": FLOW_GRPO,
    "flow_grpo swap": [*FLOW_GRPO, *SWAP],
    "flow_grpo guidance": [*FLOW_GRPO, "sample.guidance_scale=2"],
}  # fmt: skip
PHASES = ("encode", "rollout", "decode", "reward", "replay", "optimizer")
# By case, two updates together: {phase: [waits, copies]}, as `by_phase` gave them when they were recorded.
LIMITS = json.loads((SUPPORT / "pretend_gpu_limits.json").read_text())


def launch(arguments, folder, *, pretend):
    command = [sys.executable]
    command += [str(SUPPORT / "run_on_pretend_gpu.py"), str(folder / "report.json")] if pretend else []
    settings = ["train.max_steps=2", "run.save_steps=2", f"run.output_dir={folder / 'run'}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"PYTHONPATH": str(ROOT)} | ({} if pretend else {"ACCELERATE_USE_CPU": "true"})
    folder.mkdir()
    done = subprocess.run(
        [*command, *arguments, *settings], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "memory/"))} for line in lines]


def by_phase(report: dict) -> dict[str, list[int]]:
    """Return {phase: [waits, copies]} of the phases that make up an update."""
    totals = {name: collections.Counter() for name in ("waits", "copies")}
    for name, counter in totals.items():
        for phase, _, _, count in report[name]:
            counter[phase] += count
    return {phase: [totals["waits"][phase], totals["copies"][phase]] for phase in PHASES}


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_updates_on_the_pretend_gpu(case, tmp_path):
    pretended, computed = (launch(CASES[case], tmp_path / name, pretend=name == "gpu") for name in ("gpu", "cpu"))
    assert pretended == computed
    report = json.loads((tmp_path / "gpu" / "report.json").read_text())
    assert report["mixed"] == report["hazards"] == report["notes"] == []
    for phase, counts in by_phase(report).items():
        assert all(a <= b for a, b in zip(counts, LIMITS[case][phase], strict=True)), f"{phase}: {counts}"


@pytest.mark.slow(8)
def test_planted_faults_are_seen():
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "planted_faults.py")], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert len(seen) > 30
    assert [name for name, value in seen.items() if value == name.startswith("fine")] == []
