"""Checks of a configuration that need more than the file: the disk, the model's files, the machine's size.

Each raises ConfigError, or returns what it looked up.
"""

from collections.abc import Sequence
from pathlib import Path

from rewardfl.config import TRAINABLE, AnyConfig, ConfigError, RewardFlConfig
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


def check_active_experts(
    active: Sequence[int], answering: Sequence[str], experts: Sequence[str], trained: Sequence[str], coupling: float
) -> None:
    """ConfigError when a trained expert answers at no active step, or an active step gives nothing a gradient.

    answering: the expert of each step; experts: the model's, in their order; coupling: of the gradient that an active
    step hands to the one before it. A frozen expert's step has no gradient of its own: it is of use only in handing one
    on to a trained expert's.
    """
    table = ", ".join(f"{i}: {expert}" for i, expert in enumerate(answering))
    asked = {answering[i] for i in active}
    words = dict(zip(experts, TRAINABLE, strict=False))
    idle = [words[expert] for expert in trained if expert not in asked]
    if idle:
        useful = ",".join(words[expert] for expert in experts if expert in asked)
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
            f"train all experts: model.trainable_models={','.join(words.values())}"
        )
