"""Tensors of which each process may hold a part, as FSDP leaves them."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """All of it. On all processes: under FSDP each has a part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gather_to_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of all of them, whole and on the CPU. On all processes."""
    return [full_tensor(tensor.detach()).cpu().clone() for tensor in tensors]


def shard_like(tensor: Tensor, parameter: nn.Parameter) -> Tensor:
    """A whole tensor as `parameter` lies: on its device, and under FSDP in the same parts."""
    tensor = tensor.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return tensor
    return distribute_tensor(tensor, parameter.device_mesh, parameter.placements)
