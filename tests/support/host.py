"""What a GPU would not let pass: an operator that takes memory of the host together with what is on the device."""

import contextlib

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rewardfl.memory import host_pool, swap

COPIES = {torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default}


class HostIsApart(TorchDispatchMode):
    """Fails where an operator other than a copy mixes the two. On a CPU the device is all that is not `host`."""

    def __init__(self) -> None:
        super().__init__()
        self.host: dict[int, Tensor] = {}  # by its address; kept, so that no other memory begins there
        self.copied = 0

    def remember(self, tensor: Tensor) -> Tensor:
        self.host[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.dim() and t.numel()]
        mixed = len({tensor.untyped_storage().data_ptr() in self.host for tensor in inputs}) > 1
        if mixed and func not in COPIES:
            pytest.fail(f"{func} takes memory of the host and of the device")
        self.copied += mixed
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def apart(monkeypatch):
    """Within, memory that rewardfl says is the host's is a GPU's host's. Gives what has been seen."""
    seen, new = HostIsApart(), swap.host_memory

    def remembered(size, device):
        return seen.remember(new(size, device))

    with monkeypatch.context() as patch, seen:
        for module in (swap, host_pool):
            patch.setattr(module, "host_memory", remembered)
        host_pool._pool.cache_clear()  # its memory is not remembered
        yield seen
