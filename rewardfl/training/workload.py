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
from rewardfl.training import checks, plan

WEIGHTS = ({".safetensors"}, {".bin", ".pt", ".pth"}, {".onnx"})  # suffixes by format, in order of preference


@dataclass(frozen=True, kw_only=True)
class Video:
    """The model, size and adapter of a generated video."""

    backbone: Backbone
    height: int
    width: int
    num_frames: int
    adapter: Adapter | None


@dataclass(frozen=True)
class Span:
    """A part of the run, and the number of videos that it trains on, in all and by process."""

    name: str
    videos: float
    of_process: float


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Evaluations: forward passes of one video by expert, steps, videos of each, and times in the run."""

    passes: Mapping[str, float]
    steps: int
    videos: int | None
    times: int | None


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The passes, videos and settings of a run that determine its time and memory.

    Passes are forward passes of one video through an expert, by the expert's name; means where epochs differ.
    """

    video: Video
    trained: tuple[str, ...]  # experts
    untrained: str | None  # the other expert
    rollout: Mapping[str, float] = field(default_factory=dict)  # passes without a graph
    replay: Mapping[str, float] = field(default_factory=dict)  # passes with a graph
    pulled: Mapping[str, float] = field(default_factory=dict)  # backward passes through these
    reference: Mapping[str, float] = field(default_factory=dict)  # passes without a graph and without the adapter
    anchor: Mapping[str, float] = field(default_factory=dict)  # passes of the data anchor, with a graph
    anchor_to_reference: bool = False  # each of these with a second pass, without a graph
    graphs: int = 1  # passes whose graphs live together
    reward_gradient: bool = False  # the reward's gradient goes back through the decoder
    cacheable: bool = False  # boundary latents can be computed before training
    averaged: bool = False  # a moving average of the adapter is kept and saved
    waiting: int = 0  # videos of one process that are stored until an epoch's updates
    kept: Mapping[str, int] = field(default_factory=dict)  # stored latents of each, by samples_on
    spans: tuple[Span, ...] = ()
    evaluation: Sampling | None = None
    steps: int | None = None  # updates of the run
    saves: int | None = None  # its checkpoints
    clips: int | None = None
    reward_bytes: int = 0  # of the reward networks' weights, where they are on disk
    processes: int = 1  # one for each GPU
    sharding: str = "none"  # none, zero2 or fsdp2, over the processes

    # settings that trade memory for time; estimate.advice.KEYS has their keys
    trained_placement: str = "gpu"  # of the trained experts' frozen weights
    placement: str = "gpu"  # of the untrained expert
    checkpointing: bool = True
    offload_inputs: bool = False
    keep_attention: bool = False
    batch: int = 1
    accumulation: int | None = None  # None where an epoch has a fixed number of videos
    decode_caches: str = "keep"
    keeps_graphs: bool = False  # of the rollout's active steps, with the blocks' inputs in host memory
    noises: str | int = "fresh"
    samples_on: str = "gpu"


