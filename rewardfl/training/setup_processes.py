"""Connect the processes of a run, and refuse launches and trackers that do not fit the configuration."""

from accelerate.tracking import get_available_trackers

from rewardfl.backbones.protocol import DTYPES
from rewardfl.config import ConfigError, GrpoTrainConfig
from rewardfl.config.schema import ModelConfig, RunConfig
from rewardfl.memory import attention, compiling
from rewardfl.memory.sharding import Sharding
from rewardfl.training.distributed import Distributed


def connect_processes(run: RunConfig, model: ModelConfig, train: GrpoTrainConfig, per_clip: int) -> Distributed:
    """Connect the run's processes, `per_clip` for each clip. Raise LaunchError or ConfigError if they do not fit it."""
    tracker = run.log_with
    if tracker not in ("none", *map(str, get_available_trackers())):
        raise ConfigError(f"run.log_with: {tracker} is not installed; pip install {tracker}, or set run.log_with: none")
    job = Distributed(
        train.max_grad_norm,
        cpu_threads=run.cpu_threads,
        processes_per_clip=per_clip,
        log_with=tracker,
        output_dir=run.output_dir,
    )
    check_sharding(train, per_clip, job.sharding)
    attention.check_backward(model.attention_backend, DTYPES[model.dtype], job.device)
    if train.compile_blocks:
        compiling.check_compiler(job.device)
    return job


def check_sharding(train: GrpoTrainConfig, per_clip: int, sharding: Sharding) -> None:
    """Raise ConfigError for what sharded weights (zero2, fsdp2) exclude: swap, compiling, context parallelism."""
    settings = {"train.memory.trained cpu_swap": train.memory.trained == "cpu_swap"}
    settings["train.compile_blocks"] = train.compile_blocks
    settings["train.context_parallel"] = per_clip > 1
    for setting, is_on in settings.items():
        if is_on and sharding != "none":
            ddp = "configs/accelerate/ddp.yaml"
            raise ConfigError(f"{setting} does not go with {sharding}; remove it, or launch with {ddp}")
