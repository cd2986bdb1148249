"""Checks of a configuration that need more than the file: the disk, the model's files, the machine's size.

Each raises ConfigError, or returns what it looked up.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path

from rewardfl.config import EXPERTS, AnyConfig, ConfigError, RewardFlConfig
from rewardfl.rewards.face import pack as face_pack


def check_batch(cfg: RewardFlConfig, num_processes: int) -> int:
    """Clips per step over all processes. ConfigError when train_batch_size asks for another number."""
    train = cfg.train
    per_device, accumulation = train.per_device_train_batch_size, train.gradient_accumulation_steps
    per_pass = per_device * num_processes
    global_batch, wanted = per_pass * accumulation, train.train_batch_size
    if wanted is None or wanted == global_batch:
        return global_batch
    near = sorted({wanted // per_pass, -(-wanted // per_pass)} - {0})
    ways = ", ".join(f"gradient_accumulation_steps {n} gives {n * per_pass}" for n in near)
    raise ConfigError(
        f"train.train_batch_size is {wanted}, but per_device_train_batch_size {per_device} x "
        f"gradient_accumulation_steps {accumulation} x {num_processes} processes = {global_batch}; {ways}"
    )


def check_threads(cpu_threads: int | None, cores: int) -> None:
    """ConfigError for more threads than four for each of the machine's cores: 100,000 crash torch."""
    if cpu_threads is not None and cpu_threads > 4 * cores:
        raise ConfigError(
            f"run.cpu_threads must be at most {4 * cores} on this machine of {cores} cores, got {cpu_threads}; set it "
            f"to {cores}, or to null"
        )


def check_paths(cfg: AnyConfig) -> None:
    """ConfigError naming every file or folder of the configuration that is not there."""
    problems = []
    if not Path(cfg.data.file_name).is_file():
        problems.append(f"data.file_name: no such file: {cfg.data.file_name}")
    model = Path(cfg.model.model_paths)
    if cfg.model.model_paths and not (model / "model_index.json").is_file() and not model.is_file():
        problems.append(
            f"model.model_paths: no diffusers pipeline (model_index.json) in {model}, and no such json file"
        )
    for key in ("distill_lora_high", "distill_lora_low"):
        path = getattr(cfg.model, key)
        if path and not Path(path).exists():
            problems.append(f"model.{key}: no such file or folder: {path}")
    if cfg.lora.init_from and not Path(cfg.lora.init_from).exists():
        problems.append(f"lora.init_from: no such file or folder: {cfg.lora.init_from}")
    if cfg.model.tokenizer_path and not Path(cfg.model.tokenizer_path).is_dir():
        problems.append(f"model.tokenizer_path: no such folder: {cfg.model.tokenizer_path}")
    for key in ("reward_model_path", "held_out_model_path"):
        folder = getattr(cfg.reward, key)
        try:
            if folder is not None:
                face_pack.pack_files(folder)
        except (OSError, ValueError) as error:
            problems.append(f"reward.{key}: {error}")
    if problems:
        raise ConfigError("\n".join(problems))


def vae_factors(model_folder: str | Path) -> tuple[int, int]:
    """(spatial, temporal) compression of the pipeline folder's VAE, from vae/config.json; 8 and 4 for Wan."""
    path = Path(model_folder) / "vae" / "config.json"
    if not path.is_file():
        raise ConfigError(f"model.model_paths: {path} is missing; model_paths must be a diffusers pipeline folder")
    config = json.loads(path.read_text(encoding="utf-8"))
    return config.get("scale_factor_spatial", 8), config.get("scale_factor_temporal", 4)


def boundary_ratio(model_folder: str | Path) -> float:
    """The sigma at or above which the pipeline folder's high-noise expert answers, from model_index.json."""
    config = json.loads((Path(model_folder) / "model_index.json").read_text(encoding="utf-8"))
    if config.get("boundary_ratio") is None:
        raise ConfigError(
            f"model.model_paths: {model_folder} has no boundary_ratio, so it is no Wan2.2 A14B pipeline with two "
            "experts; TI2V-5B and Wan2.1 are not supported"
        )
    return config["boundary_ratio"]


def boundary_of(cfg: AnyConfig, model_folder: str | Path) -> float:
    """The sigma at or above which the high-noise expert answers: the configuration's, else the pipeline folder's."""
    given = cfg.model.min_timestep_boundary
    return boundary_ratio(model_folder) if given is None else given


def check_geometry(
    height: int, width: int, num_frames: int, spatial: int, temporal: int, patch: int = 2, max_pixels: int | None = None
) -> None:
    """ConfigError unless the VAE and the transformer can take clips of this size.

    spatial, temporal: the VAE's compression factors; patch: the transformer's spatial patch size. With max_pixels
    height and width are not used.
    """
    problems = []
    # 16 is what diffusers' Wan pipeline demands of every model, so that the trained one can be used there.
    multiple = math.lcm(16, spatial * patch)
    if max_pixels is not None and multiple != 16:
        problems.append(
            f"data.max_pixels gives sides in multiples of 16, this VAE takes multiples of {multiple}; remove "
            "max_pixels and set data.height and data.width"
        )
    for key, size in {"height": height, "width": width}.items():
        if size % multiple and max_pixels is None:
            near = _neighbours(size, multiple, 0)
            problems.append(f"data.{key} must be a multiple of {multiple}, got {size}; try {near}")
    # One latent frame would be the given image alone: nothing generated, nothing to reward.
    if num_frames % temporal != 1 % temporal or num_frames <= 1:
        near = _neighbours(num_frames, temporal, 1)
        problems.append(f"data.num_frames must be {temporal}k+1 for this VAE, got {num_frames}; try {near}")
    if problems:
        raise ConfigError("\n".join(problems))


def _neighbours(value: int, multiple: int, offset: int) -> str:
    """The numbers multiple * k + offset (k >= 1) next to `value`, in words."""
    below = (value - offset) // multiple
    return " or ".join(str(multiple * k + offset) for k in (below, below + 1) if k >= 1)


def check_active_experts(
    active: Sequence[int], answering: Sequence[str], trained: Sequence[str], coupling: float
) -> None:
    """ConfigError when a trained expert answers at no active step, or an active step gives nothing a gradient.

    answering: the expert of each step; coupling: of the gradient that an active step hands to the one before it. A
    frozen expert's step has no gradient of its own: it is of use only in handing one on to a trained expert's.
    """
    table = ", ".join(f"{i}: {expert}" for i, expert in enumerate(answering))
    asked = {answering[i] for i in active}
    idle = [name for name, expert in EXPERTS.items() if expert in trained and expert not in asked]
    if idle:
        useful = ",".join(name for name, expert in EXPERTS.items() if expert in asked)
        raise ConfigError(
            f"model.trainable_models: {', '.join(idle)} answers at no active step of {list(active)} and would not "
            f"learn (expert by step: {table}); train {useful}, or change sample.mid_timestep or sample.active_steps"
        )
    own = [i for i in active if answering[i] in trained]
    useless = [i for i in active if i not in own and (coupling == 0 or i < own[0])]
    if useless:
        raise ConfigError(
            f"sample.mid_timestep, sample.active_steps: the active steps {useless} of {list(active)} would give no "
            f"gradient, since model.trainable_models does not train their expert (expert by step: {table}) and they "
            f"hand none on to an earlier step that is trained; take {[i for i in active if i not in useless]}, or "
            "train both experts: model.trainable_models=dit,dit2"
        )
