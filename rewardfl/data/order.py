"""The samples of each forward pass: a pure function of the seed, the batch's index and the clips."""

from collections import defaultdict
from collections.abc import Hashable, Sequence

from rewardfl.epoch_order import sample_at


def one_shape_batch(index: int, batch_size: int, shapes: Sequence[Hashable], seed: int) -> list[tuple[int, int]]:
    """Return batch `index` (from 0) of the run: `batch_size` samples (epoch, row) of one shape.

    Samples of the stream queue by shape, and each `batch_size` of a shape make a batch as soon as they are complete.
    None is padded, repeated or left out: each sample of each epoch is in one batch, with that epoch's noise. Up to
    batch_size - 1 samples of each shape wait at any moment, possibly into later epochs; those that wait at the end of
    the run are not trained on. With one shape, or batch_size 1, this is the stream of `epoch_order.sample_at` itself.
    With several shapes the stream is replayed from its start: 0.02 s at index 10,000.

    A step takes the next accumulation * processes batches, and continues with the next epoch at the end of the data.
    So it depends on the product of these two, and with several shapes also on batch_size.
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
