"""Activations, caches and weights in host memory until they are needed."""

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from diffusers import ModelMixin
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, noop_context_fn

from rewardfl.memory.attention import Contexts, keeping_outputs
from rewardfl.memory.swap import BlockSwap, host_memory

Placement = Literal["gpu", "cpu_swap", "fp8"]  # of an expert's frozen weights (section `experts`)


def to_host(tensor: Tensor) -> Tensor:
    """Return a copy in host memory, page-locked for a GPU's tensor: that makes copies several times faster."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    return host.copy_(tensor)


@dataclass(frozen=True)
class InHost:
    """A tensor in host memory until it comes back; on a CPU the same copies are made."""

    host: Tensor

    def back(self, device: torch.device) -> Tensor:
        return torch.empty_like(self.host, device=device).copy_(self.host)


class InputsOnHost:
    """Checkpointing of a network's blocks with their inputs in host memory until the backward pass recomputes them.

    For diffusers' `enable_gradient_checkpointing(func)`; one per network. Gradients are the same to the last bit. The
    copies have their own stream. An input leaves while its block runs, and comes back while the block after it is
    recomputed, 335 MB each way at 480x832x81. Inputs shared by all blocks (text, time) stay on the device.
    """

    def __init__(self, device: torch.device, contexts: Callable[[], Contexts] = noop_context_fn):
        """Take checkpoint's context_fn as `contexts`."""
        self.device, self.checkpoint = device, _checkpoint(contexts)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.free_buffers: dict[int, list[Tensor]] = defaultdict(list)  # host memory by bytes
        self.last_inputs: list[weakref.ref[Tensor]] = []  # of the previous block
        self.last_offloaded: weakref.ref[OffloadedInputs] | None = None

    def __call__(self, block: Callable[..., Tensor], *inputs: object) -> Tensor:
        """Call `block(*inputs)`."""
        tensors = [value for value in inputs if isinstance(value, Tensor)]
        shared = [reference() for reference in self.last_inputs]
        new = {tensor.data_ptr() for tensor in tensors if not any(tensor is old for old in shared)}
        offloaded = OffloadedInputs(self, self.last_offloaded)
        self.last_inputs, self.last_offloaded = [weakref.ref(tensor) for tensor in tensors], weakref.ref(offloaded)

        def pack(tensor: Tensor) -> Tensor | int:
            return offloaded.put(tensor) if tensor.data_ptr() in new else tensor

        def unpack(packed: Tensor | int) -> Tensor:
            return packed if isinstance(packed, Tensor) else offloaded.take(packed)

        with saved_tensors_hooks(pack, unpack):
            return self.checkpoint(block, *inputs)

    @contextlib.contextmanager
    def whole_graph(self) -> Iterator[None]:
        """Offload all tensors that a graph made within the context saves outside of the blocks."""
        offloaded = OffloadedInputs(self, None)
        with saved_tensors_hooks(offloaded.put, offloaded.take):
            yield

    @contextlib.contextmanager
    def copying(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """Run the copies within the context on their own stream, after all kernels up to here.

        tensors: the copies' sources or targets on the device; their memory is not reused before the copies end.
        """
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            yield
        for tensor in tensors:
            tensor.record_stream(self.stream)


def graph_context(active_graphs: str, device: torch.device) -> Callable[[], contextlib.AbstractContextManager]:
    """Return the context for a graph that is kept, by train.active_graphs; see InputsOnHost.whole_graph."""
    return InputsOnHost(device).whole_graph if active_graphs == "keep_on_host" else contextlib.nullcontext


def checkpointing(device: torch.device, *, inputs_on_host: bool, keep_attention: bool) -> Callable[..., Tensor]:
    """Return the function for diffusers' `enable_gradient_checkpointing(func)` of one network.

    inputs_on_host: offload the blocks' inputs until the backward pass. keep_attention: do not recompute self-attention.
    """
    contexts = keeping_outputs if keep_attention else noop_context_fn
    return InputsOnHost(device, contexts) if inputs_on_host else _checkpoint(contexts)


def _checkpoint(contexts: Callable[[], Contexts]) -> Callable[..., Tensor]:
    # no rng state: these models have no dropout
    return partial(checkpoint, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


class OffloadedInputs:
    """One block's inputs in host memory, with the lifetime of its graph.

    before: those of the previous block, the next in a backward pass.
    """

    def __init__(self, home: InputsOnHost, before: "weakref.ref[OffloadedInputs] | None"):
        self.home, self.before = home, before
        self.hosts: list[Tensor] = []
        self.kinds: list[tuple[torch.Size, torch.dtype]] = []  # the shape and dtype of each
        self.back: dict[int, Tensor] = {}  # copies on the device, by number
        self.arrived: torch.cuda.Event | None = None  # the end of these copies

    def __del__(self) -> None:
        for host in self.hosts:
            self.home.free_buffers[len(host)].append(host)

    def put(self, tensor: Tensor) -> int:
        """Copy a tensor to the host; return its number for `take`."""
        octets = tensor.detach().contiguous().view(-1).view(torch.uint8)
        free = self.home.free_buffers[len(octets)]
        self.hosts.append(free.pop() if free else host_memory(len(octets), self.home.device))
        self.kinds.append((tensor.shape, tensor.dtype))
        with self.home.copying([octets]):
            self.hosts[-1].copy_(octets, non_blocking=True)
        return len(self.hosts) - 1

    def fetch(self) -> None:
        """Start to copy the missing tensors to the device."""
        missing = {
            i: torch.empty(shape, dtype=dtype, device=self.home.device)
            for i, (shape, dtype) in enumerate(self.kinds)
            if i not in self.back
        }
        with self.home.copying(missing.values()):
            for i, memory in missing.items():
                memory.view(-1).view(torch.uint8).copy_(self.hosts[i], non_blocking=True)
        self.back |= missing
        if self.home.stream is not None:
            self.arrived = self.home.stream.record_event()

    def take(self, number: int) -> Tensor:
        """Return a tensor on the device, and prefetch the previous block's."""
        if number not in self.back:
            self.fetch()
        if self.arrived is not None:
            torch.cuda.current_stream(self.home.device).wait_event(self.arrived)
        tensor = self.back.pop(number)
        before = None if self.before is None else self.before()
        if before is not None:
            before.fetch()
        return tensor


def move_expert(expert: ModelMixin, where: Placement, device: torch.device, block_classes: Sequence[str]) -> ModelMixin:
    """Move an expert's frozen weights to their memory; in every case it computes on `device`.

    where: gpu, all on `device`. cpu_swap: the blocks' weights in host memory, copied for their turn
    (rewardfl.memory.swap); a graph through it must then be checkpointed. fp8: on `device`, linear weights stored as
    float8_e4m3fn and cast to the expert's dtype in turn, without norms and embeddings. Not for an expert with an
    adapter: diffusers then keeps peft from casting the layers' inputs to the adapter's float32.

    block_classes: the names of the classes of its blocks.
    """
    if where == "cpu_swap":
        return _swap_blocks(expert, device, block_classes)
    if where == "fp8":
        # diffusers leaves out embeddings, norms, the output layer and adapters
        expert.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=expert.dtype)
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
