"""Set-up of both training scripts, as calls that return plain records: files, data, rewards, model, what a run leaves.

Nothing here decides what happens in training. Whatever is wrong with the input is refused here, most of it before any
weight is read.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import set_seed
from diffusers import ModelMixin
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from rewardfl import backbones, data, groups, grpo, lora, machine, reward_flow, trust
from rewardfl import config as configuration
from rewardfl.backbones import protocol
from rewardfl.backbones.protocol import DTYPES, Adapter, Backbone, Conditioning, Experts, Source, Velocity
from rewardfl.config import AnyConfig
from rewardfl.data.cache import Cache, digest
from rewardfl.files import escape_unencodable_output, model_digest, printable
from rewardfl.memory import attention, compiling, offload, sharding
from rewardfl.optim import Average, learning_rate_factor
from rewardfl.rewards import FaceIdentityReward, registry
from rewardfl.rewards.face import parity as face_parity
from rewardfl.rewards.face.pack import describe_packs, file_hashes
from rewardfl.rewards.remote import RewardServerError
from rewardfl.rewards.scoring import RewardError, Term, check_reward
from rewardfl.run import checkpoint, checks, invariants, monitor, prepare, rounding, work
from rewardfl.run.anchors import Anchors
from rewardfl.run.job import Job, LaunchError
from rewardfl.run.log import Log, start_tracker
from rewardfl.run.signals import Interruption
from rewardfl.weights import lora_files, merge
from rewardfl.weights.shards import Refused

VERSIONED = (
    "rewardfl", "torch", "accelerate", "diffusers", "transformers", "peft", "safetensors", "onnx", "numpy", "av",
    "deepspeed",
)  # fmt: skip

AFTER_EARLY_STOP = "to go on, set train.early_stop=null or raise its patience"
PROMPT_FPS = 16  # frames per second of sample videos that no real clip gives a rate
SEED_STRIDE = 1_000_003  # between the adapters of two experts, which must not start from equal matrices

# what is wrong with the input: one line for the user instead of a traceback
REFUSALS = (
    configuration.ConfigError,
    data.DataError,
    checkpoint.CheckpointError,
    Refused,
    RewardError,
    RewardServerError,
    face_parity.FaceParityError,
    LaunchError,
    prepare.CacheError,
    grpo.RatioError,
    attention.BackendError,
)


def main(
    description: str, kind: type[AnyConfig], train: Callable[[Any, bool, Interruption, checkpoint.RunFolder], int]
) -> int:
    """A script: its command line, `train`, and the exit code of what it gives or raises."""
    escape_unencodable_output()
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved plan and stop before loading weights"
    )
    trust.add_option(parser)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_intermixed_args()  # settings may stand on both sides of an option
    try:
        with Interruption() as interruption, checkpoint.RunFolder() as run_folder:
            cfg = configuration.load(args.config, args.overrides, kind)
            return train(cfg, args.dry_run, interruption, run_folder)
    except REFUSALS as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return 2
    except invariants.InvariantError as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return error.exit_code


# What will be done, as far as the configuration and headers tell


def model_source(cfg: AnyConfig) -> Source:
    """What the configuration says of the model's files."""
    model = cfg.model
    return Source(
        model_paths=model.model_paths,
        tokenizer_path=model.tokenizer_path,
        origin_paths=model.model_id_with_origin_paths,
        allow_download=model.allow_download,
        boundary=model.min_timestep_boundary,
        embedded_guidance=model.embedded_guidance,
        dtype=model.dtype,
        distilled=(model.distill_lora_high, model.distill_lora_low, model.distill_lora_mode),
    )


def open_model(cfg: AnyConfig) -> Backbone:
    """The model: all of its files are checked by their headers alone, and so is what the run wants of them."""
    checks.check_tracker(cfg.run.log_with)
    checks.check_threads(cfg.run.cpu_threads, machine.usable_cores())
    checks.check_paths(cfg)
    backbone = backbones.open(cfg.model.model_name, model_source(cfg))
    lora.check_targets(work.lora_targets(cfg, backbone), backbone.linear_layers(), backbone.layer_names)
    backbone.check_clips(cfg.data.height, cfg.data.width, cfg.data.num_frames, cfg.data.max_pixels)
    init_adapters(cfg, backbone)
    if cfg.model.attention_backend != attention.NATIVE or attention.VARIABLE in os.environ:
        network = next(iter(backbone.on_meta(512, 512, cfg.data.num_frames).experts.values()))[0].build(None)
        attention.check_name(cfg.model.attention_backend, network, cfg.model.allow_download)
    return backbone


def find_rewards(cfg: AnyConfig, backbone: Backbone, here: bool = True) -> list[registry.Chosen]:
    """The rewards by their classes alone, before anything is read or written.

    RewardError for one that is not there, does not take its settings, or has no gradient to be trained on; ConfigError
    for one that the clips are too short for. here: whether the files that settings name must exist.
    """
    found = registry.find_terms(configuration.wanted_rewards(cfg, backbone.pixels_per_token), here)
    check_frames(cfg, found)
    if isinstance(cfg, configuration.RewardFlConfig) and not configuration.is_supervised(cfg):
        registry.check_trainable(found)
    return found


