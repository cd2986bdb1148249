"""Where big things wait until they are needed: activations and caches in host memory, an expert that is not trained."""

from collections.abc import Callable

import torch
from diffusers import ModelMixin
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint


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


def place(expert: ModelMixin, where: str, device: torch.device) -> ModelMixin:
    """Put a frozen expert where it is to live; it answers on `device` in every case.

    where: gpu (all of it on `device`), cpu_swap (in host memory; its blocks come over one by one, where there is a
    GPU the next one while the present one computes), fp8 (on `device`, linear weights stored as float8_e4m3fn and
    cast to the expert's dtype in turn; norms and embeddings stay as they are. Not for an expert with an adapter:
    diffusers then keeps peft from casting the layers' inputs to the adapter's float32).
    """
    if where == "gpu":
        return expert.to(device)
    if where == "cpu_swap":
        expert.enable_group_offload(
            onload_device=device, offload_device=torch.device("cpu"), offload_type="block_level",
            num_blocks_per_group=1, use_stream=device.type == "cuda",
        )  # fmt: skip
        return expert
    if where == "fp8":
        # diffusers leaves out embeddings, norms, the output layer and adapters
        expert.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=expert.dtype)
        return expert.to(device)
    raise ValueError(f"where must be gpu, cpu_swap or fp8, got {where!r}")
