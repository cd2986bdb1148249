"""What a configuration asks for: denoising steps, windows and groups, the steps of the run, and how much work that is.

Every start prints `overview` and `sigma_table`; `work_of` gives the record from which `rewardfl.estimate` works out
what the run takes.
"""

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from statistics import fmean

from rewardfl import config as configuration
from rewardfl import data, flow, groups, lora
from rewardfl.backbones.protocol import Adapter, Backbone, Schedule, Shape
from rewardfl.config import AnyConfig, ConfigError, FlowGrpoConfig, RewardFlConfig
from rewardfl.groups import Geometry
from rewardfl.run import checks
from rewardfl.weights.shards import Refused

SIZES_SAID = 5  # of those that rows have
EPOCHS = 100  # whose windows stand for the run's, where its length is not known
WEIGHTS = ({".safetensors"}, {".bin", ".pt", ".pth"}, {".onnx"})  # by format, of which the first that is there counts
KINDS = ("flow", "dance", "cps")  # of stochastic steps

# What ordinary training asks


def largest_clip(cfg: AnyConfig, backbone: Backbone) -> tuple[int, int]:
    """(height, width) of the largest clips: under max_pixels of a square one, which no other has more tokens than.

    Else the largest of the rows that can be used, where the table is there, and some have a size of their own.
    """
    table, usual = Path(cfg.data.file_name), (cfg.data.height, cfg.data.width)
    if cfg.data.max_pixels is not None:
        return data.clip_size((4096, 4096), *usual, cfg.data.max_pixels)
    own = _own_sizes(table, table.stat().st_mtime_ns) if table.is_file() else frozenset()
    usable = [size or usual for size in own if not size_problem(cfg, backbone, size)]
    return max(usable, key=lambda size: (math.prod(size), size), default=usual)


@lru_cache(maxsize=4)
def _own_sizes(table: Path, changed: int) -> frozenset[tuple[int, int] | None]:
    """Row.size of all rows that say nothing wrong. changed: when the file was, so that it is read once as it is."""
    return frozenset(row.size for row in data.load_metadata(table) if not row.problem)


def size_problem(cfg: AnyConfig, backbone: Backbone, size: tuple[int, int] | None) -> str:
    """What keeps the model from making clips of a row's own (height, width), in words; empty where nothing does."""
    if size is None:
        return ""
    if cfg.data.max_pixels is not None:
        return "height and width say a size, and so does data.max_pixels; empty the cells, or remove data.max_pixels"
    try:
        backbone.check_clips(size[0], size[1], cfg.data.num_frames)
    except Refused as error:
        return str(error).replace("data.", "").replace("\n", "; ")  # the settings are called as the columns are
    return ""


def size_notes(cfg: AnyConfig, rows: Sequence[data.Row]) -> list[str]:
    """How many rows are generated at which size, in words, where some have a size of their own."""
    if not any(row.size for row in rows):
        return []
    counts = Counter(row.size or (cfg.data.height, cfg.data.width) for row in rows)
    listed = [f"{height} x {width} ({count} rows)" for (height, width), count in counts.most_common(SIZES_SAID)]
    more = [f"{len(counts) - SIZES_SAID} more"] if len(counts) > SIZES_SAID else []
    return [
        f"sizes (height x width): {', '.join([*listed, *more])}; the table of sigmas and the estimate are of the "
        "largest that is trained on"
    ]


def schedule_of(cfg: AnyConfig, backbone: Backbone, shape: Shape | None = None) -> Schedule:
    """The denoising steps that a run of the configuration takes with latents of `shape`; None: of the largest clips."""
    shape = backbone.latent_shape(*largest_clip(cfg, backbone), cfg.data.num_frames) if shape is None else shape
    schedule = backbone.schedule(cfg.sample.num_inference_steps, cfg.sample.shift, shape)
    return schedule.until(cfg.sample.final_timestep)


def trained_experts(cfg: AnyConfig, experts: Sequence[str]) -> tuple[str, ...]:
    """The names of the trained ones of the model's experts. ConfigError where the model has fewer."""
    chosen = configuration.trained_positions(cfg)
    if max(chosen) >= len(experts):
        known = ", ".join(configuration.TRAINABLE[: len(experts)])
        raise ConfigError(
            f"model.trainable_models: this model has {len(experts)} expert(s), to be named {known}, got "
            f"{cfg.model.trainable_models}"
        )
    return tuple(experts[i] for i in chosen)


