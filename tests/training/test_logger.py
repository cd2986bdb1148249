"""TensorBoard for real; updates without effect stop a run."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_model_files import REQUIRED

from rewardfl import config, data
from rewardfl.config import ConfigError
from rewardfl.rewards import RewardError
from rewardfl.training.logger import Log, MetricsFile
from rewardfl.training.setup_run import start_tracker


def open_log(folder, tracker, first_step):
    """Return a run's log with a tracker, from first_step on."""
    cfg = config.parse(REQUIRED, [f"run.output_dir={folder}", f"run.log_with={tracker}"])
    accelerator = Accelerator(log_with=tracker, project_config=ProjectConfiguration(logging_dir=f"{folder}/logs"))
    job = SimpleNamespace(
        accelerator=accelerator, main=True, print=print, run_on_main=lambda decide, _refusal: decide()
    )
    start_tracker(cfg.run, config.to_dict(cfg), job, first_step)
    return Log(
        output_dir=str(folder), early_stop_rule=None, job=job,
        metrics=MetricsFile(folder / "metrics.jsonl"), last_step=10,
    )  # fmt: skip


def log_steps(folder, tracker, first_step, *steps):
    """Log metrics and sample videos of some steps. Return the tracker."""
    samples = folder / "samples" / "step-000002"
    if not samples.is_dir():
        samples.mkdir(parents=True)
        frames = torch.arange(9, dtype=torch.uint8)[:, None, None, None].expand(9, 16, 32, 3) * 25
        data.write_video(samples / "00.mp4", frames, 8)
        data.write_picture(samples / "grid.png", frames[:1])
    log = open_log(folder, tracker, first_step)
    for step in steps:
        log.write(step, {"actor/loss": step / 2 + first_step, "grad_norm": float("nan")})
    log.show_samples(2, samples)
    (tracker,) = log.job.accelerator.trackers
    tracker.finish()
    return tracker


def test_tensorboard_and_a_resumed_run(tmp_path):
    def events():
        accumulator = EventAccumulator(str(tmp_path / "logs" / "rewardfl"), size_guidance={"images": 0})
        accumulator.Reload()
        return accumulator, [(event.step, event.value) for event in accumulator.Scalars("actor/loss")]

    log_steps(tmp_path, "tensorboard", 0, 1, 2, 3)
    accumulator, losses = events()
    (video,), (grid,) = accumulator.Images("samples/00"), accumulator.Images("samples/grid")
    assert (video.step, video.width, video.height) == (2, 4 * 32, 16)  # four frames in a row
    assert (grid.width, grid.height) == (32, 16) and losses == [(1, 0.5), (2, 1.0), (3, 1.5)]
    log_steps(tmp_path, "tensorboard", 2, 3)  # killed in step 3, which is repeated
    assert events()[1] == [(1, 0.5), (2, 1.0), (3, 3.5)]


def test_a_tracker_that_cannot_start_is_refused(tmp_path):
    (tmp_path / "logs").touch()
    with pytest.raises(ConfigError, match="run.log_with: tensorboard cannot start: .*; set it to none"):
        open_log(tmp_path, "tensorboard", 0)


def test_a_tracker_that_fails_later_does_not_stop_the_run(tmp_path, monkeypatch, capsys):
    log = open_log(tmp_path, "tensorboard", 0)

    def fail(*_arguments, **_settings):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(log.job.accelerator.trackers[0].writer, "add_scalar", fail)
    log.write(1, {"a": 1.0})
    assert "warning: step 1: " in capsys.readouterr().out and len(log.metrics.path.read_text().splitlines()) == 1


@pytest.mark.parametrize("step, empty, norm, stops", [
    (1, 1, 1.0, RewardError), (2, 1, 1.0, None), (5, 3, 1.0, None), (5, 4, 1.0, RewardError),
    (1, 1, float("nan"), None), (4, 4, float("nan"), SystemExit),
])  # fmt: skip
def test_a_run_stops_without_a_judged_sample_in_the_first_update_or_in_several_in_a_row(step, empty, norm, stops):
    log = object.__new__(Log)  # only its counts are used
    log.skipped_in_a_row, why = 0, "" if norm != norm else "face: judged 0 of 4"
    for _ in range(empty):
        log.count(norm, why)
    with pytest.raises(stops, match=f"stopped at step {step}: ") if stops else contextlib.nullcontext():
        log.stop_if_stuck(step, why)
