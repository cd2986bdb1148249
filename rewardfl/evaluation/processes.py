"""Several processes that share an evaluation, as torchrun and accelerate launch start them; all write one folder."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from rewardfl.training.shard import Shard

T = TypeVar("T")

PATIENCE = timedelta(days=7)  # that a process waits for the slowest one; a launcher ends all when one has failed


class Processes:
    """This process among all of them. Every method but `own` is called by all."""

    def __init__(self, rank: int, count: int):
        self.rank, self.count = rank, count
        self.share = Shard(rank, count, quiet=rank > 0)

    @property
    def main(self) -> bool:
        return self.rank == 0

    def own(self, device: str) -> str:
        """The device that this process computes on: of `cuda`, the GPU with its number on the machine."""
        return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if device == "cuda" else device

    def gather(self, items: list[T]) -> list[T]:
        """The items of all processes in one list."""
        if self.count == 1:
            return items
        found: list = [None] * self.count
        dist.all_gather_object(found, items)
        return [item for of_one in found for item in of_one]

    def wait(self) -> None:
        """Until all processes have come here."""
        self.gather([])

    def run_on_main(self, decide: Callable[[], T], refusals: tuple[type[Exception], ...]) -> T:
        """What `decide` gives on the main process, or the refusal that it raises there, on all processes."""
        found: list = []
        if self.main:
            try:
                found = [(decide(), None)]
            except refusals as error:
                found = [(None, error)]
        ((value, error),) = self.gather(found)
        if error is not None:
            raise error
        return value


@contextmanager
def connected() -> Iterator[Processes]:
    """The processes that a launcher has started, connected over gloo; this one alone where none has."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        yield Processes(0, 1)
        return
    dist.init_process_group("gloo", timeout=PATIENCE)
    try:
        yield Processes(dist.get_rank(), count)
    finally:
        dist.destroy_process_group()
