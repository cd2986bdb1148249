"""The memory and CPU cores of this machine or container, and defaults of OpenMP's threads. No torch here."""

import itertools
import math
import os
import sys
from collections.abc import Iterator, MutableMapping
from pathlib import Path


def usable_memory(root: Path = Path("/")) -> int:
    """Return the bytes of memory of this machine, or its container's limit. root: the folder of proc and sys."""
    files = itertools.product(_groups("memory", root), ("memory.max", "memory.limit_in_bytes"))
    limits = [int(text) for group, name in files if (text := _read(group / name)).isdigit()]
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *limits])


def usable_cores(root: Path = Path("/")) -> int:
    """Return the scheduler's cores, or the container's CPU quota, rounded down, if that is less; at least 1."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, math.floor(min([cores, *map(_quota, _groups("cpu", root))])))


def set_thread_defaults(environment: MutableMapping[str, str]) -> None:
    """Set OpenMP's number of threads, and how long they spin before they sleep, unless the user has set it.

    libgomp's default of 300,000 turns stalls a parallel operation whenever another process takes a core. With no turns
    two threads are no faster than one. libgomp reads the variables when torch loads it.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", "3000")
    environment.setdefault("OMP_NUM_THREADS", str(usable_cores()))


def threads_of_process(requested: int | None, processes: int) -> int:
    """Return the threads of one of `processes` on this machine: `requested`, or its share of the cores, at least 1."""
    return requested or max(1, usable_cores() // processes)


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Yield the folders of the process's control groups that may limit `controller`, and of the groups above them."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        controllers, name = line.split(":", 2)[1:]
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if controllers else "")
        group = Path(name.lstrip("/"))
        yield from (top / folder for folder in (group, *group.parents))


def _quota(group: Path) -> float:
    """Return a group's CPU quota in cores, infinite if it has no quota."""
    quota, _, period = _read(group / "cpu.max").partition(" ")
    if not period:
        quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() else math.inf


def _read(file: Path) -> str:
    return file.read_text().strip() if file.is_file() else ""
