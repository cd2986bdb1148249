"""Host memory that tensors of all sizes share: equal bits, exact sizes."""

import weakref

import pytest
import torch

from rewardfl.memory import host_pool
from rewardfl.memory.host_pool import HostPool, OffloadedTensors

DEVICE = torch.device("cpu")


@pytest.fixture
def pool(monkeypatch):
    monkeypatch.setattr(host_pool, "PAGE_BYTES", 64)
    return HostPool(DEVICE)


TENSORS = [
    torch.tensor(3.0), torch.arange(16.0), torch.randn(3, 7).T, torch.randn(5, 1).expand(5, 9),
    torch.randn(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d), torch.randn(33).bfloat16(),
    torch.arange(65, dtype=torch.uint8), torch.randn(200).double()[3::2],
]  # fmt: skip


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda tensor: f"{tensor.dtype}-{tuple(tensor.shape)}")
def test_a_tensor_comes_back_as_it_left(pool, tensor):
    offloaded = OffloadedTensors(pool)
    other = offloaded.put(torch.full((50,), 7.0))
    number = offloaded.put(tensor)
    pages = -(-tensor.numel() * tensor.element_size() // 64)
    assert pool.size == (4 + pages) * 64
    back = offloaded.take(number)
    assert torch.equal(back, tensor) and offloaded.take(other).eq(7).all()
    assert 0 in tensor.stride() or tensor.storage_offset() or back.stride() == tensor.stride()


def test_clips_of_mixed_sizes_share_their_memory(pool):
    """Four sizes, each as 20 tensors and a small one, in any order: the largest takes as much."""
    largest = 20 * 1024 + 64
    for size in (700, 1024, 300, 555, 1024, 701):
        offloaded = OffloadedTensors(pool)
        values = [torch.full((size,), i, dtype=torch.uint8) for i in range(20)]
        numbers = [offloaded.put(value) for value in [torch.ones(9), *values]][1:]
        assert all(torch.equal(offloaded.take(number), value) for number, value in zip(numbers, values, strict=True))
        assert pool.size <= largest
    del offloaded
    assert pool.size == largest == sum(map(len, pool.free))


def test_what_is_needed_next_is_fetched_once_and_not_again(pool):
    chain = [OffloadedTensors(pool)]
    chain.append(OffloadedTensors(pool, before=weakref.ref(chain[0])))
    for offloaded in chain:
        for value in (1.0, 2.0):
            offloaded.put(torch.full((40,), value))
    assert chain[1].take(0).eq(1).all()
    fetched = dict(chain[0].back)
    assert list(fetched) == [0, 1]
    assert chain[1].take(1).eq(2).all() and all(chain[0].back[number] is fetched[number] for number in fetched)
