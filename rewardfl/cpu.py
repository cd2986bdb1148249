"""CPU threads: how many a process takes, and how they wait. `rewardfl/__init__.py` applies both before torch loads."""

import math
import os
import sys
from collections.abc import MutableMapping
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def usable_cores(cgroup: Path = CGROUP) -> int:
    """Return how many cores this process may keep busy, at least 1.

    That is the number of cores that the scheduler may give it, or the container's CPU quota, rounded down, if that is
    smaller. cgroup: the folder where Linux shows that quota, by version 2 (cpu.max) or 1 (cpu.cfs_quota_us).
    """
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    return max(1, math.floor(min(cores, _quota(cgroup))))


def _quota(cgroup: Path) -> float:
    """Return the container's CPU quota in cores, infinite where there is none."""
    if (file := cgroup / "cpu.max").is_file():
        quota, period = file.read_text().split()
    elif (file := cgroup / "cpu" / "cpu.cfs_quota_us").is_file():
        quota, period = file.read_text(), (cgroup / "cpu" / "cpu.cfs_period_us").read_text()
    else:
        return math.inf
    return math.inf if quota.strip() in ("max", "-1") else int(quota) / int(period)


def set_defaults(environment: MutableMapping[str, str]) -> None:
    """Set how many threads OpenMP starts and that they sleep while they wait, unless the user has set it.

    By default libgomp's threads spin. When another process takes one of two cores, each parallel operation then lasts
    until the scheduler moves a thread that spins: encoding a clip took 30 times as long. libgomp reads both variables
    when torch loads it.
    """
    environment.setdefault("OMP_WAIT_POLICY", "passive")
    environment.setdefault("OMP_NUM_THREADS", str(usable_cores()))


def threads_of_process(requested: int | None, processes: int) -> int:
    """Return the threads of one of `processes` on this machine: `requested`, or its share of the cores, at least 1."""
    return requested or max(1, usable_cores() // processes)
