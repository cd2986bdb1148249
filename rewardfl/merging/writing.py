"""The output of a merging tool: safetensors written in constant memory, as one file or as the shards of a folder.

The safetensors library writes from complete state dicts only. No torch here: importing it takes 220 MiB, a copy 34.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import BinaryIO

from tqdm import tqdm

from rewardfl import command_line
from rewardfl.outputs import Target, nearest_existing
from rewardfl.weights import shards
from rewardfl.weights.shards import ITEM_BYTES, Entry, InputError

STORED_DTYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}  # by --dtype
STEM = "diffusion_pytorch_model"  # stem of the files in a diffusers or Wan-AI expert folder
Progress = Callable[[int], object]  # called with the size of each piece that is written, in bytes


@dataclass(frozen=True, kw_only=True)
class Part:
    """A tensor to write: its bytes are its pieces' bytes, one after the other."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[bytes | bytearray | memoryview]] = field(compare=False)

    @property
    def nbytes(self) -> int:
        return ITEM_BYTES[self.dtype] * prod(self.shape)


@dataclass(frozen=True)
class TensorFile:
    """The content of a safetensors file."""

    parts: list[Part]
    metadata: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


OutputFiles = dict[str, TensorFile | Path | bytes]  # by their names: tensors, a file to copy, or plain content


def copy_entry(entry: Entry, name: str | None = None) -> Part:
    """Return the part that copies `entry`, perhaps under another name."""
    return Part(name=name or entry.name, dtype=entry.dtype, shape=entry.shape, pieces=entry.pieces)


def write_file(file: BinaryIO, weights: TensorFile, progress: Progress) -> None:
    """Write a safetensors file. Tensors are laid out by falling item size, then by name, which aligns them."""
    ordered = sorted(weights.parts, key=lambda part: (-ITEM_BYTES[part.dtype], part.name))
    header: dict[str, object] = {"__metadata__": dict(weights.metadata)}
    end = 0
    for part in ordered:
        header[part.name] = {"dtype": part.dtype, "shape": list(part.shape), "data_offsets": [end, end + part.nbytes]}
        end += part.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for part in ordered:
        for content in part.pieces():
            file.write(content)
            progress(len(content))


def write_folder(folder: Path, files: OutputFiles, progress: Progress) -> None:
    """Fill a new folder. Hard-link weights where the disk allows it; copy what people edit (configurations)."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, TensorFile):
            with path.open("xb") as file:
                write_file(file, content, progress)
        elif isinstance(content, bytes):
            path.write_bytes(content)
        else:
            _link_or_copy(content, path)


def _link_or_copy(source: Path, path: Path) -> None:
    with suppress(OSError):  # another disk, or one without links
        if source.suffix in (".safetensors", ".bin", ".pt", ".pth", ".ckpt"):  # files that no one edits
            return os.link(source.resolve(), path)
    shutil.copyfile(source, path)


def shard(weights: TensorFile, max_bytes: int, folder: str = ".") -> OutputFiles:
    """Return a model's files in a folder, by the names that loaders expect: one, or shards with their index.json."""
    groups: list[list[Part]] = [[]]
    for part in weights.parts:
        if groups[-1] and sum(each.nbytes for each in (*groups[-1], part)) > max_bytes:
            groups.append([])
        groups[-1].append(part)
    ends = [f"-{i:05d}-of-{len(groups):05d}" for i in range(1, len(groups) + 1)] if len(groups) > 1 else [""]
    names = [f"{STEM}{end}.safetensors" for end in ends]
    by_name = dict(zip(names, groups, strict=True))
    files: OutputFiles = {Path(folder, name).as_posix(): TensorFile(by_name[name], weights.metadata) for name in names}
    if len(groups) > 1:
        weight_map = {part.name: name for name, group in by_name.items() for part in group}
        index = {"metadata": {"total_size": weights.nbytes}, "weight_map": dict(sorted(weight_map.items()))}
        files[Path(folder, f"{STEM}.safetensors.index.json").as_posix()] = f"{json.dumps(index, indent=2)}\n".encode()
    return files


def verify(path: Path, weights: TensorFile, progress: Progress) -> None:
    """Raise InputError (the output is wrong) unless a file holds exactly these weights, whose bytes are made again."""
    written, _ = shards.read_header(path)
    tensors = {(entry.name, entry.dtype, entry.shape) for entry in written.values()}
    if differing := tensors ^ {(part.name, part.dtype, part.shape) for part in weights.parts}:
        raise InputError(f"{path} and the plan differ in tensor {min(differing)[0]}")
    for part in weights.parts:
        with path.open("rb") as file:
            file.seek(written[part.name].offset)
            if any(file.read(len(content)) != content for content in part.pieces()):
                raise InputError(f"{path}: {part.name} differs from what was to be written; write it again")
        progress(part.nbytes)


class Output:
    """The --out of a merging tool, a .safetensors file or a folder."""

    def __init__(self, args: argparse.Namespace, inputs: Sequence[Path]):
        """Raise InputError if the output would harm an input or an existing file."""
        self.args, self.path = args, args.out
        self.is_file = self.path.suffix == ".safetensors"
        self.target = Target(
            option="--out", path=args.out, overwrite=args.overwrite, inputs=inputs, is_folder=not self.is_file
        )
        self.target.check()
        index = self.path.with_name(f"{self.path.name}.index.json")
        if self.is_file and index.exists():
            raise InputError(f"{index} is in the way: loaders would take its shards, not {self.path.name}; delete it")

    def model_files(self, weights: TensorFile, config: Path) -> OutputFiles:
        """Return the files of a model: one, or a folder's. A folder with the names of before takes `config`."""
        if self.is_file:
            return {self.path.name: weights}
        copied: OutputFiles = {"config.json": config} if self.args.rename == "keep" and config.is_file() else {}
        return shard(weights, self.args.max_shard_size) | copied

    def finish(self, files: OutputFiles) -> None:
        """Write the files, by their names below the output folder. Raise InputError if the disk has no room."""
        weights = {name: content for name, content in files.items() if isinstance(content, TensorFile)}
        nbytes = sum(content.nbytes for content in weights.values())
        free = shutil.disk_usage(nearest_existing(self.path.parent)).free
        if nbytes > free:  # all else is small, or a link
            sizes = f"{command_line.format_bytes(nbytes)}, the disk has {command_line.format_bytes(free)} free"
            raise InputError(f"--out {self.path} needs {sizes}")
        if self.args.dry_run:
            print(f"dry run: nothing written; {command_line.format_bytes(nbytes)} would be")
            return
        make_bar = partial(tqdm, total=nbytes, unit="B", unit_scale=True, disable=not sys.stderr.isatty())
        with make_bar(desc=str(self.path)) as bar, self.target.fill() as new:
            if self.is_file:
                (content,) = weights.values()
                write_file(new, content, bar.update)
            else:
                write_folder(new, files, bar.update)
        print(command_line.one_line(f"written: {self.path}"))
        if self.args.verify:
            with make_bar(desc="verifying") as bar:
                for name, content in weights.items():
                    verify(self.path if self.is_file else self.path / name, content, bar.update)
            print("verified: every tensor was read back and is what was to be written")