def check_frames(cfg: AnyConfig, found: Sequence[registry.Chosen]) -> None:
    """ConfigError where a reward looks at what changes from frame to frame, and the frames are too few."""
    for one, cls in found:
        if cfg.data.num_frames < cls.fewest_frames:
            raise configuration.ConfigError(
                f"{one.key} judges at least {cls.fewest_frames} frames, and data.num_frames is {cfg.data.num_frames}; "
                "take a reward that judges each picture (docs/rewards.md), or remove it"
            )


def open_job(cfg: AnyConfig) -> Job:
    """The run's processes, connected. LaunchError or ConfigError when what runs is not what was asked for."""
    several = len(configuration.trained_positions(cfg)) > 1
    job = Job(cfg.train.max_grad_norm, several, cfg.run.cpu_threads, cfg.run.log_with, cfg.run.output_dir)
    checks.check_sharding(cfg, job.sharding)
    attention.check_backward(cfg.model.attention_backend, DTYPES[cfg.model.dtype], job.device)
    if cfg.train.compile_blocks:
        compiling.check_compiler(job.device)
    return job


@dataclass(frozen=True)
class Rows:
    """The rows that can be used as far as their files' headers tell, and what is said of the others and of these."""

    train: list[data.Row]
    held_out: list[data.Row]  # of evaluation.eval_clips
    said: list[str]


def look_at_rows(cfg: AnyConfig, job: Job, backbone: Backbone, rewards: Sequence[registry.Chosen] = ()) -> Rows:
    """Look at the headers of all clips, milliseconds for each, and at what the rewards' classes need of a row.

    rewards: of find_rewards.

    DataError lists every row that cannot be used, unless data.skip_bad_rows, and is raised where none is left.
    """
    rows, said = _look_at(cfg, data.load_metadata(cfg.data.file_name), job, backbone, rewards)
    held_out: list[data.Row] = []
    if isinstance(cfg, configuration.FlowGrpoConfig) and cfg.evaluation.eval_clips:
        others = data.load_metadata(cfg.evaluation.eval_clips, "evaluation.eval_clips")
        held_out, more = _look_at(cfg, others, job, backbone, rewards)
        said = [*said, *more, *checks.check_held_out(rows, held_out)]
    return Rows(rows, held_out, said)


def _look_at(
    cfg: AnyConfig, rows: Sequence[data.Row], job: Job, backbone: Backbone, rewards: Sequence[registry.Chosen] = ()
) -> tuple[list[data.Row], list[str]]:
    look = partial(data.look_at, num_frames=cfg.data.num_frames, fps=cfg.data.fps, takes_image=backbone.takes_image)
    looks = prepare.read_all(look, rows, job.share, job.gather_lists, "headers")
    problems = [(row.line, problem) for row, look in zip(rows, looks, strict=True) for problem in look.problems]
    # of the others it depends on their settings: find_samples asks them
    needs: dict[str, str] = {
        reward.key: str(cls.compares_with)
        for i, (reward, cls) in enumerate(rewards)
        if (reward.weight > 0 or i == 0) and isinstance(cls.compares_with, str)
    }
    problems += [(row.line, lack) for row in rows if not row.problem for lack in _lacks(cfg, row, needs)]
    refused = {size: work.size_problem(cfg, backbone, size) for size in {row.size for row in rows}}
    problems += [(row.line, refused[row.size]) for row in rows if refused[row.size]]
    good, bad = data.usable_rows(rows, problems, cfg.data.skip_bad_rows)
    said, table = [f"skipped: {line}" for line in bad], rows[0].table
    if bad:
        said.append(f"note: {table}: {len(bad)} of {len(rows)} rows are left out (data.skip_bad_rows)")
    said += _anchor_notes(cfg, good)
    lines = {row.line for row in good}
    seen = [look for row, look in zip(rows, looks, strict=True) if row.line in lines]
    sizes = (cfg.data.height, cfg.data.width, cfg.data.max_pixels, cfg.data.fps)
    notes = [*data.notes(good), *data.clip_notes(good, seen, *sizes), *work.size_notes(cfg, good)]
    return good, [*said, *(f"note: {table}: {note}" for note in notes)]


def _anchor_notes(cfg: AnyConfig, rows: Sequence[data.Row]) -> list[str]:
    """Return a note on rows without a clip to anchor at. DataError where no row has one."""
    without = sum(row.video is None for row in rows)
    if cfg.anchor.weight == 0 or not without:
        return []
    if without == len(rows):
        raise data.DataError("anchor.weight: no row names a video, so there is no clip to anchor at; set it to 0")
    return [f"note: {rows[0].table}: {without} of {len(rows)} rows name no video and have no anchor (anchor.weight)"]


