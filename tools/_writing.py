"""Safetensors files written in constant memory, tensor by tensor, alone or as the shards of a folder.

The safetensors library writes from complete state dicts only. No torch here: copying shards takes 34 MiB, importing
torch alone 220.
"""

import errno
import fcntl
import json
import mmap
import os
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TypeVar

from rewardfl.files import atomic_file
from rewardfl.weights.shards import BLOCK_BYTES, ITEM_BYTES, Entry

AHEAD = 8  # pieces that may wait for the writer
STEM = "diffusion_pytorch_model"  # of the files in a diffusers or Wan-AI expert folder
Bytes = bytes | bytearray | memoryview
Result = TypeVar("Result")


@dataclass(frozen=True)
class Part:
    """A tensor to write: its bytes are those of its pieces, each computed when it is called, in any thread."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[Callable[[], Bytes]]] = field(compare=False)

    @property
    def nbytes(self) -> int:
        return ITEM_BYTES[self.dtype] * prod(self.shape)


def copy_of(entry: Entry, name: str | None = None) -> Part:
    """`entry` as it is, perhaps under another name."""
    return Part(name or entry.name, entry.dtype, entry.shape, entry.pieces)


def in_threads(pieces: Iterable[Callable[[], Result]]) -> Iterator[Result]:
    """What each piece gives, in order; the next AHEAD are computed while the caller uses the one before.

    There are more threads than cores, for some of them wait for the disk.
    """
    threads = min(8, 2 + (os.cpu_count() or 1))
    waiting: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for piece in pieces:
            waiting.append(pool.submit(piece))
            if len(waiting) > AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


class UncachedFile:
    """Fills a new file around the page cache where its file system can (O_DIRECT), through the cache elsewhere.

    The kernel's copies into the cache were about a fifth of a merge's CPU time, for a file that does not fit into it.
    """

    def __init__(self, descriptor: int):
        self.descriptor = descriptor
        self.buffer = memoryview(mmap.mmap(-1, BLOCK_BYTES))  # O_DIRECT wants whole pages
        self.filled = 0
        self._direct(True)

    def write(self, content: Bytes) -> int:
        """The number of bytes, all of them; OSError when the disk is full."""
        rest = memoryview(content).cast("B")
        while rest:
            part = rest[: len(self.buffer) - self.filled]
            self.buffer[self.filled : self.filled + len(part)] = part
            self.filled += len(part)
            rest = rest[len(part) :]
            if self.filled == len(self.buffer):
                self._empty()
        return memoryview(content).nbytes

    def finish(self) -> None:
        """Write what is left and have all of it on the disk."""
        self._direct(False)  # the rest is no whole page
        self._empty()
        os.fsync(self.descriptor)

    def _empty(self) -> None:
        rest = self.buffer[: self.filled]
        while rest:
            try:
                rest = rest[os.write(self.descriptor, rest) :]
            except OSError as error:
                # some file systems agree and refuse later; what follows a part that a full disk took is misaligned
                if error.errno != errno.EINVAL or not self._direct(False):
                    raise
        self.filled = 0

    def _direct(self, wanted: bool) -> bool:
        """Whether this changed how the file is written."""
        if sys.platform != "linux":  # others have no O_DIRECT
            return False
        flags = fcntl.fcntl(self.descriptor, fcntl.F_GETFL)
        new = flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT
        try:
            fcntl.fcntl(self.descriptor, fcntl.F_SETFL, new)
        except OSError as error:  # EINVAL: this file system has no such way
            if error.errno != errno.EINVAL:
                raise
            return False
        return new != flags


def write_file(
    path: Path,
    parts: list[Part],
    metadata: Mapping[str, str],
    progress: Callable[[int], object],
    before_replacing: Callable[[], None] = lambda: None,
) -> None:
    """Write a safetensors file that appears at `path` only when it is complete; progress(bytes) as it goes.

    Tensors are laid out by falling item size, then by name, which aligns each of them. before_replacing: called when
    the content is on the disk; what it raises leaves `path` as it is.
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
        uncached = UncachedFile(file.fileno())
        uncached.write(len(text).to_bytes(8, "little") + text)
        whose: deque[str] = deque()
        written: Counter[str] = Counter()

        def pieces() -> Iterator[Callable[[], Bytes]]:
            for part in ordered:
                for piece in part.pieces():
                    whose.append(part.name)
                    yield piece

        for content in in_threads(pieces()):  # over the borders of tensors
            written[whose.popleft()] += uncached.write(content)
            progress(len(content))
        for part in ordered:
            if written[part.name] != part.nbytes:
                raise RuntimeError(f"tensor {part.name} came as {written[part.name]} bytes of {part.nbytes}")
        uncached.finish()
        before_replacing()


def shard(parts: list[Part], max_bytes: int) -> dict[str, list[Part]]:
    """{file name: its tensors} in the given order, each file with at most max_bytes unless one tensor has more."""
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
    folder: Path, parts: list[Part], metadata: Mapping[str, str], max_bytes: int, progress: Callable[[int], object]
) -> None:
    """Fill an existing folder with one file or with shards and their index.json, under the names loaders expect."""
    files = shard(parts, max_bytes)
    for name, group in files.items():
        write_file(folder / name, group, metadata, progress)
    if len(files) > 1:
        weight_map = {part.name: name for name, group in files.items() for part in group}
        index = {
            "metadata": {"total_size": sum(part.nbytes for part in parts)},
            "weight_map": dict(sorted(weight_map.items())),
        }
        (folder / f"{STEM}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
