"""The order of rows in epochs, and the epochs that end with a save or an evaluation.

Position p of the training stream is sample p % num_rows in the order of epoch p // num_rows, for any number of GPUs.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
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


def one_shape_batch(index: int, batch_size: int, shapes: Sequence[Hashable], seed: int) -> list[tuple[int, int]]:
    """Return batch `index` (from 0) of the run: `batch_size` samples (epoch, row) of one shape.

    Samples of the stream queue by shape, and each `batch_size` of a shape make a batch as soon as they are complete.
    None is padded, repeated or left out: each sample of each epoch is in one batch, with that epoch's noise. Samples
    that still queue at the end of the run are not trained on. With one shape, or batch_size 1, this is the stream
    itself. With several shapes it is replayed from its start: 0.02 s at index 10,000.
    """
    queues = defaultdict[Hashable, list[tuple[int, int]]](list)
    is_stream = batch_size == 1 or len(set(shapes)) == 1
    position, batches = (index * batch_size, index) if is_stream else (0, 0)
    while True:
        epoch, row = sample_at(position, len(shapes), seed)
        queue = queues[shapes[row]]
        queue.append((epoch, row))
        position += 1
        if len(queue) == batch_size:
            if batches == index:
                return queue
            queue.clear()
            batches += 1


def total_steps(num_rows: int, global_batch: int, num_train_epochs: int) -> int:
    """Return the steps that visit every row at least num_train_epochs times.

    With clips of several shapes the last few may still wait for an equal shape (one_shape_batch).
    """
    return math.ceil(num_train_epochs * num_rows / global_batch)


def due_this_epoch(step: int, per_epoch: int, every: int, steps: int) -> bool:
    """Return whether the epoch that ends with `step` contains a multiple of `every`, or is the last of `steps`."""
    return step // every > (step - per_epoch) // every or step == steps