def say_plan(
    cfg: AnyConfig, backbone: Backbone, wanted: Sequence[registry.Chosen], rows: Rows, steps: int, job: Job
) -> None:
    """Print what the run will do: where it differs from the checkpoint, its configuration, rewards, arithmetic, sigmas.

    wanted: find_rewards'.
    """
    trained = [f"{one.weight:g} x {one.label} ({one.name})" for one, _ in wanted if one.weight > 0]
    if isinstance(cfg, configuration.FlowGrpoConfig):
        trained += [f"{weight:g} x {part}" for part, weight in configuration.part_weights(cfg).items()]
    trained += [f"{cfg.anchor.weight:g} x the data anchor"] if cfg.anchor.weight else []
    measured = [f"{one.label} ({one.name})" for one, _ in wanted if one.weight == 0]
    rewards = f"trained on {' + '.join(trained)}; only measured: {', '.join(measured) or 'nothing'}"
    if configuration.is_supervised(cfg):
        rewards = "supervised fine-tuning: trained on the clips alone, without rollouts; no reward is computed"
    notes = [f"note: {note}" for note in backbone.differences(cfg.sample.shift, cfg.sample.guidance_scale)]
    if isinstance(cfg, configuration.RewardFlConfig) and cfg.reward.kl_gradient == "through_trajectory":
        notes.append("note: reward.kl_gradient: through_trajectory is now reference_constant; the old name will go")
    if cfg.train.warmup_steps > steps:
        notes.append(f"note: train.warmup_steps {cfg.train.warmup_steps} do not end within the run's {steps} steps")
    overview = work.overview(cfg, backbone, len(rows.train), steps, job.world)
    for line in [*notes, *rows.said, configuration.dump(cfg), rewards, overview]:
        job.say(line)


# The run's folder, and what it goes on from


@dataclass(frozen=True)
class ResumedRun:
    """What the run is made of, and the state of the checkpoint that it goes on from.

    content: {key of the configuration: {what it leads to, in order: its digest}}, which must not change in a run.
    changes: all that run.resume_with_changes has allowed. state: {} to start anew; what is loaded of it is taken out of
    it, so that nothing is held twice.
    """

    opened: checkpoint.Resumption
    content: Mapping[str, Mapping[str, str]]
    init: Mapping[str, lora_files.Lora]
    changes: list[dict[str, Any]]
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """The steps that are done."""
        return self.opened.step


def identify(backbone: Backbone) -> dict[str, str]:
    """{part of the base model: digest of its files}, the distillation included; settings: of what else it is."""
    parts = {part: model_digest(files) for part, files in backbone.weight_files().items()}
    return parts | {"settings": digest(backbone.settings())}


def open_run(
    cfg: AnyConfig, run_folder: checkpoint.RunFolder | None, job: Job, backbone: Backbone
) -> checkpoint.Resumption:
    """Take the folder: the main process locks it and looks at it, the others do as it says.

    run_folder: None for a dry run, which only looks.
    """
    base = identify(backbone)
    take = partial(checkpoint.prepare_output_dir, run_folder, configuration.to_dict(cfg), base)
    return replace(job.by_main(take, checkpoint.CheckpointError), base=base)


def resume(
    cfg: AnyConfig,
    opened: checkpoint.Resumption,
    job: Job,
    backbone: Backbone,
    terms: Sequence[Term],
    samples: Sequence[prepare.Sample],
    held_out: Sequence[prepare.Sample] = (),
    batches: Mapping[str, int | None] | None = None,
) -> ResumedRun:
    """The checkpoint's state, if there is one; the face packs are asked first whether they answer as onnxruntime does.

    CheckpointError when what the configuration leads to has changed since, or how the data are batched. batches:
    global_batch, clips per update, and one_shape_batch, clips per forward pass where they differ in size, because
    their order depends on it then.
    """
    packs, said = _check_face_packs(cfg, terms, samples, job)
    for line in said:
        job.say(line)
    init = init_adapters(cfg, backbone)
    content = {
        "data.file_name": {sample.row.id: digest(sample.clip) for sample in samples},
        "evaluation.eval_clips": {sample.row.id: digest(sample.clip) for sample in held_out},
        "lora.init_from": {expert: model_digest([one.path]) for expert, one in init.items()},
        **packs,
    }
    state, changes = _load_state(cfg, opened, content, batches or {})
    return ResumedRun(opened, content, init, changes, state)


