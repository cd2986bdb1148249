"""Connect the processes of a run, and refuse launches that differ from the configuration."""

from rewardfl.backbones.protocol import DTYPES
from rewardfl.config import AnyConfig, trained_positions
from rewardfl.memory import attention, compiling
from rewardfl.training import checks
from rewardfl.training.distributed import Distributed


def connect_processes(cfg: AnyConfig) -> Distributed:
    """Connect the run's processes. Raise LaunchError or ConfigError where they do not fit the configuration."""
    job = Distributed(
        cfg.train.max_grad_norm,
        unused_parameters=len(trained_positions(cfg)) > 1,
        cpu_threads=cfg.run.cpu_threads,
        log_with=cfg.run.log_with,
        output_dir=cfg.run.output_dir,
    )
    checks.check_sharding(cfg.experts, cfg.train, job.sharding)
    attention.check_backward(cfg.model.attention_backend, DTYPES[cfg.model.dtype], job.device)
    if cfg.train.compile_blocks:
        compiling.check_compiler(job.device)
    return job
