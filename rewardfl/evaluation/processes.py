"""Several processes that share an evaluation, as torchrun and accelerate launch start them; all write one folder."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from rewardfl.training.shard import Shard

_T = TypeVar("_T")


@contextmanager
def connected() -> Iterator[Shard]:
    """Connect the processes of a launcher over gloo, and yield this one's share; without a launcher all is its share.

    All processes must call each of the functions below.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield Shard(0, 1)
        return
    # a process waits for the slowest one; a launcher ends all when one has failed
    dist.init_process_group("gloo", timeout=timedelta(days=7))
    try:
        yield Shard(dist.get_rank(), dist.get_world_size(), quiet=dist.get_rank() > 0)
    finally:
        dist.destroy_process_group()


def gather(items: list[_T]) -> list[_T]:
    """Concatenate the items of all processes; wait for all."""
    if not dist.is_initialized():
        return items
    lists: list = [None] * dist.get_world_size()
    dist.all_gather_object(lists, items)
    return [item for part in lists for item in part]


def run_on_main(work: Callable[[], None], *, main: bool) -> None:
    """Call `work` on the main process, and raise its refusal on all processes."""
    errors: list[Exception] = []
    if main:
        try:
            work()
        except (ValueError, OSError) as error:
            errors = [error]
    for error in gather(errors):
        raise error
