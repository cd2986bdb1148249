"""The cache on disk: content-addressed, whole or absent, checked when read."""

import errno
import multiprocessing
import os
import time

import pytest
import torch

from rewardfl import files
from rewardfl.data import cache
from rewardfl.data.cache import Cache, CacheError
from rewardfl.training.shard import Shard, fill_missing, read_entry

KEY = {"kind": "text", "model": "m", "prompt": "a person"}


def test_what_is_put_is_got_bit_for_bit(tmp_path):
    store = Cache(tmp_path)
    tensors = {"a": torch.randn(3, 4, 5).transpose(0, 2), "b": torch.randn(7).bfloat16(), "c": torch.tensor(True)}
    assert store.get(KEY) is None
    store.put(KEY, tensors)
    found = store.get(KEY)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[n], tensors[n]) and found[n].dtype == tensors[n].dtype for n in tensors)
    store.put(KEY, {"a": torch.zeros(1)})
    assert store.get(KEY)["a"].tolist() == [0]


@pytest.mark.parametrize("changed", [{"prompt": "a Person"}, {"model": "n"}, {"size": 1}, {"kind": "image"}])
def test_another_key_is_a_miss(tmp_path, changed):
    Cache(tmp_path).put(KEY, {"a": torch.ones(2)})
    assert Cache(tmp_path).get(KEY | changed) is None
    reordered = dict(reversed(KEY.items()))
    assert Cache(tmp_path).get(reordered) is not None


def header(path, change):
    """Rewrite a safetensors header by change(its JSON text)."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    text = change(content[8 : 8 + length])
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


HEADERS = {
    "a list": lambda text: b"[]",
    "a number": lambda text: b"3",
    "nested": lambda text: b"[" * 100_000,
    "no text": lambda text: b"\xff" + text,
    "metadata null": lambda text: b'{"__metadata__": null}',
    "metadata a list": lambda text: b'{"__metadata__": [1]}',
    "another dtype": lambda text: text.replace(b"F32", b"F64"),
    "another shape": lambda text: text.replace(b'"shape":[100]', b'"shape":[101]'),
    "offsets outside": lambda text: text.replace(b"[0,400]", b"[0,900]"),
    "a negative offset": lambda text: text.replace(b"[0,400]", b"[-4,396]"),
}


@pytest.mark.parametrize("change", HEADERS.values(), ids=HEADERS.keys())
def test_an_entry_with_a_damaged_header_is_a_miss(tmp_path, change):
    store = Cache(tmp_path)
    store.put(KEY, {"a": torch.arange(100.0)})
    before = store.path(KEY).read_bytes()
    header(store.path(KEY), change)
    assert store.path(KEY).read_bytes() != before and store.get(KEY) is None
    store.put(KEY, {"a": torch.arange(100.0)})
    assert store.get(KEY) is not None


def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cache, "atomic_write", fail)
    with pytest.raises(CacheError, match="No space left on device.*data.cache_dir") as error:
        Cache(tmp_path).put(KEY, {"a": torch.ones(2)})
    assert str(tmp_path) in str(error.value)
    (tmp_path / "file").touch()
    with pytest.raises(CacheError, match="Not a directory"):
        Cache(tmp_path / "file").put(KEY, {"a": torch.ones(2)})


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "header", "swapped"])
def test_a_damaged_entry_is_a_miss_and_is_mended(tmp_path, damage):
    store, values = Cache(tmp_path), {"a": torch.arange(100.0)}
    store.put(KEY, values)
    path = store.path(KEY)
    content = bytearray(path.read_bytes())
    if damage == "truncated":
        content = content[:-3]
    elif damage == "flipped":
        content[-1] ^= 1
    elif damage == "empty":
        content = b""
    elif damage == "header":
        content[20] ^= 255
    else:  # an intact entry of another key
        other = KEY | {"prompt": "b"}
        store.put(other, values)
        content = store.path(other).read_bytes()
    path.write_bytes(content)
    assert store.get(KEY) is None
    store.put(KEY, values)
    assert torch.equal(store.get(KEY)["a"], values["a"])


def write_for_ever(folder):
    store = Cache(folder)
    while True:
        store.put(KEY, {"a": torch.arange(100_000.0)})


def test_writers_that_are_killed_leave_a_usable_cache(tmp_path):
    """Two processes write one entry over and over and are killed: a reader sees it whole at all times."""
    writers = [multiprocessing.get_context("fork").Process(target=write_for_ever, args=(tmp_path,)) for _ in range(2)]
    for writer in writers:
        writer.start()
    store, seen = Cache(tmp_path), 0
    deadline = time.time() + 120
    try:
        while seen < 50 and time.time() < deadline:
            if store.path(KEY).exists():
                assert torch.equal(store.get(KEY)["a"], torch.arange(100_000.0))
                seen += 1
    finally:
        for writer in writers:
            writer.kill()
            writer.join()
    assert seen == 50
    assert torch.equal(store.get(KEY)["a"], torch.arange(100_000.0))


def test_models_are_told_apart(tmp_path):
    content = bytearray(os.urandom(5 << 20))
    (tmp_path / "shards").mkdir()
    file = tmp_path / "shards" / "weights"
    file.write_bytes(content)
    first = files.digest_files([file])
    assert files.digest_files([tmp_path / "shards"]) == first  # a folder is the files in it
    for place in (0, len(content) - 1):
        changed = bytearray(content)
        changed[place] ^= 1
        file.write_bytes(changed)
        assert files.digest_files([file]) != first
    file.write_bytes(content + b"x")
    assert files.digest_files([file]) != first
    file.write_bytes(content)
    assert files.digest_files([file, file]) != first


def test_fill_computes_what_is_missing_once_and_loads_nothing_when_warm(tmp_path):
    store, computed, loads = Cache(tmp_path), [], []

    def ready():
        loads.append(1)
        return lambda item: computed.append(item) or {"x": torch.tensor(item)}

    wanted = [({"kind": "n", "n": n % 5}, n % 5) for n in range(8)]  # 5 distinct ones
    for rank in range(2):
        fill_missing(store, wanted, ready, Shard(rank, 2, quiet=True), "numbers")
    assert sorted(computed) == [0, 1, 2, 3, 4] and len(loads) == 2
    fill_missing(store, wanted, ready, Shard(0, 1, quiet=True), "numbers")
    assert len(loads) == 2
    assert [read_entry(store, key)["x"].item() for key, _ in wanted] == [0, 1, 2, 3, 4, 0, 1, 2]
    store.path(wanted[3][0]).unlink()
    fill_missing(store, wanted, ready, Shard(0, 1, quiet=True), "numbers")
    assert sorted(computed) == [0, 1, 2, 3, 3, 4] and len(loads) == 3


def test_an_entry_that_vanished_is_an_error_that_says_why(tmp_path):
    with pytest.raises(CacheError, match="data.cache_dir must be on a disk that all processes share"):
        read_entry(Cache(tmp_path), KEY)
