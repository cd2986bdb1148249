"""Count a run's network passes, videos and saves, for the estimate of time and memory."""

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean

from rewardfl import config as configuration
from rewardfl import data, epoch_order, group_plan
from rewardfl.backbones.protocol import Adapter, Backbone, Schedule
from rewardfl.config import AnyConfig, FlowGrpoConfig, RewardFlConfig
from rewardfl.training import checks
from rewardfl.training.plan import (
    anchor_steps,
    draw_windows,
    forwards_per_velocity,
    largest_clip,
    lora_targets,
    make_geometry,
    make_schedule,
    make_windows,
    trained_experts,
    updates_per_epoch,
)

WEIGHTS = ({".safetensors"}, {".bin", ".pt", ".pth"}, {".onnx"})  # by format, of which the first that is there counts


# How much work it is


@dataclass(frozen=True)
class Video:
    """One generated video: by which model, with which adapter, and of what size."""

    backbone: Backbone
    height: int
    width: int
    num_frames: int
    adapter: Adapter | None


@dataclass(frozen=True)
class Span:
    """A part of the run, in words, and the videos that it trains on: all that are counted, and those of a process."""

    name: str
    videos: float
    of_process: float


@dataclass(frozen=True)
class Sampling:
    """An evaluation: forward passes of one video by expert, and its steps; videos and times in the run, where known."""

    passes: Mapping[str, float]
    steps: int
    videos: int | None
    times: int | None


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a run does with each video that it trains on, from its noise to its share of an update, and with what.

    Passes are forward passes through an expert, by the expert's name; means where epochs differ.
    """

    video: Video
    trained: tuple[str, ...]  # experts
    untrained: str | None  # the one that is not
    rollout: Mapping[str, float] = field(default_factory=dict)  # passes without a graph
    replay: Mapping[str, float] = field(default_factory=dict)  # passes with one
    pulled: Mapping[str, float] = field(default_factory=dict)  # backward passes through these
    reference: Mapping[str, float] = field(default_factory=dict)  # passes without a graph and without the adapter
    anchor: Mapping[str, float] = field(default_factory=dict)  # passes of the data anchor, with a graph
    anchor_to_reference: bool = False  # each with one more, without a graph
    graphs: int = 1  # passes whose graphs live together
    reward_gradient: bool = False  # the reward's gradient goes back through the decoder
    cacheable: bool = False  # what the untrained expert hands over can be computed before training
    averaged: bool = False  # an average of the adapter is kept, and saved with the last weights
    waiting: int = 0  # videos of one process whose latents and conditioning wait for an epoch's updates
    kept: Mapping[str, int] = field(default_factory=dict)  # latents that each of them keeps, by samples_on
    spans: tuple[Span, ...] = ()
    evaluation: Sampling | None = None
    steps: int | None = None  # updates of the run
    saves: int | None = None  # its checkpoints
    clips: int | None = None
    reward_bytes: int = 0  # of the reward networks' weights, where they are on disk
    processes: int = 1  # one for each GPU
    sharding: str = "none"  # none, zero2 or fsdp2, over the processes

    # the settings that trade memory for time; estimate.advice.KEYS says which keys they are
    trained_placement: str = "gpu"  # of the trained experts' frozen weights
    placement: str = "gpu"  # of the untrained expert
    checkpointing: bool = True
    offload_inputs: bool = False
    keep_attention: bool = False
    batch: int = 1
    accumulation: int | None = None  # None: an epoch has a fixed number of videos
    decode_caches: str = "keep"
    keeps_graphs: bool = False  # of the rollout's active steps, with the blocks' inputs in host memory
    noises: str | int = "fresh"
    samples_on: str = "gpu"


def make_workload(
    cfg: AnyConfig, backbone: Backbone, clips: int | None, steps: int | None, processes: int, sharding: str = "none"
) -> Workload:
    """How much work the configuration is. clips, steps: where they are known.

    ConfigError for samples that do not divide among processes, batches and updates, and for an impossible window.
    """
    checks.check_sharding(cfg, sharding)
    trained = trained_experts(cfg, backbone.experts)
    adapter = Adapter(cfg.lora.lora_rank, tuple(lora_targets(cfg, backbone)))
    common = Workload(
        video=Video(backbone, *largest_clip(cfg, backbone), cfg.data.num_frames, adapter),
        trained=trained,
        untrained=next((name for name in backbone.experts if name not in trained), None),
        steps=steps,
        clips=clips,
        reward_bytes=_reward_bytes(cfg),
        processes=processes,
        sharding=sharding,
        trained_placement=cfg.experts.trained,
        placement=cfg.experts.untrained,
        checkpointing=cfg.train.use_gradient_checkpointing,
        offload_inputs=cfg.train.use_gradient_checkpointing_offload,
        keep_attention=cfg.train.keep_attention,
        batch=cfg.train.per_device_train_batch_size,
        anchor_to_reference=cfg.anchor.target == "reference",
    )
    return _flow_grpo(common, cfg) if isinstance(cfg, FlowGrpoConfig) else _reward_fl(common, cfg)


def _reward_fl(common: Workload, cfg: RewardFlConfig) -> Workload:
    checks.check_graphs(cfg, common.processes)
    schedule, active = make_schedule(cfg, common.video.backbone), configuration.active_steps(cfg)
    experts = schedule.experts
    answers, replay = forwards_per_velocity(cfg), Counter(experts[i] for i in active)
    both = answers == 2 and cfg.sample.guidance_gradient == "both"
    coupled, kl = configuration.resolved_coupling(cfg) != 0, cfg.reward.kl_weight != 0
    # of each step that hands a gradient on: through the reference, or of the reward alone
    apart = cfg.reward.kl_gradient in ("exact", "fixed_trajectory")
    twice = active[1:] if kl and coupled and apart else ()
    own = cfg.train.per_device_train_batch_size * cfg.train.gradient_accumulation_steps
    common = replace(
        common,
        anchor=_anchor_passes(cfg, schedule, common.trained),
        averaged=cfg.train.ema_decay > 0,
        spans=(Span(f"one update of {own} clips per GPU", own, own),),
        saves=None if common.steps is None else math.ceil(common.steps / cfg.run.save_steps),
        accumulation=cfg.train.gradient_accumulation_steps,
    )
    if configuration.is_supervised(cfg):
        return common
    return replace(
        common,
        # with an answer that replay takes as a constant
        rollout=_times(answers, Counter(experts)) + (replay if answers == 2 and not both else Counter()),
        replay=_times(1 + both, replay),
        pulled=_times(1 + both, replay + Counter(experts[i] for i in twice)),
        reference=_times(answers, replay) if kl else {},
        graphs=1 + both,
        reward_gradient=True,
        # what comes before the boundary, where nothing is trained or handed a gradient
        cacheable=common.untrained == experts[0] and experts[0] not in replay,
        decode_caches=cfg.train.decode_caches,
        keeps_graphs=cfg.train.active_graphs == "keep_on_host",
        noises=cfg.sample.noises_per_sample,
    )


def _anchor_passes(cfg: AnyConfig, schedule: Schedule, trained: Sequence[str]) -> dict[str, float]:
    """Return the data anchor's draws for one sample of an update, by expert; means where the draws differ."""
    if cfg.anchor.weight == 0:
        return {}
    steps = anchor_steps(cfg, schedule, trained)
    counts = Counter(schedule.experts[i] for i in steps)
    return {expert: cfg.anchor.draws * count / len(steps) for expert, count in counts.items()}


