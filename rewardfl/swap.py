"""Weights that wait in host memory: each block's come to the device for the block's turn, and leave with it.

A block's turn is one call of it: in a forward pass, with or without a graph, and again when the backward pass of a
checkpointed one computes it anew. While it runs, the weights of the block whose turn is next are on their way: the one
behind it in a forward pass, the one before it in a backward pass. So the device holds two blocks' weights while the
network is at work and none between its passes, where it would hold all of them, and computes the same numbers to the
last bit.

A block of Wan2.2-A14B has 0.70 GB of them: 28 ms at 25 GB/s, while it computes 42 TFLOP at 480x832x81. diffusers' group
offloading prefetches in the order of the forward pass alone (hooks/group_offloading.py), and takes the weights away
from a graph that still needs them.

Where host memory is short, the matrices wait as 8-bit integers with one float32 scale for each row, half the bytes, and
are made numbers of their dtype again on the device. The network is then another one, of rounded weights: each is off by
at most 1/254 of the largest of its row.
"""

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

ALIGNMENT = 64  # bytes; a parameter begins at a multiple of this in its block's memory
LARGEST = 127  # of an 8-bit integer's values


class NotShared(ValueError):
    """A process cannot use the weights that the first one of its machine has in host memory."""


@dataclass(frozen=True)
class Stored:
    """A frozen parameter in its block's memory. scales: where its rows' begin if it is integers there, else None."""

    module: nn.Module  # whose it is
    name: str  # that it has there
    parameter: nn.Parameter
    dtype: torch.dtype  # that the network computes with
    begin: int  # bytes
    scales: int | None

    def fill(self, memory: Tensor, value: Tensor) -> None:
        """Store `value`, of the parameter's shape."""
        if self.scales is None:
            self.view(memory).copy_(value)
            return
        scales = value.float().abs().amax(1, keepdim=True) / LARGEST
        scales.masked_fill_(scales == 0, 1)
        self.scale_view(memory).copy_(scales)
        self.view(memory).copy_((value.float() / scales).round())

    def view(self, memory: Tensor) -> Tensor:
        """What is stored, of the parameter's shape."""
        dtype = self.dtype if self.scales is None else torch.int8
        octets = memory[self.begin : self.begin + self.parameter.numel() * dtype.itemsize]
        return octets.view(dtype).view(self.parameter.shape)

    def scale_view(self, memory: Tensor) -> Tensor:
        """(rows, 1) float32."""
        rows = self.parameter.shape[0]
        return memory[self.scales : self.scales + rows * torch.float32.itemsize].view(torch.float32).view(rows, 1)

    def numbers(self, memory: Tensor) -> Tensor:
        """The parameter's value, in its dtype: in `memory`, or made from the integers there."""
        if self.scales is None:
            return self.view(memory)
        made = torch.empty(self.parameter.shape, dtype=self.dtype, device=memory.device)
        return torch.mul(self.view(memory), self.scale_view(memory), out=made)  # one rounding, from float32


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
            setattr(one.module, one.name, nn.Parameter(one.numbers(memory), requires_grad=False))

    def rest(self) -> None:
        """Let the block have its own parameters, which lie in host memory as they are stored there."""
        for one in self.stored:
            setattr(one.module, one.name, one.parameter)


class Room:
    """Gives the host memory that one block's parameters after another are packed into: this process's own."""

    filled = False  # equal parameters are there already

    def new(self, size: int) -> Tensor:
        """(size,) uint8."""
        return host_memory(size)


class Passing(Room):
    """For a while: page-locked memory is not given back."""

    def new(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.uint8)


