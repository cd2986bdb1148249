"""TensorBoard for real; Weights & Biases offline where it is installed."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rewardfl import config, data
from rewardfl.config import ConfigError
from rewardfl.rewards import RewardError
from rewardfl.training import metrics_file
from rewardfl.training.logger import Log
from rewardfl.training.setup_run import start_tracker


def opened(folder, name, first_step):
    """A run's log whose tracker is `name`, from first_step on."""
    sections = {"run": {"output_dir": str(folder), "log_with": name}, "model": {"model_paths": "m"}}
    cfg = config.parse(sections | {"data": {"file_name": "m.csv"}, "reward": {"reward_model_path": "p"}})
    accelerator = Accelerator(log_with=name, project_config=ProjectConfiguration(logging_dir=f"{folder}/logs"))
    job = SimpleNamespace(
        accelerator=accelerator, main=True, print=print, run_on_main=lambda decide, _refusal: decide()
    )
    start_tracker(cfg.run, config.to_dict(cfg), job, first_step)
    return Log(
        output_dir=str(folder),
        logging_steps=1,
        motion_alarm=0.5,
        early_stop_rule=None,
        max_nonfinite=10,
        job=job,
        metrics=metrics_file.MetricsFile(folder / "metrics.jsonl"),
        last_step=10,
    )


@pytest.fixture
def samples(tmp_path):
    folder = tmp_path / "samples" / "step-000002"
    folder.mkdir(parents=True)
    frames = torch.arange(9, dtype=torch.uint8)[:, None, None, None].expand(9, 16, 32, 3) * 25
    data.write_video(folder / "00.mp4", frames, 8)
    data.write_picture(folder / "grid.png", frames[:1])
    return folder


def shown(folder):
    events = EventAccumulator(str(folder / "logs" / "rewardfl"), size_guidance={"images": 0})
    events.Reload()
    return events


def test_tensorboard_and_a_resumed_run(tmp_path, samples):
    log = opened(tmp_path, "tensorboard", 0)
    for step in (1, 2, 3):
        log.write(step, {"actor/loss": step / 2, "grad_norm": float("nan")})
    log.show_samples(2, samples)
    log.job.accelerator.trackers[0].finish()
    events = shown(tmp_path)
    assert [(e.step, e.value) for e in events.Scalars("actor/loss")] == [(1, 0.5), (2, 1.0), (3, 1.5)]
    (video,), (grid,) = events.Images("samples/00"), events.Images("samples/grid")
    assert (video.step, video.width, video.height) == (2, 4 * 32, 16)  # four frames in a row
    assert (grid.width, grid.height) == (32, 16)
    resumed = opened(tmp_path, "tensorboard", 2)  # killed in step 3, which is done again
    resumed.write(3, {"actor/loss": 7.0})
    resumed.job.accelerator.trackers[0].finish()
    assert [(e.step, e.value) for e in shown(tmp_path).Scalars("actor/loss")] == [(1, 0.5), (2, 1.0), (3, 7.0)]


def test_a_tracker_that_cannot_start_is_refused(tmp_path):
    (tmp_path / "logs").touch()
    with pytest.raises(ConfigError, match="run.log_with: tensorboard cannot start: .*; set it to none"):
        opened(tmp_path, "tensorboard", 0)


def test_a_tracker_that_fails_later_does_not_stop_the_run(tmp_path, monkeypatch, capsys):
    log = opened(tmp_path, "tensorboard", 0)

    def fail(*_arguments, **_settings):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(log.job.accelerator.trackers[0].writer, "add_scalar", fail)
    log.write(1, {"a": 1.0})
    assert "warning: step 1: " in capsys.readouterr().out and len(log.metrics.read()) == 1


def test_wandb_offline(tmp_path, samples, monkeypatch):
    """A resumed run has the id of the one before, a new one another."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    ids = []
    for first_step in (0, 2, 0):
        log = opened(tmp_path, "wandb", first_step)
        log.write(first_step + 1, {"actor/loss": 0.5, "grad_norm": float("nan")})
        log.show_samples(first_step + 1, samples)
        ids.append(log.job.accelerator.trackers[0].run.id)
        log.job.accelerator.trackers[0].finish()
    assert ids[0] == ids[1] != ids[2] == (tmp_path / "wandb_run_id").read_text().strip()


@pytest.mark.parametrize("step, empty, norm, stops", [
    (1, 1, 1.0, RewardError), (2, 1, 1.0, None), (5, 2, 1.0, None), (5, 3, 1.0, RewardError),
    (1, 1, float("nan"), None), (3, 3, float("nan"), SystemExit),
])  # fmt: skip
def test_a_run_stops_without_a_judged_sample_in_the_first_update_or_in_several_in_a_row(step, empty, norm, stops):
    log = object.__new__(Log)  # only its counts are used
    log.max_nonfinite, log.skipped_in_a_row, why = 2, 0, "" if norm != norm else "face: judged 0 of 4"
    for _ in range(empty):
        log.count(norm, why)
    with pytest.raises(stops, match=f"stopped at step {step}: ") if stops else contextlib.nullcontext():
        log.stop_if_stuck(step, why)