def _times(factor: int, passes: Mapping[str, float]) -> Counter[str]:
    return Counter({expert: factor * count for expert, count in passes.items()})


def _flow_grpo(common: Workload, cfg: FlowGrpoConfig) -> Workload:
    schedule, grpo = make_schedule(cfg, common.video.backbone), cfg.grpo
    experts = schedule.experts
    geometry, windows = make_geometry(cfg, common.processes), make_windows(cfg, experts, common.trained)
    per_epoch = updates_per_epoch(cfg)
    drawn, answers = draw_windows(cfg, windows, common.steps), forwards_per_velocity(cfg)
    own, epochs = geometry.samples // common.processes, None if common.steps is None else common.steps // per_epoch
    counts = [group_plan.rollout_counts(geometry, len(experts), window) for window in drawn]
    rollout, replay = dict.fromkeys(experts, 0.0), dict.fromkeys(common.trained, 0.0)
    for i, expert in enumerate(experts):
        rollout[expert] += answers * fmean(one[i][0] for one in counts) / own
    for i in windows.drawable:
        replay[experts[i]] += answers * grpo.inner_epochs * fmean(i in window for window in drawn)
    means = max(map(len, drawn)) if grpo.objective == "guard" else 0
    at_update = geometry.samples // geometry.updates
    spans = [
        Span(
            f"one update of {at_update} samples, with its share of the rollouts",
            geometry.samples / per_epoch,
            own / per_epoch,
        ),
        Span(f"one epoch of {geometry.samples} samples", geometry.samples, own),
    ]
    if epochs is not None:
        spans.append(
            Span(f"the run of {epochs} epochs, without its evaluations", epochs * geometry.samples, epochs * own)
        )
    return replace(
        common,
        rollout=rollout,
        replay=replay,
        pulled=replay,
        anchor=_times(grpo.inner_epochs, _anchor_passes(cfg, schedule, common.trained)),
        reference=replay if grpo.kl_weight != 0 else {},
        graphs=answers,
        averaged=True,
        waiting=own,
        # of K steps in a row K + 1 latents on the GPU, where one step's last are the next one's first, 2 K in the host
        kept={
            "gpu": means + max(len({*window, *(i + 1 for i in window)}) for window in drawn),
            "cpu": means + 2 * max(map(len, drawn)),
        },
        spans=tuple(spans),
        evaluation=_evaluation(cfg, common.video.backbone, common.steps) if cfg.evaluation.eval_clips else None,
        saves=epoch_order.count_due(cfg.run.save_steps, per_epoch, common.steps),
        samples_on=grpo.samples_on,
    )