def is_finished(cfg: AnyConfig, opened: checkpoint.Resumption, steps: int, job: Job) -> bool:
    """Whether the run has all its `steps` already, or train.early_stop has ended it, which is then said."""

    def ended() -> str:
        history = map(json.loads, checkpoint.load_metrics(opened.path).splitlines())
        return monitor.early_stop(list(history), **dict(rule))

    rule = cfg.train.early_stop
    why = "" if rule is None or opened.path is None else job.by_main(ended, checkpoint.CheckpointError)
    if why:
        job.say(f"nothing to train: {opened.path} is the last step's; {why}; {best_of(cfg)}; {AFTER_EARLY_STOP}")
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
    opened: checkpoint.Resumption,
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
        named = f", or accept this with run.resume_with_changes=[{key}]" if key in checkpoint.NAMED_KEYS else ""
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


# Clips and rewards


def example_of(cfg: AnyConfig, row: data.Row) -> data.Example:
    """The row's clips, at the configured size."""
    size = (cfg.data.height, cfg.data.width, cfg.data.num_frames)
    return data.load_example(row, *size, max_pixels=cfg.data.max_pixels, fps=cfg.data.fps)


def open_cache(cfg: AnyConfig) -> Cache:
    """The folder of what is computed once per clip."""
    return Cache(cfg.data.cache_dir or f"{cfg.run.output_dir}/cache")


def find_samples(
    cfg: AnyConfig, rows: Sequence[data.Row], terms: Sequence[Term], store: Cache, job: Job
) -> list[prepare.Sample]:
    """The clips, read once, and what the rewards keep of them; what is left out is said.

    rows: those that look_at_rows left.
    """
    if not rows:
        return []
    rewards = [term.reward for term in terms]
    size = {name: getattr(cfg.data, name) for name in ("height", "width", "num_frames", "max_pixels", "fps")}
    hashes, unreadable = prepare.hash_files(rows, job.share, job.gather_lists)
    problems = [
        (row.line, unreadable[path]) for row in rows for path in dict.fromkeys(row.files.values()) if path in unreadable
    ]
    problems += [(row.line, problem) for row in rows for problem in nothing_to_compare(cfg, row, terms)]
    lost = {line for line, _ in problems}
    whole = [row for row in rows if row.line not in lost]
    keys = {row.line: prepare.clip_key(row, hashes, size) for row in whole}
    load = partial(example_of, cfg)
    found = job.gather_lists(prepare.references(store, whole, keys, load, rewards, job.device, job.share))
    problems += [(one.line, one.problem) for one in found if one.problem]
    rows, bad = data.usable_rows(rows, problems, cfg.data.skip_bad_rows)
    for line in bad:
        job.say(f"skipped: {line}")
    return prepare.samples(store, rows, keys, found, rewards)


def nothing_to_compare(cfg: AnyConfig, row: data.Row, terms: Sequence[Term]) -> list[str]:
    """What a trained reward, or the first one, needs of the row and does not find, in words."""
    needs = {term.key: term.reward.compares_with for term in terms if term.weight > 0 or term is terms[0]}
    return _lacks(cfg, row, needs)


def _lacks(cfg: AnyConfig, row: data.Row, needs: dict[str, str]) -> list[str]:
    """What the row lacks of the needs, {key of a reward: what it compares with}, in words."""
    if isinstance(cfg, configuration.FlowGrpoConfig) and "motion" in configuration.part_weights(cfg):
        needs = needs | {"reward.motion_weight": "clip"}
    columns = {"clip": "video or reference_video", "picture": "video, reference_video or image"}
    lacks = [
        f"{key} compares with a {what}, and the row names none ({columns[what]})"
        for key, what in needs.items()
        if what not in row.offers
    ]
    if configuration.is_supervised(cfg) and row.video is None:
        lacks.append("supervised fine-tuning fits the clip of a row, and the row names none (video)")
    return lacks


def _check_face_packs(
    cfg: AnyConfig, terms: Sequence[Term], samples: Sequence[prepare.Sample], job: Job
) -> tuple[dict[str, dict[str, str]], list[str]]:
    """({configuration key: {file: sha256}}, what is said of them) of the face rewards, on every process.

    The first process asks, on the first sample's real clip. Raised on all of them: FaceParityError when a pack does not
    answer on the device as onnxruntime does, DataError when that clip cannot be read any more.
    """
    packs = {term.key: term.reward.identity for term in terms if isinstance(term.reward, FaceIdentityReward)}
    if not packs:
        return {}, []

    def ask() -> tuple[dict[str, dict[str, str]], list[str]]:
        hashes = {key: file_hashes(identity.files) for key, identity in packs.items()}
        for key, identity in packs.items():
            if identity.second_file is not None:
                hashes[configuration.second_pack_key(key)] = file_hashes([identity.second_file])
        clip = example_of(cfg, samples[0].row).reference.to(job.device)
        return hashes, describe_packs(hashes) + face_parity.check_packs(packs, clip)

    return job.by_main(ask, (face_parity.FaceParityError, data.DataError))


