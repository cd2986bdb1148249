"""Activations and weights in host memory until they are needed."""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal, assert_never

import torch
from diffusers import ModelMixin
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from rewardfl.memory.host_pool import OffloadedTensors, host_pool
from rewardfl.memory.swap import BlockSwap

Placement = Literal["gpu", "cpu_swap", "fp8"]  # placement of an expert's frozen weights (train.memory)

# no rng state: these models have no dropout
_checkpoint: Callable[..., Tensor] = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


class InputsOnHost:
    """Checkpointing of a network's blocks with their inputs in host memory until the backward pass recomputes them.

    For diffusers' `enable_gradient_checkpointing(func)`; one per network. An input leaves while its block runs, and
    comes back while the block after it is recomputed. Inputs shared by all blocks (text, time) stay on the device.
    """

    def __init__(self, device: torch.device):
        self.pool = host_pool(device)
        self.last_inputs: list[weakref.ref[Tensor]] = []  # inputs of the previous block
        self.last_offloaded: weakref.ref[OffloadedTensors] | None = None

    def __call__(self, block: Callable[..., Tensor], *inputs: object) -> Tensor:
        tensors = [value for value in inputs if isinstance(value, Tensor)]
        shared = [reference() for reference in self.last_inputs]
        new = {tensor.data_ptr() for tensor in tensors if not any(tensor is old for old in shared)}
        offloaded = OffloadedTensors(self.pool, self.last_offloaded)
        self.last_inputs, self.last_offloaded = [weakref.ref(tensor) for tensor in tensors], weakref.ref(offloaded)

        def pack(tensor: Tensor) -> Tensor | int:
            return offloaded.put(tensor) if tensor.data_ptr() in new else tensor

        def unpack(packed: Tensor | int) -> Tensor:
            return packed if isinstance(packed, Tensor) else offloaded.take(packed)

        with saved_tensors_hooks(pack, unpack):
            return _checkpoint(block, *inputs)

    @contextlib.contextmanager
    def whole_graph(self) -> Iterator[None]:
        """Offload all tensors that a graph made within the context saves outside of the blocks."""
        offloaded = OffloadedTensors(self.pool)
        with saved_tensors_hooks(offloaded.put, offloaded.take):
            yield


def graph_context(active_graphs: str, device: torch.device) -> Callable[[], contextlib.AbstractContextManager]:
    """Return the context for a graph that is kept, by train.active_graphs; see InputsOnHost.whole_graph."""
    if active_graphs == "keep_on_host":
        return InputsOnHost(device).whole_graph
    return {"replay": contextlib.nullcontext, "keep_on_device": contextlib.nullcontext}[active_graphs]


def checkpointing(device: torch.device, *, inputs_on_host: bool) -> Callable[..., Tensor]:
    """Return the function for diffusers' `enable_gradient_checkpointing(func)` of one network."""
    return InputsOnHost(device) if inputs_on_host else _checkpoint


def move_expert(expert: ModelMixin, where: Placement, device: torch.device, block_classes: Sequence[str]) -> ModelMixin:
    """Move an expert's frozen weights to their memory; in every case it computes on `device`.

    where: gpu, all on `device`. cpu_swap: the blocks' weights in host memory, copied for their turn
    (rewardfl.memory.swap); a graph through it must then be checkpointed. fp8: on `device`, linear weights stored as
    float8_e4m3fn and cast to the expert's dtype in turn; not for an expert with an adapter, whose input casts diffusers
    then prevents. block_classes: the names of the classes of its blocks.
    """
    if where == "cpu_swap":
        return _swap_blocks(expert, device, block_classes)
    if where == "fp8":
        # diffusers leaves out embeddings, norms, the output layer and adapters
        expert.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=expert.dtype)
    elif where != "gpu":
        assert_never(where)
    return expert.to(device)


def _swap_blocks(expert: ModelMixin, device: torch.device, block_classes: Sequence[str]) -> ModelMixin:
    """Move the blocks' frozen weights to host memory, and all else to `device`."""
    blocks = [module for module in expert.modules() if type(module).__name__ in block_classes]
    swap = BlockSwap(blocks, device)
    swapped = {id(weight.parameter) for packed in swap.packed for weight in packed.stored}
    for parameter in expert.parameters():
        if id(parameter) not in swapped:
            parameter.data = parameter.data.to(device)
    for module in expert.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))
    return expert
