"""Checks of a configuration that need more than the file: the disk, the model's files, the machine's size.

Each raises ConfigError, or returns what it looked up.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from accelerate.tracking import get_available_trackers

from rewardfl.config import ConfigError, RewardSpec
from rewardfl.config.schema import GrpoTrainConfig, SharedExpertsConfig, SharedRewardConfig, TrainConfig
from rewardfl.data import Row
from rewardfl.files import sha256
from rewardfl.memory.sharding import Sharding
from rewardfl.rewards.face import pack as face_pack
from rewardfl.rewards.face.detect import FaceDetector


def check_batch(train: TrainConfig, num_processes: int) -> int:
    """Return the clips per step over all processes. Raise ConfigError where train_batch_size is another number."""
    per_device, accumulation = train.per_device_train_batch_size, train.gradient_accumulation_steps
    per_pass = per_device * num_processes
    global_batch, configured = per_pass * accumulation, train.train_batch_size
    if configured is None or configured == global_batch:
        return global_batch
    near = sorted({configured // per_pass, -(-configured // per_pass)} - {0})
    ways = ", ".join(f"gradient_accumulation_steps {n} gives {n * per_pass}" for n in near)
    raise ConfigError(
        f"train.train_batch_size is {configured}, but per_device_train_batch_size {per_device} x "
        f"gradient_accumulation_steps {accumulation} x {num_processes} processes = {global_batch}; {ways}"
    )


def check_graphs(train: TrainConfig, num_processes: int) -> None:
    """Raise ConfigError where several processes would keep the graphs of the rollout.

    DDP prepares a backward pass in the forward pass before it, and would see K of these before the first backward.
    """
    if train.active_graphs == "keep_on_host" and num_processes > 1:
        raise ConfigError(
            f"train.active_graphs keep_on_host is for one process, there are {num_processes}; set it to replay"
        )


def check_sharding(experts: SharedExpertsConfig, train: GrpoTrainConfig, sharding: Sharding) -> None:
    """Raise ConfigError where sharded weights (zero2, fsdp2) would be swapped to the host or compiled."""
    if experts.trained == "cpu_swap" and sharding != "none":
        raise ConfigError(
            "experts.trained cpu_swap brings each process whole blocks from host memory, and "
            f"{sharding} puts them elsewhere; set experts.trained: gpu, or launch with configs/accelerate/ddp.yaml"
        )
    if train.compile_blocks and sharding != "none":
        raise ConfigError(
            f"train.compile_blocks has not been tried with {sharding}; set it to false, or launch with "
            "configs/accelerate/ddp.yaml"
        )


def check_tracker(name: str) -> None:
    """Raise ConfigError for a run.log_with without its package."""
    if name not in ("none", *map(str, get_available_trackers())):
        raise ConfigError(
            f"run.log_with is {name}, which is not installed: pip install {name}, or set run.log_with: none "
            "(metrics.jsonl is always written)"
        )


def check_held_out(rows: Sequence[Row], held_out: Sequence[Row]) -> list[str]:
    """Return a note on clips both trained on and evaluated. Raise ConfigError where none is held out."""

    def content(row: Row) -> tuple[str | Path, ...]:
        return (row.prompt, *(path.resolve() for path in row.files.values() if path is not None))

    trained = {content(row) for row in rows}
    shared = sum(content(row) in trained for row in held_out)
    if held_out and shared == len(held_out):
        raise ConfigError(
            f"evaluation.eval_clips: all of its {shared} rows are rows of data.file_name, so nothing is held out; name "
            "other clips, or null"
        )
    return [f"note: {shared} of {len(held_out)} rows of evaluation.eval_clips are trained on, too"] if shared else []


def check_paths(paths: Mapping[str, str | None], reward: SharedRewardConfig) -> None:
    """Raise ConfigError that names every missing path, {key: path}, and every folder of `reward` that is no pack."""
    problems = [
        f"{key}: no such file or folder: {path}" for key, path in paths.items() if path and not Path(path).exists()
    ]
    for key in ("reward_model_path", "held_out_model_path", "second_model_path"):
        folder = getattr(reward, key)
        try:
            if folder is not None:
                detector, _ = face_pack.pack_files(folder)
                if key != "second_model_path":  # only its recogniser is used
                    FaceDetector(detector, reward.det_size)
        except (OSError, ValueError) as error:
            problems.append(f"reward.{key}: {error}")
    if problems:
        raise ConfigError("\n".join(problems))


def check_second_recogniser(reward: SharedRewardConfig) -> None:
    """Raise ConfigError when the second recogniser of face_identity is its first."""
    first, second = reward.reward_model_path, reward.second_model_path
    if first is None or second is None:
        return
    network, other = (face_pack.pack_files(folder)[1] for folder in (second, first))
    if sha256(network) == sha256(other):
        raise ConfigError(
            f"reward.second_model_path: the recogniser {network} has the bytes of {other} of reward.reward_model_path, "
            "and the mean of a cosine with itself is that cosine; name a pack with another recogniser, or leave it out"
        )


def check_judge(reward: SharedRewardConfig, specs: Sequence[RewardSpec]) -> None:
    """Raise ConfigError when the held-out judge shares a network's file with a pack that is trained on."""
    judge = reward.held_out_model_path
    if judge is None:
        return
    trained = {
        "reward.reward_model_path": reward.reward_model_path,
        "reward.second_model_path": reward.second_model_path,
    }
    for term in specs:
        packs = {key: value for key, value in term.settings.items() if key.endswith("pack_dir") and value}
        trained |= {f"{term.key}.settings.{key}": str(value) for key, value in packs.items() if term.weight > 0}
    for key, folder in trained.items():
        try:
            shared = folder and face_pack.shared_file(judge, folder)
        except (OSError, ValueError):
            continue  # no pack: the reward itself reports that
        if shared:
            task, file, other = shared
            raise ConfigError(
                f"reward.held_out_model_path: the {task} {file} has the bytes of {other} of {key} (sha256 "
                f"{sha256(file)[:12]}), and a judge whose networks are trained against is not held out. antelopev2's "
                "scrfd_10g_bnkps.onnx and buffalo_l's det_10g.onnx are one file: put buffalo_l's recogniser "
                "w600k_r50.onnx beside buffalo_s's det_500m.onnx in a folder of their own and name that, or leave "
                "reward.held_out_model_path out"
            )