def try_rewards(cfg: AnyConfig, job: Job, terms: Sequence[Term], samples: Sequence[prepare.Sample]) -> None:
    """Let each reward judge a video before there is a model to make one: the first sample's clip, or noise.

    RewardError for one that breaks its contract (rewards.checked). Whatever else it raises is said: training goes on
    without what it cannot judge, or ends there by the same error. One that waits for somebody else (concurrent) is not
    asked: it would be waited for here.
    """

    def judge() -> list[str]:
        first = samples[0]
        video = example_of(cfg, first.row).video
        if video is None:
            video = groups.noise((3, cfg.data.num_frames, *first.size), cfg.run.seed, torch.device("cpu")).clamp(-1, 1)
        by_gradient = isinstance(cfg, configuration.RewardFlConfig)
        count = min(2, cfg.train.per_device_train_batch_size)  # two tell a mean over the batch from one over a video
        found = {
            term.key: check_reward(term, video.to(job.device), reference, count, by_gradient and term.weight > 0)
            for term, reference in zip(terms, first.references, strict=True)
            if not term.reward.concurrent
        }
        return [f"note: {key} does not judge the first clip: {why}" for key, why in found.items() if why]

    for line in job.by_main(judge, (RewardError, data.DataError)):
        job.say(line)


def conditions_of(cfg: AnyConfig, backbone: Backbone, base: Mapping[str, str], store: Cache) -> prepare.Conditions:
    """The conditioning of clips, in the cache. base: as `identify` gives it."""
    first = " ".join(base.get(part, part) for part in backbone.parts_of(backbone.experts[0]))
    # what an image becomes is the model's own affair: two models of one VAE make different things of it
    image = " ".join([cfg.model.model_name, *(base[part] for part in ("vae", "image_encoder") if part in base)])
    return prepare.Conditions(store, backbone, base["text_encoder"], image, first, cfg.model.dtype, cfg.data.num_frames)


def make_anchors(
    cfg: AnyConfig, backbone: Backbone, conditions: prepare.Conditions, samples: Sequence[prepare.Sample], job: Job
) -> Anchors:
    """Return the data anchor of the run, with the clips' latents in the cache where it trains or measures them."""
    trained = work.trained_experts(cfg, backbone.experts)
    anchors = Anchors(
        cfg=cfg.anchor,
        steps=work.anchor_steps(cfg, work.schedule_of(cfg, backbone), trained),
        seed=cfg.run.seed,
        backbone=backbone,
        conditions=conditions,
        samples=samples,
        schedules=partial(work.schedule_of, cfg, backbone),
        skip_lost=cfg.data.skip_bad_rows,
        device=job.device,
    )
    clips = [sample for sample in samples if sample.row.video is not None] if anchors.is_wanted else []
    clips = clips if cfg.anchor.weight else clips[: cfg.anchor.measured_clips]
    conditions.fill_latents(clips, lambda sample: example_of(cfg, sample.row).video, job.device, job.share)
    job.wait()
    return anchors


def make_starts(
    cfg: configuration.RewardFlConfig,
    backbone: Backbone,
    conditions: prepare.Conditions,
    samples: Sequence[prepare.Sample],
    job: Job,
) -> prepare.Starts:
    """Return where rollouts start, with the first expert's latents in the cache where the run caches them."""
    cached = cfg.experts.untrained == "boundary_cache"
    schedules, noises = partial(work.schedule_of, cfg, backbone), cfg.sample.noises_per_sample
    starts = prepare.Starts(
        samples, conditions, schedules, cfg.run.seed, noises, cached, cfg.data.skip_bad_rows, job.device
    )
    if cached:
        starts.fill(cfg.run.sample_videos, job.share)
        job.wait()
    return starts


def fill_conditions(
    cfg: AnyConfig, conditions: prepare.Conditions, samples: Sequence[prepare.Sample], job: Job
) -> Conditioning | None:
    """Compute what the cache lacks of the conditioning; what guidance leads away from, on the device, None for none."""
    guided = cfg.sample.guidance_scale != 1
    conditions.fill(samples, job.device, job.share, [cfg.sample.negative_prompt] if guided else [])
    job.wait()
    return protocol.move_to(conditions.text_of(cfg.sample.negative_prompt), job.device) if guided else None


# Model and adapter