def steps_of_run(cfg: AnyConfig, clips: int | None, processes: int) -> int | None:
    """Optimizer updates of the run: max_steps, or what visits every clip num_train_epochs times.

    None where the clips that must say are not there. Flow-GRPO takes whole epochs.
    """
    if cfg.train.max_steps is not None or clips is None:
        return cfg.train.max_steps
    if isinstance(cfg, FlowGrpoConfig):
        epochs = groups.total_steps(clips, cfg.grpo.groups, cfg.train.num_train_epochs)
        return epochs * updates_of_epoch(cfg)
    train = cfg.train
    at_once = processes * train.per_device_train_batch_size * train.gradient_accumulation_steps
    return groups.total_steps(clips, train.train_batch_size or at_once, train.num_train_epochs)


def updates_of_epoch(cfg: FlowGrpoConfig) -> int:
    return cfg.grpo.updates_per_epoch * cfg.grpo.inner_epochs


def geometry_of(cfg: FlowGrpoConfig, processes: int) -> Geometry:
    """How an epoch's rollouts are spread; ConfigError when the groups do not divide into passes and updates."""
    try:
        return Geometry(
            group_size=cfg.grpo.group_size,
            groups=cfg.grpo.groups,
            world=processes,
            batch=cfg.train.per_device_train_batch_size,
            updates=cfg.grpo.updates_per_epoch,
            spread=cfg.grpo.spread,
            same_noise=cfg.grpo.same_noise_in_group,
        )
    except ValueError as error:
        raise ConfigError(
            "grpo.groups, grpo.group_size, grpo.updates_per_epoch (updates) and train.per_device_train_batch_size "
            f"(batch): {error}"
        ) from error


def windows_of(cfg: FlowGrpoConfig, experts: Sequence[str], trained: Sequence[str]) -> groups.Windows:
    """Which steps an epoch may train: those of trained experts but the last, as the configuration says.

    experts: of each step. ConfigError when there can be no window, or a trained expert would answer at no step of any.
    """
    grpo = cfg.grpo
    table = ", ".join(f"{i}: {expert}" for i, expert in enumerate(experts))
    try:
        windows = groups.Windows(
            kind=grpo.window,
            # nothing would remove the noise of the last step
            usable=[i for i, expert in enumerate(experts[:-1]) if expert in trained],
            steps=grpo.window_steps or (),
            size=grpo.window_size,
            bounds=grpo.window_bounds,
            fraction=grpo.window_fraction,
        )
        groups.window(windows, 0, cfg.run.seed)
    except ValueError as error:
        raise ConfigError(
            f"grpo.window: {error}. Usable are the steps of {cfg.model.trainable_models} (model.trainable_models) but "
            f"the last step: {table}"
        ) from error
    idle = [name for name in trained if name not in {experts[i] for i in windows.drawable}]
    if idle:
        raise ConfigError(
            f"model.trainable_models: {', '.join(idle)} answers at no step that grpo.window may draw ({table}) and "
            "would not learn; train the other alone, or widen the window"
        )
    return windows


def lora_targets(cfg: AnyConfig, backbone: Backbone) -> list[str]:
    """diffusers' names of the layers that get an adapter, or ends of such names."""
    return lora.target_modules(cfg.lora.lora_target_modules, backbone.layer_names)


def check_active_experts(cfg: RewardFlConfig, backbone: Backbone) -> None:
    """ConfigError when a trained expert answers at no active step, or an active step gives nothing a gradient.

    A frozen expert's step has no gradient of its own: it is of use only in handing one on to a trained expert's. The
    active steps of supervised fine-tuning are the data anchor's.
    """
    schedule, trained = schedule_of(cfg, backbone), trained_experts(cfg, backbone.experts)
    active, coupling, answering = (
        configuration.active_steps(cfg),
        configuration.resolved_coupling(cfg),
        schedule.experts,
    )
    way_out = "sample.mid_timestep or sample.active_steps"
    if configuration.is_supervised(cfg):
        active, way_out = anchor_steps(cfg, schedule, trained), "anchor.sigmas (trained_range reaches every expert)"
    table = ", ".join(f"{i}: {expert}" for i, expert in enumerate(answering))
    asked = {answering[i] for i in active}
    words = dict(zip(backbone.experts, configuration.TRAINABLE, strict=False))
    idle = [words[expert] for expert in trained if expert not in asked]
    if idle:
        useful = ",".join(words[expert] for expert in backbone.experts if expert in asked)
        train = f"train {useful}, or change" if useful else "change"
        raise ConfigError(
            f"model.trainable_models: {', '.join(idle)} answers at no active step of {list(active)} and would not "
            f"learn (expert by step: {table}); {train} {way_out}"
        )
    own = [i for i in active if answering[i] in trained]
    useless = [i for i in active if i not in own and (coupling == 0 or i < own[0])]
    if useless:
        raise ConfigError(
            f"sample.mid_timestep, sample.active_steps: the active steps {useless} of {list(active)} would give no "
            f"gradient, since model.trainable_models does not train their expert (expert by step: {table}) and they "
            f"hand none on to an earlier step that is trained; take {[i for i in active if i not in useless]}, or "
            f"train all experts: model.trainable_models={','.join(words.values())}"
        )


