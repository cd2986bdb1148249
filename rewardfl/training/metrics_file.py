"""metrics.jsonl, one line per update."""

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rewardfl.config import shown
from rewardfl.files import atomic_write, open_to_append
from rewardfl.training.checkpoint import CheckpointError, as_write_error


class MetricsFile:
    """metrics.jsonl: one JSON object per step. Call `start` before the first `append` of a process.

    text: all lines of the run; at first those up to the checkpoint that it resumes from.
    """

    def __init__(self, path: str | Path, text: str = ""):
        self.path = Path(path)
        self.text = text
        self._complete = True  # whether the file has all lines

    def start(self) -> None:
        """Write the lines up to the checkpoint, and drop all after it."""
        with as_write_error(self.path, "it is as it was"):
            atomic_write(self.path, self.text)

    def append(self, step: int, values: Mapping[str, float]) -> None:
        """Append a line {"step": step, **values}, null for nan and inf.

        After a WriteError the next call writes the complete file.
        """
        record = {"step": step} | {key: value if math.isfinite(value) else None for key, value in values.items()}
        line = json.dumps(record) + "\n"
        self.text += line
        with as_write_error(self.path, "the lines since then are kept in memory and written when they can be"):
            if self._complete:
                self._complete = False
                with open_to_append(self.path) as file:
                    file.write(line.encode())
                    file.flush()
                    os.fsync(file.fileno())  # checkpoints rely on these lines, even after a power cut
            else:
                atomic_write(self.path, self.text)
            self._complete = True

    def read(self) -> list[dict[str, Any]]:
        """Return all full lines; none without a file. Raise CheckpointError for a line that `append` did not write."""
        if not self.path.is_file():
            return []
        *lines, _cut_off = self.path.read_text(encoding="utf-8", errors="replace").split("\n")
        records = []
        for number, line in enumerate(lines, 1):
            record = None
            with suppress(ValueError, RecursionError):
                record = json.loads(line or "null")
            if line and not (isinstance(record, dict) and isinstance(record.get("step"), int)):
                why = f"line {number} is not a line of metrics ({shown(line)}); mend or delete it"
                raise CheckpointError(f"{self.path}, {why}")
            records += [record] if record else []
        return records
