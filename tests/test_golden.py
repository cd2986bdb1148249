"""Some steps of both scripts give the numbers that they gave when tests/golden/*.json was recorded.

These runs have configurations and assets of their own, so that nothing but the code changes them, and take the
processor's AVX2 alone: a newer one's kernels add up in another order. With the library versions and the processor that
the record names every metric and the adapter are equal to the last bit. Elsewhere they may be, and else the first steps
agree within a tolerance, which is said. A commit that means to change a number records anew, and says the old number,
the new one and why:

    python tests/test_golden.py
"""

import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
GOLDEN = Path(__file__).parent / "golden"
RUNS = {  # by record: the command line
    "reward_fl": ["train_reward_fl.py", "--config", str(GOLDEN / "reward_fl.yaml")],
    "flow_grpo": ["train_flow_grpo.py", "--config", str(GOLDEN / "flow_grpo.yaml")],
    "flow_grpo_clip": [
        "train_flow_grpo.py", "--config", str(GOLDEN / "flow_grpo.yaml"), "train.max_steps=8", "grpo.objective=clip",
        "grpo.clip_range=1e-2",
    ],
}  # fmt: skip
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
LIBRARIES = ("torch", "diffusers", "transformers", "peft", "accelerate", "av", "numpy")
NEAR, NEAR_STEPS = 5e-3, 3  # what other processors are held to


def made_with() -> dict[str, str]:
    """All that the last bits depend on."""
    processor = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    versions = {name: metadata.version(name) for name in LIBRARIES} | {"torch": torch.__version__}
    return versions | {"processor": processor[0].partition(":")[2].strip()}


def run(name: str, folder: Path) -> dict:
    """{metrics: by step, without times and memory; adapter: digest of all trained weights} of a run in `folder`.

    By Python's own start, which the other tests spare themselves.
    """
    command = [sys.executable, *RUNS[name], f"run.output_dir={folder}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""} | AVX2
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = [{k: v for k, v in line.items() if not k.startswith(("time/", "memory/"))} for line in lines]
    return {"metrics": kept, "adapter": digest(folder / "checkpoints" / f"step-{lines[-1]['step']:06d}")}


def digest(checkpoint: Path) -> str:
    """sha256 over the names and bits of the adapter's tensors, whatever the order of the file."""
    found = hashlib.sha256()
    for path in sorted(checkpoint.rglob("*.safetensors")):
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        header.pop("__metadata__")
        for tensor, entry in sorted(header.items()):
            start, end = (8 + length + offset for offset in entry["data_offsets"])
            found.update(f"{path.parent.name}/{tensor}{entry['shape']}".encode() + content[start:end])
    return found.hexdigest()


def differences(record: list[dict], found: list[dict], tolerance: float) -> list[str]:
    """What differs by more than `tolerance` times 1 or the value, in words; 0 asks for equal bits."""
    assert [line["step"] for line in found] == [line["step"] for line in record]
    listed = []
    for old, new in zip(record, found, strict=True):
        for key in sorted(old.keys() | new.keys()):
            a, b = old.get(key, "missing"), new.get(key, "missing")
            numbers = isinstance(a, int | float) and isinstance(b, int | float)
            if a != b and not (numbers and math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance)):
                listed.append(f"step {old['step']} {key}: {a} -> {b}")
    return listed


@pytest.mark.parametrize("name", RUNS)
def test_golden_curve(name, tmp_path):
    record, found = json.loads((GOLDEN / f"{name}.json").read_text()), run(name, tmp_path)
    here = made_with()
    differ = differences(record["metrics"], found["metrics"], 0)
    if not differ and found["adapter"] == record["adapter"]:
        print(f"{name} is equal to the last bit")
        return
    other = {key: (was, here[key]) for key, was in record["made_with"].items() if here[key] != was}
    assert other, differ or "the adapter alone differs"
    steps = slice(0, NEAR_STEPS)
    assert differences(record["metrics"][steps], found["metrics"][steps], NEAR) == [], other
    print(f"{name}: {NEAR_STEPS} steps are within {NEAR}, not more, and these differ (as recorded, here): {other}")


def test_a_difference_is_seen():
    record = [{"step": 1, "actor/loss": 0.25, "reward/mean": None}]
    assert differences(record, record, 0) == []
    for changed in ({"actor/loss": 0.25 + 1e-16 * 4}, {"reward/mean": 0.0}, {"reward/new": 1.0}):
        assert len(differences(record, [record[0] | changed], 0)) == 1
    assert differences(record, [record[0] | {"actor/loss": 0.254}], NEAR) == []
    assert len(differences(record, [record[0] | {"actor/loss": 0.256}], NEAR)) == 1


if __name__ == "__main__":
    for wanted in sys.argv[1:] or RUNS:
        with tempfile.TemporaryDirectory() as directory:
            recorded = {"made_with": made_with()} | run(wanted, Path(directory) / "run")
        (GOLDEN / f"{wanted}.json").write_text(json.dumps(recorded, indent=1) + "\n")
        print(f"recorded {wanted}: {recorded['adapter']}")
