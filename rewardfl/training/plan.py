"""Resolve a configuration for its model and its number of processes: `resolve` returns the plan of the run."""

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, assert_never

from torch import Tensor

from rewardfl import backbones, data, epoch_order, grpo, lora, sde
from rewardfl.backbones.protocol import Backbone, Schedule, Shape
from rewardfl.config import ConfigError, schema
from rewardfl.group_plan import Geometry
from rewardfl.memory import attention
from rewardfl.rewards import registry
from rewardfl.training import model_files
from rewardfl.training.lora_init import read_initial_adapters
from rewardfl.training.state import NO_BATCHING, Batching
from rewardfl.weights import lora_files
from rewardfl.weights.shards import InputError
from rewardfl.windows import Windows, draw_window

EPOCHS = 100  # epochs to take windows from, where the run's length is not known


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What a run does, resolved from its configuration, its model and its number of processes."""

    # the sections that are only read
    run: schema.RunConfig
    model: schema.ModelConfig
    memory: schema.MemoryConfig  # train.memory
    lora: schema.LoraConfig
    data: schema.DataConfig
    sample: schema.SampleConfig | schema.WholeSampleConfig
    reward: schema.SharedRewardConfig
    anchor: schema.AnchorConfig
    train: schema.GrpoTrainConfig

    processes: int
    processes_per_clip: int  # that compute each clip together
    rewards: Sequence[registry.ResolvedReward]
    schedule: Callable[[Shape], Schedule]  # the denoising steps for latents (C, T, h, w)
    experts: tuple[str, ...]  # the expert of each denoising step
    trained: tuple[str, ...]  # experts that get an adapter
    targets: tuple[str, ...]  # their layers that get one: diffusers' names, or ends of them
    init: Mapping[str, lora_files.Lora]  # {expert: the LoRA that its adapter starts from}, of lora.init_from
    active: tuple[int, ...]  # denoising steps with a gradient, increasing; for Flow-GRPO the steps of all windows
    anchor_steps: tuple[int, ...]  # denoising steps of anchor.sigmas, increasing
    forwards_per_velocity: int  # two with guidance
    backwards_per_update: int  # backward passes of one process
    clips_at_once: int  # clips of an epoch's rollouts; for reward feedback learning of an update
    base_noises: int  # videos of the base model that a row's motion is compared with
    supervised: bool = False  # the data anchor is the entire loss
    keeps_start: bool = False  # DPO's reference is a copy of lora.init_from's adapter, not the model without one
    pairs: bool = False  # trained on the table's columns chosen and rejected, without rollouts

    def count_steps(self, clips: int) -> int:
        """Count the updates of the run: of train.max_steps, or of its visits of every clip."""
        if self.train.steps is not None:
            return self.train.steps
        epochs = epoch_order.total_steps(clips, self.clips_at_once, self.train.epochs)
        return epochs * self.updates_per_epoch

    @property
    def updates_per_epoch(self) -> int:
        """Return the updates that train on one set of rollouts."""
        return 1


@dataclass(frozen=True, kw_only=True)
class RewardFlPlan(RunPlan):
    """The plan of train_reward_fl.py."""

    memory: schema.RewardFlMemoryConfig
    sample: schema.SampleConfig
    reward: schema.RewardConfig
    train: schema.TrainConfig
    graphs_of: tuple[int, ...]  # active steps that keep the rollout's graphs; the others are replayed
    kl_steps: tuple[int, ...]  # active steps with a KL; empty without one
    coupling: float  # weight of the gradient from one active step to the one before it


@dataclass(frozen=True, kw_only=True)
class GroupPlan(RunPlan):
    """The plan of a script that compares the rollouts of a group."""

    memory: schema.GroupMemoryConfig
    sample: schema.WholeSampleConfig
    reward: schema.GrpoRewardConfig
    evaluation: schema.EvaluationConfig
    group: schema.GroupConfig  # section grpo or forward
    geometry: Geometry  # the rollouts
    training: Geometry  # what updates train on: the rollouts, or of each group one (objective best) or two (dpo)
    part_weights: Mapping[str, float]  # weights of the first reward's parts that are trained next to its score

    def part(self, update: int) -> slice:
        """Return which of its forward passes a process trains on in an update of an epoch."""
        first, count = update % self.geometry.updates, self.training.forwards_per_update
        return slice(first * count, (first + 1) * count)

    @property
    def updates_per_epoch(self) -> int:
        """Return the updates that train on one set of rollouts."""
        return self.geometry.updates * self.group.inner_epochs


@dataclass(frozen=True, kw_only=True)
class ForwardRlPlan(GroupPlan):
    """The plan of train_forward_rl.py. `active` are the steps whose sigmas are drawn."""

    group: schema.ForwardConfig
    draws: int  # draws of each video in an update
    whole_range: bool  # sigmas between the steps, too
    advantage_scale: float
    old_decay: float  # the largest share of itself that the old policy keeps
    needs_old: bool  # the old policy's velocity
    needs_base: bool  # the velocity of the model without its adapter
    measured: tuple[str, ...]  # which of the metrics policy/from_old, from_base and ratio


@dataclass(frozen=True, kw_only=True)
class FlowGrpoPlan(GroupPlan):
    """The plan of train_flow_grpo.py."""

    group: schema.GrpoConfig
    windows: Windows

    def window(self, epoch: int, group: int = 0) -> tuple[int, ...]:
        """Return the stochastic steps of a group in an epoch, increasing; there are equally many in all of them."""
        position = epoch * self.geometry.groups + group if self.group.window.per_group else epoch
        return draw_window(self.windows, position, self.run.seed)

    def kernel(self, sigmas: Tensor) -> sde.Kernel:
        """Return the law of the stochastic steps on a schedule's sigmas."""
        max_std = math.inf if self.group.max_std is None else self.group.max_std
        return sde.Kernel(self.group.sde, self.group.noise_level, sigmas, max_std)

    @property
    def ratio_tolerance(self) -> float:
        """Return the tolerance of grpo.check_ratio."""
        exact = self.model.dtype == "float32" and not self.train.compile_blocks
        return grpo.ratio_tolerance(self.group.clip_ends[0], exact=exact)

    def draw_windows(self, steps: int | None) -> list[tuple[int, ...]]:
        """Return the window of each epoch of the run, or of the first EPOCHS where its length is not known."""
        return [self.window(epoch) for epoch in range(EPOCHS if steps is None else steps // self.updates_per_epoch)]


AnyPlan = RewardFlPlan | FlowGrpoPlan | ForwardRlPlan


def open_model(cfg: schema.AnyConfig) -> Backbone:
    """Open the model, and check its files by their headers and the configuration against them."""
    model_files.check_files(cfg.data, cfg.model, cfg.lora, cfg.reward)
    backbone = backbones.open(cfg.model.model_name, model_files.model_source(cfg.model))
    backbone.check_clips(cfg.data.height, cfg.data.width, cfg.data.num_frames, cfg.data.max_pixels)
    if (processes := schema.processes_per_clip(cfg)) > 1:
        backbone.check_split(processes, cfg.data.height, cfg.data.width, cfg.data.num_frames)
    if cfg.model.attention_backend != attention.NATIVE or attention.VARIABLE in os.environ:
        network = next(iter(backbone.on_meta(512, 512, cfg.data.num_frames).experts.values()))[0].build(None)
        attention.check_name(cfg.model.attention_backend, network)
    return backbone


def resolve(cfg: schema.AnyConfig, backbone: Backbone, processes: int, *, here: bool = True) -> AnyPlan:
    """Resolve the configuration. Of files, only the header of lora.init_from is read.

    here: the run's files must be on this machine. Raise ConfigError, RewardError or InputError for what cannot
    train.
    """
    shape = backbone.latent_shape(*largest_size(cfg.data, ()), cfg.data.num_frames)
    schedule = make_schedule(cfg.sample, backbone, shape)
    trained = trained_experts(cfg, backbone.experts)
    shared = partial(_shared_fields, cfg, backbone, processes, schedule, trained, here=here)
    draws = cfg.anchor.draws if cfg.anchor.weight else 0
    if isinstance(cfg, schema.FlowGrpoConfig):
        windows, geometry = make_windows(cfg, schedule.experts, trained), make_geometry(cfg, processes)
        window_size = len(draw_window(windows, 0, cfg.run.seed))
        return FlowGrpoPlan(
            **shared(windows.drawable),
            backwards_per_update=geometry.forwards_per_update * (window_size + draws),
            clips_at_once=cfg.grpo.groups,
            windows=windows,
            geometry=geometry,
            training=geometry,
        )
    if isinstance(cfg, schema.ForwardRlConfig):
        return ForwardRlPlan(**shared(drawn_steps(cfg, schedule, trained)), **_forward_fields(cfg, processes, draws))
    active, supervised, memory = schema.active_steps(cfg), schema.is_supervised(cfg), cfg.train.memory
    check_active_experts(cfg, schedule, trained, active)
    replayed = 0 if supervised else len(active)
    count = 0 if memory.active_graphs == "replay" else memory.kept_steps or len(active)
    for key, most, what in (("kept_steps", len(active), "steps with a gradient"), ("kept_chunks", shape[1], "chunks")):
        number = getattr(memory, key) or 0
        if number > most:
            raise ConfigError(f"train.memory.{key} is {number}, but there are {most} {what}; make it smaller")
    return RewardFlPlan(
        **shared(active),
        graphs_of=active[len(active) - count :],
        kl_steps=schema.kl_steps(cfg),
        backwards_per_update=cfg.train.gradient_accumulation_steps * (replayed + draws),
        clips_at_once=check_batch(cfg.train, processes),
        coupling=cfg.sample.coupling,
        supervised=supervised,
    )


def _shared_fields(
    cfg: schema.AnyConfig,
    backbone: Backbone,
    processes: int,
    schedule: Schedule,
    trained: tuple[str, ...],
    active: tuple[int, ...],
    *,
    here: bool,
) -> dict[str, Any]:
    """Return the fields of RunPlan, and of GroupPlan, that the scripts resolve alike."""
    rewards = find_rewards(cfg, backbone, here=here)
    targets = tuple(lora.target_modules(cfg.lora.lora_target_modules, backbone.layer_names))
    if here:
        lora.check_targets(targets, backbone.linear_layers(), backbone.layer_names)
        model_files.check_shared_networks(cfg.reward, [spec for spec, _ in rewards])
    fields = {name: section for name, section in cfg if name not in ("grpo", "forward")}
    if isinstance(cfg, schema.GroupRunConfig):
        fields |= {"group": cfg.group, "part_weights": cfg.reward.part_weights}
    return fields | {
        "memory": cfg.train.memory,
        "processes": processes,
        "processes_per_clip": schema.processes_per_clip(cfg),
        "rewards": rewards,
        "schedule": partial(make_schedule, cfg.sample, backbone),
        "experts": schedule.experts,
        "trained": trained,
        "targets": targets,
        "init": read_initial_adapters(cfg.lora, backbone, trained, targets) if here else {},
        "active": active,
        "anchor_steps": anchor_steps(cfg.anchor, schedule, trained, active),
        "forwards_per_velocity": 2 if cfg.sample.guidance_scale != 1 else 1,
        "base_noises": schema.count_base_noises(cfg),
    }


def _forward_fields(cfg: schema.ForwardRlConfig, processes: int, anchor_draws: int) -> dict[str, Any]:
    """Return the fields of ForwardRlPlan that the other plans lack, with the published defaults of the objective."""
    geometry, forward = make_geometry(cfg, processes), cfg.forward
    training, objective, old = geometry, forward.objective, forward.old_policy
    if objective in ("best", "dpo"):  # so that a process trains on all that is chosen of a group, in one update
        if geometry.groups % (shares := processes * geometry.updates):
            needs = f"a multiple of {shares} (processes x updates_per_epoch), got {geometry.groups}"
            raise ConfigError(f"forward.groups must be {needs}, with objective {objective}; change one of them")
        training = replace(geometry, group_size={"best": 1, "dpo": 2}[objective], batch=1)
    default_scale = {"rvm": 0.1, "nft": 1.0, "awm": 1 / forward.advantage.clip, "best": 1.0, "dpo": 1.0}[objective]
    default_decay = {"rvm": 0.0, "nft": 0.5, "awm": 0.3, "best": 0.0, "dpo": 0.0}[objective]
    needs_old, needs_base = objective in ("nft", "awm") or old.anchor > 0, forward.base_anchor > 0
    measured = {"from_old": needs_old, "from_base": needs_base, "ratio": objective == "awm"}
    return {
        "backwards_per_update": training.forwards_per_update * (forward.draws + anchor_draws),
        "clips_at_once": forward.groups,
        "geometry": geometry,
        "training": training,
        "keeps_start": objective == "dpo" and cfg.lora.init_from is not None,
        "pairs": schema.takes_pairs(cfg),
        "draws": forward.draws,
        "whole_range": forward.sigmas == "trained_range",
        "advantage_scale": default_scale if forward.advantage.scale is None else forward.advantage.scale,
        "old_decay": default_decay if old.decay is None else old.decay,
        "needs_old": needs_old,
        "needs_base": needs_base,
        "measured": tuple(name for name, has in measured.items() if has),
    }


def check_batch(train: schema.TrainConfig, processes: int) -> int:
    """Return the clips per step over all processes. Raise ConfigError if the processes do not fit `train`."""
    if processes % train.context_parallel:
        raise ConfigError(
            f"train.context_parallel {train.context_parallel} does not divide the {processes} processes; start others"
        )
    per_device, accumulation = train.per_device_train_batch_size, train.gradient_accumulation_steps
    per_pass = per_device * processes // train.context_parallel
    global_batch, configured = per_pass * accumulation, train.train_batch_size
    if configured is None or configured == global_batch:
        return global_batch
    product = f"per_device_train_batch_size {per_device} x gradient_accumulation_steps {accumulation} x {processes}"
    divisor = f" / context_parallel {train.context_parallel}" if train.context_parallel > 1 else ""
    raise ConfigError(
        f"train.train_batch_size is {configured}, but {product} processes{divisor} = {global_batch}; change one of "
        "these numbers"
    )


def find_rewards(cfg: schema.AnyConfig, backbone: Backbone, *, here: bool = True) -> list[registry.ResolvedReward]:
    """Find the rewards' classes. here: files in their settings must exist.

    Raise RewardError for a missing reward, wrong settings, or a trained one without a gradient. Raise ConfigError for
    a reward that needs longer clips.
    """
    specs = schema.list_reward_specs(cfg, backbone.pixels_per_token)
    rewards = registry.resolve_rewards(specs, cfg.data.fps or backbone.frame_rate, here=here)
    check_frames(cfg.data.num_frames, rewards)
    if isinstance(cfg, schema.RewardFlConfig) and not schema.is_supervised(cfg):
        registry.check_trainable(rewards)
    return rewards


def check_frames(num_frames: int, rewards: Sequence[registry.ResolvedReward]) -> None:
    """Raise ConfigError if a reward needs more frames than the clips have."""
    for spec, cls in rewards:
        if num_frames < cls.fewest_frames:
            needs = f"{spec.key} judges at least {cls.fewest_frames} frames, and data.num_frames is {num_frames}"
            raise ConfigError(f"{needs}; take a reward that judges pictures (docs/rewards.md), or remove it")


def largest_size(settings: schema.DataConfig, sizes: Iterable[tuple[int, int] | None]) -> tuple[int, int]:
    """Return (height, width) of the largest generated clips: with max_pixels a square, which has the most tokens.

    sizes: rows' own height and width; None for a row of the usual size. Without rows it is the usual size.
    """
    usual = (settings.height, settings.width)
    if settings.max_pixels is not None:
        return data.clip_size((4096, 4096), *usual, settings.max_pixels)
    return max((size or usual for size in sizes), key=lambda size: (math.prod(size), size), default=usual)


def size_problem(
    settings: schema.DataConfig, backbone: Backbone, size: tuple[int, int] | None, processes_per_clip: int = 1
) -> str:
    """Return why the model cannot make clips of a row's own (height, width); "" where it can."""
    if size is None:
        return ""
    if settings.max_pixels is not None:
        return "height and width say a size, and so does data.max_pixels; empty the cells, or remove data.max_pixels"
    try:
        backbone.check_clips(size[0], size[1], settings.num_frames)
        if processes_per_clip > 1:
            backbone.check_split(processes_per_clip, size[0], size[1], settings.num_frames)
    except InputError as error:
        return str(error).replace("data.", "").replace("\n", "; ")  # columns have the settings' names
    return ""


def make_schedule(sample: schema.SampleConfig | schema.WholeSampleConfig, backbone: Backbone, shape: Shape) -> Schedule:
    """Return the run's denoising steps for latents of `shape` (C, T, h, w)."""
    return backbone.schedule(sample.num_inference_steps, sample.shift, shape).until(sample.final_timestep)


def trained_experts(cfg: schema.AnyConfig, experts: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the trained experts. Raise ConfigError if the model has fewer."""
    chosen = schema.trained_positions(cfg)
    if max(chosen) >= len(experts):
        names = ", ".join(schema.TRAINABLE[: len(experts)])
        raise ConfigError(f"model.trainable_models: {cfg.model.trainable_models}; this model has only {names}")
    return tuple(experts[i] for i in chosen)


def make_geometry(cfg: schema.GroupRunConfig, processes: int) -> Geometry:
    """Build the geometry of an epoch. Raise ConfigError if the groups do not divide into passes and updates."""
    group, section = cfg.group, "forward" if isinstance(cfg, schema.ForwardRlConfig) else "grpo"
    try:
        return Geometry(
            group_size=group.group_size,
            groups=group.groups,
            world=processes,
            batch=cfg.train.per_device_train_batch_size,
            updates=group.updates_per_epoch,
            same_noise=isinstance(cfg, schema.FlowGrpoConfig) and cfg.grpo.same_noise_in_group,
        )
    except ValueError as error:
        keys = f"{section}.groups, group_size, updates_per_epoch (updates), train.per_device_train_batch_size (batch)"
        raise ConfigError(f"{keys}: {error}") from error


def make_windows(cfg: schema.FlowGrpoConfig, experts: Sequence[str], trained: Sequence[str]) -> Windows:
    """Build the windows of steps that an epoch may train: steps of trained experts, without the last step.

    experts: of each step. Raise ConfigError if no window is possible, or a trained expert is in none.
    """
    window = cfg.grpo.window
    table = ", ".join(f"{i}: {expert}" for i, expert in enumerate(experts))
    try:
        windows = Windows(
            rule=window.rule,
            # no step would remove the noise of the last one
            usable=[i for i, expert in enumerate(experts[:-1]) if expert in trained],
            steps=window.steps or (),
            size=window.size or 2,
            bounds=window.within,
            fraction=window.fraction or 0.0,
        )
        draw_window(windows, 0, cfg.run.seed)
    except ValueError as error:
        usable = f"usable are the steps of {cfg.model.trainable_models} (model.trainable_models) but the last: {table}"
        raise ConfigError(f"grpo.window: {error}; {usable}") from error
    if window.per_group and len(trained) > 1:
        raise ConfigError(
            "grpo.window.per_group needs one trained expert, since all processes must train the same one at a time, "
            f"got model.trainable_models {cfg.model.trainable_models}; train one, or set per_group: false"
        )
    _check_used(trained, experts, windows.drawable, "grpo.window")
    return windows


def _check_used(trained: Sequence[str], experts: Sequence[str], steps: Sequence[int], keys: str) -> None:
    """Raise ConfigError if a trained expert is used at none of the steps that `keys` set. experts: of every step."""
    if idle := [name for name in trained if name not in {experts[i] for i in steps}]:
        table = ", ".join(f"{i}: {expert}" for i, expert in enumerate(experts))
        raise ConfigError(
            f"model.trainable_models: {', '.join(idle)} is used at none of the steps {list(steps)} and would not be "
            f"trained ({table}); train only the other, or change {keys}"
        )


def check_active_experts(
    cfg: schema.RewardFlConfig, schedule: Schedule, trained: Sequence[str], active: Sequence[int]
) -> None:
    """Raise ConfigError if a trained expert has no active step, or an active step gives no gradient.

    A frozen expert's step only passes a gradient on to a trained expert's earlier step.
    """
    keys, experts = "sample.mid_timestep or sample.active_steps", schedule.experts
    if schema.is_supervised(cfg):
        active = anchor_steps(cfg.anchor, schedule, trained, active)
        keys = "anchor.sigmas (trained_range reaches every expert)"
    _check_used(trained, experts, active, keys)
    first = min(i for i in active if experts[i] in trained)
    if useless := [i for i in active if experts[i] not in trained and (cfg.sample.coupling == 0 or i < first)]:
        ways = f"{[i for i in active if i not in useless]}, or model.trainable_models={','.join(schema.TRAINABLE)}"
        raise ConfigError(
            f"sample.mid_timestep, sample.active_steps: the active steps {useless} of {list(active)} give no gradient "
            f"to {', '.join(trained)} (model.trainable_models); take {ways}"
        )


def anchor_steps(
    anchor: schema.AnchorConfig, schedule: Schedule, trained: Sequence[str], active: Sequence[int]
) -> tuple[int, ...]:
    """Return the increasing steps of anchor.sigmas. Raise ConfigError if a listed step's expert is not trained."""
    trained_steps = tuple(i for i, expert in enumerate(schedule.experts) if expert in trained)
    if anchor.sigmas == "trained_range":
        return trained_steps
    if anchor.sigmas == "active":
        return tuple(i for i in active if i in trained_steps)
    assert isinstance(anchor.sigmas, tuple), f"anchor.sigmas {anchor.sigmas} has no branch"
    return _listed_steps("anchor.sigmas", anchor.sigmas, trained_steps)


def drawn_steps(cfg: schema.ForwardRlConfig, schedule: Schedule, trained: Sequence[str]) -> tuple[int, ...]:
    """Return the increasing steps of forward.sigmas.

    Raise ConfigError if a listed step's expert is not trained, or a trained expert has no step.
    """
    steps = tuple(i for i, expert in enumerate(schedule.experts) if expert in trained)
    if isinstance(sigmas := cfg.forward.sigmas, tuple):
        steps = _listed_steps("forward.sigmas", sigmas, steps)
    elif sigmas != "steps" and sigmas != "trained_range":
        assert_never(sigmas)
    _check_used(trained, schedule.experts, steps, "forward.sigmas or sample.num_inference_steps")
    return steps


def _listed_steps(key: str, listed: Sequence[int], trained_steps: Sequence[int]) -> tuple[int, ...]:
    """Return the listed steps. Raise ConfigError for one of an untrained expert."""
    if untrained := [i for i in listed if i not in trained_steps]:
        raise ConfigError(f"{key}: no trained expert is used at the steps {untrained}; take some of {[*trained_steps]}")
    return tuple(listed)


def make_batching(run_plan: RunPlan, sizes: Sequence[tuple[int, int]]) -> Batching:
    """Return the numbers of clips that the order of training depends on. sizes: of all clips.

    Raise ConfigError if a forward pass of a script with groups would get videos of two sizes.
    """
    per_pass, several = run_plan.train.per_device_train_batch_size, len(set(sizes)) > 1
    if not isinstance(run_plan, GroupPlan):
        return Batching(run_plan.clips_at_once, per_pass if several else None)
    if several and run_plan.group.group_size % per_pass:
        raise ConfigError("train.per_device_train_batch_size must divide group_size where clips differ in size")
    return NO_BATCHING
