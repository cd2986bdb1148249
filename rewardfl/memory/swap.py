"""Weights that wait in host memory: each block's come to the device for the block's turn, and leave with it.

A block's turn is one call of it: in a forward pass, with or without a graph, and again when the backward pass of a
checkpointed one computes it anew. While it runs, the weights of the block whose turn is next are on their way: the one
behind it in a forward pass, the one before it in a backward pass. So the device holds two blocks' weights while the
network is at work and none between its passes, where it would hold all of them, and computes the same numbers to the
last bit.

A block of Wan2.2-A14B has 0.70 GB of them: 28 ms at 25 GB/s, while it computes 42 TFLOP at 480x832x81. diffusers' group
offloading prefetches in the order of the forward pass alone (hooks/group_offloading.py), and takes the weights away
from a graph that still needs them.
"""

import mmap
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

ALIGNMENT = 64  # bytes; a parameter begins at a multiple of this in its block's memory


@dataclass(frozen=True)
class Stored:
    """A frozen parameter in its block's memory."""

    module: nn.Module  # whose it is
    name: str  # that it has there
    parameter: nn.Parameter
    begin: int  # bytes

    def view(self, memory: Tensor) -> Tensor:
        """Return the parameter's value in `memory`, of its shape and dtype."""
        octets = memory[self.begin : self.begin + self.parameter.nbytes]
        return octets.view(self.parameter.dtype).view(self.parameter.shape)


@dataclass(frozen=True)
class Packed:
    """A block's frozen parameters in one piece of host memory, so that one copy brings them all."""

    stored: Sequence[Stored]
    host: Tensor  # (bytes,) uint8, page-locked where there is a GPU

    def work_from(self, memory: Tensor) -> None:
        """Let the block compute with numbers. memory: `host`, or a copy of it on the device.

        They are parameters of their own: a graph keeps those that an operator has saved, and would find the block's own
        in host memory when it is walked back.
        """
        for one in self.stored:
            setattr(one.module, one.name, nn.Parameter(one.view(memory), requires_grad=False))

    def rest(self) -> None:
        """Let the block have its own parameters, which lie in host memory."""
        for one in self.stored:
            setattr(one.module, one.name, one.parameter)


def pack_block(block: nn.Module, device: torch.device) -> Packed:
    """Move a block's frozen parameters, wherever they lie, into one piece of host memory; device: where it computes."""
    stored, size = [], 0
    for module in block.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad:
                stored.append(Stored(module, name, parameter, size))
                size += -(-parameter.nbytes // ALIGNMENT) * ALIGNMENT
    packed = Packed(stored, host_memory(size, device))
    for one in stored:
        one.view(packed.host).copy_(one.parameter.data)
        one.parameter.data = one.view(packed.host)
    return packed


class _Pages(mmap.mmap):
    """Host memory of this process, which a GPU may have locked.

    It is unlocked before the system gives its addresses to somebody else: CUDA would refuse to lock these again, and
    would keep the old pages.
    """

    locked_at: int | None = None  # the address that CUDA knows

    def __del__(self) -> None:
        if self.locked_at is not None and not sys.is_finalizing():
            torch.cuda.synchronize()  # a copy may still be at work in it
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(self.locked_at)))


def host_memory(size: int, device: torch.device) -> Tensor:
    """Return (size,) uint8 of host memory, page-locked for a GPU as `device`, which then copies without the CPU.

    torch's own page-locked memory comes in powers of two: 1.07 GB for a block of 0.70.
    """
    pages = _Pages(-1, size)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    if device.type == "cuda":
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0)))
        pages.locked_at = memory.data_ptr()
    return memory


class BlockSwap:
    """Brings the blocks' frozen weights to `device`, each block's for its turn.

    blocks: in the order of their turns in a forward pass; in another order the copies come too late to be hidden, and
    nothing else changes. They are changed when this is made. Their weights that require a gradient, an adapter's, stay
    where they are. On a CPU the same copies are made, so that all but their overlap can be seen without a GPU.

    A graph needs the weights that its block had, so it must be one that the backward pass computes anew (see
    torch.utils.checkpoint, without reentry): that one keeps its copy on the device alive until it has been walked back.
    """

    def __init__(self, blocks: Sequence[nn.Module], device: torch.device):
        self.device = device
        self.packed = [pack_block(block, device) for block in blocks]
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.last: int | None = None  # whose turn it was in this pass
        self.ahead: tuple[int, Tensor, torch.cuda.Event | None] | None = None  # what was sent for: see `fetch`
        for turn, block in enumerate(blocks):
            block.register_forward_pre_hook(lambda module, inputs, turn=turn: self.begin(turn))
            # called in every case: the backward pass leaves a block as soon as it has computed what it needs
            block.register_forward_hook(lambda module, inputs, output, turn=turn: self.end(turn), always_call=True)

    def begin(self, turn: int) -> None:
        """Let block `turn` have its weights on the device, and send for those of the next one."""
        memory = self.take(turn)
        self.packed[turn].work_from(memory)
        following = self.following(turn)
        self.last = None if following is None else turn
        if following == turn:
            self.ahead = turn, memory, None
        elif following is not None:
            self.ahead = following, *self.fetch(following)

    def end(self, turn: int) -> None:
        """Let block `turn` have its weights in host memory."""
        self.packed[turn].rest()

    def following(self, turn: int) -> int | None:
        """Whose turn is next after block `turn`, None at the end of a pass.

        A forward pass goes up. With a graph, its last block is the first that the backward pass computes anew.
        """
        last_block = len(self.packed) - 1
        if turn == last_block and self.last != last_block:
            return turn if torch.is_grad_enabled() else None
        if self.last is None or self.last < turn:
            return turn + 1
        return turn - 1 if turn > 0 else None

    def fetch(self, turn: int) -> tuple[Tensor, torch.cuda.Event | None]:
        """(a copy of a block's weights on the device, what has to happen before it is there)."""
        host = self.packed[turn].host
        memory = torch.empty(host.shape, dtype=host.dtype, device=self.device)
        if self.stream is None:
            return memory.copy_(host), None
        # what has been sent to the device before may still be at work in this memory
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            memory.copy_(host, non_blocking=True)
        return memory, self.stream.record_event()

    def take(self, turn: int) -> Tensor:
        """A block's weights on the device: those that were sent for, where it is its."""
        ahead, self.ahead = self.ahead, None
        wanted = ahead if ahead is not None and ahead[0] == turn else (turn, *self.fetch(turn))
        for _, _, there in (wanted, ahead or wanted):  # a copy that is not wanted, too, must end before its memory does
            if there is not None:
                torch.cuda.current_stream(self.device).wait_event(there)
        return wanted[1]
