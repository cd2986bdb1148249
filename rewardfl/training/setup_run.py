"""Open a run folder, resume: compare the run's content with the checkpoint and load its state, open the log."""

import json
import os
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rewardfl.backbones.protocol import Backbone
from rewardfl.config import ConfigError, flat
from rewardfl.config.resuming import NAMED
from rewardfl.config.schema import RunConfig, VerdictConfig
from rewardfl.data.cache import digest
from rewardfl.files import atomic_write, digest_files
from rewardfl.rewards.scoring import Term
from rewardfl.training import alarms, checkpoint, run_folder
from rewardfl.training.checkpoint import after_early_stop
from rewardfl.training.distributed import Distributed
from rewardfl.training.logger import Log, MetricsFile
from rewardfl.training.plan import RewardFlPlan, RunPlan
from rewardfl.training.run_folder import RunFolder, prepare_output_dir
from rewardfl.training.samples import Sample
from rewardfl.training.setup_rewards import check_face_packs
from rewardfl.training.state import Batching, ResumePoint, RunState, TrainState
from rewardfl.verdict import VerdictState

VERSIONED = (
    "rewardfl", "torch", "accelerate", "diffusers", "transformers", "peft", "safetensors", "onnx", "numpy", "av",
    "deepspeed",
)  # fmt: skip


def digest_base_model(backbone: Backbone) -> dict[str, str]:
    """Return {part of the base model: digest of its files}, the distillation included, and a digest of its settings."""
    parts = {part: digest_files(files) for part, files in backbone.weight_files.items()}
    return parts | {"settings": digest(backbone.settings())}


def open_run(
    settings: dict[str, dict[str, Any]], folder: RunFolder | None, job: Distributed, backbone: Backbone
) -> ResumePoint:
    """Lock the run folder (None in a dry run) on the main process, and return where to resume on all processes.

    settings: of config.to_dict.
    """
    base = digest_base_model(backbone)

    def take() -> ResumePoint:
        point = prepare_output_dir(folder, settings, base)
        output_dir = Path(settings["run"]["output_dir"])
        for name in ("checkpoints", "samples", "logs"):
            check_can_create(f"run.output_dir {output_dir}: its folder", output_dir / name)
        check_can_create("data.cache_dir", Path(settings["data"]["cache_dir"] or output_dir / "cache"))
        return point

    return replace(job.run_on_main(take, (checkpoint.CheckpointError, ConfigError)), base=base)


def check_can_create(key: str, folder: Path) -> None:
    """Raise ConfigError if files cannot be written to a folder, which may not exist yet. Leave nothing there."""
    try:
        existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
        with tempfile.TemporaryDirectory(prefix=".try-", dir=existing):
            return
    except OSError as error:
        why = f"{error.strerror or error}: {existing}"
        raise ConfigError(f"{key} {folder} cannot be written ({why}); name another folder") from error


def resume(
    run_plan: RunPlan,
    resume_point: ResumePoint,
    job: Distributed,
    terms: Sequence[Term],
    samples: Sequence[Sample],
    held_out: Sequence[Sample],
    batching: Batching,
) -> tuple[RunState, TrainState | None]:
    """Check the face packs, and load the checkpoint's state; None for a new run.

    Raise CheckpointError if the content of files, or the batching of reward feedback learning, has changed since.
    """
    packs, messages = check_face_packs(run_plan.data, terms, samples, job)
    for message in messages:
        job.print(message)
    content = {
        "data.file_name": {sample.row.id: digest(sample.clip) for sample in samples},
        "evaluation.eval_clips": {sample.row.id: digest(sample.clip) for sample in held_out},
        "lora.init_from": {expert: digest_files([adapter.path]) for expert, adapter in run_plan.init.items()},
        **packs,
    }
    restored, changes = _load_state(run_plan.run, resume_point, content, batching)
    settings = run_plan.sample.verdict if isinstance(run_plan, RewardFlPlan) else None
    learned = None if restored is None else restored.verdict
    verdict = VerdictState(**(learned or {"tau": (settings or VerdictConfig()).tau}))
    return RunState(resume_point=resume_point, content=content, changes=changes, verdict=verdict), restored


def is_finished(run_plan: RunPlan, resume_point: ResumePoint, steps: int, job: Distributed) -> bool:
    """Tell, and print why, whether the run has all its `steps` already or train.early_stop has ended it."""
    rule, path = run_plan.train.early_stop, resume_point.path
    if rule is not None and path is not None:
        history = [json.loads(line) for line in checkpoint.load_metrics(path).splitlines()]
        if why := alarms.early_stop(history, **dict(rule)):
            after = after_early_stop(run_plan.run.output_dir)
            job.print(f"nothing to train: {path} is the last step's; {why}; {after}")
            return True
    if resume_point.step < steps:
        return False
    job.print(
        f"nothing to train: {resume_point.step} steps are done already ({resume_point.path}), train.max_steps asks for "
        f"{steps} in all; raise it to continue"
    )
    return True


