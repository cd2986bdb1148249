"""How the items of a list are divided among processes."""

import pytest

from rewardfl.training.shard import Shard


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5])
def test_every_process_has_as_many_rounds(count):
    shards = [Shard(rank, 4) for rank in range(4)]
    rounds = [shard.padded(range(count)) for shard in shards]
    assert {len(items) for items in rounds} == {-(-count // 4)}
    reported = [[item for item, in_shard in items if in_shard] for items in rounds]
    assert reported == [shard.take(range(count)) for shard in shards] and sum(map(len, reported)) == count


def test_the_processes_of_a_clip_have_the_same_rounds():
    assert [Shard(rank, 4, processes_per_clip=2).padded("abc") for rank in range(4)] == [
        [("a", True), ("c", True)], [("a", False), ("c", False)], [("b", True), ("a", False)],
        [("b", False), ("a", False)],
    ]  # fmt: skip
