"""Records of a resumed run: its checkpoint and the restored state."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rewardfl.weights import lora_files


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """The checkpoint that a run resumes from, if any."""

    path: Path | None = None  # the checkpoint; None for a new run
    step: int = 0  # updates before it
    changes: tuple[dict[str, Any], ...] = ()  # (key, old, new, step) of this resumption and of earlier ones
    base: Mapping[str, str] = field(default_factory=dict)  # {part of the base model: digest of its files}


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The content of a run, and the state of the checkpoint that it resumes from.

    content: {key of the configuration: {file or row, in order: digest}}, which must not change in a run. changes: those
    that run.resume_with_changes has allowed. state: {} for a new run; entries are popped as they are loaded, to save
    memory.
    """

    resume_point: ResumePoint
    content: Mapping[str, Mapping[str, str]]
    init: Mapping[str, lora_files.Lora]
    changes: list[dict[str, Any]]
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """Return the number of updates before the resume."""
        return self.resume_point.step
