"""Pinned pages for offloaded tensors: block inputs, kept graphs and decoder caches of clips of any size.

The pool grows to the peak offloaded size. All copies run on one stream, so a page can be used again as soon as its last
copy is enqueued.
"""

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from functools import cache

import torch
from torch import Tensor

from rewardfl.memory.swap import host_memory

PAGE_BYTES = 2**21  # bytes: 0.1 ms of copying, and 1.7 % of a decoder's caches at 480x832 are unused ends of pages


class HostPool:
    """Pages of host memory, page-locked for a GPU, and the stream of the copies to and from them."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.free: list[Tensor] = []
        self.size = 0  # bytes of all pages

    def take(self, size: int) -> list[Tensor]:
        """Return free pages, (PAGE_BYTES,) uint8 each, for `size` bytes."""
        count = -(-size // PAGE_BYTES)
        missing = count - len(self.free)
        if missing > 0:
            self.free += host_memory(missing * PAGE_BYTES, self.device).split(PAGE_BYTES)
            self.size += missing * PAGE_BYTES
        return [self.free.pop() for _ in range(count)]

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


_pool = cache(HostPool)


def host_pool(device: torch.device) -> HostPool:
    """Return the pool of this process for a device."""
    return _pool(torch.empty(0, device=device).device)  # cuda and cuda:0 have the same


class OffloadedTensors:
    """Tensors in host memory; their pages are free when this object dies.

    before: the tensors that are needed after these, as a backward pass needs the tensors of the block before.
    """

    def __init__(self, pool: HostPool, before: "weakref.ref[OffloadedTensors] | None" = None):
        self.pool, self.before = pool, before
        self.pages: list[list[Tensor]] = []
        self.layouts: list[tuple[torch.Size, torch.dtype, list[int]]] = []  # shape in memory, dtype, its dimensions
        self.back: dict[int, Tensor] = {}  # copies on the device, by number
        self.arrived: torch.cuda.Event | None = None  # the end of these copies

    def __del__(self) -> None:
        for pages in self.pages:
            self.pool.free += pages

    def put(self, tensor: Tensor) -> int:
        """Copy a tensor to the host; return its number for `take`."""
        order = sorted(range(tensor.ndim), key=tensor.stride().__getitem__, reverse=True)  # channels may be last
        dense = tensor.detach().permute(order).contiguous()
        octets = dense.view(-1).view(torch.uint8)
        pages = self.pool.take(len(octets))
        self.pages.append(pages)
        self.layouts.append((dense.shape, tensor.dtype, [order.index(dimension) for dimension in range(tensor.ndim)]))
        with self.pool.copying([octets]):
            for page, piece in zip(pages, octets.split(PAGE_BYTES), strict=True):
                page[: len(piece)].copy_(piece, non_blocking=True)
        return len(self.pages) - 1

    def fetch(self) -> None:
        """Start to copy the missing tensors to the device."""
        missing = {
            i: torch.empty(shape, dtype=dtype, device=self.pool.device)
            for i, (shape, dtype, _) in enumerate(self.layouts)
            if i not in self.back
        }
        with self.pool.copying(missing.values()):
            for i, memory in missing.items():
                pieces = memory.view(-1).view(torch.uint8).split(PAGE_BYTES)
                for page, piece in zip(self.pages[i], pieces, strict=True):
                    piece.copy_(page[: len(piece)], non_blocking=True)
        self.back |= missing
        if missing and self.pool.stream is not None:
            self.arrived = self.pool.stream.record_event()

    def take(self, number: int) -> Tensor:
        """Return a tensor on the device, and start to copy the tensors that are needed after these."""
        if number not in self.back:
            self.fetch()
        if self.arrived is not None:
            torch.cuda.current_stream(self.pool.device).wait_event(self.arrived)
        tensor = self.back.pop(number).permute(self.layouts[number][2])
        before = None if self.before is None else self.before()
        if before is not None:
            before.fetch()
        return tensor
