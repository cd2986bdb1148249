"""Whether a run fits a machine, and the settings that take less memory."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rewardfl.estimate.needs import RESERVE, Memory
from rewardfl.training.workload import Workload


@dataclass(frozen=True)
class Machine:
    """Bytes of one GPU (None without one) and of the host's memory, and the number of processes that share it."""

    gpu: float | None
    host: float = math.inf
    processes: int = 1

    def gpu_fits(self, memory: Memory) -> bool:
        """Return whether a GPU has the run's peak and the reserve."""
        return self.gpu is None or memory.peak + RESERVE <= self.gpu

    def host_fits(self, memory: Memory) -> bool:
        """Return whether the host has the memory of all its processes."""
        return self.processes * sum(memory.host.values()) <= self.host


def smaller_settings(work: Workload) -> Mapping[str, Any]:
    """Return {configuration key: value} that take less memory of a GPU, in the order in which they cost time."""
    levers = {
        "train.memory.samples_on": ("cpu", work.samples_in_flight > 0 and work.samples_on == "gpu"),
        "train.memory.untrained": ("cpu_swap", work.untrained is not None and work.untrained_placement == "gpu"),
        "train.memory.decode_caches": ("offload", work.reward_gradient and work.decode_caches == "keep"),
        "train.memory.use_gradient_checkpointing": (True, not work.checkpointing),
        "train.memory.use_gradient_checkpointing_offload": (True, not work.offload_inputs),
        "train.per_device_train_batch_size": (1, work.batch > 1),
        "train.memory.trained": ("cpu_swap", work.sharding == "none" and work.trained_placement == "gpu"),
        "train.memory.kept_chunks": (0, work.kept_chunks > 0),
        "train.memory.active_graphs": ("replay", work.kept_steps > 0),
    }
    return {key: value for key, (value, helps) in levers.items() if helps}