def _evaluation(cfg: FlowGrpoConfig, backbone: Backbone, steps: int | None) -> Sampling:
    wanted, per_epoch = cfg.evaluation, updates_per_epoch(cfg)
    num_steps = wanted.eval_inference_steps or cfg.sample.num_inference_steps
    shape, videos = backbone.latent_shape(*largest_clip(cfg, backbone), cfg.data.num_frames), None
    experts = backbone.schedule(num_steps, cfg.sample.shift, shape).experts
    if Path(wanted.eval_clips).is_file():
        videos = len(data.load_metadata(wanted.eval_clips, "evaluation.eval_clips")) * wanted.eval_noises
    passes = {expert: forwards_per_velocity(cfg) * count for expert, count in Counter(experts).items()}
    due = epoch_order.count_due(wanted.eval_steps, per_epoch, steps)
    return Sampling(passes, num_steps, videos, None if due is None else 1 + due)  # one before the first epoch


def _reward_bytes(cfg: AnyConfig) -> int:
    """Return the bytes of the weights that the rewards' settings name, each place once, as far as they are on disk."""
    settings = [value for one in configuration.wanted_rewards(cfg) for value in one.settings.values()]
    total = 0
    for place in {Path(value) for value in settings if isinstance(value, str) and value and os.path.exists(value)}:
        files = [place] if place.is_file() else list(place.rglob("*"))
        sizes = [sum(file.stat().st_size for file in files if file.suffix in suffixes) for suffixes in WEIGHTS]
        total += next((size for size in sizes if size), 0)  # of one format, where the same are there in several
    return total
