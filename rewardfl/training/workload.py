"""Count a run's network passes and videos from its plan, for the estimate of time and memory."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Literal

from rewardfl import data, group_plan
from rewardfl.backbones.protocol import Adapter, Backbone, DecodeCaches
from rewardfl.memory.sharding import Sharding
from rewardfl.training.plan import AnyPlan, FlowGrpoPlan, ForwardRlPlan, GroupPlan, RewardFlPlan, RunPlan, largest_size
from rewardfl.training.setup_processes import check_sharding
from rewardfl.training.setup_rewards import rows_without_motion, takes_base_latents

_WEIGHTS = ({".safetensors"}, {".bin", ".pt", ".pth"}, {".onnx"})  # suffixes by format, in order of preference


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
class Workload:
    """The passes, videos and settings of a run that determine its time and memory.

    Passes are forward passes of one video through an expert, by the expert's name; means where epochs differ.
    """

    video: Video
    trained: tuple[str, ...]  # experts
    untrained: str | None  # the other expert
    rollout: Mapping[str, float] = field(default_factory=dict)  # passes without a graph
    replay: Mapping[str, float] = field(default_factory=dict)  # passes with a graph
    backward_passes: Mapping[str, float] = field(default_factory=dict)  # through these graphs
    reference: Mapping[str, float] = field(default_factory=dict)  # passes without a graph and without the adapter
    anchor: Mapping[str, float] = field(default_factory=dict)  # passes of the data anchor, with a graph
    anchor_to_reference: bool = False  # each of these with a second pass, without a graph
    graphs: int = 1  # passes whose graphs live together
    reward_gradient: bool = False  # the reward's gradient goes back through the decoder
    verdict_decodes: float = 0  # further decodings, without a graph
    averages: int = 0  # moving averages of the adapter that are kept
    samples_in_flight: int = 0  # videos of one process that are stored until an epoch's updates
    latents_kept: Mapping[str, int] = field(default_factory=dict)  # stored latents of each, by samples_on
    latents_of_update: int = 0  # further latents on the GPU, of one process in an update
    spans: tuple[Span, ...] = ()
    steps: int | None = None  # updates of the run
    base_videos: int = 0  # made without the adapter before training, in all
    base: Mapping[str, float] = field(default_factory=dict)  # passes of one of them, without a graph
    reward_bytes: int = 0  # bytes of the reward networks' weights, where they are on disk
    processes: int = 1  # one for each GPU
    processes_per_clip: int = 1  # each with a part of the tokens
    sharding: Sharding = "none"  # over the processes

    # settings that trade memory for time; estimate.report has their keys
    trained_placement: Literal["gpu", "cpu_swap"] = "gpu"  # placement of the trained experts' frozen weights
    untrained_placement: Literal["gpu", "cpu_swap", "fp8", "boundary_cache"] = "gpu"
    checkpointing: bool = True
    offload_inputs: bool = False
    batch: int = 1
    decode_caches: DecodeCaches = "keep"
    kept_chunks: int = 0  # the number of last chunks that keep the decoding's graphs
    active_experts: tuple[str, ...] = ()  # the expert of each step with a gradient; where graphs can be kept
    kept_steps: int = 0  # the number of last such steps that keep the rollout's graphs
    samples_on: Literal["gpu", "cpu"] = "gpu"
    group_section: Literal["grpo", "forward"] = "grpo"  # section of the configuration, for samples_on


def make_workload(
    plan: AnyPlan, backbone: Backbone, rows: Sequence[data.Row] | None, sharding: Sharding = "none"
) -> Workload:
    """Count the work of the run. rows: the clips to train on; None where they are not known.

    Raise ConfigError if the sharding does not go with the configuration.
    """
    check_sharding(plan.train, plan.processes_per_clip, sharding)
    adapter, trained = Adapter(plan.lora.lora_rank, plan.targets), plan.trained
    height, width = largest_size(plan.data, [row.size for row in rows or ()])
    steps = plan.train.steps if rows is None else plan.count_steps(len(rows))
    without = rows_without_motion(plan, rows or ())
    base_videos = plan.base_noises * len(without)
    # the anchor needs one of each
    base_videos = base_videos or sum(takes_base_latents(plan, row) for row in rows or ())
    common = Workload(
        video=Video(backbone=backbone, height=height, width=width, num_frames=plan.data.num_frames, adapter=adapter),
        trained=trained,
        untrained=next((name for name in backbone.experts if name not in trained), None),
        steps=steps,
        reward_bytes=_reward_bytes(plan),
        processes=plan.processes,
        processes_per_clip=plan.processes_per_clip,
        sharding=sharding,
        trained_placement=plan.memory.trained,
        untrained_placement=plan.memory.untrained,
        checkpointing=plan.memory.use_gradient_checkpointing,
        offload_inputs=plan.memory.use_gradient_checkpointing_offload,
        batch=plan.train.per_device_train_batch_size,
        anchor_to_reference=plan.anchor.target == "reference",
        base_videos=base_videos,
        base=_times(plan.forwards_per_velocity, Counter(plan.experts)) if base_videos else {},
    )
    if isinstance(plan, FlowGrpoPlan):
        return _flow_grpo(common, plan)
    return _forward_rl(common, plan) if isinstance(plan, ForwardRlPlan) else _reward_fl(common, plan)


def _reward_fl(common: Workload, plan: RewardFlPlan) -> Workload:
    experts, active = plan.experts, plan.active
    passes_of_velocity, replay = plan.forwards_per_velocity, Counter(experts[i] for i in active)
    both = passes_of_velocity == 2 and plan.sample.guidance_gradient == "both"
    # steps that pass a gradient on have a second backward pass: through the reference, or of only the reward
    is_separate = plan.reward.kl_gradient in ("exact", "fixed_trajectory")
    twice = [i for i in plan.kl_steps if i != active[0]] if plan.coupling != 0 and is_separate else []
    clips_per_gpu = plan.train.per_device_train_batch_size * plan.train.gradient_accumulation_steps
    common = replace(
        common,
        anchor=_anchor_passes(plan),
        averages=int(plan.train.ema_decay > 0),
        spans=(Span(f"one update of {clips_per_gpu} clips per GPU", clips_per_gpu, clips_per_gpu),),
    )
    if plan.supervised:
        return common
    verdict = plan.sample.verdict  # its moves wait until all passes of an update have them
    measured = 0 if verdict is None else 1 / plan.train.gradient_accumulation_steps  # after the optimizer's step
    return replace(
        common,
        # and the velocity that replay takes as a constant
        rollout=_times(passes_of_velocity, Counter(experts))
        + (replay if passes_of_velocity == 2 and not both else Counter())
        + _times(measured * passes_of_velocity, replay),
        replay=_times(1 + both, replay),
        backward_passes=_times(1 + both, replay + Counter(experts[i] for i in twice)),
        reference=_times(passes_of_velocity, Counter(experts[i] for i in plan.kl_steps)),
        graphs=1 + both,
        reward_gradient=True,
        verdict_decodes=0 if verdict is None else 1 + len(plan.sample.lengths) + measured,
        decode_caches=plan.memory.decode_caches,
        kept_chunks=plan.memory.kept_chunks,
        # the active steps' latents and velocities, x0, its gradient, the noise, and the network's output
        latents_of_update=common.batch * (2 * len(active) + 4),
        active_experts=() if plan.sample.gradient_mode == "endpoint" else tuple(experts[i] for i in active),
        kept_steps=len(plan.graphs_of),
        samples_in_flight=0 if verdict is None else clips_per_gpu,
        latents_kept={} if verdict is None else {"gpu": 4},
    )


def _anchor_passes(plan: RunPlan) -> dict[str, float]:
    """Return the data anchor's draws for one sample of an update, by expert; means where the draws differ."""
    if plan.anchor.weight == 0:
        return {}
    counts = Counter(plan.experts[i] for i in plan.anchor_steps)
    return {expert: plan.anchor.draws * count / len(plan.anchor_steps) for expert, count in counts.items()}


