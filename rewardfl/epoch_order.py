"""The order of rows in epochs, and which epochs are due for a save or an evaluation.

Pure functions of a seed, an epoch and numbers; nothing depends on the number of processes.
"""

import math
from functools import lru_cache

import torch

from rewardfl.noise import stable_hash

# Order: position p of the training stream is sample p % num_rows in the order of epoch p // num_rows


@lru_cache(maxsize=4)
def visit_order(num_rows: int, seed: int, epoch: int) -> tuple[int, ...]:
    """The order in which an epoch visits the rows 0..num_rows - 1, each once."""
    generator = torch.Generator().manual_seed(stable_hash(f"order/{seed}/{epoch}"))
    return tuple(torch.randperm(num_rows, generator=generator).tolist())


def sample_at(position: int, num_rows: int, seed: int) -> tuple[int, int]:
    """(epoch, row) at `position` (from 0) of the endless stream of epochs."""
    epoch, offset = divmod(position, num_rows)
    return epoch, visit_order(num_rows, seed, epoch)[offset]


def total_steps(num_rows: int, global_batch: int, num_train_epochs: int) -> int:
    """Steps of a run: as many as visit every row at least num_train_epochs times.

    With clips of several shapes the last few may still wait for company then (one_shape_batch).
    """
    return math.ceil(num_train_epochs * num_rows / global_batch)


def count_due(every: int, per_epoch: int, steps: int | None) -> int | None:
    """How many epochs of `per_epoch` updates end with something that is done `every` so many updates.

    These are the epochs in which a multiple falls, and the last one. None where the number of steps is not known.
    """
    if steps is None:
        return None
    return len({math.ceil(step / per_epoch) for step in range(every, steps + 1, every)} | {steps // per_epoch})


def due_this_epoch(step: int, per_epoch: int, every: int, steps: int) -> bool:
    """Whether the epoch that ends with `step` has a multiple of `every` in it, or is the last of `steps`."""
    return step // every > (step - per_epoch) // every or step == steps
