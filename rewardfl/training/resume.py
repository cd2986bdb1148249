"""Resume a run: compare its content with the checkpoint and load the saved state."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rewardfl import config as configuration
from rewardfl.backbones.protocol import Backbone
from rewardfl.config import AnyConfig
from rewardfl.data.cache import digest
from rewardfl.files import model_digest
from rewardfl.rewards.scoring import Term
from rewardfl.training import alarms, checkpoint
from rewardfl.training.checkpoint import AFTER_EARLY_STOP, describe_best
from rewardfl.training.distributed import Distributed
from rewardfl.training.lora_init import read_initial_adapters
from rewardfl.training.run_folder import MAY_CHANGE_IF_NAMED, RunFolder, prepare_output_dir
from rewardfl.training.samples import Sample
from rewardfl.training.setup_rewards import _check_face_packs
from rewardfl.training.state import ResumePoint, RunState


def digest_base_model(backbone: Backbone) -> dict[str, str]:
    """{part of the base model: digest of its files}, the distillation included; settings: of what else it is."""
    parts = {part: model_digest(files) for part, files in backbone.weight_files().items()}
    return parts | {"settings": digest(backbone.settings())}


def open_run(cfg: AnyConfig, run_folder: RunFolder | None, job: Distributed, backbone: Backbone) -> ResumePoint:
    """Take the folder: the main process locks it and looks at it, the others do as it says.

    run_folder: None for a dry run, which only looks.
    """
    base = digest_base_model(backbone)
    take = partial(prepare_output_dir, run_folder, configuration.to_dict(cfg), base)
    return replace(job.by_main(take, checkpoint.CheckpointError), base=base)


def resume(
    cfg: AnyConfig,
    opened: ResumePoint,
    job: Distributed,
    backbone: Backbone,
    terms: Sequence[Term],
    samples: Sequence[Sample],
    held_out: Sequence[Sample] = (),
    batches: Mapping[str, int | None] | None = None,
) -> RunState:
    """The checkpoint's state, if there is one; the face packs are asked first whether they answer as onnxruntime does.

    CheckpointError when what the configuration leads to has changed since, or how the data are batched. batches:
    global_batch, clips per update, and one_shape_batch, clips per forward pass where they differ in size, because
    their order depends on it then.
    """
    packs, said = _check_face_packs(cfg, terms, samples, job)
    for line in said:
        job.say(line)
    init = read_initial_adapters(cfg, backbone)
    content = {
        "data.file_name": {sample.row.id: digest(sample.clip) for sample in samples},
        "evaluation.eval_clips": {sample.row.id: digest(sample.clip) for sample in held_out},
        "lora.init_from": {expert: model_digest([one.path]) for expert, one in init.items()},
        **packs,
    }
    state, changes = _load_state(cfg, opened, content, batches or {})
    return RunState(opened, content, init, changes, state)


def is_finished(cfg: AnyConfig, opened: ResumePoint, steps: int, job: Distributed) -> bool:
    """Whether the run has all its `steps` already, or train.early_stop has ended it, which is then said."""

    def ended() -> str:
        history = map(json.loads, checkpoint.load_metrics(opened.path).splitlines())
        return alarms.early_stop(list(history), **dict(rule))

    rule = cfg.train.early_stop
    why = "" if rule is None or opened.path is None else job.by_main(ended, checkpoint.CheckpointError)
    if why:
        job.say(f"nothing to train: {opened.path} is the last step's; {why}; {describe_best(cfg)}; {AFTER_EARLY_STOP}")
        return True
    if opened.step < steps:
        return False
    key = "train.num_train_epochs" if cfg.train.max_steps is None else "train.max_steps"
    job.say(
        f"nothing to train: {opened.step} steps are done already ({opened.path}), {key} asks for {steps} in all; "
        "raise it to go on"
    )
    return True


def _load_state(
    cfg: AnyConfig,
    opened: ResumePoint,
    content: Mapping[str, Mapping[str, str]],
    batches: Mapping[str, int | None],
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(the checkpoint's state, all changes that were allowed); ({}, []) to start anew."""
    folder, changes = opened.path, list(opened.changes)
    if folder is None:
        return {}, []
    state = checkpoint.load_state(folder)
    for key in sorted(state["content"].keys() | content.keys()):
        old, new = state["content"].get(key, {}), content.get(key, {})
        if list(old.items()) == list(new.items()):
            continue
        if key in cfg.run.resume_with_changes:
            changes.append({"key": key, "old": digest(old), "new": digest(new), "step": opened.step})
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
