"""Resolve a configuration: schedule, trained experts, windows, group geometry, number of steps."""

import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from rewardfl import config as configuration
from rewardfl import data, epoch_order, lora
from rewardfl.backbones.protocol import Backbone, Schedule, Shape
from rewardfl.config import AnyConfig, ConfigError, FlowGrpoConfig, RewardFlConfig
from rewardfl.group_plan import Geometry
from rewardfl.weights.shards import InputError
from rewardfl.windows import Windows, draw_window

EPOCHS = 100  # epochs to take windows from, where the run's length is not known


def largest_clip(cfg: AnyConfig, backbone: Backbone) -> tuple[int, int]:
    """Return (height, width) of the largest clips: with max_pixels a square, which has the most tokens.

    Otherwise it is the largest size of the usable rows, where the table exists and rows have sizes of their own.
    """
    table, usual = Path(cfg.data.file_name), (cfg.data.height, cfg.data.width)
    if cfg.data.max_pixels is not None:
        return data.clip_size((4096, 4096), *usual, cfg.data.max_pixels)
    sizes = _row_sizes(table, table.stat().st_mtime_ns) if table.is_file() else frozenset()
    usable = [size or usual for size in sizes if not size_problem(cfg, backbone, size)]
    return max(usable, key=lambda size: (math.prod(size), size), default=usual)


@lru_cache(maxsize=4)
def _row_sizes(table: Path, modified: int) -> frozenset[tuple[int, int] | None]:
    """Return Row.size of all rows without a problem. modified: time of the file's change, a key of the cache."""
    return frozenset(row.size for row in data.load_metadata(table) if not row.problem)


def size_problem(cfg: AnyConfig, backbone: Backbone, size: tuple[int, int] | None) -> str:
    """Return why the model cannot make clips of a row's own (height, width); "" where it can."""
    if size is None:
        return ""
    if cfg.data.max_pixels is not None:
        return "height and width say a size, and so does data.max_pixels; empty the cells, or remove data.max_pixels"
    try:
        backbone.check_clips(size[0], size[1], cfg.data.num_frames)
    except InputError as error:
        return str(error).replace("data.", "").replace("\n", "; ")  # columns have the settings' names
    return ""


def make_schedule(cfg: AnyConfig, backbone: Backbone, shape: Shape | None = None) -> Schedule:
    """Return the run's denoising steps for latents of `shape`; None: of the largest clips."""
    shape = backbone.latent_shape(*largest_clip(cfg, backbone), cfg.data.num_frames) if shape is None else shape
    schedule = backbone.schedule(cfg.sample.num_inference_steps, cfg.sample.shift, shape)
    return schedule.until(cfg.sample.final_timestep)


