"""Safetensors files written in constant memory, tensor by tensor, as one file or as the shards of a folder.

The safetensors library writes from complete state dicts only. No torch here: copying shards takes 34 MiB, importing
torch 220.
"""

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from tqdm import tqdm

from rewardfl.files import atomic_file
from rewardfl.weights.shards import ITEM_BYTES, Checkpoint, Entry, InputError

STEM = "diffusion_pytorch_model"  # of the files in a diffusers or Wan-AI expert folder
Bytes = bytes | bytearray | memoryview
Progress = Callable[[int], object]  # called with the size of each piece that is written, in bytes


@dataclass(frozen=True, kw_only=True)
class Part:
    """A tensor to write: its bytes are those of its pieces, one after the other."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[Bytes]] = field(compare=False)

    @property
    def nbytes(self) -> int:
        return ITEM_BYTES[self.dtype] * prod(self.shape)


def copy_entry(entry: Entry, name: str | None = None) -> Part:
    """Return the part that copies `entry`, perhaps under another name."""
    return Part(name=name or entry.name, dtype=entry.dtype, shape=entry.shape, pieces=entry.pieces)


def write_file(
    path: Path,
    parts: list[Part],
    metadata: Mapping[str, str],
    progress: Progress,
    before_replacing: Callable[[], None] = lambda: None,
) -> None:
    """Write a safetensors file that appears at `path` only when it is complete, with progress(bytes) per piece.

    Tensors are laid out by falling item size, then by name, which aligns each of them. before_replacing: called when
    the content is written; an exception in it leaves `path` as it is.
    """
    ordered = sorted(parts, key=lambda part: (-ITEM_BYTES[part.dtype], part.name))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for part in ordered:
        header[part.name] = {"dtype": part.dtype, "shape": list(part.shape), "data_offsets": [end, end + part.nbytes]}
        end += part.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with atomic_file(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for part in ordered:
            written = 0
            for content in part.pieces():
                written += file.write(content)
                progress(len(content))
            if written != part.nbytes:
                raise RuntimeError(f"tensor {part.name} came as {written} bytes of {part.nbytes}")
        before_replacing()


def shard(parts: list[Part], max_bytes: int) -> dict[str, list[Part]]:
    """Return {file name: its tensors} in the parts' order. A file exceeds max_bytes only if a single tensor does."""
    groups: list[list[Part]] = [[]]
    size = 0
    for part in parts:
        if groups[-1] and size + part.nbytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(part)
        size += part.nbytes
    if len(groups) == 1:
        return {f"{STEM}.safetensors": groups[0]}
    return {f"{STEM}-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}


def write_folder(
    folder: Path, parts: list[Part], metadata: Mapping[str, str], max_bytes: int, progress: Progress
) -> None:
    """Fill an existing folder with one file or with shards and their index.json, under the names loaders expect."""
    files = shard(parts, max_bytes)
    for name, group in files.items():
        write_file(folder / name, group, metadata, progress)
    if len(files) > 1:
        weight_map = dict(sorted((part.name, name) for name, group in files.items() for part in group))
        index = {"metadata": {"total_size": sum(part.nbytes for part in parts)}, "weight_map": weight_map}
        (folder / f"{STEM}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def verify(parts: list[Part], written: Checkpoint, progress: Progress) -> None:
    """Raise InputError (the output is wrong) unless it holds exactly the parts, whose bytes are made again."""
    if differing := sorted(written.tensors.keys() ^ {part.name for part in parts}):
        raise InputError(f"{written.path} and the plan differ in tensor {differing[0]}")
    for part in parts:
        output = written.tensors[part.name]
        if (output.dtype, output.shape) != (part.dtype, part.shape):
            raise InputError(f"{written.path}: {part.name} is {output.dtype} {output.shape}")
        with output.file.open("rb") as file:
            file.seek(output.offset)
            if any(file.read(len(content)) != content for content in part.pieces()):
                raise InputError(f"{written.path}: {part.name} differs from what was to be written; write it again")
        progress(part.nbytes)


def progress_bar(parts: list[Part], title: str) -> tqdm:
    total = sum(part.nbytes for part in parts)
    return tqdm(total=total, desc=title, unit="B", unit_scale=True, disable=not sys.stderr.isatty())
