"""The order of rows, and the epochs that end with a save."""

from collections import Counter, defaultdict

import pytest

from rewardfl import epoch_order


def test_every_epoch_visits_each_row_once_in_a_new_order():
    stream = [epoch_order.sample_at(position, 5, seed=3) for position in range(20)]
    assert [epoch for epoch, _ in stream] == [0] * 5 + [1] * 5 + [2] * 5 + [3] * 5
    orders = {tuple(row for _, row in stream[i : i + 5]) for i in range(0, 20, 5)}
    assert len(orders) == 4 and all(sorted(order) == [0, 1, 2, 3, 4] for order in orders)
    assert epoch_order.visit_order(6, 42, 0) == (0, 2, 3, 5, 4, 1)  # the same in every process and version


def test_the_last_batch_of_the_last_epoch_counts():
    assert [epoch_order.total_steps(rows, 4, 2) for rows in (6, 7, 8, 9)] == [3, 4, 4, 5]


def test_an_epoch_with_a_multiple_ends_with_a_save():
    due = [step for step in range(3, 23, 3) if epoch_order.due_this_epoch(step, per_epoch=3, every=5, steps=21)]
    assert due == [6, 12, 15, 21]


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
    assert [epoch_order.one_shape_batch(i, batch_size, shapes, seed=3) for i in range(len(expected))] == expected
    used = Counter(sample for batch in expected for sample in batch)
    assert set(used.values()) == {1}  # no sample comes twice
    visits = Counter(row for _, row in used)
    assert max(visits.values()) - min(visits.values()) <= batch_size
