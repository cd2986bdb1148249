"""Where big things wait until they are needed: activations, caches and weights in host memory."""

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from diffusers import ModelMixin
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, noop_context_fn

from rewardfl.memory.attention import Contexts, keeping_outputs
from rewardfl.memory.swap import BlockSwap, host_memory


def to_host(tensor: Tensor) -> Tensor:
    """Return a copy in host memory; page-locked for a GPU's tensor, which makes the copies several times faster."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    return host.copy_(tensor)


@dataclass(frozen=True)
class InHost:
    """A tensor that waits in host memory until it comes back; on a CPU the same copies are made."""

    host: Tensor

    def back(self, device: torch.device) -> Tensor:
        return torch.empty_like(self.host, device=device).copy_(self.host)


class InputsOnHost:
    """Checkpoints a network's blocks; their inputs wait in host memory until the backward pass computes them anew.

    For diffusers' `enable_gradient_checkpointing(func)`; one for each network. What the backward pass computes is the
    same to the last bit. The copies have a stream of their own: an input leaves while its block is at work, and comes
    back while the block behind it is, 335 MB each way at 480x832x81. What every block is given alike (text, time) is on
    the device once, and stays.
    """

    def __init__(self, device: torch.device, contexts: Callable[[], Contexts] = noop_context_fn):
        """contexts: checkpoint's context_fn."""
        self.device, self.checkpoint = device, _checkpoint(contexts)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.rooms: dict[int, list[Tensor]] = defaultdict(list)  # by bytes: host memory that nobody uses
        self.given: list[weakref.ref[Tensor]] = []  # inputs of the block before
        self.before: weakref.ref[OffloadedInputs] | None = None  # what it left in the host

    def __call__(self, block: Callable[..., Tensor], *inputs: object) -> Tensor:
        """`block(*inputs)`."""
        tensors = [one for one in inputs if isinstance(one, Tensor)]
        known = [old() for old in self.given]
        new = {tensor.data_ptr() for tensor in tensors if not any(tensor is old for old in known)}
        waiting = OffloadedInputs(self, self.before)
        self.given, self.before = [weakref.ref(tensor) for tensor in tensors], weakref.ref(waiting)

        def pack(tensor: Tensor) -> Tensor | int:
            return waiting.put(tensor) if tensor.data_ptr() in new else tensor

        def unpack(packed: Tensor | int) -> Tensor:
            return packed if isinstance(packed, Tensor) else waiting.take(packed)

        with saved_tensors_hooks(pack, unpack):
            return self.checkpoint(block, *inputs)

    @contextlib.contextmanager
    def whole_graph(self) -> Iterator[None]:
        """Within, all that a graph keeps outside of the blocks waits in host memory, too."""
        waiting = OffloadedInputs(self, None)
        with saved_tensors_hooks(waiting.put, waiting.take):
            yield

    @contextlib.contextmanager
    def copying(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """What is copied within is copied beside what is computed, after all of that up to here.

        tensors: on the device, that are copied from or to: their memory is not given away before that is over.
        """
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            yield
        for tensor in tensors:
            tensor.record_stream(self.stream)


def checkpointing(device: torch.device, inputs_on_host: bool, keep_attention: bool) -> Callable[..., Tensor]:
    """For diffusers' `enable_gradient_checkpointing(func)`: how one network's blocks are computed with a graph.

    inputs_on_host: where their inputs wait for the backward pass; else on `device`. keep_attention: their
    self-attention is not computed again.
    """
    contexts = keeping_outputs if keep_attention else noop_context_fn
    if inputs_on_host:
        return InputsOnHost(device, contexts)
    return _checkpoint(contexts)


def _checkpoint(contexts: Callable[[], Contexts]) -> Callable[..., Tensor]:
    # these models have no dropout: the generators' states need not be kept for the recomputation
    return partial(checkpoint, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


class OffloadedInputs:
    """One block's inputs in host memory, which die with the graph that asks for them.

    before: those of the block before it, which a backward pass asks for next.
    """

    def __init__(self, home: InputsOnHost, before: "weakref.ref[OffloadedInputs] | None"):
        self.home, self.before = home, before
        self.hosts: list[Tensor] = []
        self.kinds: list[tuple[torch.Size, torch.dtype]] = []  # the shape and dtype of each
        self.back: dict[int, Tensor] = {}  # by number: those that have been sent for
        self.arrived: torch.cuda.Event | None = None  # happens when all of these are there

    def __del__(self) -> None:
        for host in self.hosts:
            self.home.rooms[len(host)].append(host)

    def put(self, tensor: Tensor) -> int:
        """Send a tensor to the host; the number to ask for it by."""
        octets = tensor.detach().contiguous().view(-1).view(torch.uint8)
        free = self.home.rooms[len(octets)]
        self.hosts.append(free.pop() if free else host_memory(len(octets), self.home.device))
        self.kinds.append((tensor.shape, tensor.dtype))
        with self.home.copying([octets]):
            self.hosts[-1].copy_(octets, non_blocking=True)
        return len(self.hosts) - 1

    def fetch(self) -> None:
        """Send for what has not been sent for."""
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
        """A tensor, back on the device. What the block before it was given is sent for."""
        if number not in self.back:
            self.fetch()
        if self.arrived is not None:
            torch.cuda.current_stream(self.home.device).wait_event(self.arrived)
        tensor = self.back.pop(number)
        before = None if self.before is None else self.before()
        if before is not None:
            before.fetch()
        return tensor


def move_expert(expert: ModelMixin, where: str, device: torch.device, block_classes: Sequence[str]) -> ModelMixin:
    """Put an expert where its frozen weights are to live; it answers on `device` in every case.

    where: gpu (all of it on `device`), cpu_swap (its blocks' weights in host memory, from where they come for their
    turn: rewardfl.memory.swap; a graph through it must then be a checkpointed one), fp8 (on `device`, linear
    weights stored as float8_e4m3fn and cast to the expert's dtype in turn; norms and embeddings stay. Not for an expert
    with an adapter: diffusers then keeps peft from casting the layers' inputs to the adapter's float32).
    block_classes: the names of the classes of its blocks.
    """
    if where == "gpu":
        return expert.to(device)
    if where == "cpu_swap":
        return _swapped(expert, device, block_classes)
    if where == "fp8":
        # diffusers leaves out embeddings, norms, the output layer and adapters
        expert.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=expert.dtype)
        return expert.to(device)
    raise ValueError(f"where must be gpu, cpu_swap or fp8, got {where!r}")


def _swapped(expert: ModelMixin, device: torch.device, block_classes: Sequence[str]) -> ModelMixin:
    """The expert with its blocks' frozen weights in host memory, and all else on `device`."""
    blocks = [module for module in expert.modules() if type(module).__name__ in block_classes]
    swap = BlockSwap(blocks, device)
    waiting = {id(one.parameter) for packed in swap.packed for one in packed.stored}
    for parameter in expert.parameters():
        if id(parameter) not in waiting:
            parameter.data = parameter.data.to(device)
    for module in expert.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))
    return expert
