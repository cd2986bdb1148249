"""Which samples of the training stream make up a step.

A pure function of the seed, the step and the clips: the number of processes, the batch size and the accumulation do not
change it (with clips of several shapes the batch size does: see Order). `groups.sample_at` is the stream.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from rewardfl.epoch_order import visit_order


@dataclass(frozen=True)
class Order:
    """Which samples each forward pass of a run takes.

    sizes: each row's; the samples of one forward pass have one. batch_size: samples of a forward pass; accumulation:
    forward passes of a process in a step.
    """

    sizes: Sequence[Hashable]
    batch_size: int
    accumulation: int
    processes: int
    seed: int

    def micro_batch(self, step: int, micro: int, rank: int) -> list[tuple[int, int]]:
        """The `batch_size` samples (epoch, row) that process `rank` takes in forward pass `micro` of `step`.

        A step takes the next accumulation * processes batches of one_shape_batch, so it depends on the product of these
        two alone; on batch_size it depends as soon as there are several sizes. With one size it takes the next
        batch_size * accumulation * processes positions of the stream, whatever the three factors are. Where the data
        run out in the middle of a step it goes on with the next epoch, so every step is full and no row is left out.
        """
        index = (step * self.accumulation + micro) * self.processes + rank
        return one_shape_batch(index, self.batch_size, self.sizes, self.seed)


def one_shape_batch(index: int, batch_size: int, shapes: Sequence[Hashable], seed: int) -> list[tuple[int, int]]:
    """Batch `index` (from 0) of the run: `batch_size` samples (epoch, row) of one shape.

    The samples of the stream gather with those of their shape, and each `batch_size` of a shape leave together
    as soon as they are complete. Nothing is padded, repeated or left out: each sample of each epoch leaves once,
    with that epoch's noise. Up to batch_size - 1 samples of each shape wait at any moment, possibly into later
    epochs; those that wait when the run ends are not trained on. With one shape, or one sample a batch, this is
    the stream itself.
    """
    sizes = Counter(shapes)

    def leaving_before(epoch: int) -> int:
        return sum(epoch * size // batch_size for size in sizes.values())

    epoch = index * batch_size // len(shapes)  # as if none were waiting; later than that if some are
    while leaving_before(epoch + 1) <= index:
        epoch += 1
    arrived, leaving = Counter({shape: epoch * size for shape, size in sizes.items()}), []
    for row in visit_order(len(shapes), seed, epoch):
        arrived[shapes[row]] += 1
        if arrived[shapes[row]] % batch_size == 0:
            leaving.append((shapes[row], arrived[shapes[row]]))
    shape, end = leaving[index - leaving_before(epoch)]
    visits = [divmod(position, sizes[shape]) for position in range(end - batch_size, end)]  # among its own shape
    return [(visit, _rows_of_shape(shapes, shape, seed, visit)[k]) for visit, k in visits]


def _rows_of_shape(shapes: Sequence[Hashable], shape: Hashable, seed: int, epoch: int) -> list[int]:
    """The rows of one shape in the order in which the epoch visits them."""
    return [row for row in visit_order(len(shapes), seed, epoch) if shapes[row] == shape]
