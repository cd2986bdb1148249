"""Advice on settings that make a run fit a machine."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rewardfl.estimate.measure import Costs
from rewardfl.estimate.needs import RESERVE, flops, memory
from rewardfl.training.workload import Workload

KEYS = {
    "trained_placement": "experts.trained",
    "untrained_placement": "experts.untrained",
    "checkpointing": "train.use_gradient_checkpointing",
    "offload_inputs": "train.use_gradient_checkpointing_offload",
    "keep_attention": "train.keep_attention",
    "decode_caches": "train.decode_caches",
    "batch": "train.per_device_train_batch_size",
    "accumulation": "train.gradient_accumulation_steps",
    "noises_per_sample": "sample.noises_per_sample",
    "samples_on": "grpo.samples_on",
}  # {field of Workload: configuration key}
CACHED_NOISES = 4  # noises_per_sample proposed with boundary_cache


@dataclass(frozen=True, eq=False)
class Option:
    """Other values of some of Workload's fields. exact: the run computes the same numbers with them."""

    fields: Mapping[str, Any]
    exact: bool = True
    note: str = ""  # printed after the settings

    @property
    def settings(self) -> dict[str, Any]:
        """Return the values by configuration key."""
        return {KEYS[field]: value for field, value in self.fields.items()}


def options(work: Workload) -> list[Option]:
    """Return the options of this run that save memory; of two that take the same time, the first is preferred.

    The decoder's caches are late in the list: little computing hides their copies. The trained expert is last among the
    exact options: its weights take most host memory, and are copied three times for each replayed step.
    """
    fewer = max((n for n in range(1, work.batch) if work.batch % n == 0), default=1)  # a divisor: same epoch samples
    by_one = {"batch": 1, "accumulation": work.batch * work.accumulation} if work.accumulation else {"batch": fewer}
    noises = {"noises_per_sample": CACHED_NOISES} if work.noises_per_sample == "fresh" else {}
    few = "; each clip then has a few noises, used in turn"
    possible = [
        (work.latents_kept, Option({"samples_on": "cpu"})),
        (True, Option({"keep_attention": False})),
        (True, Option({"offload_inputs": True} if work.checkpointing else {"checkpointing": True})),
        (True, Option(by_one)),
        (work.untrained, Option({"untrained_placement": "cpu_swap"})),
        (work.reward_gradient, Option({"decode_caches": "offload"})),
        (work.reward_gradient, Option({"decode_caches": "segment"})),
        (work.checkpointing and work.sharding == "none", Option({"trained_placement": "cpu_swap"})),
        (work.untrained, Option({"untrained_placement": "fp8"}, exact=False, note="; its weights are rounded by 3 %")),
        (work.cacheable, Option({"untrained_placement": "boundary_cache"} | noises, exact=False, note=few)),
    ]
    return [option for applies, option in possible if applies and replace(work, **option.fields) != work]


@dataclass(frozen=True)
class Machine:
    """Bytes of one GPU (None without one) and of the host's memory, and the number of processes that share it."""

    gpu: float | None
    host: float = math.inf
    processes: int = 1


def lacking(costs: Costs, work: Workload, machine: Machine) -> tuple[float, float]:
    """Return the bytes that the machine lacks for the run: of a GPU, and of the host's memory."""
    needed = memory(costs, work)
    gpu = 0.0 if machine.gpu is None else needed.peak + RESERVE - machine.gpu
    return max(0.0, gpu), max(0.0, machine.processes * sum(needed.host.values()) - machine.host)


def fits(costs: Costs, work: Workload, machine: Machine) -> bool:
    return sum(lacking(costs, work, machine)) == 0


def recommend(costs: Costs, work: Workload, machine: Machine) -> list[Option]:
    """Return the options with which the run fits the machine, or comes closest.

    Add options greedily: of those that lower the lacking bytes the one with the fewest FLOPs, exact options first. Then
    remove the options that turn out to be unnecessary.
    """
    chosen: list[Option] = []
    while not fits(costs, now := with_options(work, chosen), machine):
        lack = {option: sum(lacking(costs, with_options(now, [option]), machine)) for option in options(now)}
        lower = [option for option in lack if lack[option] < sum(lacking(costs, now, machine))]
        if not lower:
            return chosen
        total = {option: sum(flops(costs, with_options(now, [option])).values()) for option in lower}
        chosen.append(min(lower, key=lambda option: (not option.exact, total[option])))
    for option in reversed(chosen):
        fewer = [candidate for candidate in chosen if candidate is not option]
        if fits(costs, with_options(work, fewer), machine):
            chosen = fewer
    return chosen


def with_options(work: Workload, chosen: Iterable[Option]) -> Workload:
    for option in chosen:
        work = replace(work, **option.fields)
    return work