def trained_experts(cfg: AnyConfig, experts: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the trained experts. Raise ConfigError where the model has fewer."""
    chosen = configuration.trained_positions(cfg)
    if max(chosen) >= len(experts):
        names = ", ".join(configuration.TRAINABLE[: len(experts)])
        raise ConfigError(
            f"model.trainable_models: this model has {len(experts)} expert(s), to be named {names}, got "
            f"{cfg.model.trainable_models}"
        )
    return tuple(experts[i] for i in chosen)


def count_steps(cfg: AnyConfig, clips: int | None, processes: int) -> int | None:
    """Count the updates of the run: max_steps, or num_train_epochs visits of every clip. None where not known."""
    if cfg.train.max_steps is not None or clips is None:
        return cfg.train.max_steps
    if isinstance(cfg, FlowGrpoConfig):
        epochs = epoch_order.total_steps(clips, cfg.grpo.groups, cfg.train.num_train_epochs)
        return epochs * updates_per_epoch(cfg)
    train = cfg.train
    at_once = processes * train.per_device_train_batch_size * train.gradient_accumulation_steps
    return epoch_order.total_steps(clips, train.train_batch_size or at_once, train.num_train_epochs)


def make_order(cfg: RewardFlConfig, sizes: Sequence[tuple[int, int]], processes: int) -> data.Order:
    """Build the order of training. sizes: (height, width) of each clip."""
    train = cfg.train
    return data.Order(
        sizes=sizes, batch_size=train.per_device_train_batch_size, accumulation=train.gradient_accumulation_steps,
        processes=processes, seed=cfg.run.seed,
    )  # fmt: skip


def updates_per_epoch(cfg: FlowGrpoConfig) -> int:
    return cfg.grpo.updates_per_epoch * cfg.grpo.inner_epochs


def make_geometry(cfg: FlowGrpoConfig, processes: int) -> Geometry:
    """Build the geometry of an epoch. Raise ConfigError where the groups do not divide into passes and updates."""
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


def make_windows(cfg: FlowGrpoConfig, experts: Sequence[str], trained: Sequence[str]) -> Windows:
    """Build the windows of steps that an epoch may train: those of trained experts, without the last step.

    experts: of each step. Raise ConfigError where no window is possible, or a trained expert is in none.
    """
    grpo = cfg.grpo
    table = ", ".join(f"{i}: {expert}" for i, expert in enumerate(experts))
    try:
        windows = Windows(
            kind=grpo.window,
            # no step would remove the noise of the last one
            usable=[i for i, expert in enumerate(experts[:-1]) if expert in trained],
            steps=grpo.window_steps or (),
            size=grpo.window_size,
            bounds=grpo.window_bounds,
            fraction=grpo.window_fraction,
        )
        draw_window(windows, 0, cfg.run.seed)
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
    """Return diffusers' names, or their ends, of the layers that get an adapter."""
    return lora.target_modules(cfg.lora.lora_target_modules, backbone.layer_names)


def check_active_experts(cfg: RewardFlConfig, backbone: Backbone) -> None:
    """Raise ConfigError where a trained expert has no active step, or an active step gives no gradient.

    A frozen expert's step only passes a gradient on to a trained expert's earlier step.
    """
    schedule, trained = make_schedule(cfg, backbone), trained_experts(cfg, backbone.experts)
    active, coupling, experts = configuration.active_steps(cfg), configuration.resolve_coupling(cfg), schedule.experts
    way_out = "sample.mid_timestep or sample.active_steps"
    if configuration.is_supervised(cfg):
        active, way_out = anchor_steps(cfg, schedule, trained), "anchor.sigmas (trained_range reaches every expert)"
    table = ", ".join(f"{i}: {expert}" for i, expert in enumerate(experts))
    active_experts = {experts[i] for i in active}
    words = dict(zip(backbone.experts, configuration.TRAINABLE, strict=False))
    idle = [words[expert] for expert in trained if expert not in active_experts]
    if idle:
        useful = ",".join(words[expert] for expert in backbone.experts if expert in active_experts)
        train = f"train {useful}, or change" if useful else "change"
        raise ConfigError(
            f"model.trainable_models: {', '.join(idle)} answers at no active step of {list(active)} and would not "
            f"learn (expert by step: {table}); {train} {way_out}"
        )
    trained_steps = [i for i in active if experts[i] in trained]
    useless = [i for i in active if i not in trained_steps and (coupling == 0 or i < trained_steps[0])]
    if useless:
        raise ConfigError(
            f"sample.mid_timestep, sample.active_steps: the active steps {useless} of {list(active)} would give no "
            f"gradient, since model.trainable_models does not train their expert (expert by step: {table}) and they "
            f"hand none on to an earlier step that is trained; take {[i for i in active if i not in useless]}, or "
            f"train all experts: model.trainable_models={','.join(words.values())}"
        )


def anchor_steps(cfg: AnyConfig, schedule: Schedule, trained: Sequence[str]) -> tuple[int, ...]:
    """Return the increasing steps of anchor.sigmas. Raise ConfigError where a listed step's expert is not trained."""
    trained_steps = [i for i, expert in enumerate(schedule.experts) if expert in trained]
    sigmas = cfg.anchor.sigmas
    if sigmas == "trained_range":
        return tuple(trained_steps)
    if sigmas == "active":
        if isinstance(cfg, FlowGrpoConfig):
            return tuple(make_windows(cfg, schedule.experts, trained).drawable)
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


def backwards_per_sample(cfg: RewardFlConfig) -> int:
    """Return the backward passes of one sample: those of the replay, none if supervised, and the data anchor's."""
    return anchor_draws(cfg) + (0 if configuration.is_supervised(cfg) else len(configuration.active_steps(cfg)))


def check_sizes(cfg: FlowGrpoConfig, sizes: Sequence[tuple[int, int]]) -> None:
    """Raise ConfigError where a forward pass would get videos of two sizes. sizes: of all clips."""
    if len(set(sizes)) > 1 and cfg.grpo.group_size % cfg.train.per_device_train_batch_size:
        raise ConfigError(
            "train.per_device_train_batch_size must divide grpo.group_size where clips differ in size: one forward "
            "pass takes videos of one size"
        )


def forwards_per_velocity(cfg: AnyConfig) -> int:
    """Return the forward passes of one velocity: two with guidance."""
    return 2 if cfg.sample.guidance_scale != 1 else 1


def draw_windows(cfg: FlowGrpoConfig, windows: Windows, steps: int | None) -> list[tuple[int, ...]]:
    """Draw the window of each epoch of the run, or of the first EPOCHS where its length is not known."""
    epochs = EPOCHS if steps is None else steps // updates_per_epoch(cfg)
    return [draw_window(windows, epoch, cfg.run.seed) for epoch in range(epochs)]
