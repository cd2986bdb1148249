"""Divide work among processes, and cache entries that are computed once."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor
from tqdm import tqdm

from rewardfl.data import cache
from rewardfl.data.cache import Cache, CacheError, Key

T = TypeVar("T")

U = TypeVar("U")

READERS = 4  # files that a process hashes, or whose headers it reads, at a time

Gather = Callable[[list], list]  # collects a list over all processes, as accelerate.utils.gather_object does


@dataclass(frozen=True)
class Shard:
    """The part of the work that this process does."""

    rank: int
    processes: int
    quiet: bool = False  # no progress bar

    def of(self, items: Iterable) -> list:
        # by position among all items, not among those that are missing: others write while we look
        return list(items)[self.rank :: self.processes]

    def rounds(self, items: Iterable) -> list[tuple[Any, bool]]:
        """`of(items)`, each with True, and on a process with fewer another one's, with False.

        So every process has as many: a forward pass under FSDP needs them all.
        """
        items = list(items)
        own = [(item, True) for item in self.of(items)]
        return own + [(item, False) for item in items[:1]] * (math.ceil(len(items) / self.processes) - len(own))


def fill_missing(
    store: Cache,
    wanted: Iterable[tuple[Key, T]],
    ready: Callable[[], Callable[[T], Mapping[str, Tensor]]],
    share: Shard,
    what: str,
) -> None:
    """Compute the entries of this process's share of `wanted` that the cache lacks.

    wanted: keys, each with what its entry is computed of, the same on all processes. ready: loads what computing
    takes, and returns the function; it is called only if something is missing.
    """
    distinct = {cache.digest(key): (key, item) for key, item in wanted}.values()
    missing = [(key, item) for key, item in share.of(distinct) if store.get(key) is None]
    if not missing:
        return
    compute = ready()
    for key, item in tqdm(missing, desc=what, disable=share.quiet):
        store.put(key, compute(item))


def read_entry(store: Cache, key: Key) -> dict[str, Tensor]:
    """An entry that `fill` has seen to; CacheError when it is not there."""
    entry = store.get(key)
    if entry is None:
        raise CacheError(
            f"{store.path(key)} is missing or damaged although it was prepared; data.cache_dir must be on a disk that "
            "all processes share, and is not to be emptied during a run; the same command computes it anew and goes on "
            "from the last checkpoint (data.skip_bad_rows: true would go on without the clip)"
        )
    return entry


# Clips and what the rewards keep of them


def map_shared(look: Callable[[T], U], items: Sequence[T], share: Shard, gather: Gather, what: str) -> list[U]:
    """[look(item)] on every process; each looks at its share."""
    mine = share.of(range(len(items)))
    with ThreadPoolExecutor(READERS) as pool:
        seen = tqdm(pool.map(look, share.of(items)), total=len(mine), desc=what, disable=share.quiet)
        found = dict(gather(list(zip(mine, seen, strict=True))))
    return [found[i] for i in range(len(items))]
