"""What is computed once per clip and read at every step, on disk, under a hash of all that it depends on.

An entry is a safetensors file whose name is the hash of its key. It appears whole or not at all, so that any number
of processes may write the same folder, and it is checked when it is read: a damaged entry counts as absent.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from rewardfl.files import atomic_write

FORMAT = 2  # to be raised when what is cached is computed in another way: old entries are then not found

Key = Mapping[str, object]  # plain JSON values; "kind" says what the entry is


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
        """The entry's tensors, on the CPU; None when there is none, or it is damaged."""
        try:
            content = self.path(key).read_bytes()
        except FileNotFoundError:
            return None
        length = int.from_bytes(content[:8], "little")
        data = memoryview(content)[8 + length :]
        try:
            stated = json.loads(content[8 : 8 + length])["__metadata__"]
            whole = stated.get("key") == _text(key) and stated.get("data") == _hash(data)
            return load(content) if whole else None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError):
            return None

    def put(self, key: Key, tensors: Mapping[str, Tensor]) -> None:
        """Write the entry, or replace it. CacheError when the disk does not take it."""
        plain = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
        content = save(plain)
        length = int.from_bytes(content[:8], "little")
        path = self.path(key)
        content = save(plain, {"key": _text(key), "data": _hash(memoryview(content)[8 + length :])})
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(path, content, durable=False)  # `get` sees a damaged entry for what it is
        except OSError as error:
            raise CacheError(
                f"{path} could not be written ({error.strerror or error}); free space there or take another "
                "data.cache_dir, then the same command goes on with the entries that are there"
            ) from error


def digest(key: Key) -> str:
    """Hash (32 hex digits) of a key; one key may stand in another by its digest."""
    return _hash(_text(key).encode())


def _text(key: Key) -> str:
    return json.dumps({"format": FORMAT, **key}, sort_keys=True, separators=(",", ":"))


def _hash(content: bytes | memoryview) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()