def anchor_steps(cfg: AnyConfig, schedule: Schedule, trained: Sequence[str]) -> tuple[int, ...]:
    """Return the denoising steps that anchor.sigmas stands for, increasing, of trained experts alone.

    ConfigError where a listed step is another expert's.
    """
    trained_steps = [i for i, expert in enumerate(schedule.experts) if expert in trained]
    sigmas = cfg.anchor.sigmas
    if sigmas == "trained_range":
        return tuple(trained_steps)
    if sigmas == "active":
        if isinstance(cfg, FlowGrpoConfig):
            return tuple(windows_of(cfg, schedule.experts, trained).drawable)
        return tuple(i for i in configuration.active_steps(cfg) if i in trained_steps)
    if foreign := [i for i in sigmas if i not in trained_steps]:
        raise ConfigError(
            f"anchor.sigmas: no trained expert answers at the steps {foreign} (model.trainable_models "
            f"{cfg.model.trainable_models}); take some of {trained_steps}"
        )
    return tuple(sigmas)


def anchor_draws(cfg: AnyConfig) -> int:
    """Return the backward passes that the data anchor adds to each forward pass of an update."""
    return cfg.anchor.draws if cfg.anchor.weight else 0


def check_sizes(cfg: FlowGrpoConfig, sizes: Sequence[tuple[int, int]]) -> None:
    """ConfigError where a forward pass would get videos of two sizes; sizes: of all clips."""
    if len(set(sizes)) > 1 and cfg.grpo.group_size % cfg.train.per_device_train_batch_size:
        raise ConfigError(
            "train.per_device_train_batch_size must divide grpo.group_size where clips differ in size: one forward "
            "pass takes videos of one size"
        )


# For people, at every start


def overview(cfg: AnyConfig, backbone: Backbone, clips: int | None, steps: int | None, processes: int) -> str:
    """The arithmetic of the run's batches, steps and gradients, and its sigmas. clips, steps: where they are known."""
    schedule = schedule_of(cfg, backbone)
    if isinstance(cfg, FlowGrpoConfig):
        windows = windows_of(cfg, schedule.experts, trained_experts(cfg, backbone.experts))
        lines, trained = _group_arithmetic(cfg, len(schedule), windows, clips, steps, processes), windows.drawable
    else:
        lines, trained = _batch_arithmetic(cfg, clips, steps, processes), configuration.active_steps(cfg)
    if cfg.anchor.weight:
        lines.append(_anchor_line(cfg, anchor_steps(cfg, schedule, trained_experts(cfg, backbone.experts))))
    return "\n".join([*lines, "", *sigma_table(cfg, schedule, trained), ""])


def _anchor_line(cfg: AnyConfig, steps: Sequence[int]) -> str:
    """Return what the data anchor does, in words."""
    anchor = cfg.anchor
    where = "any moment of" if anchor.sigmas == "trained_range" else "in turn"
    target = "the velocity without the adapter" if anchor.target == "reference" else "the clips"
    return (
        f"data anchor: weight {anchor.weight:g}, {anchor.draws} draws per sample, {where} steps {list(steps)}, "
        f"fitted to {target}"
    )