def _load_state(
    run: RunConfig, point: ResumePoint, content: Mapping[str, Mapping[str, str]], batching: Batching
) -> tuple[TrainState | None, list[dict[str, Any]]]:
    """Return (the checkpoint's state, all changes that were allowed); (None, []) for a new run."""
    folder, changes = point.path, list(point.changes)
    if folder is None:
        return None, []
    state = TrainState(**checkpoint.load_state(folder))
    for key in sorted(state.content.keys() | content.keys()):
        old, new = state.content.get(key, {}), content.get(key, {})
        if list(old.items()) == list(new.items()):
            continue
        if key in run.resume_with_changes:
            changes.append({"key": key, "old": digest(old), "new": digest(new), "step": point.step})
            continue
        names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
        listed = f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
        words = f"{len(names)} gone, new or of other content ({listed})" if names else "in another order"
        named = f", or accept this with run.resume_with_changes=[{key}]" if key in NAMED else ""
        raise checkpoint.CheckpointError(
            f"{folder} was trained with something else in {key}: {words}; put it back{named}, or "
            f"{checkpoint.new_run(folder)}"
        )
    update = "clips per update (train.per_device_train_batch_size x train.gradient_accumulation_steps x processes)"
    forward = "clips of one size per forward pass (train.per_device_train_batch_size)"
    for was, now, what in (
        (state.global_batch, batching.global_batch, update),
        (state.one_shape_batch, batching.one_shape_batch, forward),
    ):
        if was != now:
            raise checkpoint.CheckpointError(f"{folder} was trained on {was} {what}, not on {now}; set it back")
    return state, changes


def open_log(
    run_plan: RunPlan,
    settings: dict[str, dict[str, Any]],
    job: Distributed,
    folder: RunFolder,
    run: RunState,
    restored: TrainState | None,
    steps: int,
) -> Log:
    """Write run.json, begin metrics.jsonl and the tracker, and return the log.

    settings: of config.to_dict. steps: the total number of updates.
    """
    point, lines = run.resume_point, ""
    if point.path is not None:
        lines = checkpoint.load_metrics(point.path)
        job.print(f"resuming from {point.path} at step {point.step}")
    metrics = MetricsFile(Path(run_plan.run.output_dir) / "metrics.jsonl", lines)
    for change in run.changes:
        job.print(f"changed at step {change['step']}: {run_folder.describe_changes([change])}")

    def begin() -> None:
        metrics.start()
        packs = {key: files for key, files in run.content.items() if key.startswith("reward.")}
        folder.write_run_json(
            {
                "config": settings,
                "command": sys.argv,
                "versions": run_folder.library_versions(VERSIONED),
                "git_commit": run_folder.git_commit(Path(__file__).parent),
                "face_packs": packs,
                "base_model": point.base,
                "init_from": run.content["lora.init_from"],
                "changes": run.changes,
            }
        )

    job.run_on_main(begin, checkpoint.CheckpointError)
    start_tracker(run_plan.run, settings, job, point.step)
    return Log(
        output_dir=run_plan.run.output_dir, early_stop_rule=run_plan.train.early_stop, job=job, metrics=metrics,
        last_step=steps,
        skipped_in_a_row=restored.skipped_in_a_row if restored else 0,
    )  # fmt: skip


def start_tracker(run: RunConfig, settings: dict[str, dict[str, Any]], job: Distributed, first_step: int) -> None:
    """Start run.log_with's tracker on the main process, and show it the settings (config.to_dict).

    Raise ConfigError if it fails, as wandb does without a key.
    """
    folder = Path(run.output_dir)
    errors: tuple[type[Exception], ...] = (OSError,)
    options: dict[str, Any] = {"purge_step": first_step + 1}
    if run.log_with == "wandb" and job.main:
        import wandb

        errors, id_file = (OSError, wandb.Error), folder / "wandb_run_id"
        if not (first_step and id_file.is_file()):
            atomic_write(id_file, f"{uuid.uuid4().hex[:8]}\n")
        run_id = id_file.read_text(encoding="utf-8").strip()
        options = {"name": folder.name, "dir": folder, "id": run_id, "resume": "allow"}

    def start() -> None:
        try:
            job.accelerator.init_trackers("rewardfl", flat(settings), {run.log_with: options})
        except errors as error:
            raise ConfigError(f"run.log_with: {run.log_with} cannot start: {error}; set it to none") from error

    job.run_on_main(start, ConfigError)