def pack_block(block: nn.Module, room: Room, in_8_bits: bool) -> Packed:
    """Move a block's frozen parameters, wherever they lie, into one piece of the room's memory.

    in_8_bits: the matrices among them as integers. NotShared where the room is filled with others.
    """
    stored, size = laid_out(block, in_8_bits)
    packed = Packed(stored, room.new(size))
    mine = torch.zeros(size, dtype=torch.uint8) if room.filled else packed.host
    for one in stored:
        one.fill(mine, one.parameter.data)
    if room.filled and not torch.equal(mine, packed.host):
        raise NotShared(
            "a block's frozen weights are not those that the first process of this machine has loaded; start again, "
            "and check the files of model.model_paths (sha256sum) if it is said again"
        )
    for one in stored:
        one.parameter.data = one.view(packed.host)
    return packed


def laid_out(block: nn.Module, in_8_bits: bool) -> tuple[list[Stored], int]:
    """(where each frozen parameter begins in the block's memory, the bytes that this has)."""
    stored, end = [], 0
    owned = ((module, *named) for module in block.modules() for named in module.named_parameters(recurse=False))
    for module, name, parameter in owned:
        if parameter.requires_grad:
            continue
        integers = in_8_bits and parameter.dim() == 2
        begin, end = end, end + _aligned(parameter.numel() * (1 if integers else parameter.element_size()))
        stored.append(Stored(module, name, parameter, parameter.dtype, begin, end if integers else None))
        end += _aligned(parameter.shape[0] * torch.float32.itemsize) if integers else 0
    return stored, end


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def host_memory(size: int, file: int = -1) -> Tensor:
    """(size,) uint8 of host memory, page-locked where there is a GPU, which then copies without the CPU.

    file: a descriptor of what lies there; by default it is nobody else's. torch's own page-locked memory comes in
    powers of two: 1.07 GB for a block of 0.70.
    """
    memory = torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
    if torch.cuda.is_available():
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0)))
    return memory


class Lender(Room):
    """Memory that other processes of the machine can use, too: see Borrower."""

    def __init__(self) -> None:
        self.files: list[int] = []  # descriptors of this process, in the order of the blocks

    def new(self, size: int) -> Tensor:
        self.files.append(os.memfd_create("rewardfl"))  # no file's name, and not in /dev/shm, which may be small
        os.ftruncate(self.files[-1], size)
        return host_memory(size, self.files[-1])

    def close(self) -> None:
        """Let nobody else in. The memory is there as long as one of those who are in it lives."""
        while self.files:
            os.close(self.files.pop())


class Borrower(Room):
    """A Lender's memory for equal blocks in the same order, which this process then has no copy of.

    NotShared where they are not equal to the last bit, and where the system does not let one process into the memory of
    another.
    """

    filled = True

    def __init__(self, process: int, files: Sequence[int]):
        """process: the lender's number; files: its descriptors."""
        self.files = [f"/proc/{process}/fd/{file}" for file in files]

    def new(self, size: int) -> Tensor:
        path = self.files.pop(0)
        try:
            file = os.open(path, os.O_RDWR)
        except OSError as error:
            raise NotShared(
                f"experts: cpu_swap has one copy of the weights for all processes of a machine, and {path} of the "
                f"first one cannot be opened ({error.strerror}); let the processes run as one user in one container, "
                "or set experts.trained and experts.untrained to something else"
            ) from error
        try:
            return host_memory(size, file)
        finally:
            os.close(file)


class BlockSwap:
    """Brings the blocks' frozen weights to `device`, each block's for its turn.

    blocks: in the order of their turns in a forward pass; in another order the copies come too late to be hidden, and
    nothing else changes. They are changed when this is made. Their weights that require a gradient, an adapter's, stay
    where they are. On a CPU the same copies are made, so that all but their overlap can be seen without a GPU.

    A graph needs the weights that its block had, so it must be one that the backward pass computes anew (see
    torch.utils.checkpoint, without reentry): that one keeps its copy on the device alive until it has been walked back.
    """

    def __init__(
        self, blocks: Sequence[nn.Module], device: torch.device, room: Room | None = None, in_8_bits: bool = False
    ):
        self.device = device
        self.packed = [pack_block(block, room or Room(), in_8_bits) for block in blocks]
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
