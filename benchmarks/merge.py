"""Time and memory of the merging tools on Wan-shaped files, next to those of `cp`.

    python benchmarks/merge.py --work /tmp/merge_bench            # 3.4 GB of bf16 shards, about 12 GB of disk, CPU only

Every round runs each job once, from a cold page cache where the kernel lets us drop it, and ends with a sync; the
table gives the median over rounds. Peak memory is the child's maximum resident set, from the kernel.
"""

import argparse
import json
import multiprocessing
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent


def make_inputs(work: Path, blocks: int, rank: int) -> tuple[Path, Path]:
    """Write a sharded bf16 checkpoint with names and sizes of Wan2.2-I2V-A14B, and a rank-64 LoRA for it."""
    import torch
    from safetensors.torch import save_file

    base, lora = work / "low_noise_model", work / "lora_low.safetensors"
    if lora.exists():
        return base, lora
    base.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    dim, ffn = 5120, 13824
    linears = {f"{a}.{b}": (dim, dim) for a in ("self_attn", "cross_attn") for b in "qkvo"}
    linears |= {"ffn.0": (ffn, dim), "ffn.2": (dim, ffn)}
    update, weight_map, total = {}, {}, 0

    def normal(*shape: int, std: float) -> "torch.Tensor":
        return torch.randn(shape, generator=generator) * std

    for block in range(blocks):
        state = {f"blocks.{block}.modulation": normal(1, 6, dim, std=0.02).bfloat16()}
        for name, shape in linears.items():
            stem = f"blocks.{block}.{name}"
            state[f"{stem}.weight"] = normal(*shape, std=0.02).bfloat16()
            state[f"{stem}.bias"] = normal(shape[0], std=0.02).bfloat16()
            update[f"diffusion_model.{stem}.lora_down.weight"] = normal(rank, shape[1], std=shape[1] ** -0.5)
            update[f"diffusion_model.{stem}.lora_up.weight"] = normal(shape[0], rank, std=5e-3)
            update[f"diffusion_model.{stem}.alpha"] = torch.tensor(float(rank))
        if block == 0:
            state["time_projection.1.weight"] = normal(6 * dim, dim, std=0.02).bfloat16()
            state["time_projection.1.bias"] = normal(6 * dim, std=0.02).bfloat16()
        file = f"diffusion_pytorch_model-{block + 1:05d}-of-{blocks:05d}.safetensors"
        save_file(state, base / file)
        weight_map |= dict.fromkeys(state, file)
        total += sum(value.nbytes for value in state.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (base / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    save_file(update, lora)
    return base, lora


def measure(command: list[str]) -> tuple[float, float, float]:
    """Return (seconds including sync, CPU seconds, peak MiB) of a command run from a cold cache."""
    os.sync()
    if os.geteuid() == 0:
        Path("/proc/sys/vm/drop_caches").write_text("1")
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)
    _, status, usage = os.wait4(process.pid, 0)
    os.sync()
    if status:
        raise RuntimeError(f"{command} failed with status {status}")
    return time.perf_counter() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="an empty or earlier folder on the disk to measure")
    parser.add_argument("--blocks", type=int, default=4, help="of Wan-A14B's 40 (default: 4)")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    # in another process: the kernel counts a parent's memory at the fork as its children's peak
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        base, lora = pool.apply(make_inputs, (args.work, args.blocks, 64))
    out = args.work / "out"
    python, tools = sys.executable, ROOT / "tools"
    result = f"{out}/m.safetensors"
    merge = [python, f"{tools}/merge_lora.py", "--base", str(base), "--lora", str(lora), "--out", result]
    jobs = {
        "cp -r": ["cp", "-r", str(base), str(out)],
        "merge_shards": [python, f"{tools}/merge_shards.py", "--input", str(base), "--out", result],
        "merge_lora": merge,
        "merge_lora --dtype fp16": [*merge, "--dtype", "fp16"],
    }
    results: dict[str, list[tuple[float, float, float]]] = {name: [] for name in jobs}
    for _ in range(args.rounds):
        for name, command in jobs.items():
            shutil.rmtree(out, ignore_errors=True)
            if name != "cp -r":
                out.mkdir()
            results[name].append(measure(command))
    shutil.rmtree(out, ignore_errors=True)
    size = sum(file.stat().st_size for file in base.glob("*.safetensors"))
    print(f"{size / 1e9:.2f} GB in {args.blocks} shards, LoRA {lora.stat().st_size / 1e6:.0f} MB; {args.rounds} rounds")
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}")
    print("| job | wall s, median (min) | over cp | CPU s | peak MiB |\n|---|---|---|---|---|")
    copy = statistics.median(wall for wall, _, _ in results["cp -r"])
    for name, rounds in results.items():
        wall, cpu, peak = (statistics.median(column) for column in zip(*rounds, strict=True))
        least = min(row[0] for row in rounds)
        print(f"| {name} | {wall:.1f} ({least:.1f}) | {wall / copy:.2f} | {cpu:.1f} | {peak:.0f} |")


if __name__ == "__main__":
    main()