def init_adapters(cfg: AnyConfig, backbone: Backbone) -> dict[str, lora_files.Lora]:
    """{expert: the LoRA that its adapter starts from} of lora.init_from, by their headers; empty without one.

    Refused where they are not of the trained experts, or not of the adapter's rank, alpha, layers and shapes.
    """
    if cfg.lora.init_from is None:
        return {}
    names, where = work.trained_experts(cfg, backbone.experts), f"lora.init_from: {cfg.lora.init_from}"
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
    adapter = Adapter(rank, tuple(work.lora_targets(cfg, backbone)))
    for one in found:
        _check_init(where, one, rank, alpha, backbone.adapter_shapes(one.expert, adapter))
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
    cfg: AnyConfig, backbone: Backbone, job: Job, conditions: prepare.Conditions, samples: Sequence[prepare.Sample]
) -> tuple[Experts, dict[str, nn.Module]]:
    """(all experts in their places, the trained ones by name with their LoRA, where `job.prepare` wants them).

    samples: by one of them it is measured how far an expert's velocity in fp8 is from the exact one.
    """
    names = work.trained_experts(cfg, backbone.experts)
    outside = [name for name in backbone.experts if name not in names]
    model_of: dict[str, nn.Module | None] = dict.fromkeys(backbone.experts)  # one at a time: the host holds one expert

    def loaded(name: str) -> ModelMixin:
        expert = backbone.load_expert(name)
        if cfg.model.attention_backend != attention.NATIVE:
            expert.set_attention_backend(cfg.model.attention_backend)
        if cfg.train.compile_blocks:
            compiling.compile_blocks(expert, backbone.block_classes)
        return expert

    if cfg.experts.untrained != "boundary_cache":  # which nothing will ask
        probe = None
        if cfg.experts.untrained == "fp8":
            row, conditioning = conditions.readable(samples, 0, cfg.data.skip_bad_rows)
            shape = conditions.shape_of(samples[row])
            noise = groups.noise((1, *shape), groups.noise_seed(cfg.run.seed, 0, "8 bits"))
            probe = rounding.Probe(backbone, work.schedule_of(cfg, backbone, shape), noise, conditioning, job.device)
        for name in outside:
            measures = probe is not None and job.main and name in probe.schedule.experts
            # loaded twice then: two in the host at once would take what is to be saved
            exact = probe.exact(name, partial(loaded, name)) if measures else None
            expert = offload.move_expert(loaded(name), cfg.experts.untrained, job.device, backbone.block_classes)
            if exact is not None:
                job.say(probe.note(name, expert, exact))
            model_of[name] = expert
    trained, rank, targets = {}, cfg.lora.lora_rank, work.lora_targets(cfg, backbone)

    for i, name in enumerate(names):
        expert = loaded(name)
        lora.inject(expert, rank, cfg.lora.lora_alpha or rank, targets, cfg.run.seed + i * SEED_STRIDE)
        expert = offload.move_expert(expert, cfg.experts.trained, job.home, backbone.block_classes)
        if cfg.train.use_gradient_checkpointing:
            on_host, keep_attention = cfg.train.use_gradient_checkpointing_offload, cfg.train.keep_attention
            expert.enable_gradient_checkpointing(offload.checkpointing(job.device, on_host, keep_attention))
        trained[name] = model_of[name] = expert
    return Experts(model_of, outside), trained


def fill_adapters(model: Experts, trained: Mapping[str, nn.Module], backbone: Backbone, resumed: ResumedRun) -> None:
    """Give the adapters their first weights: of the checkpoint, of lora.init_from, or as they are: they change nothing.

    CheckpointError for a checkpoint without the adapters that are trained.
    """
    folder = resumed.opened.path
    if folder is None:
        for name, one in resumed.init.items():
            lora.start_from(trained[name], one)
        return
    for name, expert in trained.items():
        try:
            backbone.load_adapter(name, expert, folder)
        except (ValueError, FileNotFoundError) as error:
            raise checkpoint.CheckpointError(f"{folder} cannot be gone on from: {error}") from error
    if "parameters" in resumed.state:  # the checkpoint's adapter is an average of these
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter, value in zip(parameters, resumed.state.pop("parameters"), strict=True):
            parameter.data.copy_(value)


@dataclass(frozen=True)
class Learner:
    """What is trained, and what moves it."""

    policy: nn.Module  # what is called to train: the experts, or what wraps them
    parameters: list[nn.Parameter]
    optimizer: AcceleratedOptimizer
    scheduler: LambdaLR
    trained: Mapping[str, nn.Module]  # the trained experts by name
    watched: invariants.Weights


def make_learner(
    cfg: AnyConfig,
    job: Job,
    backbone: Backbone,
    model: Experts,
    trained: Mapping[str, nn.Module],
    steps: int,
    resumed: ResumedRun,
) -> Learner:
    """AdamW and its schedule over the adapters, whose first weights are in place; where the checkpoint left them.

    steps: of the whole run.
    """
    train = cfg.train
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=train.learning_rate, weight_decay=train.weight_decay)
    # a plain scheduler: accelerate's steps once per process
    factor = learning_rate_factor(train.lr_scheduler_type, train.warmup_steps, steps)
    scheduler = LambdaLR(optimizer, factor)
    invariants.check_loaded(job.accelerator, model)
    policy, optimizer, parameters = job.prepare(model, optimizer, backbone.block_classes)
    watched = invariants.Weights(job.accelerator, model)
    if resumed.state:
        job.load_optimizer_state(optimizer, parameters, resumed.state.pop("optimizer"))
        load_schedule(scheduler, resumed.state.pop("scheduler"), train)
    return Learner(policy, parameters, optimizer, scheduler, trained, watched)


