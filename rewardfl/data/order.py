"""The order in which clips are trained on, and the noise each of them gets.

Order and noise are pure functions of the seed, the epoch and the clip: the number of processes, the batch
size and the accumulation change neither which clips make up a step nor the noise they start from (with clips
of several shapes the batch size does change which clips make up a step: see micro_batch).
A position p of the training stream is sample p % num_rows in the order of epoch p // num_rows.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Hashable, Sequence
from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=4)
def epoch_order(num_rows: int, seed: int, epoch: int) -> tuple[int, ...]:
    """The order in which an epoch visits the rows 0..num_rows - 1, each once."""
    generator = torch.Generator().manual_seed(_stable_hash(f"order/{seed}/{epoch}"))
    return tuple(torch.randperm(num_rows, generator=generator).tolist())


def sample_at(position: int, num_rows: int, seed: int) -> tuple[int, int]:
    """(epoch, row) at `position` (from 0) of the endless stream of epochs."""
    epoch, offset = divmod(position, num_rows)
    return epoch, epoch_order(num_rows, seed, epoch)[offset]


def micro_batch(
    step: int,
    micro: int,
    rank: int,
    *,
    batch_size: int,
    accumulation: int,
    processes: int,
    num_rows: int,
    seed: int,
    shapes: Sequence[Hashable] | None = None,
) -> list[tuple[int, int]]:
    """The `batch_size` samples (epoch, row) that process `rank` takes in forward pass `micro` of `step`.

    A step takes the next batch_size * accumulation * processes positions of the stream, whatever the three
    factors are. Where the data run out in the middle of a step it goes on with the next epoch, so every step
    is full and no row is left out.

    `shapes`, each row's (None: all are equal): the samples of one forward pass then have one shape. A step takes
    the next accumulation * processes batches of one_shape_batch, so it still depends on the product of these two
    alone; on batch_size it depends as soon as there are several shapes.
    """
    index = (step * accumulation + micro) * processes + rank
    if shapes is not None:
        return one_shape_batch(index, batch_size, shapes, seed)
    return [sample_at(index * batch_size + i, num_rows, seed) for i in range(batch_size)]


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
    for row in epoch_order(len(shapes), seed, epoch):
        arrived[shapes[row]] += 1
        if arrived[shapes[row]] % batch_size == 0:
            leaving.append((shapes[row], arrived[shapes[row]]))
    shape, end = leaving[index - leaving_before(epoch)]
    visits = [divmod(position, sizes[shape]) for position in range(end - batch_size, end)]  # among its own shape
    return [(visit, _rows_of_shape(shapes, shape, seed, visit)[k]) for visit, k in visits]


def _rows_of_shape(shapes: Sequence[Hashable], shape: Hashable, seed: int, epoch: int) -> list[int]:
    """The rows of one shape in the order in which the epoch visits them."""
    return [row for row in epoch_order(len(shapes), seed, epoch) if shapes[row] == shape]


def total_steps(num_rows: int, global_batch: int, num_train_epochs: int, max_steps: int | None) -> int:
    """Steps of a run: max_steps, or as many as visit every row at least num_train_epochs times.

    With clips of several shapes the last few may still wait for company then (one_shape_batch).
    """
    return max_steps or math.ceil(num_train_epochs * num_rows / global_batch)


def noise_seed(run_seed: int, epoch: int, sample_id: str, member: int = 0) -> int:
    """Seed (63 bits) of the noise of one sample; `member` counts the noises of a sample within an epoch."""
    return _stable_hash(f"noise/{run_seed}/{epoch}/{member}/{sample_id}")


def training_noise_seed(run_seed: int, epoch: int, sample_id: str, noises_per_sample: str | int) -> int:
    """noise_seed for a sample's visit in `epoch`: new in each ("fresh"), or the same n in turn (n)."""
    if noises_per_sample == "fresh":
        return noise_seed(run_seed, epoch, sample_id)
    return noise_seed(run_seed, 0, sample_id, epoch % noises_per_sample)


def noise(shape: Sequence[int], seed: int, device: str | torch.device = "cpu") -> Tensor:
    """Standard normal float32 noise, drawn on the CPU so that every device starts from the same."""
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed)).to(device)


def _stable_hash(text: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # Python's own hash() differs from process to process
