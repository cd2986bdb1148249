"""Settings that make a run fit a machine."""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rewardfl.estimate.measure import Costs
from rewardfl.estimate.needs import RESERVE, memory, seconds
from rewardfl.estimate.rates import Rates
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
    "noises_per_sample": "sample.noises_per_sample",
    "samples_on": "grpo.samples_on",
}  # {field of Workload: configuration key}
WORTHWHILE = 0.01  # share of the time that a proposal for a run that fits must save
CACHED_NOISES = 4  # noises_per_sample proposed with boundary_cache
INEXACT = {  # {placement of the untrained expert that changes the run's numbers: how}
    "fp8": "its weights are rounded by 3 %",
    "boundary_cache": "each clip then has a few noises, used in turn",
}


def alternatives(work: Workload) -> Iterator[Workload]:
    """Yield the run with each combination of settings that may save memory; of equally fast ones the best comes first.

    The trained expert changes last: its weights take most host memory.
    """
    options: dict[str, list[Any]] = {
        "trained_placement": ["cpu_swap"] if work.sharding == "none" else [],
        "decode_caches": ["offload", "segment"] if work.reward_gradient else [],
        "untrained_placement": (["cpu_swap", "fp8"] if work.untrained else [])
        + (["boundary_cache"] if work.cacheable else []),
        "batch": [n for n in range(work.batch, 0, -1) if work.batch % n == 0],  # an update keeps its samples
        "offload_inputs": [True],
        "checkpointing": [True],
        "kept_chunks": [0],
        "kept_steps": [*range(work.kept_steps, -1, -1)],
        "samples_on": ["cpu"] if work.latents_kept else [],
    }
    options = {field: list(dict.fromkeys([getattr(work, field), *values])) for field, values in options.items()}
    for values in itertools.product(*options.values()):
        run = replace(work, **dict(zip(options, values, strict=True)))
        if work.accumulation:
            run = replace(run, accumulation=work.accumulation * work.batch // run.batch)
        if run.untrained_placement == "boundary_cache" and work.noises_per_sample == "fresh":
            run = replace(run, noises_per_sample=CACHED_NOISES)
        if run.checkpointing or not (run.offload_inputs or run.trained_placement == "cpu_swap"):
            yield run


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


def fits(costs: Costs, work: Workload, machine: Machine) -> bool:
    return lacking(costs, work, machine) == 0


def recommend(costs: Costs, work: Workload, machine: Machine, rates: Rates) -> Workload:
    """Return the alternative that fits the machine, or comes closest: an exact one, then the fastest."""

    def price(run: Workload) -> tuple[float, bool]:
        inexact = run.untrained_placement != work.untrained_placement and run.untrained_placement in INEXACT
        return lacking(costs, run, machine), inexact

    prices = [(price(run), run) for run in alternatives(work)]
    least = min(paid for paid, _ in prices)
    return min((run for paid, run in prices if paid == least), key=lambda run: _time(costs, run, rates))


def _time(costs: Costs, work: Workload, rates: Rates) -> float:
    return sum(spent for spent, _, _ in seconds(costs, work, rates).values())


def keep_more_graphs(costs: Costs, work: Workload, machine: Machine, rates: Rates) -> Workload:
    """Return the run with more graphs kept, of steps, then of the decoder's chunks, if that saves enough time."""

    def first_that_fits(*runs: Workload) -> Workload:
        return next((run for run in runs if fits(costs, run, machine)), work)

    steps = range(len(work.active_experts), work.kept_steps, -1) if work.processes_per_clip == 1 else ()
    runs = [replace(work, kept_steps=count) for count in steps]
    after = min(work, first_that_fits(*runs), key=lambda run: _time(costs, run, rates))
    chunks = len(costs.chunks) if work.reward_gradient and len(costs.chunks) > 1 else 0
    more = [replace(after, kept_chunks=count) for count in range(chunks, after.kept_chunks, -1)]
    after = first_that_fits(*more, after)
    return after if _time(costs, after, rates) < (1 - WORTHWHILE) * _time(costs, work, rates) else work


def memory_settings(work: Workload) -> dict[str, Any]:
    """Return the values of the configuration keys that trade memory for time."""
    keys = KEYS | {"samples_on": f"{work.group_section}.samples_on"}
    place = "keep_on_host" if work.offload_inputs else "keep_on_device"
    values = {key: getattr(work, field) for field, key in keys.items()} | {"train.kept_steps": work.kept_steps or None}
    return values | {"train.active_graphs": place if work.kept_steps else "replay"}


def changed_settings(work: Workload, after: Workload) -> Mapping[str, Any]:
    """Return the configuration keys whose values differ, and their values in `after`."""
    before = memory_settings(work)
    return {key: value for key, value in memory_settings(after).items() if value != before[key]}
