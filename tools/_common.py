"""What tools share: exit codes and options of those that merge, progress, the device. No torch at import."""

import argparse
import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from rewardfl.weights.shards import Refused
from rewardfl_tools._writing import Part

MERGED, IO_ERROR, REFUSED = 0, 1, 2  # exit codes
LONGEST_LINE = 2000  # characters of a message: names come from files


def command(work: Callable[[], None]) -> Callable[[], int]:
    """`work` with an exit code: 0 done, 2 refused with nothing written, 1 for the disk's errors."""

    @functools.wraps(work)
    def main() -> int:
        try:
            work()
        except Refused as error:
            print(one_line(f"refused: {error}"), file=sys.stderr)
            return REFUSED
        except OSError as error:
            print(one_line(f"error: {error}"), file=sys.stderr)
            return IO_ERROR
        return MERGED

    return main


def add_output_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, help="a .safetensors file, or a folder")
    parser.add_argument("--dry-run", action="store_true", help="check everything, report, write nothing")
    parser.add_argument("--verify", action="store_true", help="read the output back and compare it with the input")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report to this file")
    parser.add_argument("--force", action="store_true", help="replace an earlier output of this tool")


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
    nbytes = float(found[1]) * {"": 1, "K": 1e3, "M": 1e6, "G": 1e9}[found[2]]
    if not 1 <= nbytes < 1e18:
        raise argparse.ArgumentTypeError(f"{text!r} is no size of a file; write 5GB or 500MB")
    return int(nbytes)


def path_and_strength(text: str) -> tuple[str, float]:
    """PATH[:strength], as LoRAs are named on the command line; 1 where it names no strength."""
    found = re.fullmatch(r"(.+):([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)", text)
    return (found[1], float(found[2])) if found else (text, 1.0)


def number_or_null(text: str) -> float | None:
    """The value of an option that says null as a configuration does."""
    return None if text == "null" else float(text)


def one_line(text: str) -> str:
    """The text as one line for a terminal, cut where it is longer than a page: names in files may be anything."""
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:LONGEST_LINE])
    return line + (" ..." if len(text) > LONGEST_LINE else "")


def device(asked: str | None) -> str:
    """`asked`; without it cuda where there is one, else cpu."""
    import torch  # here: a copy of shards does without

    return asked or ("cuda" if torch.cuda.is_available() else "cpu")


def gigabytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e7 else f"{nbytes / 1e3:.1f} kB"


def progress_bar(parts: list[Part], title: str) -> tqdm:
    total = sum(part.nbytes for part in parts)
    return tqdm(total=total, desc=title, unit="B", unit_scale=True, disable=not sys.stderr.isatty())
