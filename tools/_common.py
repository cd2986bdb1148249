"""What the merging tools share: exit codes, checks of the output's place, progress. No torch here."""

import argparse
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from rewardfl.files import atomic_write
from rewardfl.shards import Part, Refused

MERGED, IO_ERROR, REFUSED = 0, 1, 2  # exit codes


def run(main: Callable[[], None]) -> None:
    """Call main and exit: 0 done, 2 refused with nothing written, 1 for the disk's errors."""
    try:
        main()
    except Refused as error:
        print(f"refused: {error}", file=sys.stderr)
        sys.exit(REFUSED)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(IO_ERROR)
    sys.exit(MERGED)


def add_output_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, help="a .safetensors file, or a folder")
    parser.add_argument("--dry-run", action="store_true", help="check everything, report, write nothing")
    parser.add_argument("--verify", action="store_true", help="read the output back and compare it with the input")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report to this file")
    parser.add_argument("--force", action="store_true", help="replace an output that is already there")


def add_layout_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype", default="keep", choices=("keep", "fp32", "bf16", "fp16"),
        help="of the output; bf16 and fp16 leave in float32 what diffusers keeps there (default: keep)",
    )  # fmt: skip
    parser.add_argument(
        "--rename", default="keep", choices=("keep", "diffusers", "original", "comfy"),
        help="names of the tensors in the output; comfy: original names behind model.diffusion_model. (default: keep)",
    )  # fmt: skip
    parser.add_argument(
        "--max-shard-size", type=size, default=size("5GB"), metavar="5GB", help="of files in an output folder"
    )


def size(text: str) -> int:
    """Bytes of 5GB, 500MB, 1.5GB or a number."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)B?", text.strip().upper())
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 5GB or 500MB")
    return int(float(found[1]) * {"": 1, "K": 1e3, "M": 1e6, "G": 1e9}[found[2]])


def check_output(out: Path, inputs: list[Path], force: bool) -> None:
    """Refused when the output would overwrite an input or, without force, anything; or when no loader would see it."""
    place = out.resolve()
    for source in inputs:
        source = source.resolve()
        if place == source or source in place.parents or place in source.parents:
            raise Refused(f"--out {out} is, holds or lies in the input {source}; write to another place")
    if out.exists() and not force:
        raise Refused(f"--out {out} exists; give another name, or --force to replace it")
    if out.suffix == ".safetensors":
        if out.is_dir():
            raise Refused(f"--out {out} is a folder")
        index = out.with_name(f"{out.name}.index.json")
        if index.exists():
            raise Refused(f"{index} is in the way: loaders would take its shards and ignore {out.name}; delete it")
    elif out.is_file():
        raise Refused(f"--out {out} is a file without .safetensors; name a folder or a .safetensors file")


def check_space(out: Path, nbytes: int) -> None:
    """Refused when the disk has no room for the output next to what is there."""
    folder = next(parent for parent in out.resolve().parents if parent.is_dir())
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise Refused(f"--out {out} needs {gigabytes(nbytes)}, the disk has {gigabytes(free)} free")


def gigabytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e7 else f"{nbytes / 1e3:.1f} kB"


def progress_bar(parts: list[Part], title: str) -> tqdm:
    total = sum(part.nbytes for part in parts)
    return tqdm(total=total, desc=title, unit="B", unit_scale=True, disable=not sys.stderr.isatty())


def write_report(path: Path | None, report: dict) -> None:
    if path:
        atomic_write(path, json.dumps(report, indent=2) + "\n")
