"""Records of a resumed run: its checkpoint, its content and the restored state."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from rewardfl.verdict import VerdictState


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """The checkpoint that a run resumes from, if any."""

    path: Path | None = None  # the checkpoint; None for a new run
    step: int = 0  # updates before it
    changes: tuple[dict[str, Any], ...] = ()  # (key, old, new, step) of this resumption and of earlier ones
    base: Mapping[str, str] = field(default_factory=dict)  # {part of the base model: digest of its files}


class Batching(NamedTuple):
    """Numbers of clips that the order of training depends on. None for Flow-GRPO, whose groups fix the order."""

    global_batch: int | None = None  # clips of an update
    one_shape_batch: int | None = None  # clips of a forward pass, where clips differ in size


NO_BATCHING = Batching()


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """What a checkpoint restores next to its adapters. Tensors are complete, on the CPU."""

    step: int  # updates done
    skipped_in_a_row: int  # updates without effect before it
    content: dict[str, dict[str, str]]  # see RunState
    optimizer: dict[str, Any]
    scheduler: dict[str, Any]
    parameters: list[Tensor] | None = None  # where the checkpoint's adapters are an average of them
    average: dict[str, Any] | None = None  # state of this average
    old_policy: list[Tensor] | None = None  # for forward-process reinforcement
    start_policy: list[Tensor] | None = None  # for DPO from lora.init_from: the adapters at step 0
    verdict: dict[str, Any] | None = None  # of sample.verdict: fields of VerdictState
    global_batch: int | None = None  # see Batching
    one_shape_batch: int | None = None


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The content of a run, which must not change when it resumes.

    content: {key of the configuration: {file or row, in order: digest}}. changes: those that run.resume_with_changes
    has allowed. verdict: what sample.verdict has learned, which changes with every update.
    """

    resume_point: ResumePoint
    content: Mapping[str, Mapping[str, str]]
    changes: list[dict[str, Any]]
    verdict: VerdictState

    @property
    def step(self) -> int:
        """Return the number of updates before the resume."""
        return self.resume_point.step
