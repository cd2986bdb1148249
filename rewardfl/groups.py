"""Who rolls out what: the order of the samples, groups of rollouts, their noises, the steps that are trained.

Pure functions of a seed, an epoch and numbers. Which samples an epoch has, and the noise that each of them starts from,
depend neither on the number of processes nor on the batch size; only the order in which they are visited does.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

# Order: position p of the training stream is sample p % num_rows in the order of epoch p // num_rows


@lru_cache(maxsize=4)
def epoch_order(num_rows: int, seed: int, epoch: int) -> tuple[int, ...]:
    """The order in which an epoch visits the rows 0..num_rows - 1, each once."""
    generator = torch.Generator().manual_seed(_stable_hash(f"order/{seed}/{epoch}"))
    return tuple(torch.randperm(num_rows, generator=generator).tolist())


def sample_at(position: int, num_rows: int, seed: int) -> tuple[int, int]:
    """(epoch, row) at `position` (from 0) of the endless stream of epochs."""
    epoch, offset = divmod(position, num_rows)
    return epoch, epoch_order(num_rows, seed, epoch)[offset]


def total_steps(num_rows: int, global_batch: int, num_train_epochs: int) -> int:
    """Steps of a run: as many as visit every row at least num_train_epochs times.

    With clips of several shapes the last few may still wait for company then (one_shape_batch).
    """
    return math.ceil(num_train_epochs * num_rows / global_batch)


# Noise


def noise_seed(run_seed: int, epoch: int, sample_id: str, member: int = 0) -> int:
    """Seed (63 bits) of the noise of one sample; `member` counts the noises of a sample within an epoch."""
    return _stable_hash(f"noise/{run_seed}/{epoch}/{member}/{sample_id}")


def training_noise_seed(run_seed: int, epoch: int, sample_id: str, noises_per_sample: str | int) -> int:
    """noise_seed for a sample's visit in `epoch`: new in each ("fresh"), or the same n in turn (n).

    Epoch -1 is that of the sample videos, which have a noise of their own.
    """
    if isinstance(noises_per_sample, str) or epoch < 0:
        return noise_seed(run_seed, epoch, sample_id)
    return noise_seed(run_seed, 0, sample_id, epoch % noises_per_sample)


def noise(shape: Sequence[int], seed: int, device: str | torch.device = "cpu") -> Tensor:
    """Standard normal float32 noise, drawn on the CPU so that every device starts from the same."""
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed)).to(device)


def _stable_hash(text: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # Python's own hash() differs from process to process


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


def new_starts(plans: Sequence[Sequence[Sequence[Member]]]) -> list[bool]:
    """By forward pass: whether some process comes to a start that its pass before had not.

    plans: of all processes. Where it is False, the latents before the window can be taken from the pass before. The
    same on every process, since each has to take as many forward passes of the model as the others.
    """
    seen = [[{member.start for member in members} for members in process] for process in plans]
    found = [[i == 0 or not starts <= process[i - 1] for i, starts in enumerate(process)] for process in seen]
    return [any(at_once) for at_once in zip(*found, strict=True)]


@lru_cache
def start_counts(geometry: Geometry) -> tuple[int, int]:
    """(starts, forward passes) with which one process computes one step before the window, for all of an epoch.

    starts: of the process that has the most of them. The passes are the same on all processes.
    """
    plans = [plan(0, rank, geometry, ("",), seed=0) for rank in range(geometry.world)]
    new = new_starts(plans)
    starts = [
        sum(len({member.start for member in members}) for members, is_new in zip(one, new, strict=True) if is_new)
        for one in plans
    ]
    return max(starts), sum(new)


def rollout_counts(geometry: Geometry, num_steps: int, window: Sequence[int]) -> list[tuple[int, int]]:
    """By step, (videos, forward passes) of one process in an epoch; guidance is not in it.

    With the same noise in a group the steps before the window are computed once for all members that a pass has of it.
    """
    before, after = start_counts(geometry), (geometry.forwards * geometry.batch, geometry.forwards)
    return [before if i < window[0] else after for i in range(num_steps)]


def epochs_due(every: int, per_epoch: int, steps: int | None) -> int | None:
    """How many epochs of `per_epoch` updates end with something that is done `every` so many updates.

    These are the epochs in which a multiple falls, and the last one. None where the number of steps is not known.
    """
    if steps is None:
        return None
    return len({math.ceil(step / per_epoch) for step in range(every, steps + 1, every)} | {steps // per_epoch})


def is_due(step: int, per_epoch: int, every: int, steps: int) -> bool:
    """Whether the epoch that ends with `step` has a multiple of `every` in it, or is the last of `steps`."""
    return step // every > (step - per_epoch) // every or step == steps


def step_noise(members: Sequence[Member], shape: Sequence[int], device: str | torch.device, step: int) -> Tensor:
    """(B, ...) standard normal noise of one stochastic step, each member's its own; shape: (1, ...) of one latent."""
    seeds = [noise_seed(member.step_seed, step, "step") for member in members]
    return torch.cat([noise(shape, seed, device) for seed in seeds])


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


# Which steps are stochastic, and trained


@dataclass(frozen=True)
class Windows:
    """Which steps of a schedule may be stochastic, and trained.

    kind: `list`, the given `steps`; `random`, `size` steps in a row (Flow-GRPO-Fast); `fraction`, that share of
    the steps, rounded and at least one, not necessarily in a row (DanceGRPO draws 0.6). Both draw from
    bounds[0] <= step < bounds[1], all steps by default, anew in each epoch.

    usable: the steps that have std > 0 and matter. The caller leaves out deterministic ones: CPS
    has std = 0 at the last. Flow-SDE and Dance-SDE have a density there, yet it only leaves noise in the sample;
    every published recipe leaves it out as well.
    """

    kind: Literal["list", "random", "fraction"]
    usable: Sequence[int]
    steps: Sequence[int] = ()
    size: int = 1
    bounds: Sequence[int] | None = None
    fraction: float = 0.6

    @property
    def drawable(self) -> tuple[int, ...]:
        """The steps that some epoch's window may have, ascending."""
        if self.kind == "list":
            return tuple(sorted(self.steps))
        low, high = self.bounds or (0, math.inf)
        return tuple(step for step in sorted(self.usable) if low <= step < high)


def window(windows: Windows, epoch: int, seed: int) -> tuple[int, ...]:
    """The SDE steps of an epoch, ascending: the same on every process and for every group; ODE elsewhere.

    Raises ValueError for a window that fits nowhere, and for listed steps that are not usable.
    """
    candidates, usable = windows.drawable, sorted(windows.usable)
    if windows.kind == "list":
        refused = [step for step in windows.steps if step not in usable]
        if refused or not candidates or len(set(candidates)) < len(candidates):
            raise ValueError(
                f"steps must be some of the usable {usable}, each once, got {list(windows.steps)}"
                + (f": {refused} are not usable" if refused else "")
            )
        return candidates
    generator = torch.Generator().manual_seed(noise_seed(seed, epoch, "window"))
    size = windows.size if windows.kind == "random" else 1
    starts = [s for s in candidates if set(range(s, s + size)) <= set(candidates)]
    if not starts:
        raise ValueError(
            f"no {size} steps in a row among the usable {list(candidates)} within the bounds; take a smaller window or "
            "wider bounds"
        )
    if windows.kind == "random":
        start = starts[int(torch.randint(len(starts), (), generator=generator))]
        return tuple(range(start, start + size))
    count = max(1, round(windows.fraction * len(candidates)))
    drawn = torch.randperm(len(candidates), generator=generator)[:count].tolist()
    return tuple(sorted(candidates[i] for i in drawn))
