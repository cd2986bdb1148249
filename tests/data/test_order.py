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


def test_the_order_is_shuffled_and_depends_on_seed_and_epoch():
    orders = {epoch_order.visit_order(50, seed, epoch) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9 and tuple(range(50)) not in orders
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert epoch_order.visit_order(6, 42, 0) == (0, 2, 3, 5, 4, 1)  # the same in every process and version
