"""Which process rolls out which member of which group, and from which noise.

Pure functions of a seed, an epoch and numbers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rewardfl.epoch_order import sample_at
from rewardfl.noise import draw_noise, noise_seed

# The group plan


class Member(NamedTuple):
    """One rollout of an epoch. Carry group_id through rewards and gathers: no text or picture identifies a group."""

    row: int  # of the training data: prompt and image
    group_id: int  # 0 .. groups - 1 within the epoch
    member: int  # 0 .. group_size - 1 within the group
    noise_seed: int  # of the latents at sigma 1; the group's own under Geometry.same_noise
    step_seed: int  # of the noise of the SDE steps: never shared, or the group's rollouts would all be one

    @property
    def start(self) -> tuple[int, int]:
        """Members of one start are the same video until the first stochastic step."""
        return self.row, self.noise_seed


@dataclass(frozen=True)
class Geometry:
    """How the rollouts of an epoch are spread over processes, forward passes and updates.

    updates: an epoch's optimizer updates, each of which takes the next of its forward passes, and so, whatever world
    and batch are, the same members as on one process.

    spread: `contiguous`, each process takes one run of an update's groups, so a group is on one process if its size
    divides the samples that a process has of an update; or `spread`, each forward pass of all processes takes the
    next groups, so that a group is complete as early as possible. A batch that divides group_size never mixes rows,
    in both.

    Raises ValueError for a geometry that does not divide, with the nearest that do, and for updates that do not.
    """

    group_size: int
    groups: int  # of an epoch, over all processes
    world: int = 1  # processes
    batch: int = 1  # samples of one forward pass of one process
    updates: int = 1
    spread: Literal["contiguous", "spread"] = "contiguous"
    same_noise: bool = False  # the members of a group start from the same noise

    def __post_init__(self):
        check_geometry(self.world, self.batch, self.group_size, self.groups)
        if self.forwards % self.updates:
            near = ", ".join(str(n) for n in range(1, self.forwards + 1) if self.forwards % n == 0)
            raise ValueError(
                f"updates must divide the {self.forwards} forward passes of a process, got {self.updates}; take one "
                f"of {near}"
            )

    @property
    def samples(self) -> int:
        """The samples of an epoch, over all processes."""
        return self.groups * self.group_size

    @property
    def forwards(self) -> int:
        """Forward passes of each process in an epoch."""
        return self.samples // (self.world * self.batch)

    @property
    def forwards_per_update(self) -> int:
        return self.forwards // self.updates


def positions(geometry: Geometry, rank: int) -> list[range]:
    """By forward pass of process `rank`, its members' positions 0 .. samples - 1 in the epoch, group after group."""
    per_update, world, batch = geometry.forwards_per_update, geometry.world, geometry.batch

    def start(forward: int) -> int:
        if geometry.spread == "spread":
            return (forward * world + rank) * batch
        update, at = divmod(forward, per_update)
        return ((update * world + rank) * per_update + at) * batch

    return [range(start(forward), start(forward) + batch) for forward in range(geometry.forwards)]


def plan(epoch: int, rank: int, geometry: Geometry, sample_ids: Sequence[str], seed: int) -> list[list[Member]]:
    """The forward passes of process `rank` in `epoch`: lists of geometry.batch members, as many on every process.

    An epoch is the next `groups` rows of the stream `sample_at`, `group_size` members of each. Together the processes
    roll out the same members whatever world, batch and spread are, and (seed, epoch) is all the state. groups may
    exceed the number of rows: a row that comes twice in an epoch is two groups, with noises of their own. sample_ids:
    one per row (`data.Row.id`), the key of its noise.
    """

    def member_at(position: int) -> Member:
        group_id, member = divmod(position, geometry.group_size)
        visit, row = sample_at(epoch * geometry.groups + group_id, len(sample_ids), seed)
        name = sample_ids[row]
        return Member(
            row=row,
            group_id=group_id,
            member=member,
            noise_seed=noise_seed(seed, visit, name, 0 if geometry.same_noise else member),
            step_seed=noise_seed(seed, visit, f"steps/{name}", member),
        )

    return [list(map(member_at, members)) for members in positions(geometry, rank)]


def needs_prefix(plans: Sequence[Sequence[Sequence[Member]]]) -> list[bool]:
    """By forward pass: whether some process comes to a start that its pass before had not.

    plans: of all processes. Where it is False, the latents before the window can be taken from the pass before. The
    same on every process, since each has to take as many forward passes of the model as the others.
    """
    seen = [[{member.start for member in members} for members in process] for process in plans]
    found = [[i == 0 or not starts <= process[i - 1] for i, starts in enumerate(process)] for process in seen]
    return [any(at_once) for at_once in zip(*found, strict=True)]


@lru_cache
def prefix_counts(geometry: Geometry) -> tuple[int, int]:
    """(starts, forward passes) with which one process computes one step before the window, for all of an epoch.

    starts: of the process that has the most of them. The passes are the same on all processes.
    """
    plans = [plan(0, rank, geometry, ("",), seed=0) for rank in range(geometry.world)]
    new = needs_prefix(plans)
    starts = [
        sum(len({member.start for member in members}) for members, is_new in zip(one, new, strict=True) if is_new)
        for one in plans
    ]
    return max(starts), sum(new)


def rollout_counts(geometry: Geometry, num_steps: int, window: Sequence[int]) -> list[tuple[int, int]]:
    """By step, (videos, forward passes) of one process in an epoch; guidance is not in it.

    With the same noise in a group the steps before the window are computed once for all members that a pass has of it.
    """
    before, after = prefix_counts(geometry), (geometry.forwards * geometry.batch, geometry.forwards)
    return [before if i < window[0] else after for i in range(num_steps)]


def draw_step_noise(members: Sequence[Member], shape: Sequence[int], device: str | torch.device, step: int) -> Tensor:
    """(B, ...) standard normal noise of one stochastic step, each member's its own; shape: (1, ...) of one latent."""
    seeds = [noise_seed(member.step_seed, step, "step") for member in members]
    return torch.cat([draw_noise(shape, seed, device) for seed in seeds])


def check_geometry(world: int, batch: int, group_size: int, groups: int) -> None:
    """Raise ValueError unless groups * group_size samples divide into forward passes of world * batch."""
    samples, at_once = groups * group_size, world * batch
    if samples % at_once == 0:
        return
    divisors = [d for d in range(1, samples // world + 1) if samples % (world * d) == 0]
    near = [d for d in divisors if d < batch][-1:] + [d for d in divisors if d > batch][:1]
    options = [
        ("groups", _nearest_multiples(groups, at_once // math.gcd(at_once, group_size))),
        ("group_size", _nearest_multiples(group_size, at_once // math.gcd(at_once, groups))),
        ("batch", near),
    ]
    advice = ", or ".join(f"{name} {' or '.join(map(str, values))}" for name, values in options if values)
    raise ValueError(
        f"groups {groups} x group_size {group_size} = {samples} samples per epoch do not divide into forward passes "
        f"of world {world} x batch {batch} = {at_once}; the nearest that do: {advice}"
    )


def _nearest_multiples(value: int, step: int) -> list[int]:
    below = value // step * step
    return [candidate for candidate in (below, below + step) if candidate > 0]
