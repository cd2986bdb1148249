"""Some steps of all scripts give the numbers that they gave when tests/golden/*.json was recorded.

These runs have configurations of their own, and read assets/tiny_world, whose digest stands in each record. Another
processor adds up in another order, and its noise for a seed may differ in the seventh digit. So any machine compares
the first STEPS steps within a tolerance, and the norms of the adapters after the last step. To the last bit a machine
compares with itself:

    make golden-record    # at the commit before the change, into outputs/golden
    make golden           # after the change: every metric of every step, and the adapter

A commit that means to change a number records again, and says the old number, the new one and why. So does a commit
that changes the tiny world; it also begins the runs of test_saved_runs.py again:

    python tests/integration/test_golden.py record tests/golden
"""

import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from safetensors.torch import load_file

pytestmark = pytest.mark.slow(160)

ROOT = Path(__file__).parents[2]
GOLDEN, WORLD = ROOT / "tests" / "golden", ROOT / "assets" / "tiny_world"
RUNS = {  # by record: the command line
    "reward_fl": ["train_reward_fl.py", "--trust-code", "--config", str(GOLDEN / "reward_fl.yaml")],
    "flow_grpo": ["train_flow_grpo.py", "--config", str(GOLDEN / "flow_grpo.yaml")],
    "flow_grpo_clip": [
        "train_flow_grpo.py", "--config", str(GOLDEN / "flow_grpo.yaml"), "train.max_steps=8", "grpo.objective=clip",
        "grpo.clip_range=1e-2",
    ],
    "forward_rl": ["train_forward_rl.py", "--config", str(GOLDEN / "forward_rl.yaml")],
}  # fmt: skip
# SSE instead of AVX2 in torch, oneDNN, MKL, OpenBLAS and OpenCV changes a metric of these steps by 5e-6 of its value, a
# small difference of larger numbers (actor/loss) by 4e-7. Later steps differ by up to 2 %, norms by 2.3e-5.
STEPS, RELATIVE, ABSOLUTE, NORM = 3, 1e-4, 1e-6, 1e-3


def run(name: str, folder: Path) -> dict:
    """Run a script in `folder`; return {world; metrics: by step, without times and memory; adapter: digest; norms}."""
    command = [sys.executable, *RUNS[name], f"run.output_dir={folder}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    metrics = [{k: v for k, v in line.items() if not k.startswith(("time/", "memory/"))} for line in lines]
    files = sorted((folder / "checkpoints" / f"step-{lines[-1]['step']:06d}").rglob("*.safetensors"))
    return {"world": digest_world(), "metrics": metrics, "adapter": digest(files), "norms": norms(files)}


def digest_world() -> str:
    """Return the sha256 over the tiny world's files that these runs read."""
    total = hashlib.sha256()
    for part in ("pipeline/**/*.*", "faces/reward/*", "faces/judge/*", "train/videos/00[012].mp4"):
        for file in sorted(WORLD.glob(part)):
            total.update(file.read_bytes())
    return total.hexdigest()


def digest(files: list[Path]) -> str:
    """Return the sha256 over the names and bits of the adapters' tensors."""
    total = hashlib.sha256()
    for file in files:
        for name, tensor in sorted(load_file(file).items()):
            total.update(f"{file.parent.name}/{name}{list(tensor.shape)}".encode() + tensor.numpy().tobytes())
    return total.hexdigest()


def norms(files: list[Path]) -> dict[str, float]:
    """Return the norm of all lora_A and of all lora_B of each adapter."""
    squares: dict[str, float] = {}
    for file in files:
        for name, tensor in load_file(file).items():
            key = f"{file.parent.name} lora_{'A' if 'lora_A' in name else 'B'}"
            squares[key] = squares.get(key, 0.0) + float(tensor.double().square().sum())
    return {key: math.sqrt(value) for key, value in sorted(squares.items())}


def differences(old: dict, new: dict, relative: float, absolute: float) -> list[str]:
    """Return the keys whose values differ by more than the tolerances, with both values; 0 and 0 ask for equal bits."""
    lines = []
    for key in sorted(old.keys() | new.keys()):
        a, b = old.get(key, "missing"), new.get(key, "missing")
        numbers = isinstance(a, int | float) and isinstance(b, int | float)
        if a != b and not (numbers and math.isclose(a, b, rel_tol=relative, abs_tol=absolute)):
            lines.append(f"{key}: {a} -> {b}")
    return lines


def in_steps(old: list[dict], new: list[dict], relative: float = 0, absolute: float = 0) -> list[str]:
    """Return what differs between two lists of metrics, step by step."""
    pairs = zip(old, new, strict=True)
    return [f"step {a['step']} {line}" for a, b in pairs for line in differences(a, b, relative, absolute)]


@pytest.mark.parametrize("name", RUNS)
def test_golden_curve(name, tmp_path):
    record = json.loads((GOLDEN / f"{name}.json").read_text())
    assert record["world"] == digest_world(), "assets/tiny_world has changed since the record: record again"
    result = run(name, tmp_path)
    pairs = zip(record["metrics"][:STEPS], result["metrics"], strict=False)
    recorded = [{key: new[key] for key in new if key in old} for old, new in pairs]  # a metric may be new
    assert in_steps(record["metrics"][:STEPS], recorded, RELATIVE, ABSOLUTE) == []
    assert [line["step"] for line in result["metrics"]] == [line["step"] for line in record["metrics"]]
    assert differences(record["norms"], result["norms"], NORM, 0) == []


def test_a_difference_is_seen():
    record = [{"step": 1, "actor/loss": 0.25, "reward/mean": None}]
    assert in_steps(record, record) == []
    for changed in ({"actor/loss": 0.25 + 1e-16 * 4}, {"reward/mean": 0.0}, {"reward/new": 1.0}):
        assert len(in_steps(record, [record[0] | changed])) == 1
    assert in_steps(record, [record[0] | {"actor/loss": 0.25002}], RELATIVE, ABSOLUTE) == []
    assert len(in_steps(record, [record[0] | {"actor/loss": 0.25003}], RELATIVE, ABSOLUTE)) == 1


def main(task: str, folder: Path) -> int:
    """Record all runs in `folder`, or compare them with its records to the last bit; return the exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    different = False
    for name in RUNS:
        with tempfile.TemporaryDirectory() as directory:
            result = run(name, Path(directory) / "run")
        file = folder / f"{name}.json"
        if task == "record":
            file.write_text(json.dumps(result, indent=1) + "\n")
            print(f"{name}: recorded in {file}")
            continue
        record = json.loads(file.read_text())
        lines = in_steps(record["metrics"], result["metrics"])
        lines += [f"the {key}" for key in ("world", "adapter") if record[key] != result[key]]
        different |= bool(lines)
        print(f"{name}: {'differs' if lines else 'equal to the last bit'}", *lines[:20], sep="\n    ")
    return int(different)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
