"""Records of training: a sample, a batch, a rollout of members of groups."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rewardfl import data, group_plan, sde
from rewardfl.backbones.protocol import Conditioning, Schedule, move_to
from rewardfl.data.cache import Key
from rewardfl.rewards.base import Reference


@dataclass(frozen=True)
class Rows:
    """Rows with valid file headers, and the messages to print about all rows."""

    train: list[data.Row]
    held_out: list[data.Row]  # the rows of evaluation.eval_clips
    messages: list[str]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The record of one clip, without its frames."""

    row: data.Row
    clip: Key  # identifies the clip as it was read
    size: tuple[int, int]  # height and width of the generated video
    references: tuple[Reference, ...]  # the real clip's, by reward
    base_latents: Key | None = None  # the base model's, for the data anchor where the row has no clip

    @property
    def rejected(self) -> "Sample":
        """Return the record of the pair's rejected clip, for its latents."""
        row = replace(self.row, video=self.row.rejected, rejected=None)
        return replace(self, row=row, clip={**self.clip, "video": self.clip["rejected"]})


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The input of one forward pass of reward feedback learning: B clips of one size, on the device."""

    rows: list[int]  # indices of samples
    replaced: list[bool]  # whether the clip replaces one whose cache entries are lost
    conditioning: Conditioning
    x: Tensor  # (B, C, T, h, w) float32
    schedule: Schedule
    start_step: int  # the denoising step of x

    @property
    def members(self) -> list[group_plan.Member]:
        """Return the samples as groups of one."""
        return [group_plan.Member(row, group_id, 0, 0, 0, 0) for group_id, row in enumerate(self.rows)]


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """The videos of one forward pass of B members, with the inputs that train on them."""

    members: list[group_plan.Member]
    is_requested: Tensor  # (B,) bool: False where another clip's conditioning replaces a lost one
    conditioning: Conditioning
    schedule: Schedule
    shape: tuple[int, ...]  # (1, C, T, h, w), of one member's latents

    @property
    def row(self) -> Tensor:
        """Return the members' rows (B,)."""
        return torch.tensor([member.row for member in self.members])

    def with_latents(self, x0: Tensor, device: torch.device) -> "CleanRollout":
        """Return the rollout with its clean latents, on the device where it waits for the update."""
        return CleanRollout(
            members=self.members, is_requested=self.is_requested, conditioning=move_to(self.conditioning, device),
            schedule=self.schedule, shape=self.shape, x0=x0.to(device),
        )  # fmt: skip

    def with_steps(self, kernel: sde.Kernel, steps: dict[int, sde.Step], device: torch.device) -> "StochasticRollout":
        """Return the rollout with the stochastic steps of its window, on the device where it waits for the update."""
        return StochasticRollout(
            members=self.members, is_requested=self.is_requested, conditioning=move_to(self.conditioning, device),
            schedule=self.schedule, shape=self.shape, kernel=kernel,
            steps={i: step.to(device) for i, step in steps.items()},
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CleanRollout(Rollout):
    """A rollout of forward-process reinforcement."""

    x0: Tensor  # (B, C, T, h, w) float32


@dataclass(frozen=True, kw_only=True)
class StochasticRollout(Rollout):
    """A rollout of Flow-GRPO."""

    kernel: sde.Kernel
    steps: dict[int, sde.Step]  # the window's steps
