"""Disk cache of tensors that are computed once per clip and read at every step.

An entry is a safetensors file, named by the hash of its key. The key holds everything that the tensors depend on.
Writes are atomic, so that any number of processes may write the same folder. Reads are checked: a damaged entry counts
as absent.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from rewardfl.files import atomic_write

_FORMAT = 3  # raise it when the tensors are computed in another way: old entries are then not found

Key = Mapping[str, object]  # plain JSON values; "kind" is the folder


class CacheError(RuntimeError):
    """An entry that cannot be written, or was lost."""


class Cache:
    """A folder of entries; safe to share between processes, runs, and nodes with a common file system."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)

    def path(self, key: Key) -> Path:
        name = digest(key)
        return self.folder / str(key["kind"]) / name[:2] / f"{name}.safetensors"

    def get(self, key: Key) -> dict[str, Tensor] | None:
        """Return the entry's tensors, on the CPU; None when it is absent or damaged."""
        try:
            content = self.path(key).read_bytes()
        except FileNotFoundError:
            return None
        length = int.from_bytes(content[:8], "little")
        data = memoryview(content)[8 + length :]
        try:
            metadata = json.loads(content[8 : 8 + length])["__metadata__"]
            is_whole = metadata.get("key") == _text(key) and metadata.get("data") == _hash(data)
            return load(content) if is_whole else None
        except (ValueError, KeyError, TypeError, AttributeError, SafetensorError):
            return None

    def put(self, key: Key, tensors: Mapping[str, Tensor]) -> None:
        """Write or replace the entry. Raise CacheError when the disk does not take it."""
        plain = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
        content = save(plain)
        length = int.from_bytes(content[:8], "little")
        path = self.path(key)
        content = save(plain, {"key": _text(key), "data": _hash(memoryview(content)[8 + length :])})
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(path, content)
        except OSError as error:
            raise CacheError(
                f"{path} could not be written ({error.strerror or error}); free space there or take another "
                "data.cache_dir, then run the same command again: it keeps the entries that are there"
            ) from error


def digest(key: Key) -> str:
    """Return the hash (32 hex digits) of a key. A key may hold another key's digest."""
    return _hash(_text(key).encode())


def _text(key: Key) -> str:
    return json.dumps({"format": _FORMAT, **key}, sort_keys=True, separators=(",", ":"))


def _hash(content: bytes | memoryview) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