def _batch_arithmetic(cfg: RewardFlConfig, clips: int | None, steps: int | None, processes: int) -> list[str]:
    train, sample = cfg.train, cfg.sample
    at_once = train.per_device_train_batch_size * train.gradient_accumulation_steps * processes
    lines = [
        f"batch: {train.per_device_train_batch_size} per process x {train.gradient_accumulation_steps} accumulation x "
        f"{processes} processes = {at_once} clips per step",
        f"gradient: {sample.gradient_mode} through steps {list(configuration.active_steps(cfg))}, coupling "
        f"{configuration.resolved_coupling(cfg):g}, KL weight {cfg.reward.kl_weight:g} ({cfg.reward.kl_gradient})",
        f"untrained expert: {cfg.experts.untrained}; decoder caches: {train.decode_caches}",
    ]
    if configuration.is_supervised(cfg):
        lines = lines[:1]
    if answers_of(cfg) > 1:
        lines.append(f"guidance: {sample.guidance_scale:g}, gradient of {sample.guidance_gradient}")
    if steps is None or clips is None:
        return lines
    visited = f"steps: {steps} = {steps * at_once} samples = {steps * at_once / clips:.2f} x {clips} rows"
    return [lines[0], visited, *lines[1:]]


def _group_arithmetic(
    cfg: FlowGrpoConfig, num_steps: int, windows: groups.Windows, clips: int | None, steps: int | None, processes: int
) -> list[str]:
    grpo, geometry = cfg.grpo, geometry_of(cfg, processes)
    drawn = drawn_windows(cfg, windows, steps)
    batches, widest = geometry.forwards_per_update, max(map(len, drawn))
    rolled = fmean(sum(passes for _, passes in groups.rollout_counts(geometry, num_steps, window)) for window in drawn)
    guidance = f" x {answers_of(cfg)} (guidance)" if answers_of(cfg) > 1 else ""
    first = ", ".join(str(list(window)) for window in drawn[:3])
    steps_drawn = list(windows.drawable)
    window = (
        f"{steps_drawn}" if grpo.window == "list" else f"{widest} of {steps_drawn}, drawn in each epoch: {first}, ..."
    )
    lines = [
        f"an epoch: {grpo.groups} groups x {grpo.group_size} = {geometry.samples} samples = {geometry.forwards} "
        f"forwards x {geometry.batch} batch x {processes} process{'es' if processes > 1 else ''}",
        f"  per process {answers_of(cfg) * rolled:g} forwards without gradient: {geometry.forwards} batches x "
        f"{num_steps} steps{guidance}{', its first steps once per group' if grpo.same_noise_in_group else ''}",
        f"an update: {geometry.samples // geometry.updates} samples; per process {answers_of(cfg) * batches * widest} "
        f"forwards with gradient: {batches} batches x {widest} window steps{guidance}",
        f"updates: {grpo.updates_per_epoch} per epoch x {grpo.inner_epochs} inner epochs = {updates_of_epoch(cfg)}",
        f"SDE: {grpo.sde}, noise level {grpo.noise_level:g}, window {window}",
    ]
    if steps is None:
        return lines
    rounds = steps // updates_of_epoch(cfg) * grpo.groups
    visits = f" = {rounds / clips:.2f} x {clips} clips" if clips else ""
    return [*lines, f"the run: {steps} updates = {steps // updates_of_epoch(cfg)} epochs = {rounds} groups{visits}"]


def sigma_table(cfg: AnyConfig, schedule: Schedule, trained: Sequence[int]) -> list[str]:
    """By step: sigma, timestep, expert, whether it is one of the `trained`, or of those that windows are drawn from.

    Of Flow-GRPO besides, for each kind of stochastic step at the configured noise level, its std, gradient weight
    (`flow.gradient_weight`) and noise left over sigma_next (`flow.noise_scale_error`).
    """
    kinds: Sequence[str] = ()
    role, word, level, trained_with = "gradient", "replayed", 0.0, ""
    if isinstance(cfg, FlowGrpoConfig):
        kinds, level, trained_with = KINDS, cfg.grpo.noise_level, cfg.grpo.sde
        role, word = "window ", "trained" if cfg.grpo.window == "list" else "drawn"
    heads = "".join(f"{kind + ' std':>11s}{'weight':>8s}{'noise':>7s}" for kind in kinds)
    lines = [f"step   sigma   timestep  expert      {role}{heads}".rstrip()]
    sigmas = schedule.sigmas.tolist()
    for i, (sigma, sigma_next) in enumerate(zip(sigmas[:-1], sigmas[1:], strict=True)):
        cells = "".join(_cells(kind, sigma, sigma_next, level, sigmas[1]) for kind in kinds)
        place = f"{word if i in trained else '-':{len(role)}s}"
        lines.append(f"{i:4d}  {sigma:6.4f}  {1000 * sigma:9.3f}  {schedule.experts[i]:10s}  {place}{cells}".rstrip())
    if kinds:
        lines.append(
            f"at noise level {level:g}, trained with {trained_with}. weight: of the step's gradient, |dmean/dv| / std "
            "(cps: 2 |dmean/dv| std). noise: what one step leaves / sigma of the next, 1 is exact"
        )
    return lines


