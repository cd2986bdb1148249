"""Records of a resumed run: where it continues, and what is restored."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rewardfl.weights import lora_files

# The run's folder, and what it goes on from


@dataclass(frozen=True)
class ResumePoint:
    """What a run goes on from."""

    path: Path | None = None  # the checkpoint, None to start anew
    step: int = 0  # that it was saved after
    changes: tuple[dict[str, Any], ...] = ()  # key, old, new, step: of this resumption and of those before it
    base: Mapping[str, str] = field(default_factory=dict)  # {part of the base model: digest of its files}


@dataclass(frozen=True)
class RunState:
    """What the run is made of, and the state of the checkpoint that it goes on from.

    content: {key of the configuration: {what it leads to, in order: its digest}}, which must not change in a run.
    changes: all that run.resume_with_changes has allowed. state: {} to start anew; what is loaded of it is taken out of
    it, so that nothing is held twice.
    """

    opened: ResumePoint
    content: Mapping[str, Mapping[str, str]]
    init: Mapping[str, lora_files.Lora]
    changes: list[dict[str, Any]]
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """The steps that are done."""
        return self.opened.step
