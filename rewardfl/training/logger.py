"""Log a run: metrics.jsonl, a tracker, warnings. Stop it after too many skipped updates in a row."""

import json
import math
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from rewardfl import data
from rewardfl.config import EarlyStopConfig
from rewardfl.files import atomic_write, escape_control, open_to_append
from rewardfl.rewards.base import RewardError
from rewardfl.training import checkpoint
from rewardfl.training.alarms import MOTION_ALARM, alarms, early_stop, score_for_best, suspects
from rewardfl.training.distributed import Distributed

MAX_WITHOUT_EFFECT = 3  # updates in a row without a finite gradient or a judged sample


class MetricsFile:
    """metrics.jsonl: one JSON object per step. text: all lines, at first those up to the checkpoint."""

    def __init__(self, path: str | Path, text: str = ""):
        self.path = Path(path)
        self.text = text
        self._complete = True  # whether the file has all lines

    def start(self) -> None:
        """Write the lines up to the checkpoint, and drop all after it."""
        with checkpoint.as_write_error(self.path, "it is as it was"):
            atomic_write(self.path, self.text)

    def append(self, step: int, values: Mapping[str, float]) -> None:
        """Append a line {"step": step, **values}, null for nan and inf. After a WriteError write the complete file."""
        record = {"step": step} | {key: value if math.isfinite(value) else None for key, value in values.items()}
        line = json.dumps(record) + "\n"
        self.text += line
        with checkpoint.as_write_error(self.path, "the lines since then are kept in memory and written when possible"):
            if self._complete:
                self._complete = False
                with open_to_append(self.path) as file:
                    file.write(line.encode())
                    file.flush()
                    os.fsync(file.fileno())  # checkpoints rely on these lines, even after a power cut
            else:
                atomic_write(self.path, self.text)
            self._complete = True


@dataclass(kw_only=True)
class Log:
    """The log of a run. The main process writes; all of them count skipped updates."""

    output_dir: str
    early_stop_rule: EarlyStopConfig | None
    job: Distributed
    metrics: MetricsFile
    last_step: int  # total number of updates
    skipped_in_a_row: int = 0  # updates without effect, those before a resume included

    def __post_init__(self) -> None:
        self.history: list[dict[str, float]] = [json.loads(line) for line in self.metrics.text.splitlines()]
        self._printed: set[str] = set()

    def print(self, step: int, line: str) -> None:
        """Print a line about a step, once for all processes."""
        if self.job.main:
            print(escape_control(f"step {step}: {line}"))

    def print_skipped(self, step: int, norm: float, ids: Sequence[str], finite: Tensor) -> None:
        """Print the responsible samples where the update was skipped. finite: (N,) bool, see alarms.suspects."""
        if not math.isfinite(norm):
            origin = suspects(ids, finite.tolist())
            self.print(step, f"gradient norm {norm}, skipped ({self.skipped_in_a_row} in a row); it became so {origin}")

    def print_problems(self, step: int, why_nothing: str, problems: Collection[str]) -> None:
        """Print why no sample of an update was judged, and each new problem of a reward once."""
        if why_nothing:
            self.print(step, f"not one sample was judged ({self.skipped_in_a_row} in a row); {why_nothing}")
        for problem in problems:
            if problem not in self._printed:
                self.print(step, f"{problem}; it is only measured, so the run continues (reward/failed)")
        self._printed.update(problems)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a step's metrics and print alarms. Step 0 is an evaluation before the first update."""
        if not self.job.main:
            return
        self.history.append({"step": step, **metrics})
        with checkpoint.warn_on_write_error(self.job.print, step, last=step == self.last_step):
            self.metrics.append(step, metrics)
        with checkpoint.warn_on_write_error(self.job.print, step, last=False), self._tracking():
            self.job.accelerator.log(metrics, step=step)
        for warning in alarms(self.history):
            tqdm.write(f"step {step}: {warning}")

    def show_samples(self, step: int, folder: Path) -> None:
        """Send images and four frames of each sample video of a folder to the tracker, as samples/<n>."""
        for tracker in self.job.accelerator.trackers:
            layout = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}
            for path in sorted([*folder.glob("*.mp4"), *folder.glob("*.png")]):
                frames = data.read_picture(path)[None] if path.suffix == ".png" else data.read_video(path)
                shown = torch.linspace(0, len(frames) - 1, min(4, len(frames))).round().long()
                with checkpoint.warn_on_write_error(self.job.print, step, last=False), self._tracking():
                    tracker.log_images({f"samples/{path.stem}": frames[shown].numpy()}, step=step, **layout)

    def _tracking(self) -> AbstractContextManager[None]:
        return checkpoint.as_write_error(Path(self.output_dir), "metrics.jsonl and samples/ have everything")

    def early_stop(self, step: int, metrics: Mapping[str, float]) -> str:
        """Return why train.early_stop ends the run; "" where it continues. Call it before `write`. Collective."""
        rule = self.early_stop_rule
        if rule is None:
            return ""
        return self.job.run_on_main(lambda: early_stop([*self.history, {"step": step, **metrics}], **dict(rule)), ())

    def score_for_best(self, step: int, since: int, keys: Sequence[str]) -> float | None:
        """Return the score of checkpoints/best (alarms.score_for_best) by the limits of train.early_stop, if set."""
        rule, limits = self.early_stop_rule, dict[str, Any](motion=MOTION_ALARM)
        if rule is not None:
            limits = {"window": rule.window, "motion": rule.motion, "grid": rule.grid}
        score, broken = score_for_best(self.history, since, keys, **limits)
        if broken:
            self.print(step, f"this checkpoint does not become checkpoints/best: {'; '.join(broken)}")
        return score

    def count(self, norm: float, why_nothing: str) -> None:
        """Count updates without effect in a row: skipped ones (norm nan or inf), and without a judged sample."""
        has_effect = math.isfinite(norm) and not why_nothing
        self.skipped_in_a_row = 0 if has_effect else self.skipped_in_a_row + 1

    def stop_if_stuck(self, step: int, why_nothing: str) -> None:
        """Raise RewardError or SystemExit after more than MAX_WITHOUT_EFFECT updates in a row without effect.

        The first update of a run must have a judged sample.
        """
        if self.skipped_in_a_row <= MAX_WITHOUT_EFFECT and not (why_nothing and step == 1):
            return
        count = self.skipped_in_a_row
        stopped = f"stopped at step {step}: {count} update{'s' if count > 1 else ''} in a row"
        if why_nothing:
            raise RewardError(f"{stopped} taught nothing; {why_nothing}")
        raise SystemExit(f"{stopped} were not finite")
