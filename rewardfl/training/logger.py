"""What a run writes of itself while it trains: a line of metrics per step, a tracker, warnings.

And how many updates in a row have taught nothing: a run that has stopped learning is stopped.
"""

import json
import math
import uuid
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from rewardfl import data
from rewardfl.config import AnyConfig, ConfigError, flat
from rewardfl.files import atomic_write, printable
from rewardfl.rewards.base import RewardError
from rewardfl.training import checkpoint, metrics_file, run_folder
from rewardfl.training.alarms import alarms, early_stop, score_for_best, suspects
from rewardfl.training.distributed import Distributed

FRAMES_SHOWN = 4  # of each sample video, by trackers


@dataclass
class Log:
    """One plain call per step. The main process writes; all of them count."""

    cfg: AnyConfig
    job: Distributed
    folder: run_folder.RunFolder
    metrics: metrics_file.MetricsFile
    last_step: int  # of the whole run
    skipped_in_a_row: int = 0  # updates that taught nothing, before this start and then until now

    def __post_init__(self):
        self.history: list[dict[str, float]] = [json.loads(line) for line in self.metrics.text.splitlines()]
        self.told: set[str] = set()

    def say(self, step: int, line: str) -> None:
        """Print a line about a step, once for all processes."""
        if self.job.main:
            print(printable(f"step {step}: {line}"))

    def say_once(self, step: int, lines: Sequence[str]) -> None:
        """Print those that were not said before."""
        for line in lines:
            if line not in self.told:
                self.say(step, line)
        self.told.update(lines)

    def say_skipped(self, step: int, norm: float, ids: Sequence[str], finite: Tensor) -> None:
        """Say which samples an update was skipped for, where it was; finite: (N,) bool, see monitor.suspects."""
        if not math.isfinite(norm):
            found = suspects(ids, finite.tolist())
            self.say(step, f"gradient norm {norm}, skipped ({self.skipped_in_a_row} in a row); it became so {found}")

    def say_problems(self, step: int, why_nothing: str, problems: Collection[str]) -> None:
        """Print why no sample of an update could be scored, and each new problem of a reward once."""
        if why_nothing:
            self.say(step, f"not one sample could be judged ({self.skipped_in_a_row} in a row); {why_nothing}")
        self.say_once(step, [f"{line}; it is only measured, so the run goes on (reward/failed)" for line in problems])

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step's line; step 0 is an evaluation before the first update."""
        if not self.job.main:
            return
        self.history.append({"step": step, **metrics})
        with checkpoint.warn_on_write_error(self.job.say, step, last=step == self.last_step):
            self.folder.check_present()
            self.metrics.append(step, metrics)
        if step % self.cfg.run.logging_steps == 0:
            with checkpoint.warn_on_write_error(self.job.say, step, last=False), self._tracking():
                self.job.accelerator.log(metrics, step=step)
        for warning in alarms(self.history, self.cfg.reward.motion_alarm):
            tqdm.write(f"step {step}: {warning}")

    def show_samples(self, step: int, folder: Path) -> None:
        """Send the sample videos and images of a folder to the tracker, as samples/<n>."""
        for tracker in self.job.accelerator.trackers:
            layout = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}
            for path in sorted([*folder.glob("*.mp4"), *folder.glob("*.png")]):
                frames = data.read_picture(path)[None] if path.suffix == ".png" else data.read_video(path)
                shown = torch.linspace(0, len(frames) - 1, min(FRAMES_SHOWN, len(frames))).round().long()
                with checkpoint.warn_on_write_error(self.job.say, step, last=False), self._tracking():
                    tracker.log_images({f"samples/{path.stem}": frames[shown].numpy()}, step=step, **layout)

    def _tracking(self) -> AbstractContextManager[None]:
        return checkpoint.as_write_error(Path(self.cfg.run.output_dir), "metrics.jsonl and samples/ have everything")

    def early_stop(self, step: int, metrics: Mapping[str, float]) -> str:
        """Why train.early_stop ends the run with this step, whose line is still to be written; "" where it goes on.

        On all processes, which do as the main one's history says.
        """
        rule = self.cfg.train.early_stop
        if rule is None:
            return ""
        return self.job.by_main(lambda: early_stop([*self.history, {"step": step, **metrics}], **dict(rule)), ())

    def score_for_best(self, step: int, since: int, keys: Sequence[str]) -> float | None:
        """What checkpoints/best is chosen by: see monitor.score_for_best. None on other processes than the main one.

        Its windows and limits are train.early_stop's where that is set: what counts towards a stop becomes no `best`.
        """
        rule, alarm = self.cfg.train.early_stop, self.cfg.reward.motion_alarm
        if rule is None:
            score, broken = score_for_best(self.history, since, keys, motion=alarm)
        else:
            limits = {"motion": rule.motion, "grid": rule.grid}
            score, broken = score_for_best(self.history, since, keys, window=rule.window, **limits)
        if broken:
            self.say(step, f"this checkpoint does not become checkpoints/best: {'; '.join(broken)}")
        return score

    def count(self, norm: float, why_nothing: str) -> None:
        """Count an update that taught nothing, and forget those before one that did. On all processes.

        norm: the update's gradient norm; one that is not finite was skipped. why_nothing: why not one sample could be
        judged, in words, "" where one was.
        """
        taught = math.isfinite(norm) and not why_nothing
        self.skipped_in_a_row = 0 if taught else self.skipped_in_a_row + 1

    def stop_if_stuck(self, step: int, why_nothing: str) -> None:
        """RewardError or SystemExit when more than max_nonfinite updates in a row have taught nothing."""
        if self.skipped_in_a_row <= self.cfg.train.max_nonfinite:
            return
        if why_nothing:
            raise RewardError(
                f"stopped at step {step}: {self.skipped_in_a_row} updates in a row taught nothing; {why_nothing}"
            )
        raise SystemExit(f"stopped at step {step}: {self.skipped_in_a_row} updates in a row were not finite")


def start_tracker(cfg: AnyConfig, job: Distributed, first_step: int) -> None:
    """Start the tracker of run.log_with on the main process. first_step: 0, or where the run resumes.

    ConfigError where it cannot start, as wandb without a key.
    """
    folder = Path(cfg.run.output_dir)
    errors: tuple[type[Exception], ...] = (OSError,)
    settings: dict[str, Any] = {"purge_step": first_step + 1}
    if cfg.run.log_with == "wandb" and job.main:
        import wandb

        errors, id_file = (OSError, wandb.Error), folder / "wandb_run_id"
        if not (first_step and id_file.is_file()):
            atomic_write(id_file, f"{uuid.uuid4().hex[:8]}\n")
        run_id = id_file.read_text(encoding="utf-8").strip()
        settings = {"name": folder.name, "dir": folder, "id": run_id, "resume": "allow"}

    def start() -> None:
        try:
            job.accelerator.init_trackers("rewardfl", flat(cfg), {cfg.run.log_with: settings})
        except errors as error:
            raise ConfigError(f"run.log_with: {cfg.run.log_with} cannot start: {error}; set it to none") from error

    job.by_main(start, ConfigError)
