"""What both training scripts do before their first step, of the whole configuration: data, rewards, model, adapter.

Nothing here decides what happens in training.
"""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from rewardfl import config as configuration
from rewardfl import data, groups, lora, offload
from rewardfl.backbones.seam import DTYPES, Backbone, Experts
from rewardfl.backbones.wan import load as wan_load
from rewardfl.backbones.wan import model as wan
from rewardfl.backbones.wan.backbone import Wan22I2V, of_files
from rewardfl.config import AnyConfig
from rewardfl.data.cache import Cache, digest
from rewardfl.files import model_digest
from rewardfl.rewards import FaceIdentityReward
from rewardfl.rewards.face import parity as face_parity
from rewardfl.rewards.face.pack import describe, file_hashes
from rewardfl.rewards.remote import RewardServerError
from rewardfl.rewards.terms import RewardError, Term
from rewardfl.run import checkpoint, checks, prepare, trackers
from rewardfl.run import job as distributed
from rewardfl.weights import lora_files, merge
from rewardfl.weights.shards import Refused

VERSIONED = (
    "rewardfl",
    "torch",
    "accelerate",
    "diffusers",
    "transformers",
    "peft",
    "safetensors",
    "onnx",
    "numpy",
    "av",
    "deepspeed",
)

SEED_STRIDE = 1_000_003  # between the adapters of two experts, which must not start from equal matrices

# what is wrong with the input: one line for the user instead of a traceback
REFUSALS = (
    configuration.ConfigError, data.DataError, checkpoint.CheckpointError, Refused, RewardError, RewardServerError,
    face_parity.FaceParityError, distributed.LaunchError, prepare.CacheError, trackers.TrackerError,
)  # fmt: skip


