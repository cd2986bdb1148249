"""Connect the processes of a run, and refuse launches and trackers that do not fit the configuration."""

from accelerate.tracking import get_available_trackers

from rewardfl.backbones.protocol import DTYPES
from rewardfl.config import AnyConfig, ConfigError, processes_per_clip
from rewardfl.memory import attention, compiling
from rewardfl.memory.sharding import Sharding
from rewardfl.training.distributed import Distributed


def connect_processes(cfg: AnyConfig) -> Distributed:
    """Connect the run's processes. Raise LaunchError or ConfigError where they do not fit the configuration."""
    tracker = cfg.run.log_with
    if tracker not in ("none", *map(str, get_available_trackers())):
        raise ConfigError(f"run.log_with: {tracker} is not installed; pip install {tracker}, or set run.log_with: none")
    job = Distributed(
        cfg.train.max_grad_norm,
        cpu_threads=cfg.run.cpu_threads,
        processes_per_clip=processes_per_clip(cfg),
        log_with=tracker,
        output_dir=cfg.run.output_dir,
    )
    check_sharding(cfg, job.sharding)
    attention.check_backward(cfg.model.attention_backend, DTYPES[cfg.model.dtype], job.device)
    if cfg.train.compile_blocks:
        compiling.check_compiler(job.device)
    return job


def check_sharding(cfg: AnyConfig, sharding: Sharding) -> None:
    """Raise ConfigError for what sharded weights (zero2, fsdp2) exclude: swap, compiling, context parallelism."""
    settings = {"experts.trained cpu_swap": cfg.experts.trained == "cpu_swap"}
    settings["train.compile_blocks"] = cfg.train.compile_blocks
    settings["train.context_parallel"] = processes_per_clip(cfg) > 1
    for setting, is_on in settings.items():
        if is_on and sharding != "none":
            ddp = "configs/accelerate/ddp.yaml"
            raise ConfigError(f"{setting} does not go with {sharding}; remove it, or launch with {ddp}")
