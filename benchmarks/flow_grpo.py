"""What a point of likeness costs on the tiny world: by the reward's gradient, and by policy gradient.

    python benchmarks/flow_grpo.py [--out outputs/flow_grpo_benchmark] [--seed 42]

Trains configs/tiny_face.yaml and configs/tiny_flow_grpo.yaml as they are, one after the other on one thread, without
evaluations in between, and has tools/evaluate.py judge both on the same held-out people, noises and recogniser. Prints
JSON: CPU seconds of each training process, start-up included, and per 0.01 of FaceSim gained.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
RUNS = {
    "reward feedback learning": ("train_reward_fl.py", "configs/tiny_face.yaml", []),
    "Flow-GRPO": ("train_flow_grpo.py", "configs/tiny_flow_grpo.yaml", ["evaluation.eval_clips=null"]),
}
EVALUATION = "assets/tiny_world/eval/metadata.csv"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/flow_grpo_benchmark"))
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()
    out = args.out.resolve()
    found = {name: measure(*run, out / Path(run[1]).stem, args.seed) for name, run in RUNS.items()}
    per_point = [one["cpu_seconds"] / (100 * one["gain"]["mean"]) for one in found.values()]
    for one, seconds in zip(found.values(), per_point, strict=True):
        one["cpu_seconds_per_0.01"] = seconds
    print(json.dumps({"runs": found, "ratio": per_point[1] / per_point[0]}, indent=2))


def measure(script: str, config: str, overrides: list[str], run: Path, seed: int) -> dict:
    settings = [f"run.output_dir={run}", f"run.seed={seed}", "run.cpu_threads=1", "run.log_with=none", *overrides]
    seconds = cpu_seconds([script, "--config", config, *settings])
    cpu_seconds(["tools/evaluate.py", "--run", str(run), "--data", EVALUATION])
    judged = json.loads((run / "evaluation" / "report.json").read_text())["recognisers"]["held_out"]
    return {
        "cpu_seconds": seconds,
        "gain": judged["gain"]["absolute"],
        "motion_after_to_before": judged["motion_after_to_before"],
    }


def cpu_seconds(arguments: list[str]) -> float:
    """User and system seconds of a Python process of its own, which must succeed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, check=True, stdout=sys.stderr)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
