"""Tensors that FSDP shards over processes."""

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

Sharding = Literal["none", "zero2", "fsdp2"]  # ways of sharding over the processes


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor. Collective: under FSDP each process has a part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gather_to_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return full copies of the tensors on the CPU. Collective."""
    return [full_tensor(tensor.detach()).cpu().clone() for tensor in tensors]


def shard_like(tensor: Tensor, parameter: nn.Parameter) -> Tensor:
    """Return a full tensor on the device of `parameter`, under FSDP in the same parts."""
    tensor = tensor.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return tensor
    return distribute_tensor(tensor, parameter.device_mesh, parameter.placements)
