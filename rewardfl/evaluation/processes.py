"""Several processes that share an evaluation, as torchrun and accelerate launch start them; all write one folder."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from rewardfl.training.shard import Shard

_T = TypeVar("_T")

PATIENCE = timedelta(days=7)  # of a process for the slowest one; a launcher ends all when one has failed


class Processes:
    """This process among all of them. All processes must call each method, except `local_device`."""

    def __init__(self, rank: int, count: int):
        self.rank, self.count = rank, count
        self.share = Shard(rank, count, quiet=rank > 0)

    @property
    def main(self) -> bool:
        return self.rank == 0

    def local_device(self, device: str) -> str:
        """Return the device of this process: of `cuda`, the GPU with its number on the machine."""
        return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if device == "cuda" else device

    def gather(self, items: list[_T]) -> list[_T]:
        """Concatenate the items of all processes."""
        if self.count == 1:
            return items
        lists: list = [None] * self.count
        dist.all_gather_object(lists, items)
        return [item for part in lists for item in part]

    def wait(self) -> None:
        """Wait for all processes."""
        self.gather([])

    def run_on_main(self, work: Callable[[], None]) -> None:
        """Call `work` on the main process, and raise its refusal on all processes."""
        errors: list[Exception] = []
        if self.main:
            try:
                work()
            except (ValueError, OSError) as error:
                errors = [error]
        for error in self.gather(errors):
            raise error


@contextmanager
def connected() -> Iterator[Processes]:
    """Connect the processes of a launcher over gloo; without a launcher yield a single process."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        yield Processes(0, 1)
        return
    dist.init_process_group("gloo", timeout=PATIENCE)
    try:
        yield Processes(dist.get_rank(), count)
    finally:
        dist.destroy_process_group()
