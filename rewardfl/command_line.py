"""Command lines of the tools: options, exit codes, messages and the device. No torch at import."""

import argparse
import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

from pydantic import Field, TypeAdapter, ValidationError

from rewardfl.config.schema import Number, Section, shown
from rewardfl.files import escape_control, protect_console
from rewardfl.weights.shards import InputError

DONE, REFUSED, INTERRUPTED = 0, 2, 130  # exit codes; 130 is the shell's for Ctrl-C

LONGEST_LINE = 2000  # characters of a message: names come from files

# first words of the figures' names, which no judge may have
NO_JUDGE = ("reward", "held_out", "rewards", "look", "motion", "canary")

Strength = Annotated[Number, Field(ge=-1000, le=1000)]  # strength of an adapter


class Parser(argparse.ArgumentParser):
    """A command line with the tool's docstring as its help. A mistake is one line that names the option.

    config: the help of --config, for tools that read a configuration with overrides.
    """

    def __init__(self, description: str | None, config: str = ""):
        protect_console()
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        if config:
            self.add_argument("--config", required=True, help=config)
            self.add_argument("overrides", nargs="*", metavar="section.key=value")

    def error(self, message: str) -> NoReturn:
        self.exit(REFUSED, one_line(f"error: {message.removeprefix('argument ')}") + "\n")


def option_type(expected: Any) -> Callable[[str], Any]:
    """Return a reader of an option's text, for `type=`. expected: a type of the schema; `null` means None."""
    adapter: TypeAdapter = TypeAdapter(expected)

    def read(text: str) -> Any:
        try:
            return adapter.validate_python(None if text == "null" else text)
        except ValidationError as error:
            words = error.errors()[0]["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
            raise argparse.ArgumentTypeError(f"must be {words}, got {shown(text)}") from None

    return read


def setting_type(section: type[Section], key: str) -> Callable[[str], Any]:
    """Return a reader of an option with the type of a key of the configuration."""
    return option_type(section.model_fields[key].rebuild_annotation())


def run(entry: str, args: argparse.Namespace) -> int:
    """Run "module:function" and return its exit code. The import is here: help and mistakes need no torch."""
    module, _, function = entry.partition(":")
    return exit_code(lambda: getattr(importlib.import_module(module), function)(args))


def exit_code(work: Callable[[], int | None]) -> int:
    """Return the tool's exit code: 2 and one line for a refusal or an error of the disk, 130 and one for Ctrl-C."""
    try:
        return work() or DONE
    except KeyboardInterrupt:
        code, line = INTERRUPTED, "interrupted"
    except InputError as error:
        code, line = REFUSED, one_line(f"error: {error}")
    except OSError as error:
        why = f"{error.filename or 'the disk'}: {error.strerror}" if error.strerror else error
        code, line = REFUSED, f"error: {why}"
    except _refusals() as error:
        code, line = REFUSED, f"error: {error}"
    print(escape_control(line), file=sys.stderr)  # here `error` and its frames are gone, so a progress bar has ended
    return code


def _refusals() -> tuple[type[Exception], ...]:
    from rewardfl.data.cache import CacheError  # here: they import torch
    from rewardfl.rewards.remote import RewardServerError

    return (CacheError, RewardServerError, ValueError)


def add_device_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="default: cuda where there is one, else cpu")
    text = "cpu_swap: blocks come from host memory in turn"
    parser.add_argument("--experts", choices=("gpu", "cpu_swap"), default="gpu", help=text)


def add_overwrite_option(parser: argparse.ArgumentParser, text: str = "replace files and folders that exist") -> None:
    parser.add_argument("--overwrite", "--force", action="store_true", help=text)


def add_output_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, help="a .safetensors file, or a folder")
    parser.add_argument("--dry-run", action="store_true", help="check everything, report, write nothing")
    parser.add_argument("--verify", action="store_true", help="read the output back and compare it with the input")
    add_overwrite_option(parser)


def add_layout_options(parser: argparse.ArgumentParser) -> None:
    text = "of the output; bf16 and fp16 leave in float32 what diffusers keeps there (default: keep)"
    parser.add_argument("--dtype", default="keep", choices=("keep", "fp32", "bf16", "fp16"), help=text)
    text = "names of the tensors in the output; comfy: original names behind model.diffusion_model. (default: keep)"
    parser.add_argument("--rename", default="keep", choices=("keep", "diffusers", "original", "comfy"), help=text)
    text = "of files in an output folder"
    parser.add_argument("--max-shard-size", type=parse_size, default="5GB", metavar="5GB", help=text)


def parse_size(text: str) -> int:
    """Return the bytes of 5GB, 500MB, 1.5GB or a number."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d+)?)\s*([KMG]?)B?", text.strip().upper())
    nbytes = int(float(match[1]) * {"": 1, "K": 1e3, "M": 1e6, "G": 1e9}[match[2]]) if match else 0
    if nbytes < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a file size; write 5GB or 500MB")
    return nbytes


def parse_path_and_strength(text: str) -> tuple[str, float]:
    """Split PATH[:strength], as LoRAs are named on the command line; the strength is 1 without one."""
    match = re.fullmatch(r"(.+):([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)", text)
    return (match[1], float(match[2])) if match else (text, 1.0)


def parse_adapter(text: str) -> tuple[str, float]:
    """Return a checkpoint folder and the strength of its adapter, as --adapter names them."""
    path, strength = parse_path_and_strength(text)
    return path, option_type(Strength)(str(strength))


def parse_judge(text: str) -> tuple[str, Path]:
    """Return name and folder of NAME=FOLDER, as --judge names a recogniser."""
    name, _, folder = text.partition("=")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name in NO_JUDGE or not folder:
        words = f"NAME of small letters, digits and underscores, and none of {', '.join(NO_JUDGE)}"
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=FOLDER, {words}")
    return name, Path(folder)


def one_line(text: str) -> str:
    """Return the text as one line for a terminal, cut to LONGEST_LINE: names in files may be anything."""
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:LONGEST_LINE])
    return line + (" ..." if len(text) > LONGEST_LINE else "")


def resolve_device(name: str | None) -> str:
    """Return the device of this name, by default cuda where there is a GPU, else cpu. Raise InputError for another."""
    import torch  # here: a copy of shards needs none

    gpus = torch.cuda.device_count()
    devices = ["cuda", *(f"cuda:{i}" for i in range(gpus)), "cpu"] if gpus else ["cpu"]
    if name not in (None, *devices):
        raise InputError(f"--device: this torch has no {shown(name)}; give {', '.join(devices)}, or leave it out")
    return name or devices[0]


def format_bytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e7 else f"{nbytes / 1e3:.1f} kB"
