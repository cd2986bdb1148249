"""Records of what training reads: a sample, a batch, the rollout of a Flow-GRPO group."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from rewardfl import data, group_plan, sde
from rewardfl.backbones.protocol import Conditioning, Schedule
from rewardfl.data.cache import Key


@dataclass(frozen=True)
class Rows:
    """The rows that can be used as far as their files' headers tell, and what is said of the others and of these."""

    train: list[data.Row]
    held_out: list[data.Row]  # of evaluation.eval_clips
    said: list[str]


@dataclass(frozen=True)
class Sample:
    """What training needs of one clip; the clip itself is not kept."""

    row: data.Row
    clip: Key  # identifies the clip as it was read
    size: tuple[int, int]  # height and width that it is generated at
    references: tuple[Mapping[str, Tensor], ...]  # what each reward keeps of the real clip


# What a forward pass starts from


@dataclass(frozen=True)
class Batch:
    """What one forward pass of reward feedback learning starts from: B clips of one size, on the device."""

    rows: list[int]  # of the samples
    replaced: list[bool]  # whether the clip stands in for one whose cache entries are lost
    conditioning: Conditioning
    x: Tensor  # (B, C, T, h, w) float32
    schedule: Schedule
    start: int  # the denoising step that x is given to

    @property
    def members(self) -> list[group_plan.Member]:
        """The samples as groups of one."""
        return [group_plan.Member(row, group_id, 0, 0, 0) for group_id, row in enumerate(self.rows)]


@dataclass(frozen=True)
class Rollout:
    """One forward pass of Flow-GRPO's members, and what scoring them again takes."""

    members: list[group_plan.Member]
    own: Tensor  # (B,) bool: the conditioning is the member's; another clip's stands in for one that is lost
    conditioning: Conditioning
    schedule: Schedule
    kernel: sde.Kernel
    steps: dict[int, sde.Step]  # of the window