def _times(factor: float, passes: Mapping[str, float]) -> Counter[str]:
    return Counter({expert: factor * count for expert, count in passes.items()})


def _flow_grpo(common: Workload, plan: FlowGrpoPlan) -> Workload:
    grpo, experts, geometry = plan.group, plan.experts, plan.geometry
    drawn, passes_of_velocity = plan.draw_windows(common.steps), plan.forwards_per_velocity
    per_process = geometry.samples // common.processes
    counts = [group_plan.rollout_counts(geometry, len(experts), window) for window in drawn]
    rollout, replay = dict.fromkeys(experts, 0.0), dict.fromkeys(common.trained, 0.0)
    for i, expert in enumerate(experts):
        rollout[expert] += passes_of_velocity * fmean(passes[i][0] for passes in counts) / per_process
    for i in plan.active:
        replay[experts[i]] += passes_of_velocity * grpo.inner_epochs * fmean(i in window for window in drawn)
    means = max(map(len, drawn)) if grpo.objective == "guard" else 0
    return replace(
        _epochs(common, plan),
        rollout=rollout,
        replay=replay,
        backward_passes=replay,
        reference=replay if grpo.kl_weight != 0 else {},
        graphs=passes_of_velocity,
        averages=1,
        # K steps in a row have K + 1 latents on the GPU, where two steps share one, and 2 K on the host
        latents_kept={
            "gpu": means + max(len({*window, *(i + 1 for i in window)}) for window in drawn),
            "cpu": means + 2 * max(map(len, drawn)),
        },
    )


