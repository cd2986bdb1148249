"""The samples of each step: a pure function of the seed, the step and the clips.

The number of processes, the batch size and the accumulation do not change it. With clips of several shapes the batch
size does: see Order. `epoch_order.sample_at` is the stream.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from rewardfl.epoch_order import sample_at


@dataclass(frozen=True, kw_only=True)
class Order:
    """The samples of each forward pass of a run.

    sizes: of each row; all samples of a forward pass have one size. batch_size: samples of a forward pass.
    accumulation: forward passes of a process in a step.
    """

    sizes: Sequence[Hashable]
    batch_size: int
    accumulation: int
    processes: int
    seed: int

    @property
    def shape_batch(self) -> int | None:
        """Return batch_size where clips differ in size, since the order depends on it; None otherwise."""
        return self.batch_size if len(set(self.sizes)) > 1 else None

    def micro_batch(self, step: int, micro: int, rank: int) -> list[tuple[int, int]]:
        """Return the `batch_size` samples (epoch, row) of process `rank` in forward pass `micro` of `step`.

        A step takes the next accumulation * processes batches of one_shape_batch. It depends on the product of these
        two, and with several sizes also on batch_size. With one size it takes the next batch_size * accumulation *
        processes positions of the stream. At the end of the data a step continues with the next epoch, so that every
        step is full and no row is left out.
        """
        index = (step * self.accumulation + micro) * self.processes + rank
        return one_shape_batch(index, self.batch_size, self.sizes, self.seed)


def one_shape_batch(index: int, batch_size: int, shapes: Sequence[Hashable], seed: int) -> list[tuple[int, int]]:
    """Return batch `index` (from 0) of the run: `batch_size` samples (epoch, row) of one shape.

    Samples of the stream queue by shape, and each `batch_size` of a shape make a batch as soon as they are complete.
    None is padded, repeated or left out: each sample of each epoch is in one batch, with that epoch's noise. Up to
    batch_size - 1 samples of each shape wait at any moment, possibly into later epochs; those that wait at the end of
    the run are not trained on. With one shape, or batch_size 1, this is the stream itself. With several shapes the
    stream is replayed from its start: 0.02 s at index 10,000.
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