def _cells(kind: str, sigma: float, sigma_next: float, level: float, sigma_max: float) -> str:
    """std, gradient weight and noise-scale error; - for what is not defined there."""
    if kind == "cps" and level > 1:
        return f"{'-':>11s}{'-':>8s}{'-':>7s}"
    step = (kind, sigma, sigma_next, level, sigma_max)
    std = flow.coefficients(*step).std
    weight = f"{flow.gradient_weight(*step):.4f}" if std > 0 else "-"
    noise = f"{flow.noise_scale_error(*step):.3f}" if sigma_next > 0 else "-"
    return f"{std:11.4f}{weight:>8s}{noise:>7s}"


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
class Work:
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


def work_of(
    cfg: AnyConfig, backbone: Backbone, clips: int | None, steps: int | None, processes: int, sharding: str = "none"
) -> Work:
    """How much work the configuration is. clips, steps: where they are known.

    ConfigError for samples that do not divide among processes, batches and updates, and for an impossible window.
    """
    checks.check_sharding(cfg, sharding)
    trained = trained_experts(cfg, backbone.experts)
    adapter = Adapter(cfg.lora.lora_rank, tuple(lora_targets(cfg, backbone)))
    common = Work(
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


def _reward_fl(common: Work, cfg: RewardFlConfig) -> Work:
    checks.check_graphs(cfg, common.processes)
    schedule, active = schedule_of(cfg, common.video.backbone), configuration.active_steps(cfg)
    experts = schedule.experts
    answers, replay = answers_of(cfg), Counter(experts[i] for i in active)
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


def _flow_grpo(common: Work, cfg: FlowGrpoConfig) -> Work:
    schedule, grpo = schedule_of(cfg, common.video.backbone), cfg.grpo
    experts = schedule.experts
    geometry, windows = geometry_of(cfg, common.processes), windows_of(cfg, experts, common.trained)
    per_epoch = updates_of_epoch(cfg)
    drawn, answers = drawn_windows(cfg, windows, common.steps), answers_of(cfg)
    own, epochs = geometry.samples // common.processes, None if common.steps is None else common.steps // per_epoch
    counts = [groups.rollout_counts(geometry, len(experts), window) for window in drawn]
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
        saves=groups.epochs_due(cfg.run.save_steps, per_epoch, common.steps),
        samples_on=grpo.samples_on,
    )


def _evaluation(cfg: FlowGrpoConfig, backbone: Backbone, steps: int | None) -> Sampling:
    wanted, per_epoch = cfg.evaluation, updates_of_epoch(cfg)
    num_steps = wanted.eval_inference_steps or cfg.sample.num_inference_steps
    shape, videos = backbone.latent_shape(*largest_clip(cfg, backbone), cfg.data.num_frames), None
    experts = backbone.schedule(num_steps, cfg.sample.shift, shape).experts
    if Path(wanted.eval_clips).is_file():
        videos = len(data.load_metadata(wanted.eval_clips, "evaluation.eval_clips")) * wanted.eval_noises
    passes = {expert: answers_of(cfg) * count for expert, count in Counter(experts).items()}
    due = groups.epochs_due(wanted.eval_steps, per_epoch, steps)
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


# Small questions


def answers_of(cfg: AnyConfig) -> int:
    """Forward passes that one velocity takes."""
    return 2 if cfg.sample.guidance_scale != 1 else 1


def drawn_windows(cfg: FlowGrpoConfig, windows: groups.Windows, steps: int | None) -> list[tuple[int, ...]]:
    """By epoch of the run, its window; of the first EPOCHS where its length is not known."""
    epochs = EPOCHS if steps is None else steps // updates_of_epoch(cfg)
    return [groups.window(windows, epoch, cfg.run.seed) for epoch in range(epochs)]
