"""What it costs to check that the base model has not changed: bit_sums of an expert's weights, beside copying them.

    python benchmarks/invariants.py [--layers 4] [--repeats 5] [--json FILE]

The weights are random bfloat16 tensors of the shapes of `--layers` blocks of Wan2.2-I2V-A14B (0.70 GB each; an expert
has 40). The copy reads and writes every byte once: a sum that reads each once should not take longer.
"""

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from rewardfl.run import checkpoint, invariants

SHAPES = [(5120, 5120)] * 8 + [(13824, 5120), (5120, 13824)] + [(5120,)] * 12 + [(13824,)]


def seconds(work: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write there what is printed")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(0)
    drawn = [torch.randn(4096, generator=generator, device=device) for _ in SHAPES]
    weights = [
        draw.repeat(-(-torch.Size(shape).numel() // 4096))[: torch.Size(shape).numel()].view(shape).bfloat16()
        for _ in range(args.layers)
        for shape, draw in zip(SHAPES, drawn, strict=True)
    ]
    size = sum(weight.nbytes for weight in weights)
    works = {"bit_sums": lambda: invariants.bit_sums(weights), "copy": lambda: [weight.clone() for weight in weights]}
    taken = {name: [] for name in works}
    for i in range(args.repeats + 1):  # in turn, the first not counted
        for name, work in works.items():
            found = seconds(work, device)
            taken[name] += [found] if i else []
    medians = {name: statistics.median(values) for name, values in taken.items()}
    report = {
        "command": shlex.join(["python", "benchmarks/invariants.py", *sys.argv[1:]]),
        "commit": checkpoint.git_commit(Path(__file__).parent),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU, {torch.get_num_threads()} thr.",
        "bytes": size,
        "tensors": len(weights),
        "seconds": medians,
        "seconds, all": taken,
        "GB/s": {name: size / 1e9 / value for name, value in medians.items()},
        "bit_sums / copy": medians["bit_sums"] / medians["copy"],
    }
    print(json.dumps(report, indent=1))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
