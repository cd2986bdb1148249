"""The distribution of an epoch's rollouts over processes, and their noise. All functions are pure."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rewardfl.epoch_order import sample_at
from rewardfl.noise import draw_noise, noise_seed


class Member(NamedTuple):
    """One rollout of an epoch. Carry group_id through rewards and gathers: no text or picture identifies a group."""

    row: int  # row of the training data: prompt and image
    group_id: int  # 0 .. groups - 1 within the epoch
    member: int  # 0 .. group_size - 1 within the group
    noise_seed: int  # seed of the latents at sigma 1; one per group under Geometry.same_noise
    step_seed: int  # seed of the noise of the SDE steps: never shared, or the group's rollouts would be equal
    group_seed: int  # seed of noise that all members of the group share

    @property
    def start(self) -> tuple[int, int]:
        """Return the key of the start: members with the same key are equal up to the first stochastic step."""
        return self.row, self.noise_seed


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The distribution of an epoch's rollouts over processes, forward passes and updates.

    updates: optimizer updates per epoch. An update's members are the same for any world and batch, and each process has
    one run of its groups. A batch that divides group_size never mixes rows. Raise ValueError for what does not divide.
    """

    group_size: int
    groups: int  # groups of an epoch, over all processes
    world: int = 1  # processes
    batch: int = 1  # samples of one forward pass of one process
    updates: int = 1
    same_noise: bool = False  # within a group

    def __post_init__(self):
        at_once = self.world * self.batch
        if self.samples % at_once:
            raise ValueError(
                f"groups {self.groups} x group_size {self.group_size} = {self.samples} samples per epoch do not divide "
                f"into forward passes of world {self.world} x batch {self.batch} = {at_once}; take groups of this size "
                f"in a multiple of {at_once // math.gcd(at_once, self.group_size)}"
            )
        if self.forwards % self.updates:
            raise ValueError(f"updates must divide the {self.forwards} forward passes of a process, got {self.updates}")

    @property
    def samples(self) -> int:
        """Return the samples of an epoch, over all processes."""
        return self.groups * self.group_size

    @property
    def forwards(self) -> int:
        """Return the forward passes of each process in an epoch."""
        return self.samples // (self.world * self.batch)

    @property
    def forwards_per_update(self) -> int:
        return self.forwards // self.updates


def positions(geometry: Geometry, rank: int) -> list[range]:
    """Return the members' positions 0 .. samples - 1 in the epoch, by forward pass of process `rank`."""
    per_update, world, batch = geometry.forwards_per_update, geometry.world, geometry.batch

    def start(forward: int) -> int:
        update, offset = divmod(forward, per_update)
        return ((update * world + rank) * per_update + offset) * batch

    return [range(start(forward), start(forward) + batch) for forward in range(geometry.forwards)]


def plan(epoch: int, rank: int, geometry: Geometry, sample_ids: Sequence[str], seed: int) -> list[list[Member]]:
    """Return the forward passes of process `rank` in `epoch`: lists of geometry.batch members, equally many per rank.

    An epoch is the next `groups` rows of the stream `sample_at`, `group_size` members of each, the same for any world
    and batch. A row that comes twice in an epoch is two groups with different noise. sample_ids: one per row, the key
    of its noise.
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
            group_seed=noise_seed(seed, visit, name, 0),
        )

    return [list(map(member_at, members)) for members in positions(geometry, rank)]


def passes_to_train(
    geometry: Geometry, rank: int, part: slice, trained_groups: Tensor
) -> tuple[dict[int, Tensor], list[int], float]:
    """Return ({forward pass: weights (B,)}, other passes, share of samples left out) of process `rank` in an update.

    part: the update's forward passes. trained_groups: (groups,) bool. The first passes have all samples of these
    groups; every process has equally many, at least one. Samples of other groups weigh 0 and these all the same; over
    the first passes of all processes the mean is 1, or 0 without any.
    """
    groups = torch.tensor([positions(geometry, process)[part] for process in range(geometry.world)])
    trained = trained_groups[groups // geometry.group_size]  # (world, passes, B)
    needed, total = trained.any(2), int(trained.sum())
    count = max(1, int(needed.sum(1).amax()))
    order = needed[rank].int().argsort(descending=True, stable=True).tolist()
    weights = trained[rank] * (geometry.world * count * geometry.batch / max(1, total))
    chosen = {part.start + n: weights[n] for n in sorted(order[:count])}
    return chosen, [part.start + n for n in sorted(order[count:])], 1 - total / trained.numel()


def needs_prefix(plans: Sequence[Sequence[Sequence[Member]]]) -> list[bool]:
    """Return by forward pass whether some process has a start that its previous pass had not.

    plans: of all processes. Where False, the latents before the window are the previous pass's. The result is
    the same on every process: all must call the model equally often.
    """
    starts = [[{member.start for member in members} for members in process] for process in plans]
    is_new = [[i == 0 or not keys <= process[i - 1] for i, keys in enumerate(process)] for process in starts]
    return [any(processes) for processes in zip(*is_new, strict=True)]


def rollout_counts(geometry: Geometry, num_steps: int, window: Sequence[int]) -> list[tuple[int, int]]:
    """Return by step (videos, forward passes) of one process in an epoch, without guidance.

    With the same noise in a group the steps before the window are computed once for all its members in a pass. Their
    videos are counted in the process that has the most; the passes are the same on all processes.
    """
    plans = [plan(0, rank, geometry, ("",), seed=0) for rank in range(geometry.world)]
    new = needs_prefix(plans)
    starts = [[len({member.start for member in members}) for members in process] for process in plans]
    before = max(sum(itertools.compress(counts, new)) for counts in starts), sum(new)
    after = geometry.forwards * geometry.batch, geometry.forwards
    return [before if i < window[0] else after for i in range(num_steps)]


def draw_start_noise(members: Sequence[Member], shape: Sequence[int], device: str | torch.device) -> Tensor:
    """Return (B, ...) standard normal latents at sigma 1, by member; shape: (1, ...) of one latent."""
    return torch.cat([draw_noise(shape, member.noise_seed, device) for member in members])


def draw_step_noise(members: Sequence[Member], shape: Sequence[int], device: str | torch.device, step: int) -> Tensor:
    """Return (B, ...) standard normal noise of one stochastic step, by member; shape: (1, ...) of one latent."""
    seeds = [noise_seed(member.step_seed, step, "step") for member in members]
    return torch.cat([draw_noise(shape, seed, device) for seed in seeds])