def load_schedule(scheduler: LambdaLR, state: dict[str, Any], train: configuration.GrpoTrainConfig) -> None:
    """Go on with a scheduler's state_dict, at the configuration's rate and weight decay, which may be others than then.

    Where they are not, this changes nothing, to the last bit.
    """
    step = state["last_epoch"]
    rates = [train.learning_rate * factor(step) for factor in scheduler.lr_lambdas]
    scheduler.load_state_dict(state | {"base_lrs": [train.learning_rate] * len(rates), "_last_lr": rates})
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group |= {"initial_lr": train.learning_rate, "lr": rate, "weight_decay": train.weight_decay}


def find_floor(
    job: Job,
    starts: prepare.Starts,
    velocity_of: Callable[[prepare.Batch], Velocity],
    active: Sequence[int],
    kl_weight: float,
    dtype: str,
) -> dict[str, float]:
    """Return {"actor/kl_floor": the KL that rounding alone shows}, and print it; nothing in float32 or without KL."""
    if kl_weight == 0 or dtype != "bfloat16":
        return {}
    batch = starts.batch([(0, 0)])
    reference, sigmas = velocity_of(batch).reference, batch.schedule.sigmas
    floor = reward_flow.kl_floor(reference, batch.x, sigmas, active, batch.start)
    job.say(f"note: in bfloat16 this model's KL reads about {floor:.1e} from rounding alone")
    return {"actor/kl_floor": floor}


def make_average(decay: float, parameters: Sequence[nn.Parameter], resumed: ResumedRun) -> Average:
    """The average of the parameters, which are in place; where the checkpoint left it.

    decay: weight of the old average at each of its steps, to which that rises from 0.1.
    """
    average = Average(parameters, decay=decay)
    if resumed.state:
        average.load_state_dict(resumed.state.pop("average"))
        average.shadow_params = list(map(sharding.shard_like, average.shadow_params, parameters))
    return average


def state_of_average(average: Average, parameters: Sequence[nn.Parameter]) -> dict[str, Any]:
    """What going on takes where a checkpoint's adapter is an average. On all processes, which may hold parts of it."""
    shadows = {"shadow_params": sharding.gather_to_cpu(average.shadow_params)}
    return {"parameters": sharding.gather_to_cpu(parameters), "average": average.state_dict() | shadows}


def seed_generators(seed: int, step: int, rank: int) -> None:
    """Python's, numpy's and torch's own generators, which nothing here draws from but a reward of the user's may.

    A function of the step, so that a resumed run draws what it would have drawn.
    """
    set_seed(groups.noise_seed(seed, step, f"process {rank}") % 2**32)


# What a run leaves


def open_log(cfg: AnyConfig, job: Job, folder: checkpoint.RunFolder, resumed: ResumedRun, steps: int) -> Log:
    """Begin to write run.json and metrics.jsonl. steps: of the whole run."""
    opened = resumed.opened
    before = "" if opened.path is None else checkpoint.load_metrics(opened.path)
    metrics = checkpoint.MetricsFile(Path(cfg.run.output_dir) / "metrics.jsonl", before)
    if opened.path is not None:
        job.say(f"resuming from {opened.path} at step {opened.step}")
    for change in resumed.changes:
        job.say(f"changed at step {change['step']}: {checkpoint.listing([change])}")
    changed = {change["key"] for change in resumed.changes}
    for key in cfg.run.resume_with_changes:
        if key not in changed:
            job.say(f"note: run.resume_with_changes names {key}, which has not changed")

    def begin() -> None:
        folder.check_present()
        metrics.start()
        packs = {key: files for key, files in resumed.content.items() if key.startswith("reward.")}
        folder.write_run_json(
            {
                "config": configuration.to_dict(cfg),
                "command": sys.argv,
                "versions": checkpoint.library_versions(VERSIONED),
                "git_commit": checkpoint.git_commit(Path(__file__).parent),
                "face_packs": packs,
                "base_model": opened.base,
                "init_from": resumed.content["lora.init_from"],
                "changes": resumed.changes,
            }
        )

    job.by_main(begin, checkpoint.CheckpointError)
    start_tracker(cfg, job, opened.step)
    return Log(cfg, job, folder, metrics, steps, resumed.state.get("skipped_in_a_row", 0))


def state_of(job: Job, learner: Learner, resumed: ResumedRun, log: Log, step: int) -> dict[str, Any]:
    """What going on after `step` takes in both scripts. On all processes, which may hold parts of it."""
    return {
        "step": step,
        "skipped_in_a_row": log.skipped_in_a_row,
        "content": {key: dict(files) for key, files in resumed.content.items()},
        "scheduler": learner.scheduler.state_dict(),
        "optimizer": job.optimizer_state(learner.optimizer, learner.parameters),
    }


