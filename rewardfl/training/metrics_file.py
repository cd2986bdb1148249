"""metrics.jsonl, one line per update."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from rewardfl.config import shown
from rewardfl.files import atomic_write
from rewardfl.training.checkpoint import CheckpointError, as_write_error

# metrics.jsonl


class _Line(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)
    __pydantic_extra__: dict[str, int | float | None]

    step: NonNegativeInt


class MetricsFile:
    """metrics.jsonl: one JSON object per step. Call `start` before the first `append` of a process.

    text: the lines up to the checkpoint that the run resumes from, then all of the run. Each checkpoint has a copy.
    """

    def __init__(self, path: str | Path, text: str = ""):
        self.path = Path(path)
        self.text = text
        self.waiting = ""  # lines that the disk did not take

    def start(self) -> None:
        """Drop what the file has after the checkpoint, and what a kill or a power cut left at its end."""
        with as_write_error(self.path, "it is as it was"):
            atomic_write(self.path, self.text)

    def append(self, step: int, values: Mapping[str, float]) -> None:
        """Add a line {"step": step, **values}; nan and inf, which JSON cannot say, are written as null.

        WriteError when that fails; the line then waits, and is written with the next one that can be.
        """
        record = {"step": step} | {key: value if math.isfinite(value) else None for key, value in values.items()}
        line = json.dumps(record) + "\n"
        self.text += line
        self.waiting += line
        with as_write_error(self.path, "the lines since then are kept in memory and written when they can be"):
            length = self.path.stat().st_size if self.path.exists() else 0
            try:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(self.waiting)
                    file.flush()
                    os.fsync(file.fileno())  # a power cut may not take lines that a checkpoint counts on
            except OSError:
                if self.path.exists():
                    os.truncate(self.path, length)  # half a line would spoil the next one
                raise
        self.waiting = ""

    def read(self) -> list[dict[str, Any]]:
        """All lines, without a last one that is cut off; none when there is no file yet.

        CheckpointError for one that `append` did not write.
        """
        if not self.path.is_file():
            return []
        *lines, _cut_off = self.path.read_text(encoding="utf-8", errors="replace").split("\n")
        return [self._parsed(number, line) for number, line in enumerate(lines, 1) if line.strip()]

    def _parsed(self, number: int, line: str) -> dict[str, Any]:
        try:
            return _Line.model_validate_json(line).model_dump()
        except ValidationError as error:
            raise CheckpointError(
                f"{self.path}, line {number} is no line of metrics ({shown(line)}); mend or delete it, then the same "
                "command goes on"
            ) from error
