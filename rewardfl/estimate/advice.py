"""Whether a run fits a GPU, and what to set when it does not."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rewardfl.estimate.measure import Costs
from rewardfl.estimate.needs import RESERVE, flops, memory
from rewardfl.run.work import Work

KEYS = {
    "trained_placement": "experts.trained",
    "placement": "experts.untrained",
    "checkpointing": "train.use_gradient_checkpointing",
    "offload_inputs": "train.use_gradient_checkpointing_offload",
    "keep_attention": "train.keep_attention",
    "decode_caches": "train.decode_caches",
    "batch": "train.per_device_train_batch_size",
    "accumulation": "train.gradient_accumulation_steps",
    "noises": "sample.noises_per_sample",
    "samples_on": "grpo.samples_on",
}  # of Work's settings
CACHED_NOISES = 4  # noises_per_sample that is proposed together with boundary_cache


@dataclass(frozen=True)
class Option:
    """Other values of some of Work's settings. exact: the run computes the same numbers with them."""

    fields: Mapping[str, Any]
    exact: bool = True
    note: str = ""  # for people, behind the figures

    @property
    def settings(self) -> dict[str, Any]:
        """By configuration key."""
        return {KEYS[field]: value for field, value in self.fields.items()}


def options(work: Work) -> list[Option]:
    """Return what can be switched on in this run; of two that take the same time, the first is preferred.

    The decoder's caches go to the host late: their copies have the least computing to hide behind. The trained expert
    goes last: its weights take the most of the host's memory, and come over three times for each replayed step.
    """
    found: list[dict[str, Any]] = [{"samples_on": "cpu"}] if work.kept else []
    found += [{"keep_attention": False}, {"offload_inputs": True} if work.checkpointing else {"checkpointing": True}]
    if work.batch > 1 and work.accumulation:
        found.append({"batch": 1, "accumulation": work.batch * work.accumulation})
    elif work.batch > 1:  # more forward passes: an epoch's samples stay
        found.append({"batch": max(n for n in range(1, work.batch) if work.batch % n == 0)})
    if work.untrained:
        found.append({"placement": "cpu_swap"})
    if work.reward_gradient:
        found += [{"decode_caches": place} for place in ("offload", "segment")]
    if work.checkpointing and work.sharding == "none":
        found.append({"trained_placement": "cpu_swap"})
    all_options = [Option(fields) for fields in found]
    if work.untrained:
        all_options.append(Option({"placement": "fp8"}, False, "; its weights are rounded by 3 %"))
    if work.cacheable:
        noises = {"noises": CACHED_NOISES} if work.noises == "fresh" else {}
        note = "; each clip then has a few noises, used in turn"
        all_options.append(Option({"placement": "boundary_cache"} | noises, False, note))
    return [option for option in all_options if replace(work, **option.fields) != work]


@dataclass(frozen=True)
class Machine:
    """Bytes of one GPU, None where there is none, and of the host's memory, for so many of the run's processes."""

    gpu: float | None
    host: float = math.inf
    processes: int = 1


def lacking(costs: Costs, work: Work, machine: Machine) -> tuple[float, float]:
    """Return the bytes that the run needs and the machine does not have: of a GPU, and of the host's memory."""
    found = memory(costs, work)
    gpu = 0.0 if machine.gpu is None else found.peak + RESERVE - machine.gpu
    return max(0.0, gpu), max(0.0, machine.processes * sum(found.host.values()) - machine.host)


def fits(costs: Costs, work: Work, machine: Machine) -> bool:
    return sum(lacking(costs, work, machine)) == 0


def recommend(costs: Costs, work: Work, machine: Machine) -> list[Option]:
    """Return what makes the run fit the machine, or comes closest.

    Of what lowers the bytes that are lacking always the one that adds the fewest FLOPs, what computes the same numbers
    before what does not. What turns out to be unnecessary is left out again.
    """
    chosen: list[Option] = []
    while not fits(costs, now := with_options(work, chosen), machine):
        missing = sum(lacking(costs, now, machine))
        lower = [one for one in options(now) if sum(lacking(costs, with_options(now, [one]), machine)) < missing]
        if not lower:
            return chosen
        chosen.append(min(lower, key=lambda one: (not one.exact, sum(flops(costs, with_options(now, [one])).values()))))
    for option in reversed(chosen):
        rest = [other for other in chosen if other is not option]
        if fits(costs, with_options(work, rest), machine):
            chosen = rest
    return chosen


def with_options(work: Work, chosen: Iterable[Option]) -> Work:
    for option in chosen:
        work = replace(work, **option.fields)
    return work
