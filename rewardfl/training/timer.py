"""Time by phase, and peak memory."""

import contextlib
import resource
import time
from collections.abc import Iterator

import torch


class Timer:
    """Seconds by name: `with timer("decode"): ...` adds up. device: synchronised at the end of each phase."""

    def __init__(self, device: torch.device):
        self.device = device
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        """Return {"time/<name>": seconds}."""
        return {f"time/{name}": seconds for name, seconds in self.seconds.items()}


def peak_memory_gb(device: torch.device) -> float:
    """Return the peak in 1e9 bytes: of a GPU's allocator since the last call, on a CPU of the process."""
    if device.type != "cuda":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak / 1e9


def total_memory(device: torch.device) -> int | None:
    """Return the bytes of a GPU; None for the CPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