def _forward_rl(common: Workload, plan: ForwardRlPlan) -> Workload:
    forward, experts = plan.group, plan.experts
    draws = forward.inner_epochs * plan.draws * plan.training.samples / plan.geometry.samples  # per video
    passes = _times(draws / len(plan.active), Counter(experts[i] for i in plan.active))
    latents_of_video, is_dpo = 2 + plan.needs_old + plan.needs_base, forward.objective == "dpo"
    return replace(
        _epochs(common, plan),
        rollout=_times(plan.forwards_per_velocity * (not plan.pairs), Counter(experts))
        + _times(plan.needs_old, passes),
        replay=passes,
        backward_passes=passes,
        reference=_times(plan.needs_base + 2 * is_dpo, passes),  # dpo: the policy's errors, too
        averages=2 + plan.keeps_start,
        group_section="forward",
        latents_kept=dict.fromkeys(("gpu", "cpu"), 1),
        # for each draw: the latents with noise, the target, and the velocities of the other policies
        latents_of_update=plan.training.batch * plan.training.forwards_per_update * plan.draws * latents_of_video,
    )


def _epochs(common: Workload, plan: GroupPlan) -> Workload:
    """Count what all scripts with groups have in common: the videos and anchors of an epoch."""
    samples, per_epoch = plan.geometry.samples, plan.updates_per_epoch
    per_process = samples // common.processes
    update = f"one update of {plan.training.samples // plan.geometry.updates} samples, with its share of the rollouts"
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
        anchor=_times(plan.group.inner_epochs * plan.training.samples / samples, _anchor_passes(plan)),
        samples_in_flight=per_process,
        spans=tuple(spans),
        samples_on=plan.memory.samples_on,
    )


def _reward_bytes(plan: RunPlan) -> int:
    """Return the bytes of the weights on disk that the rewards' settings name, each path once."""
    settings = [value for spec, _ in plan.rewards for value in spec.settings.values()]
    total = 0
    for path in {Path(value) for value in settings if isinstance(value, str) and value and os.path.exists(value)}:
        files = [path] if path.is_file() else list(path.rglob("*"))
        sizes = [sum(file.stat().st_size for file in files if file.suffix in suffixes) for suffixes in _WEIGHTS]
        total += next((size for size in sizes if size), 0)  # formats repeat the same weights
    return total
