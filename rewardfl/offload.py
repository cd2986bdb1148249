"""Where big things wait until they are needed: activations, caches and weights in host memory."""

from collections.abc import Callable, Sequence

import torch
from diffusers import ModelMixin
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from rewardfl.swap import BlockSwap


def to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory; page-locked where there is a GPU, which makes the copies several times faster."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=torch.cuda.is_available())
    return host.copy_(tensor)


def checkpoint_on_host(block: Callable[..., Tensor], *inputs: object) -> Tensor:
    """`block(*inputs)`, recomputed in the backward pass from inputs that wait in host memory.

    For diffusers' `enable_gradient_checkpointing(func)`. What the backward pass computes is the same to the last
    bit. The copies are not overlapped with the computation: 335 MB per block and direction at 480x832x81.
    """
    with save_on_cpu(pin_memory=torch.cuda.is_available()):
        # these models have no dropout: the generators' states need not be kept for the recomputation
        return checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False)


def place(expert: ModelMixin, where: str, device: torch.device, block_classes: Sequence[str]) -> ModelMixin:
    """Put an expert where its frozen weights are to live; it answers on `device` in every case.

    where: gpu (all of it on `device`), cpu_swap (its blocks' weights in host memory, from where they come for their
    turn: rewardfl.swap; a graph through it must then be a checkpointed one), fp8 (on `device`, linear weights stored as
    float8_e4m3fn and cast to the expert's dtype in turn; norms and embeddings stay as they are. Not for an expert with
    an adapter: diffusers then keeps peft from casting the layers' inputs to the adapter's float32). block_classes: the
    names of the classes of its blocks.
    """
    if where == "gpu":
        return expert.to(device)
    if where == "cpu_swap":
        return swapped(expert, device, block_classes)
    if where == "fp8":
        # diffusers leaves out embeddings, norms, the output layer and adapters
        expert.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=expert.dtype)
        return expert.to(device)
    raise ValueError(f"where must be gpu, cpu_swap or fp8, got {where!r}")


def swapped(expert: ModelMixin, device: torch.device, block_classes: Sequence[str]) -> ModelMixin:
    """The expert with its blocks' frozen weights in host memory, and all else on `device`."""
    swap = BlockSwap([module for module in expert.modules() if type(module).__name__ in block_classes], device)
    waiting = {id(parameter) for packed in swap.packed for parameter in packed.parameters}
    for parameter in expert.parameters():
        if id(parameter) not in waiting:
            parameter.data = parameter.data.to(device)
    for module in expert.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))
    return expert
