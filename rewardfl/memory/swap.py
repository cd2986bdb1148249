"""Weights in host memory: each block's weights come to the device for the block's turn, and leave after it.

A block's turn is one call of it: in a forward pass, or when the backward pass of a checkpointed one recomputes it.
While it runs, the weights of the next turn are copied: in a forward pass the next block's, in a backward pass the
previous one's. So the device holds two blocks' weights during a pass and none between passes.

diffusers' group offloading prefetches only in the order of the forward pass (hooks/group_offloading.py), and takes the
weights away from a graph that still needs them.
"""

import mmap
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

ALIGNMENT = 64  # bytes; a parameter begins at a multiple of this in its block's memory


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A frozen parameter in its block's memory."""

    module: nn.Module
    name: str  # within the module
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
        """Give the block new parameters in `memory`, a copy of `host` on the device.

        A graph keeps parameters that an operator has saved; the original ones are in host memory in its backward pass.
        """
        for weight in self.stored:
            setattr(weight.module, weight.name, nn.Parameter(weight.view(memory), requires_grad=False))

    def rest(self) -> None:
        """Give the block its original parameters, which are in host memory."""
        for weight in self.stored:
            setattr(weight.module, weight.name, weight.parameter)


def pack_block(block: nn.Module, device: torch.device) -> Packed:
    """Move a block's frozen parameters into one piece of host memory; device: where the block computes."""
    stored, size = [], 0
    for module in block.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad:
                stored.append(Stored(module=module, name=name, parameter=parameter, begin=size))
                size += -(-parameter.nbytes // ALIGNMENT) * ALIGNMENT
    packed = Packed(stored, host_memory(size, device))
    for weight in stored:
        weight.view(packed.host).copy_(weight.parameter.data)
        weight.parameter.data = weight.view(packed.host)
    return packed


class _Pages(mmap.mmap):
    """Host memory, page-locked for a GPU, and unlocked at its end: CUDA would refuse to lock its addresses again."""

    locked_at: int | None = None  # the address that CUDA knows

    def __del__(self) -> None:
        if self.locked_at is not None and not sys.is_finalizing():
            torch.cuda.synchronize()  # a copy from or to it may still run
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(self.locked_at)))


def host_memory(size: int, device: torch.device) -> Tensor:
    """Return (size,) uint8 of host memory, page-locked for a GPU; torch's own comes in powers of two."""
    pages = _Pages(-1, size)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    if device.type == "cuda":
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0)))
        pages.locked_at = memory.data_ptr()
    return memory


class BlockSwap:
    """The frozen weights of the blocks, each brought to `device` for its block's turn.

    blocks: in the order of their turns in a forward pass; in another order the copies do not overlap with computation.
    They are changed in place. Weights that require a gradient, an adapter's, stay where they are. On a CPU the same
    copies are made. A graph must be a checkpointed one (torch.utils.checkpoint, without reentry).
    """

    def __init__(self, blocks: Sequence[nn.Module], device: torch.device):
        self.device = device
        self.packed = [pack_block(block, device) for block in blocks]
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.last: int | None = None  # the block of the last turn in this pass
        self.ahead: tuple[int, Tensor, torch.cuda.Event | None] | None = None  # a prefetched block: see `fetch`
        for turn, block in enumerate(blocks):
            block.register_forward_pre_hook(lambda *_, turn=turn: self.begin(turn))
            # always: the recomputation leaves a block early, once it has the tensors for the backward pass
            block.register_forward_hook(lambda *_, turn=turn: self.packed[turn].rest(), always_call=True)

    def begin(self, turn: int) -> None:
        """Load block `turn`'s weights to the device, and start the copy for the next turn."""
        memory = self.take(turn)
        self.packed[turn].work_from(memory)
        following = self.following(turn)
        self.last = None if following is None else turn
        if following == turn:
            self.ahead = turn, memory, None
        elif following is not None:
            self.ahead = following, *self.fetch(following)

    def following(self, turn: int) -> int | None:
        """Return the next turn's block, None at the end of a pass. The backward pass begins with the last block."""
        last_block = len(self.packed) - 1
        if turn == last_block and self.last != last_block:
            return turn if torch.is_grad_enabled() else None
        if self.last is None or self.last < turn:
            return turn + 1
        return turn - 1 if turn > 0 else None

    def fetch(self, turn: int) -> tuple[Tensor, torch.cuda.Event | None]:
        """Start to copy a block's weights to the device; return the copy and the event of its end."""
        host = self.packed[turn].host
        memory = torch.empty(host.shape, dtype=host.dtype, device=self.device)
        if self.stream is None:
            return memory.copy_(host), None
        # earlier kernels may still use this memory
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            memory.copy_(host, non_blocking=True)
        return memory, self.stream.record_event()

    def take(self, turn: int) -> Tensor:
        """Return a block's weights on the device: the prefetched ones, if they are this block's."""
        ahead, self.ahead = self.ahead, None
        current = ahead if ahead is not None and ahead[0] == turn else (turn, *self.fetch(turn))
        for _, _, copied in (current, ahead or current):  # an unused copy, too, must end before its memory is freed
            if copied is not None:
                torch.cuda.current_stream(self.device).wait_event(copied)
        return current[1]
