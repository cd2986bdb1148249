"""Host memory and time of loading one expert to bfloat16, from float32 files as the official release stores them.

    python benchmarks/load.py [--layers 12] [--width 1536]

Writes an expert of random numbers in both layouts into a temporary folder and loads it in a process of its own
(fused with a rank-64 LoRA, too). Prints JSON; peak is VmHWM less what Python and the libraries held before.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from rewardfl.backbones.stock import read_config
from rewardfl.backbones.wan import load as wan_load
from rewardfl.backbones.wan.files import published
from rewardfl.backbones.wan.variants import VARIANTS
from rewardfl.merging import writing
from rewardfl.weights import lora_files, shards, wan_names

SHARDS, RANK = 3, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=1536, help="a multiple of 128")
    parser.add_argument("--load", nargs=3, metavar=("CONFIG", "FOLDER", "LORA"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.load:
        print(json.dumps(measure(*args.load)))
        return
    with tempfile.TemporaryDirectory() as folder:
        expert_config, lora = write(Path(folder), args.layers, args.width)
        loads = [
            {"layout": layout, "distilled": bool(distilled)}
            | in_own_process(expert_config, Path(folder) / layout, distilled)
            for layout in ("original", "diffusers")
            for distilled in ("", str(lora))
        ]
    print(json.dumps(loads, indent=2))


def in_own_process(config: Path, folder: Path, lora: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--load", str(config), str(folder), str(lora)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def write(folder: Path, layers: int, width: int) -> tuple[Path, Path]:
    """Write folder/original and folder/diffusers, float32 in SHARDS files each; return config.json and a LoRA."""
    config = read_config(published(VARIANTS["wan2_2"]), "transformer")
    config |= {"num_layers": layers, "num_attention_heads": width // 128, "ffn_dim": 4 * width}
    (folder / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        model = wan_load.WanTransformer3DModel.from_config(config)
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    names = sorted(shapes)
    size = -(-len(names) // SHARDS)
    for i in range(SHARDS):
        state = {name: 0.02 * torch.randn(shapes[name]) for name in names[i * size : (i + 1) * size]}
        for layout in ("original", "diffusers"):
            named = {wan_names.to_original(name) if layout == "original" else name: state[name] for name in state}
            (folder / layout).mkdir(exist_ok=True)
            save_file(named, folder / layout / f"{writing.STEM}-{i + 1:05d}-of-{SHARDS:05d}.safetensors")
    lora = {}
    for name, shape in shapes.items():
        if name.startswith("blocks.") and len(shape) == 2:
            stem = "diffusion_model." + wan_names.to_original(name).removesuffix(".weight")
            lora[f"{stem}.lora_down.weight"] = 0.02 * torch.randn(RANK, shape[1])
            lora[f"{stem}.lora_up.weight"] = 0.02 * torch.randn(shape[0], RANK)
            lora[f"{stem}.alpha"] = torch.tensor(float(RANK))
    save_file(lora, folder / "lora.safetensors")
    return folder / "config.json", folder / "lora.safetensors"


def measure(config: str, folder: str, lora: str) -> dict[str, float]:
    """Load the expert in this process; return seconds, the expert's size, and the peak over it."""
    distilled = lora_files.assign_expert(lora_files.read_lora(lora), "high_noise") if lora else []
    checkpoint = shards.open_checkpoint(Path(folder))
    before, start = status("VmRSS"), time.perf_counter()
    expert = wan_load.load_expert(checkpoint, json.loads(Path(config).read_text()), torch.bfloat16, distilled)
    seconds = time.perf_counter() - start
    size = sum(value.nbytes for value in expert.state_dict().values())
    peak = status("VmHWM") - before
    return {
        "expert_gb": round(size / 1e9, 4), "seconds": round(seconds, 2), "peak_gb": round(peak / 1e9, 4),
        "peak_over_expert": round(peak / size, 3),
    }  # fmt: skip


def status(field: str) -> int:
    """Return bytes by /proc/self/status: VmRSS is in use now, VmHWM is the maximum ever."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{field}:")))


if __name__ == "__main__":
    main()
