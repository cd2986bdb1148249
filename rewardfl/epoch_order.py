"""The order of rows in epochs, and the epochs that end with a save or an evaluation.

Position p of the training stream is sample p % num_rows in the order of epoch p // num_rows. Pure functions of a seed,
an epoch and numbers; nothing depends on the number of processes.
"""

import math
from functools import lru_cache

import torch

from rewardfl.noise import stable_hash


@lru_cache(maxsize=4)
def visit_order(num_rows: int, seed: int, epoch: int) -> tuple[int, ...]:
    """Return the rows 0..num_rows - 1 in the order in which an epoch visits them."""
    generator = torch.Generator().manual_seed(stable_hash(f"order/{seed}/{epoch}"))
    return tuple(torch.randperm(num_rows, generator=generator).tolist())


def sample_at(position: int, num_rows: int, seed: int) -> tuple[int, int]:
    """Return (epoch, row) at `position` (from 0) of the endless stream of epochs."""
    epoch, offset = divmod(position, num_rows)
    return epoch, visit_order(num_rows, seed, epoch)[offset]


def total_steps(num_rows: int, global_batch: int, num_train_epochs: int) -> int:
    """Return the steps that visit every row at least num_train_epochs times.

    With clips of several shapes the last few may still wait for an equal shape (one_shape_batch).
    """
    return math.ceil(num_train_epochs * num_rows / global_batch)


def due_this_epoch(step: int, per_epoch: int, every: int, steps: int) -> bool:
    """Return whether the epoch that ends with `step` contains a multiple of `every`, or is the last of `steps`."""
    return step // every > (step - per_epoch) // every or step == steps