def make_workload(
    cfg: AnyConfig, backbone: Backbone, clips: int | None, steps: int | None, processes: int, sharding: str = "none"
) -> Workload:
    """Count the work of the configuration. clips, steps: None where not known.

    Raise ConfigError where samples do not divide among processes, batches and updates, or no window is possible.
    """
    checks.check_sharding(cfg, sharding)
    trained = plan.trained_experts(cfg, backbone.experts)
    adapter = Adapter(cfg.lora.lora_rank, tuple(plan.lora_targets(cfg, backbone)))
    height, width = plan.largest_clip(cfg, backbone)
    common = Workload(
        video=Video(backbone=backbone, height=height, width=width, num_frames=cfg.data.num_frames, adapter=adapter),
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
    schedule, active = plan.make_schedule(cfg, common.video.backbone), configuration.active_steps(cfg)
    experts = schedule.experts
    answers, replay = plan.forwards_per_velocity(cfg), Counter(experts[i] for i in active)
    both = answers == 2 and cfg.sample.guidance_gradient == "both"
    coupled, kl = configuration.resolve_coupling(cfg) != 0, cfg.reward.kl_weight != 0
    # steps that pass a gradient on have a second backward pass: through the reference, or of the reward alone
    is_separate = cfg.reward.kl_gradient in ("exact", "fixed_trajectory")
    twice = active[1:] if kl and coupled and is_separate else ()
    clips_per_gpu = cfg.train.per_device_train_batch_size * cfg.train.gradient_accumulation_steps
    common = replace(
        common,
        anchor=_anchor_passes(cfg, schedule, common.trained),
        averaged=cfg.train.ema_decay > 0,
        spans=(Span(f"one update of {clips_per_gpu} clips per GPU", clips_per_gpu, clips_per_gpu),),
        saves=None if common.steps is None else math.ceil(common.steps / cfg.run.save_steps),
        accumulation=cfg.train.gradient_accumulation_steps,
    )
    if configuration.is_supervised(cfg):
        return common
    return replace(
        common,
        # and the velocity that replay takes as a constant
        rollout=_times(answers, Counter(experts)) + (replay if answers == 2 and not both else Counter()),
        replay=_times(1 + both, replay),
        pulled=_times(1 + both, replay + Counter(experts[i] for i in twice)),
        reference=_times(answers, replay) if kl else {},
        graphs=1 + both,
        reward_gradient=True,
        # the steps before the boundary have no gradient
        cacheable=common.untrained == experts[0] and experts[0] not in replay,
        decode_caches=cfg.train.decode_caches,
        keeps_graphs=cfg.train.active_graphs == "keep_on_host",
        noises=cfg.sample.noises_per_sample,
    )


def _anchor_passes(cfg: AnyConfig, schedule: Schedule, trained: Sequence[str]) -> dict[str, float]:
    """Return the data anchor's draws for one sample of an update, by expert; means where the draws differ."""
    if cfg.anchor.weight == 0:
        return {}
    steps = plan.anchor_steps(cfg, schedule, trained)
    counts = Counter(schedule.experts[i] for i in steps)
    return {expert: cfg.anchor.draws * count / len(steps) for expert, count in counts.items()}


def _times(factor: int, passes: Mapping[str, float]) -> Counter[str]:
    return Counter({expert: factor * count for expert, count in passes.items()})


def _flow_grpo(common: Workload, cfg: FlowGrpoConfig) -> Workload:
    schedule, grpo = plan.make_schedule(cfg, common.video.backbone), cfg.grpo
    experts = schedule.experts
    geometry, windows = plan.make_geometry(cfg, common.processes), plan.make_windows(cfg, experts, common.trained)
    per_epoch = plan.updates_per_epoch(cfg)
    drawn, answers = plan.draw_windows(cfg, windows, common.steps), plan.forwards_per_velocity(cfg)
    samples, per_process = geometry.samples, geometry.samples // common.processes
    counts = [group_plan.rollout_counts(geometry, len(experts), window) for window in drawn]
    rollout, replay = dict.fromkeys(experts, 0.0), dict.fromkeys(common.trained, 0.0)
    for i, expert in enumerate(experts):
        rollout[expert] += answers * fmean(passes[i][0] for passes in counts) / per_process
    for i in windows.drawable:
        replay[experts[i]] += answers * grpo.inner_epochs * fmean(i in window for window in drawn)
    means = max(map(len, drawn)) if grpo.objective == "guard" else 0
    update = f"one update of {samples // geometry.updates} samples, with its share of the rollouts"
    spans = [
        Span(update, samples / per_epoch, per_process / per_epoch),
        Span(f"one epoch of {samples} samples", samples, per_process),
    ]
    if common.steps is not None:
        epochs = common.steps // per_epoch
        run = f"the run of {epochs} epochs, without its evaluations"
        spans.append(Span(run, epochs * samples, epochs * per_process))
    return replace(
        common,
        rollout=rollout,
        replay=replay,
        pulled=replay,
        anchor=_times(grpo.inner_epochs, _anchor_passes(cfg, schedule, common.trained)),
        reference=replay if grpo.kl_weight != 0 else {},
        graphs=answers,
        averaged=True,
        waiting=per_process,
        # K steps in a row have K + 1 latents on the GPU, where two steps share one, and 2 K on the host
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
    settings, per_epoch = cfg.evaluation, plan.updates_per_epoch(cfg)
    num_steps = settings.eval_inference_steps or cfg.sample.num_inference_steps
    shape, videos = backbone.latent_shape(*plan.largest_clip(cfg, backbone), cfg.data.num_frames), None
    experts = backbone.schedule(num_steps, cfg.sample.shift, shape).experts
    if Path(settings.eval_clips).is_file():
        videos = len(data.load_metadata(settings.eval_clips, "evaluation.eval_clips")) * settings.eval_noises
    passes = {expert: plan.forwards_per_velocity(cfg) * count for expert, count in Counter(experts).items()}
    due = epoch_order.count_due(settings.eval_steps, per_epoch, steps)
    return Sampling(
        passes=passes, steps=num_steps, videos=videos, times=None if due is None else 1 + due
    )  # one before the first epoch


def _reward_bytes(cfg: AnyConfig) -> int:
    """Return the bytes of the weights on disk that the rewards' settings name, each path once."""
    settings = [value for spec in configuration.list_reward_specs(cfg) for value in spec.settings.values()]
    total = 0
    for path in {Path(value) for value in settings if isinstance(value, str) and value and os.path.exists(value)}:
        files = [path] if path.is_file() else list(path.rglob("*"))
        sizes = [sum(file.stat().st_size for file in files if file.suffix in suffixes) for suffixes in WEIGHTS]
        total += next((size for size in sizes if size), 0)  # formats repeat the same weights
    return total
