"""Divide work among processes, and compute cache entries once."""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor
from tqdm import tqdm

from rewardfl.data.cache import Cache, CacheError, Key, digest

T = TypeVar("T")
U = TypeVar("U")

Gather = Callable[[list], list]  # concatenates the lists of all processes, as accelerate.utils.gather_object


@dataclass(frozen=True)
class Shard:
    """The part of the work that this process does. processes_per_clip: that make forward passes together, in a row."""

    rank: int
    processes: int
    quiet: bool = False  # no progress bar
    processes_per_clip: int = 1

    def take(self, items: Iterable) -> list:
        """Return the items of this process. Pass the full list: the missing items change while others write."""
        return list(items)[self.rank :: self.processes]

    def padded(self, items: Iterable) -> list[tuple[Any, bool]]:
        """Return this process's items for forward passes, each with True where this process reports the result.

        Every process gets equally many, padded by another's: a forward pass under FSDP needs all processes.
        """
        items, clips = list(items), self.processes // self.processes_per_clip
        clip, place = divmod(self.rank, self.processes_per_clip)
        shard = [(item, place == 0) for item in items[clip::clips]]
        return shard + [(item, False) for item in items[:1]] * (math.ceil(len(items) / clips) - len(shard))


def fill_missing(
    store: Cache,
    entries: Iterable[tuple[Key, T]],
    load: Callable[[], Callable[[T], Mapping[str, Tensor]]],
    share: Shard,
    what: str,
) -> None:
    """Compute the entries of this process's shard that the cache lacks.

    entries: (key, input of the network), the same on all processes. load: returns the network, if an entry is missing.
    """
    network = functools.cache(load)
    distinct = {digest(key): (key, item) for key, item in entries}.values()
    shard = share.take(distinct)
    for key, item in tqdm(shard, desc=what, disable=share.quiet or not shard):
        if store.get(key) is None:
            store.put(key, network()(item))


def read_entry(store: Cache, key: Key) -> dict[str, Tensor]:
    """Read a cache entry that a process has computed. Raise CacheError if it is lost."""
    entry = store.get(key)
    if entry is None:
        raise CacheError(
            f"{store.path(key)} was prepared and is missing or damaged; keep data.cache_dir on a disk that all "
            "processes share, and start the same command again (data.skip_bad_rows: true leaves out the clip)"
        )
    return entry


def map_shared(look: Callable[[T], U], items: Sequence[T], share: Shard, gather: Gather, what: str) -> list[U]:
    """Return [look(item)] on every process. Each calls `look` for its shard, in four threads."""
    indices = share.take(range(len(items)))
    with ThreadPoolExecutor(4) as pool:
        results = tqdm(pool.map(look, share.take(items)), total=len(indices), desc=what, disable=share.quiet)
        by_index = dict(gather(list(zip(indices, results, strict=True))))
    return [by_index[i] for i in range(len(items))]
