"""Settings that make a run fit a machine."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rewardfl.estimate.measure import Costs
from rewardfl.estimate.needs import RESERVE, memory
from rewardfl.training.workload import Workload

KEYS = {
    "trained_placement": "experts.trained",
    "untrained_placement": "experts.untrained",
    "checkpointing": "train.use_gradient_checkpointing",
    "offload_inputs": "train.use_gradient_checkpointing_offload",
    "decode_caches": "train.decode_caches",
    "kept_chunks": "train.kept_chunks",
    "batch": "train.per_device_train_batch_size",
    "accumulation": "train.gradient_accumulation_steps",
}  # {field of Workload: configuration key}


@dataclass(frozen=True)
class Machine:
    """Bytes of one GPU (None without one) and of the host's memory, and the number of processes that share it."""

    gpu: float | None
    host: float = math.inf
    processes: int = 1


def lacking(costs: Costs, work: Workload, machine: Machine) -> float:
    """Return the bytes that the machine lacks for the run: of a GPU, and of the host's memory."""
    needed = memory(costs, work)
    gpu = 0.0 if machine.gpu is None else needed.peak + RESERVE - machine.gpu
    return max(0.0, gpu) + max(0.0, machine.processes * sum(needed.host.values()) - machine.host)


def levers(work: Workload) -> list[dict[str, Any]]:
    """Return sets of Workload's fields that save memory, in the order in which they cost time on an H100."""
    batch = {"batch": 1, "accumulation": work.accumulation and work.accumulation * work.batch}
    swap = {"trained_placement": "cpu_swap", "checkpointing": True}
    return [
        {"samples_on": "cpu"},
        {"untrained_placement": "cpu_swap"} if work.untrained else {},
        {"decode_caches": "offload"},
        {"checkpointing": True, "offload_inputs": True},
        batch,  # an update keeps its samples
        swap if work.sharding == "none" else {},
        {"kept_chunks": 0},
        {"kept_steps": 0},
        {"decode_caches": "segment"},
    ]


def recommend(costs: Costs, work: Workload, machine: Machine) -> Workload:
    """Return the run with one lever after the other, without those that save nothing, until it fits the machine."""
    for lever in 2 * levers(work):  # some save nothing until a later one has lowered another phase
        candidate = replace(work, **lever)
        if lacking(costs, candidate, machine) < lacking(costs, work, machine):
            work = candidate
    return work


def changed_settings(work: Workload, after: Workload) -> Mapping[str, Any]:
    """Return the configuration keys whose values differ, and their values in `after`."""

    def settings(run: Workload) -> dict[str, Any]:
        place = "keep_on_host" if run.offload_inputs else "keep_on_device"
        graphs = {"train.active_graphs": place if run.kept_steps else "replay", "train.kept_steps": run.kept_steps}
        samples = {f"{run.group_section}.samples_on": run.samples_on}
        return {key: getattr(run, field) for field, key in KEYS.items()} | graphs | samples

    before = settings(work)
    changed = {key: value for key, value in settings(after).items() if value != before[key]}
    return changed | ({"train.kept_steps": None} if changed.get("train.kept_steps") == 0 else {})
