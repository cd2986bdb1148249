"""The cache on disk: content-addressed, complete or absent, checked when read."""

import errno
import os

import pytest
import torch

from rewardfl import files
from rewardfl.data import cache
from rewardfl.data.cache import Cache, CacheError
from rewardfl.training.shard import Shard, fill_missing, read_entry

KEY = {"kind": "text", "model": "m", "prompt": "a person"}


def test_an_entry_is_read_bit_for_bit(tmp_path):
    store = Cache(tmp_path)
    tensors = {"a": torch.randn(3, 4, 5).transpose(0, 2), "b": torch.randn(7).bfloat16(), "c": torch.tensor([True])}
    assert store.get(KEY) is None
    store.put(KEY, tensors)
    entry = store.get(KEY)
    assert entry.keys() == tensors.keys()
    assert all(torch.equal(entry[n], tensors[n]) and entry[n].dtype == tensors[n].dtype for n in tensors)
    store.put(KEY, {"a": torch.zeros(1)})
    assert store.get(KEY)["a"].tolist() == [0]


def test_another_key_is_a_miss(tmp_path):
    store = Cache(tmp_path)
    store.put(KEY, {"a": torch.ones(2)})
    for change in ({"prompt": "a Person"}, {"model": "n"}, {"size": 1}, {"kind": "image"}):
        assert store.get(KEY | change) is None
    assert store.get(dict(reversed(KEY.items()))) is not None


def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache, "atomic_write", fail)
    with pytest.raises(CacheError, match="No space left on device.*data.cache_dir") as error:
        Cache(tmp_path).put(KEY, {"a": torch.ones(2)})
    assert str(tmp_path) in str(error.value)


def with_header(content, change):
    """A safetensors file with change(its header's JSON text)."""
    length = int.from_bytes(content[:8], "little")
    text = change(content[8 : 8 + length])
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


DAMAGES = {
    "truncated": lambda content: content[:-3],
    "flipped": lambda content: content[:-1] + bytes([content[-1] ^ 1]),
    "header is a list": lambda content: with_header(content, lambda text: b"[]"),
    "metadata is null": lambda content: with_header(content, lambda text: b'{"__metadata__": null}'),
    "another entry": lambda content: with_header(content, lambda text: text.replace(b"a person", b"A person")),
}


def test_a_damaged_entry_is_a_miss_and_is_replaced(tmp_path):
    store, values = Cache(tmp_path), {"a": torch.arange(100.0)}
    for name, damage in DAMAGES.items():
        store.put(KEY, values)
        assert torch.equal(store.get(KEY)["a"], values["a"])
        content = store.path(KEY).read_bytes()
        store.path(KEY).write_bytes(damage(content))
        assert store.path(KEY).read_bytes() != content and store.get(KEY) is None, name


def test_models_have_different_digests(tmp_path):
    content, file = bytearray(os.urandom(5 << 20)), tmp_path / "shards" / "weights"
    file.parent.mkdir()
    file.write_bytes(content)
    first = files.digest_files([file])
    (file.parent / "link to nothing").symlink_to("nowhere")
    os.mkfifo(file.parent / "fifo")
    assert files.digest_files([file.parent]) == first  # a folder is the files in it
    assert files.digest_files([file, file]) != first
    for changed in (content + b"x", bytes([content[0] ^ 1]) + content[1:], content[:-1] + bytes([content[-1] ^ 1])):
        file.write_bytes(changed)
        assert files.digest_files([file]) != first


def test_fill_computes_what_is_missing_once_and_loads_nothing_when_warm(tmp_path):
    store, computed, loads = Cache(tmp_path), [], []

    def ready():
        loads.append(1)
        return lambda item: computed.append(item) or {"x": torch.tensor(item)}

    entries = [({"kind": "n", "n": n % 5}, n % 5) for n in range(8)]  # 5 distinct ones
    for rank in range(2):
        fill_missing(store, entries, ready, Shard(rank, 2, quiet=True), "numbers")
    assert sorted(computed) == [0, 1, 2, 3, 4] and len(loads) == 2
    fill_missing(store, entries, ready, Shard(0, 1, quiet=True), "numbers")
    assert len(loads) == 2
    assert [read_entry(store, key)["x"].item() for key, _ in entries] == [0, 1, 2, 3, 4, 0, 1, 2]
    store.path(entries[3][0]).unlink()
    fill_missing(store, entries, ready, Shard(0, 1, quiet=True), "numbers")
    assert sorted(computed) == [0, 1, 2, 3, 3, 4] and len(loads) == 3


def test_an_entry_that_vanished_is_an_error(tmp_path):
    with pytest.raises(CacheError, match="keep data.cache_dir on a disk that all processes share"):
        read_entry(Cache(tmp_path), KEY)
