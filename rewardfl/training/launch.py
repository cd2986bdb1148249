"""Make the Accelerator, and refuse launches that would train something else."""

import os
from collections.abc import Mapping
from datetime import timedelta

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DistributedType,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    ProjectConfiguration,
)

TIMEOUT = timedelta(hours=2)  # for a collective: others wait while one process writes sample videos or fills the cache
REDUCE_BUCKET = 50_000_000  # float32 numbers that ZeRO-2 reduces at a time


class LaunchError(ValueError):
    """The processes differ from the launcher's request, or cannot train. The message names the way out."""


def make_accelerator(max_grad_norm: float, *, log_with: str, output_dir: str | None) -> Accelerator:
    """Make the Accelerator of a training script. Raise LaunchError if the processes differ from the request."""
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    # on a CPU, accelerate runs DeepSpeed as one process unless the backend is set; for others it must stay unset
    backend = {"backend": "gloo"} if deepspeed and not torch.cuda.is_available() else {}
    accelerator = Accelerator(
        mixed_precision="no",  # whatever the launcher says: it would cast the float32 adapter
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1, sync_with_dataloader=False),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=TIMEOUT, **backend)],
        log_with=None if log_with == "none" else log_with,
        project_config=ProjectConfiguration(logging_dir=f"{output_dir}/logs"),
    )
    check_processes(accelerator, os.environ)
    if deepspeed:
        accelerator.state.deepspeed_plugin.deepspeed_config |= {
            "gradient_clipping": max_grad_norm,  # "auto" would be 1.0
            "gradient_accumulation_steps": 1,  # Distributed.gradient_reduction accumulates
            "train_micro_batch_size_per_gpu": 1,  # required, without effect
            "zero_force_ds_cpu_optimizer": False,  # torch's AdamW: the same arithmetic everywhere, nothing to compile
            "steps_per_print": None,
        }
        # a GPU buffer of 2 GB by default, more than ZeRO-2 saves for a LoRA
        accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]["reduce_bucket_size"] = REDUCE_BUCKET
    return accelerator


def check_processes(accelerator: Accelerator, environment: Mapping[str, str]) -> None:
    """Raise LaunchError unless the processes are connected in the way that the launcher requested."""
    world = int(environment.get("WORLD_SIZE", "1"))
    plugins = {"ACCELERATE_USE_DEEPSPEED": DistributedType.DEEPSPEED, "ACCELERATE_USE_FSDP": DistributedType.FSDP}
    for key, requested in plugins.items():
        if environment.get(key) == "true" and accelerator.distributed_type != requested:
            actual = f"{accelerator.distributed_type.value} with {accelerator.num_processes} of {world} processes"
            needs = "; FSDP needs GPUs" if requested == DistributedType.FSDP else ""
            raise LaunchError(f"{requested.value} was requested, accelerate gives {actual}{needs}")
    if accelerator.num_processes != world or (world > 1 and accelerator.distributed_type == DistributedType.NO):
        raise LaunchError(
            f"the launcher started {world} processes, accelerate sees {accelerator.num_processes} "
            f"({accelerator.distributed_type.value}): each would train by itself"
        )
    plugin = accelerator.state.deepspeed_plugin
    if plugin is not None and plugin.zero_stage != 2:
        raise LaunchError(f"zero_stage is {plugin.zero_stage}; set it to 2 (configs/accelerate/zero2_offload.yaml)")
    if accelerator.distributed_type == DistributedType.FSDP:
        check_fsdp(accelerator.state.fsdp_plugin)


def check_fsdp(plugin: FullyShardedDataParallelPlugin) -> None:
    """Raise LaunchError for settings that train something else than configs/accelerate/fsdp2.yaml."""
    if plugin.fsdp_version != 2:
        raise LaunchError(f"fsdp_version is {plugin.fsdp_version}; set fsdp_version: 2 (configs/accelerate/fsdp2.yaml)")
    if plugin.reshard_after_forward is not True:
        # the next rollout would be by the weights gathered for the last one
        raise LaunchError(f"fsdp_reshard_after_forward is {plugin.reshard_after_forward}; set it to true")
    if plugin.activation_checkpointing or plugin.cpu_ram_efficient_loading:
        raise LaunchError("fsdp_activation_checkpointing and fsdp_cpu_ram_efficient_loading must be false")
