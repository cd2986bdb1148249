"""Safetensors files written in constant memory, tensor by tensor, as one file or as the shards of a folder.

The safetensors library writes from complete state dicts only. No torch here: copying shards takes 34 MiB, importing
torch 220.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import BinaryIO

from rewardfl.weights import shards
from rewardfl.weights.shards import ITEM_BYTES, Entry, InputError

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
    """Write a safetensors file, with progress(bytes) per piece.

    Tensors are laid out by falling item size, then by name, which aligns each of them.
    """
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
    """Fill a new folder. Hard-link weights where the disk has links and both places are on it; copy all other files.

    A link shares its content with the original, so files that people edit (configurations, tokenizer) must be copies.
    """
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
    """Return a model's files in a folder, by the names that loaders expect: one, or shards with their index.json.

    A file exceeds max_bytes only if a single tensor does.
    """
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
