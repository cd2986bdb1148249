"""Copies between host and GPU through page-locked memory: the GPU's own speed, and to the GPU without a wait."""

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: str | torch.device) -> Tensor:
    """Return a tensor on a device. The CPU does not wait for a copy from the host to a GPU."""
    if torch.device(device).type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=tensor.device.type == "cpu")


def to_host(tensor: Tensor) -> Tensor:
    """Return a tensor in host memory, contiguous; a GPU's values have arrived."""
    if tensor.device.type != "cuda":
        return tensor.cpu().contiguous()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return host
