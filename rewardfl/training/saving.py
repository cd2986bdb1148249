"""Write checkpoints and sample videos, and close a run."""

import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers.training_utils import EMAModel
from torch import Tensor

from rewardfl import data, lora
from rewardfl.backbones.protocol import Backbone
from rewardfl.config import DataConfig
from rewardfl.config.schema import RunConfig
from rewardfl.files import escape_control
from rewardfl.memory import sharding
from rewardfl.optim import Average
from rewardfl.training import checkpoint
from rewardfl.training.clip_scan import load_video
from rewardfl.training.distributed import Distributed
from rewardfl.training.learner import Learner
from rewardfl.training.logger import Log
from rewardfl.training.samples import Sample
from rewardfl.training.signals import Interruption
from rewardfl.training.state import Batching, RunState, TrainState


def collect_state(
    job: Distributed,
    learner: Learner,
    average: Average | None,
    run: RunState,
    log: Log,
    step: int,
    batching: Batching,
    copies: Mapping[str, EMAModel],
) -> TrainState:
    """Collect the state to resume from after `step`. copies: {field of TrainState: its parameters}. Collective."""
    weights: dict[str, Any] = {}
    if average is not None:
        shadows = {"shadow_params": sharding.gather_to_cpu(average.shadow_params)}
        weights["parameters"] = sharding.gather_to_cpu(learner.parameters)
        weights["average"] = average.state_dict() | shadows
    weights |= {name: sharding.gather_to_cpu(each.shadow_params) for name, each in copies.items() if each.shadow_params}
    return TrainState(
        step=step,
        skipped_in_a_row=log.skipped_in_a_row,
        content={key: dict(files) for key, files in run.content.items()},
        scheduler=learner.scheduler.state_dict(),
        optimizer=job.optimizer_state(learner.optimizer, learner.parameters),
        **weights,
        verdict=vars(run.verdict),
        global_batch=batching.global_batch,
        one_shape_batch=batching.one_shape_batch,
    )


def save(
    settings: RunConfig,
    job: Distributed,
    backbone: Backbone,
    learner: Learner,
    log: Log,
    state: TrainState,
    score: float | None,
    *,
    last: bool,
) -> None:
    """Save a checkpoint of the adapters as they are now. Collective; the main process writes.

    state: of collect_state. score: of `best`. last: the run's last checkpoint; write errors of others are printed.
    """
    adapters = {name: lora.adapter_state(expert) for name, expert in learner.trained.items()}

    def write(folder: Path) -> None:
        for name, expert in learner.trained.items():
            backbone.save_adapter(name, expert, folder, adapters[name])

    if job.main:
        with checkpoint.warn_on_write_error(job.print, state.step, last=last):
            keep_last, lines = settings.keep_last, log.metrics.text
            checkpoint.save_checkpoint(settings.output_dir, state.step, write, vars(state), score, keep_last, lines)


@torch.no_grad()
def sample_videos(
    run: RunConfig,
    clips: DataConfig,
    backbone: Backbone,
    samples: Sequence[Sample],
    generate: Callable[[int], tuple[int, Tensor, Tensor]],
    job: Distributed,
    step: int,
) -> Path:
    """Write samples/step-*/<n>.mp4 of the first samples, each process its shard, and return the folder. Collective.

    A model of images writes <n>.png, and grid.png of several. generate: row -> (row, its video (3, F, H, W), its
    latents). A video that cannot be written, or its real clip not be read, is left out with a warning.
    """
    folder = Path(run.output_dir) / "samples" / f"step-{step:06d}"
    fps = clips.fps or backbone.frame_rate
    for n, in_shard in job.shard.padded(range(min(run.sample_videos, len(samples)))):
        row, video, _ = generate(n)
        path = folder / f"{n:02d}.{'png' if video.shape[1] == 1 else 'mp4'}"
        if in_shard:
            try:
                with checkpoint.warn_on_write_error(print, step, last=False):
                    write_comparison(clips, fps, samples[row], video, path)
            except data.DataError as error:
                why = f"its real clip cannot be shown: {error}"
                print(escape_control(f"warning: step {step}: {path} is left out, since {why}"))
    job.wait()
    written = [path for n in range(run.sample_videos) if (path := folder / f"{n:02d}.png").is_file()]
    if len(written) > 1 and job.main:
        with checkpoint.warn_on_write_error(print, step, last=False):
            pictures = [data.read_picture(path) for path in written]
            _write_video(folder / "grid.png", data.side_by_side(pictures)[None], fps)
    return folder


def write_comparison(clips: DataConfig, fps: float, sample: Sample, video: Tensor, path: Path) -> None:
    """Write the real clip, if any, next to the generated `video` (3, F, H, W). Raise WriteError or DataError."""
    if sample.row.video is None:
        _write_video(path, video.float().cpu(), fps)
        return
    _write_video(path, torch.cat([load_video(clips, sample.row), video.float().cpu()], -1), fps)


def _write_video(path: Path, video: Tensor, fps: float) -> None:
    with checkpoint.as_write_error(path, "training continues without this sample video"):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".png":
            data.write_picture(path, video)
        else:
            data.write_video(path, video, fps=fps)


def close_run(run: RunConfig, job: Distributed, interruption: Interruption, step: int, stopped: str) -> int:
    """Close the tracker, print how the run ended, and return the exit code. stopped: why train.early_stop ended it."""
    job.accelerator.end_training()
    if interruption.number:
        name = signal.Signals(interruption.number).name
        job.print(f"{name}: stopped after step {step}; the same command resumes it")
        return 128 + interruption.number  # as a shell does
    if stopped:
        job.print(f"stopped at step {step}: {stopped}; {checkpoint.after_early_stop(run.output_dir)}")
    job.print(f"done: {run.output_dir}/checkpoints/latest")
    return 0