def command_line(description: str) -> argparse.Namespace:
    """config, dry_run, overrides."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved plan and stop before loading weights"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    return parser.parse_args()


def open_model(cfg: AnyConfig) -> Wan22I2V:
    """The model, with the distillation that belongs to it: all of its files are checked, by their headers alone."""
    trackers.check_installed(cfg.run.log_with)
    checks.check_threads(cfg.run.cpu_threads, os.cpu_count())
    checks.check_paths(cfg)
    layout = wan_load.find(
        cfg.model.model_paths, cfg.model.tokenizer_path, cfg.model.model_id_with_origin_paths, cfg.model.allow_download
    )
    layout = wan_load.open_files(layout)
    targets = lora.target_modules(cfg.lora.lora_target_modules)
    lora.check_targets(targets, wan_load.linear_layers(layout.opened["low_noise"]))
    spatial, temporal = checks.vae_factors(layout.configs)
    checks.check_geometry(
        cfg.data.height, cfg.data.width, cfg.data.num_frames, spatial, temporal, max_pixels=cfg.data.max_pixels
    )
    init_adapters(cfg, layout)
    distilled = (cfg.model.distill_lora_high, cfg.model.distill_lora_low, cfg.model.distill_lora_mode)
    return of_files(layout, checks.boundary_of(cfg, layout.configs), DTYPES[cfg.model.dtype], distilled)


# ------------------------------------------------------------------------------------------------------------
# Clips and rewards


def load_example(cfg: AnyConfig, row: data.Row) -> data.Example:
    size = (cfg.data.height, cfg.data.width, cfg.data.num_frames)
    return data.load_example(row, *size, max_pixels=cfg.data.max_pixels, fps=cfg.data.fps)


def look_at_rows(
    cfg: AnyConfig, rows: Sequence[data.Row], share: prepare.Share, gather: prepare.Gather
) -> tuple[list[data.Row], list[str]]:
    """(rows that can be trained on as far as their files' headers tell, what is said of the others and of these).

    Takes milliseconds per clip. DataError lists every row that cannot be trained on,
    unless data.skip_bad_rows, and is raised where none is left.
    """
    looks = prepare.look_at(rows, cfg.data.num_frames, cfg.data.fps, share, gather)
    problems = [(row.line, problem) for row, look in zip(rows, looks, strict=True) for problem in look.problems]
    good, bad = data.usable_rows(rows, problems, cfg.data.skip_bad_rows)
    said, table = [f"skipped: {line}" for line in bad], rows[0].table
    if bad:
        said.append(f"note: {table}: {len(bad)} of {len(rows)} rows are left out (data.skip_bad_rows)")
    seen = [look for look in looks if not look.problems]
    sizes = (cfg.data.height, cfg.data.width, cfg.data.max_pixels, cfg.data.fps)
    notes = [*data.notes(good), *data.clip_notes(good, seen, *sizes)]
    return good, [*said, *(f"note: {table}: {note}" for note in notes)]


def find_samples(
    cfg: AnyConfig,
    rows: Sequence[data.Row],
    terms: Sequence[Term],
    store: Cache,
    device: torch.device,
    share: prepare.Share,
    gather: prepare.Gather,
) -> tuple[list[prepare.Sample], list[str]]:
    """(samples, what is said of rows that are left out): the clips, read once, and what the rewards keep of them.

    rows: those that look_at_rows left.
    """
    rewards = [term.reward for term in terms]
    size = {name: getattr(cfg.data, name) for name in ("height", "width", "num_frames", "max_pixels", "fps")}
    hashes, unreadable = prepare.hash_files(rows, share, gather)
    problems = [
        (row.line, unreadable[path]) for row in rows for path in dict.fromkeys(row.files.values()) if path in unreadable
    ]
    lost = {line for line, _ in problems}
    whole = [row for row in rows if row.line not in lost]
    load = partial(data.read_example, **size)
    found = gather(prepare.references(store, whole, hashes, size, load, rewards, device, share))
    problems += [(one.line, problem) for one in found for problem in one.problems]
    rows, said = data.usable_rows(rows, problems, cfg.data.skip_bad_rows)
    return prepare.samples(store, rows, hashes, size, found, rewards), said


def check_face_packs(
    cfg: AnyConfig,
    terms: Sequence[Term],
    samples: Sequence[prepare.Sample],
    device: torch.device,
    share: prepare.Share,
    gather: prepare.Gather,
) -> tuple[dict[str, dict[str, str]], list[str]]:
    """({configuration key: {file: sha256}}, what is said of them) of the face rewards, on every process.

    The first process asks, on the first sample's real clip. Raised on all of them: FaceParityError when a pack does not
    answer on the device as onnxruntime does, DataError when that clip cannot be read any more.
    """
    packs = {term.key: term.reward.identity for term in terms if isinstance(term.reward, FaceIdentityReward)}
    if not packs:
        return {}, []
    answers = []
    if share.rank == 0:
        hashes = {key: file_hashes(identity.files) for key, identity in packs.items()}
        try:
            clip = load_example(cfg, samples[0].row).reference.to(device)
            answers.append((hashes, describe(hashes) + face_parity.check_packs(packs, clip), None))
        except (face_parity.FaceParityError, data.DataError) as error:  # the others wait for an answer
            answers.append(({}, [], error))
    ((hashes, said, refused),) = gather(answers)
    if refused:
        raise refused
    return hashes, said


# ------------------------------------------------------------------------------------------------------------
# Model and adapter


def base_model(cfg: AnyConfig, layout: wan_load.Layout) -> dict[str, str]:
    """{part of the base model: digest of its files}, the distillation included; settings: of its configurations."""
    settings = {part: wan_load.config_of(layout, part) for part in (*wan.PARTS.values(), "vae")}
    settings = {
        part: {key: value for key, value in config.items() if not key.startswith("_")}  # the version that wrote it
        for part, config in settings.items()
    }
    settings["boundary_ratio"] = checks.boundary_ratio(layout.configs)
    weights = {part: model_digest(files) for part, files in wan_load.files(layout).items()}
    distilled = {"distill_high": cfg.model.distill_lora_high, "distill_low": cfg.model.distill_lora_low}
    weights |= {name: model_digest([Path(path)]) for name, path in distilled.items() if path}
    return weights | {"settings": digest(settings)}


def conditions_of(cfg: AnyConfig, backbone: Backbone, weights: dict[str, str], store: Cache) -> prepare.Conditions:
    """weights: as base_model gives them."""
    # what the untrained expert's answers depend on: its weights and the distillation that goes with them
    base = weights["high_noise"]
    if "distill_high" in weights:
        base = f"{base} {weights['distill_high']} {cfg.model.distill_lora_mode}"
    return prepare.Conditions(
        store, backbone, weights["text_encoder"], weights["vae"], base, cfg.model.dtype, cfg.data.num_frames
    )


def init_adapters(cfg: AnyConfig, layout: wan_load.Layout) -> dict[str, lora_files.Lora]:
    """{expert: the LoRA that its adapter starts from} of lora.init_from, by their headers; empty without one.

    Refused where they are not of the trained experts, or not of the adapter's rank, alpha, layers and shapes.
    """
    if cfg.lora.init_from is None:
        return {}
    names, where = configuration.trainable_experts(cfg), f"lora.init_from: {cfg.lora.init_from}"
    found = lora_files.read_lora(cfg.lora.init_from)
    if len(found) == len(names) == 1 and found[0].expert is None:
        found = lora_files.assign(found, names[0])
    if {one.expert for one in found} != set(names):
        has = ", ".join(sorted(one.expert or "unknown" for one in found))
        raise Refused(
            f"{where} is for {has}, model.trainable_models {cfg.model.trainable_models} for {', '.join(names)}; give "
            "an adapter of these experts"
        )
    rank, alpha = cfg.lora.lora_rank, cfg.lora.lora_alpha or cfg.lora.lora_rank
    targets = tuple(lora.target_modules(cfg.lora.lora_target_modules))
    for one in found:
        config = wan_load.config_of(layout, wan.PARTS[one.expert])
        adapter = wan_load.Adapter(rank, targets)
        model = wan_load.new_expert(config, torch.float32, config["num_layers"], adapter)
        wanted = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
        _check_init(where, one, rank, alpha, wanted)
    return {one.expert: one for one in found}


def _check_init(where: str, given: lora_files.Lora, rank: int, alpha: float, wanted: dict[str, tuple]) -> None:
    """Refused unless the LoRA is one of this rank and alpha, with exactly the `wanted` tensors, {name: shape}."""
    shapes = {}
    for name, update in given.updates.items():
        if update.sources().keys() != {"down", "up"}:
            raise Refused(f"{where}: {name} has more than a low-rank update; an adapter has no bias and no magnitude")
        if update.rank != rank or update.scale != alpha / rank:
            raise Refused(
                f"{where} has rank {update.rank} and alpha {update.scale * update.rank:g} in {name}, this run "
                f"lora.lora_rank {rank} and lora.lora_alpha {alpha:g}; set them to the same"
            )
        shapes[f"{name}.lora_A.{lora.POLICY}.weight"] = tuple(update.down.shape)
        shapes[f"{name}.lora_B.{lora.POLICY}.weight"] = tuple(update.up.shape)
    if differing := sorted(shapes.items() ^ wanted.items()):
        name, shape = differing[0]
        raise Refused(
            f"{where} has other layers, or other shapes, than lora.lora_target_modules gives in this model, for "
            f"instance {name} of shape {shape} in one of the two"
        )
    merge.check_finite(given)


def load_experts(
    cfg: AnyConfig, backbone: Backbone, device: torch.device, home: torch.device, skip: Sequence[str] = ()
) -> tuple[Experts, dict[str, nn.Module]]:
    """(all experts in their places, the trained ones by name with their LoRA, at `home`).

    skip: experts that nothing will ask.
    """
    names = configuration.trainable_experts(cfg)
    outside = [name for name in backbone.experts if name not in names]
    model_of = dict.fromkeys(backbone.experts)  # one at a time: the host holds one expert
    for name in outside:
        if name not in skip:
            model_of[name] = offload.place(backbone.load_expert(name), cfg.experts.untrained, device)
    for i, name in enumerate(names):
        expert = backbone.load_expert(name).to(home)
        lora.inject(
            expert, cfg.lora.lora_rank, cfg.lora.lora_alpha or cfg.lora.lora_rank,
            lora.target_modules(cfg.lora.lora_target_modules), cfg.run.seed + i * SEED_STRIDE,
        )  # fmt: skip
        if cfg.train.use_gradient_checkpointing_offload:
            expert.enable_gradient_checkpointing(offload.checkpoint_on_host)
        elif cfg.train.use_gradient_checkpointing:
            expert.enable_gradient_checkpointing()
        model_of[name] = expert
    return Experts(model_of, outside), {name: model_of[name] for name in names}


def seed_generators(seed: int, step: int, rank: int) -> None:
    """Python's, numpy's and torch's own generators, which nothing here draws from but a reward of the user's may.

    A function of the step, so that a resumed run draws what it would have drawn.
    """
    set_seed(groups.noise_seed(seed, step, f"process {rank}") % 2**32)


# ------------------------------------------------------------------------------------------------------------
# What a run leaves


def open_run(
    cfg: AnyConfig, run_folder: checkpoint.RunFolder, accelerator: Accelerator, weights: Mapping[str, str]
) -> checkpoint.Resumption:
    """What to go on from: the main process locks and looks at the folder, the others do as it says.

    weights: as base_model gives them.
    """
    open_folder = partial(checkpoint.prepare_output_dir, run_folder, configuration.to_dict(cfg), weights)
    return distributed.by_main(accelerator, open_folder, checkpoint.CheckpointError)


def begin_run(
    cfg: AnyConfig,
    run_folder: checkpoint.RunFolder,
    metrics_file: checkpoint.MetricsFile,
    last_line: int,
    weights: Mapping[str, str],
    content: Mapping[str, Mapping[str, str]],
    changes: Sequence[Mapping[str, Any]],
) -> None:
    """For the main process: write run.json, and cut the metrics back to step `last_line`."""
    run_folder.keep()
    metrics_file.cut_back(last_line)
    packs = {key: files for key, files in content.items() if key.startswith("reward.")}
    checkpoint.write_run_json(
        run_folder, configuration.to_dict(cfg), sys.argv, checkpoint.library_versions(VERSIONED),
        checkpoint.git_commit(Path(__file__).parent), packs, weights, content["lora.init_from"], changes,
    )  # fmt: skip


def content_of(
    samples: Sequence[prepare.Sample],
    held_out: Sequence[prepare.Sample],
    face_packs: Mapping[str, Mapping[str, str]],
    init: Mapping[str, lora_files.Lora],
) -> dict[str, dict[str, str]]:
    """{key of the configuration: {what it leads to, in order: its digest}}, which must not change in a run."""
    return {
        "data.file_name": {sample.row.id: digest(sample.clip) for sample in samples},
        "evaluation.eval_clips": {sample.row.id: digest(sample.clip) for sample in held_out},
        "lora.init_from": {expert: model_digest([one.path]) for expert, one in init.items()},
        **face_packs,
    }


def save_adapters(trained: dict[str, nn.Module], states: dict[str, dict[str, Tensor]], folder: Path) -> None:
    """states: lora.adapter_state of each, gathered by all processes."""
    for name, expert in trained.items():
        lora.save_adapter(expert, folder / wan.PARTS[name], states[name])


def load_adapters(trained: dict[str, nn.Module], folder: Path) -> None:
    """CheckpointError for a checkpoint without the adapters that are trained."""
    for name, expert in trained.items():
        try:
            lora.load_adapter(expert, folder / wan.PARTS[name])
        except (ValueError, FileNotFoundError) as error:
            raise checkpoint.CheckpointError(f"{folder} cannot be gone on from: {error}") from error


def start_adapters(trained: dict[str, nn.Module], init: Mapping[str, lora_files.Lora]) -> None:
    """init: as init_adapters gives them; without them the adapters stay as they are, and change nothing."""
    for name, one in init.items():
        lora.start_from(trained[name], one)


def load_state(
    cfg: AnyConfig,
    opened: checkpoint.Resumption,
    content: Mapping[str, Mapping[str, str]],
    global_batch: int | None = None,
    one_shape_batch: int | None = None,
) -> tuple[dict | None, list[dict[str, Any]]]:
    """(a checkpoint's state, all changes that run.resume_with_changes has allowed); (None, []) to start anew.

    CheckpointError when what the configuration leads to (`content`, as content_of gives it) has changed since, or how
    the data are batched. one_shape_batch: clips per forward pass where they differ in size, because their order
    depends on it then.
    """
    folder, changes = opened.path, list(opened.changes)
    if folder is None:
        return None, []
    state = checkpoint.load_state(folder)
    if "content" not in state or state["step"] != opened.step:
        raise checkpoint.CheckpointError(
            f"{folder} was not written by this version of rewardfl; go on with the version that wrote it, or start a "
            f"new run in another run.output_dir from its adapter: lora.init_from={folder}"
        )
    for key in sorted(state["content"].keys() | content.keys()):
        old, new = state["content"].get(key, {}), content.get(key, {})
        words = _difference(old, new)
        if words and key not in cfg.run.resume_with_changes:
            raise checkpoint.CheckpointError(_changed_content(folder, key, words))
        if words:
            changes.append({"key": key, "old": digest(old), "new": digest(new), "step": opened.step})
    if state.get("global_batch") != global_batch:
        raise checkpoint.CheckpointError(
            f"{folder} was trained on {state.get('global_batch')} clips per update, "
            f"train.per_device_train_batch_size x train.gradient_accumulation_steps x the processes now give "
            f"{global_batch}; they may change, their product may not"
        )
    if state.get("one_shape_batch") != one_shape_batch:
        raise checkpoint.CheckpointError(
            f"{folder} was trained on clips of several sizes with train.per_device_train_batch_size "
            f"{state.get('one_shape_batch')}, now {one_shape_batch}: their order would change; set it back"
        )
    return state, changes


def _difference(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """What is different in content, in words; empty when nothing is."""
    found = {
        "gone": [name for name in old if name not in new],
        "new": [name for name in new if name not in old],
        "of other content": [name for name in old if name in new and old[name] != new[name]],
    }
    words = [
        f"{len(names)} {what} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
        for what, names in found.items()
        if names
    ]
    return ", ".join(words) or ("in another order" if list(old) != list(new) else "")


def _changed_content(folder: Path, key: str, words: str) -> str:
    named = f", or accept this with run.resume_with_changes=[{key}]" if key in checkpoint.NAMED_KEYS else ""
    return (
        f"{folder} was trained with something else in {key}: {words}; put it back{named}, or start a new run in "
        f"another run.output_dir from its adapter: lora.init_from={folder}"
    )


def load_schedule(scheduler: LambdaLR, state: dict[str, Any], train: configuration.GrpoTrainConfig) -> None:
    """Go on with a scheduler's state_dict, at the configuration's rate and weight decay, which may be others than then.

    Where they are not, this changes nothing, to the last bit.
    """
    step = state["last_epoch"]
    rates = [train.learning_rate * factor(step) for factor in scheduler.lr_lambdas]
    scheduler.load_state_dict(state | {"base_lrs": [train.learning_rate] * len(rates), "_last_lr": rates})
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group |= {"initial_lr": train.learning_rate, "lr": rate, "weight_decay": train.weight_decay}


def notes_on_changes(named: Sequence[str], changes: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is said of run.resume_with_changes when a run starts."""
    known = {change["key"] for change in changes}
    return [f"changed at step {change['step']}: {checkpoint.listing([change])}" for change in changes] + [
        f"note: run.resume_with_changes names {key}, which has not changed" for key in named if key not in known
    ]


@torch.no_grad()
def sample_videos(
    cfg: AnyConfig,
    samples: Sequence[prepare.Sample],
    generate: Callable[[int], tuple[int, Tensor]],
    share: prepare.Share,
    step: int,
) -> Path:
    """Write samples/step-*/<n>.mp4 of the first samples, each process its share; the folder.

    generate: row -> (row, its video (3, F, H, W)), asked as often on every process; another row where this one's inputs
    are lost. A video that the disk does not take, or whose real clip cannot be read any more, is said and left out.
    """
    folder = Path(cfg.run.output_dir) / "samples" / f"step-{step:06d}"
    for wanted, mine in share.rounds(range(min(cfg.run.sample_videos, len(samples)))):
        row, video = generate(wanted)
        path = folder / f"{wanted:02d}.mp4"
        if mine:
            try:
                with checkpoint.tolerant(print, step, last=False):
                    write_video(cfg, samples[row], video, path)
            except data.DataError as error:
                print(f"warning: step {step}: {path} is left out, since its real clip cannot be shown: {error}")
    return folder


def write_video(cfg: AnyConfig, sample: prepare.Sample, video: Tensor, path: Path) -> None:
    """The real clip, its face marked, beside the generated `video` (3, F, H, W).

    WriteError as a checkpoint's; DataError where the real clip is not what it was when training began.
    """
    real = load_example(cfg, sample.row).video
    if real.shape != video.shape:
        sizes = " x ".join(map(str, real.shape[1:])), " x ".join(map(str, video.shape[1:]))
        raise data.DataError(f"{sample.row.video}: is {sizes[0]} (frames x height x width) now, it was {sizes[1]}")
    if "boxes" in (sample.references[0] or {}) and sample.row.reference_video is None:
        real = data.draw_boxes(real, sample.references[0]["boxes"])  # whom the reward follows
    fps = cfg.data.fps or data.frame_rate(sample.row.video)
    with checkpoint.writing(path, "training goes on without this sample video"):
        path.parent.mkdir(parents=True, exist_ok=True)
        data.write_video(path, torch.cat([real, video.float().cpu()], -1), fps=fps)
