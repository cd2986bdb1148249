from collections import Counter, defaultdict

import pytest

from rewardfl import epoch_order
from rewardfl.data import order

SHAPES = {"two": "aabababbaab", "a rare one": "aaaaaaabaaa", "one": "aaaaaaaaaaa"}


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_batches_of_one_shape_are_those_of_a_queue(shapes, batch_size):
    """Against samples that really queue up, and leave when batch_size of a shape are there."""
    queues, expected = defaultdict(list), []
    for position in range(40 * len(shapes)):
        epoch, row = epoch_order.sample_at(position, len(shapes), seed=3)
        queues[shapes[row]].append((epoch, row))
        if len(queues[shapes[row]]) == batch_size:
            expected.append(queues.pop(shapes[row]))
    assert [order.one_shape_batch(i, batch_size, shapes, seed=3) for i in range(len(expected))] == expected
    used = Counter(sample for batch in expected for sample in batch)
    assert set(used.values()) == {1}  # no sample comes twice
    visits = Counter(row for _, row in used)
    assert max(visits.values()) - min(visits.values()) <= batch_size