def save(
    cfg: AnyConfig,
    job: Job,
    backbone: Backbone,
    learner: Learner,
    log: Log,
    state: dict[str, Any],
    score: float | None,
    last: bool,
) -> None:
    """Write a checkpoint of the adapters as they are now. On all processes; the main one writes.

    state: see state_of. score: what `best` is chosen by. last: a disk that does not take it stops the run, as nothing
    later could make up for it; it is said otherwise.
    """
    adapters = {name: lora.adapter_state(expert) for name, expert in learner.trained.items()}

    def write(folder: Path) -> None:
        for name, expert in learner.trained.items():
            backbone.save_adapter(name, expert, folder, adapters[name])

    if job.main:
        with checkpoint.tolerant(job.say, state["step"], last=last):
            log.folder.check_present()
            keep_last, lines = cfg.run.keep_last, log.metrics.text
            checkpoint.save_checkpoint(cfg.run.output_dir, state["step"], write, state, score, keep_last, lines)


def samples_folder(cfg: AnyConfig, step: int) -> Path:
    return Path(cfg.run.output_dir) / "samples" / f"step-{step:06d}"


@torch.no_grad()
def sample_videos(
    cfg: AnyConfig,
    samples: Sequence[prepare.Sample],
    generate: Callable[[int], tuple[int, Tensor]],
    job: Job,
    step: int,
) -> Path:
    """Write samples/step-*/<n>.mp4 of the first samples, each process its share; the folder, when all have written.

    A model of images writes <n>.png, and grid.png of them all where they are several.

    generate: row -> (row, its video (3, F, H, W)), asked as often on every process; another row where this one's inputs
    are lost. A video that the disk does not take, or whose real clip cannot be read any more, is said and left out.
    """
    folder = samples_folder(cfg, step)
    for wanted, mine in job.share.rounds(range(min(cfg.run.sample_videos, len(samples)))):
        row, video = generate(wanted)
        path = folder / f"{wanted:02d}.{'png' if video.shape[1] == 1 else 'mp4'}"
        if mine:
            try:
                with checkpoint.tolerant(print, step, last=False):
                    write_beside(cfg, samples[row], video, path)
            except data.DataError as error:
                why = f"its real clip cannot be shown: {error}"
                print(printable(f"warning: step {step}: {path} is left out, since {why}"))
    job.wait()
    written = [path for n in range(cfg.run.sample_videos) if (path := folder / f"{n:02d}.png").is_file()]
    if len(written) > 1 and job.main:
        with checkpoint.tolerant(print, step, last=False):
            pictures = [data.read_picture(path) for path in written]
            _write_video(folder / "grid.png", data.side_by_side(pictures)[None], PROMPT_FPS)
    return folder


def write_beside(cfg: AnyConfig, sample: prepare.Sample, video: Tensor, path: Path) -> None:
    """The real clip, its face marked, beside the generated `video` (3, F, H, W), which is alone where there is none.

    WriteError as a checkpoint's; DataError where the real clip is not what it was when training began.
    """
    if sample.row.video is None:
        _write_video(path, video.float().cpu(), cfg.data.fps or PROMPT_FPS)
        return
    real = example_of(cfg, sample.row).video
    if real.shape != video.shape:
        sizes = " x ".join(map(str, real.shape[1:])), " x ".join(map(str, video.shape[1:]))
        raise data.DataError(f"{sample.row.video}: is {sizes[0]} (frames x height x width) now, it was {sizes[1]}")
    if sample.references and "boxes" in (sample.references[0] or {}) and sample.row.reference_video is None:
        for boxes in sample.references[0]["boxes"]:  # of those whom the reward follows
            real = data.draw_boxes(real, boxes)
    fps = cfg.data.fps or data.frame_rate(sample.row.video)
    _write_video(path, torch.cat([real, video.float().cpu()], -1), fps)


def _write_video(path: Path, video: Tensor, fps: float) -> None:
    with checkpoint.writing(path, "training goes on without this sample video"):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".png":
            data.write_picture(path, video)
        else:
            data.write_video(path, video, fps=fps)


def best_of(cfg: AnyConfig) -> str:
    """Which checkpoint checkpoints/best is, in words."""
    best = Path(cfg.run.output_dir) / "checkpoints" / "best"
    return f"{best} is {best.resolve().name}" if best.exists() else f"no checkpoint became {best}"


def close_run(cfg: AnyConfig, job: Job, interruption: Interruption, step: int, stopped: str) -> int:
    """Close everything after the last step of this process group; the exit code. stopped: by train.early_stop, why."""
    job.accelerator.end_training()
    if interruption.number:
        if cfg.run.sample_videos and step and not samples_folder(cfg, step).exists():
            job.say(f"note: {interruption.name} came before the sample videos of step {step}, which are left out")
        job.say(f"{interruption.name}: stopped after step {step}; the same command goes on from there")
        return interruption.exit_code
    if stopped:
        job.say(f"stopped at step {step}: {stopped}; {best_of(cfg)}; {AFTER_EARLY_STOP}")
    job.say(f"done: {cfg.run.output_dir}/checkpoints/latest")
    return 0
