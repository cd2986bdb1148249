"""Resume a run: compare its content with the checkpoint and load the saved state."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rewardfl.backbones.protocol import Backbone
from rewardfl.config import AnyConfig, to_dict
from rewardfl.data.cache import digest
from rewardfl.files import digest_files
from rewardfl.rewards.scoring import Term
from rewardfl.training import alarms, checkpoint
from rewardfl.training.checkpoint import AFTER_EARLY_STOP, format_best
from rewardfl.training.distributed import Distributed
from rewardfl.training.lora_init import read_initial_adapters
from rewardfl.training.run_folder import MAY_CHANGE_IF_NAMED, RunFolder, prepare_output_dir
from rewardfl.training.samples import Sample
from rewardfl.training.setup_rewards import check_face_packs
from rewardfl.training.state import ResumePoint, RunState


def digest_base_model(backbone: Backbone) -> dict[str, str]:
    """Return {part of the base model: digest of its files}, the distillation included, and a digest of its settings."""
    parts = {part: digest_files(files) for part, files in backbone.weight_files.items()}
    return parts | {"settings": digest(backbone.settings())}


def open_run(cfg: AnyConfig, run_folder: RunFolder | None, job: Distributed, backbone: Backbone) -> ResumePoint:
    """Lock the run folder (None in a dry run) on the main process, and return where to resume on all processes."""
    base = digest_base_model(backbone)
    take = partial(prepare_output_dir, run_folder, to_dict(cfg), base)
    return replace(job.run_on_main(take, checkpoint.CheckpointError), base=base)


def resume(
    cfg: AnyConfig,
    resume_point: ResumePoint,
    job: Distributed,
    backbone: Backbone,
    terms: Sequence[Term],
    samples: Sequence[Sample],
    held_out: Sequence[Sample] = (),
    batches: Mapping[str, int | None] | None = None,
) -> RunState:
    """Check the face packs, and load the checkpoint's state, if there is one.

    Raise CheckpointError where the content of files or the batching has changed since. batches: global_batch, clips per
    update; one_shape_batch, clips per forward pass where clips differ in size: their order depends on it.
    """
    packs, messages = check_face_packs(cfg, terms, samples, job)
    for message in messages:
        job.print(message)
    init = read_initial_adapters(cfg, backbone)
    content = {
        "data.file_name": {sample.row.id: digest(sample.clip) for sample in samples},
        "evaluation.eval_clips": {sample.row.id: digest(sample.clip) for sample in held_out},
        "lora.init_from": {expert: digest_files([adapter.path]) for expert, adapter in init.items()},
        **packs,
    }
    state, changes = _load_state(cfg, resume_point, content, batches or {})
    return RunState(resume_point=resume_point, content=content, init=init, changes=changes, state=state)


def is_finished(cfg: AnyConfig, resume_point: ResumePoint, steps: int, job: Distributed) -> bool:
    """Tell, and print why, whether the run has all its `steps` already or train.early_stop has ended it."""

    def ended() -> str:
        history = map(json.loads, checkpoint.load_metrics(resume_point.path).splitlines())
        return alarms.early_stop(list(history), **dict(rule))

    rule = cfg.train.early_stop
    why = "" if rule is None or resume_point.path is None else job.run_on_main(ended, checkpoint.CheckpointError)
    if why:
        job.print(
            f"nothing to train: {resume_point.path} is the last step's; {why}; {format_best(cfg)}; {AFTER_EARLY_STOP}"
        )
        return True
    if resume_point.step < steps:
        return False
    key = "train.num_train_epochs" if cfg.train.max_steps is None else "train.max_steps"
    job.print(
        f"nothing to train: {resume_point.step} steps are done already ({resume_point.path}), {key} asks for {steps} "
        "in all; raise it to go on"
    )
    return True


def _load_state(
    cfg: AnyConfig, point: ResumePoint, content: Mapping[str, Mapping[str, str]], batches: Mapping[str, int | None]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return (the checkpoint's state, all changes that were allowed); ({}, []) for a new run."""
    folder, changes = point.path, list(point.changes)
    if folder is None:
        return {}, []
    state = checkpoint.load_state(folder)
    for key in sorted(state["content"].keys() | content.keys()):
        old, new = state["content"].get(key, {}), content.get(key, {})
        if list(old.items()) == list(new.items()):
            continue
        if key in cfg.run.resume_with_changes:
            changes.append({"key": key, "old": digest(old), "new": digest(new), "step": point.step})
            continue
        names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
        listed = f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
        words = f"{len(names)} gone, new or of other content ({listed})" if names else "in another order"
        named = f", or accept this with run.resume_with_changes=[{key}]" if key in MAY_CHANGE_IF_NAMED else ""
        raise checkpoint.CheckpointError(
            f"{folder} was trained with something else in {key}: {words}; put it back{named}, or start a new run in "
            f"another run.output_dir from its adapter: lora.init_from={folder}"
        )
    was, now = state.get("global_batch"), batches.get("global_batch")
    if was != now:
        raise checkpoint.CheckpointError(
            f"{folder} was trained on {was} clips per update, train.per_device_train_batch_size x "
            f"train.gradient_accumulation_steps x the processes now give {now}; they may change, their product may not"
        )
    was, now = state.get("one_shape_batch"), batches.get("one_shape_batch")
    if was != now:
        raise checkpoint.CheckpointError(
            f"{folder} was trained on clips of several sizes with train.per_device_train_batch_size {was}, now {now}: "
            "their order would change; set it back"
        )
    return state, changes
