"""Make the Accelerator, and refuse launches that would train something else."""

import os
import re
from collections.abc import Sequence
from datetime import timedelta
from importlib import metadata
from pathlib import Path

import psutil
import torch
import yaml
from accelerate import Accelerator
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    ProjectConfiguration,
)
from torch import nn

# of a collective: the others wait while one process writes sample videos, or fills what is left of the cache
TIMEOUT = timedelta(hours=2)

REDUCE_BUCKET = 50_000_000  # float32 numbers that ZeRO-2 reduces at a time
DEEPSPEED = (0, 19, 8)  # the first version that this was measured with


class LaunchError(ValueError):
    """The processes are not what the launcher was asked for, or cannot train. The message names the way out."""


def _placements(parameter: nn.Parameter) -> tuple[slice, slice] | None:
    """(where in the flattened parameter, where in the vector) the part is that is on this process; None without one."""
    mapping = vars(parameter)["_hp_mapping"]
    if mapping is None:
        return None
    inside, outside = mapping.lp_fragment_address, mapping.get_hp_fragment_address()
    return (slice(inside.start, inside.start + inside.numel), slice(outside.start, outside.start + outside.numel))


# Start


def make_accelerator(
    max_grad_norm: float, unused_parameters: bool, log_with: str, output_dir: str | None
) -> Accelerator:
    """The Accelerator of a training script, checked; see Job.

    LaunchError when what runs is not what was asked for. DeepSpeed's configuration gets here what it would
    otherwise not get at all: a `gradient_clipping` of "auto" is 1.0, whatever `clip_grad_norm_` is told.
    """
    try:  # accelerate leaves no other trace of a wish that it does not fulfil than the parent's command line
        launcher = psutil.Process().parent().cmdline()
    except (psutil.Error, AttributeError):  # gone, not ours, or there is none
        launcher = []
    check_environment(os.environ, launcher)
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    handlers = [
        DistributedDataParallelKwargs(find_unused_parameters=unused_parameters, gradient_as_bucket_view=True),
        # accelerate takes DeepSpeed on a CPU for one process unless it is told the backend; plain DDP must not be told
        InitProcessGroupKwargs(backend="gloo", timeout=TIMEOUT)
        if deepspeed and not torch.cuda.is_available()
        else InitProcessGroupKwargs(timeout=TIMEOUT),
    ]
    accelerator = Accelerator(
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1, sync_with_dataloader=False),
        kwargs_handlers=handlers,
        log_with=None if log_with == "none" else log_with,
        project_config=ProjectConfiguration(logging_dir=f"{output_dir}/logs"),
    )
    check_processes(accelerator, os.environ)
    if deepspeed:
        accelerator.state.deepspeed_plugin.deepspeed_config |= {
            "gradient_clipping": max_grad_norm,
            "gradient_accumulation_steps": 1,  # ours, see one_update
            "train_micro_batch_size_per_gpu": 1,  # it asks for one; nothing depends on it
            "zero_force_ds_cpu_optimizer": False,  # torch's AdamW: the same arithmetic everywhere, nothing to compile
            "steps_per_print": None,
        }
        # a buffer on the GPU: by default 2 GB, more than all that ZeRO-2 saves of a LoRA
        accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]["reduce_bucket_size"] = REDUCE_BUCKET
    return accelerator


def check_environment(environment: os._Environ | dict[str, str], launcher: Sequence[str]) -> None:
    """LaunchError for what can be refused before processes connect. launcher: the parent process's command line."""
    precision = environment.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision != "no":
        raise LaunchError(
            f"accelerate's mixed_precision is {precision}, which would cast the float32 adapter and lose its updates; "
            "set mixed_precision: no (the base model is bfloat16 by model.dtype)"
        )
    if environment.get("ACCELERATE_USE_DEEPSPEED") == "true":
        found = metadata.version("deepspeed")
        if tuple(int(part) for part in re.findall(r"\d+", found)[:3]) < DEEPSPEED:
            raise LaunchError(
                f"deepspeed is {found}, {'.'.join(map(str, DEEPSPEED))} or later is needed: pip install -U deepspeed"
            )
    asked = requested_processes(launcher)
    if "WORLD_SIZE" not in environment and asked > 1:
        raise LaunchError(
            f"accelerate launch was asked for {asked} processes and started one, as it does with --cpu, use_cpu and "
            "MULTI_CPU; on CPUs use: ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes "
            f"{asked} ..."
        )


def check_processes(accelerator: Accelerator, environment: os._Environ | dict[str, str]) -> None:
    """LaunchError unless the processes are connected, and the way that was asked for."""
    world = int(environment.get("WORLD_SIZE", "1"))
    wanted = {"ACCELERATE_USE_DEEPSPEED": DistributedType.DEEPSPEED, "ACCELERATE_USE_FSDP": DistributedType.FSDP}
    for key, kind in wanted.items():
        if environment.get(key) == "true" and accelerator.distributed_type != kind:
            raise LaunchError(
                f"{kind.value} was asked for, accelerate gives {accelerator.distributed_type.value} with "
                f"{accelerator.num_processes} of {world} processes connected"
                + ("; FSDP needs GPUs" if kind == DistributedType.FSDP else "")
            )
    if accelerator.num_processes != world or (world > 1 and accelerator.distributed_type == DistributedType.NO):
        raise LaunchError(
            f"the launcher started {world} processes, accelerate sees {accelerator.num_processes} "
            f"({accelerator.distributed_type.value}): each would train alone"
        )
    plugin = accelerator.state.deepspeed_plugin
    if plugin is not None and plugin.zero_stage != 2:
        raise LaunchError(
            f"DeepSpeed's zero_stage is {plugin.zero_stage}; take 2 (configs/accelerate/zero2_offload.yaml), or DDP"
        )
    if accelerator.distributed_type == DistributedType.FSDP:
        check_fsdp(accelerator.state.fsdp_plugin)


def check_fsdp(plugin: FullyShardedDataParallelPlugin) -> None:
    """LaunchError for what would train something else than configs/accelerate/fsdp2.yaml does."""
    if plugin.fsdp_version != 2:
        raise LaunchError(f"fsdp_version is {plugin.fsdp_version}; set fsdp_version: 2 (configs/accelerate/fsdp2.yaml)")
    if plugin.reshard_after_forward is not True:
        raise LaunchError(
            f"fsdp_reshard_after_forward is {plugin.reshard_after_forward}: the next rollout would be by the weights "
            "gathered for the last one; set it to true"
        )
    if plugin.activation_checkpointing or plugin.cpu_ram_efficient_loading:
        raise LaunchError(
            "fsdp_activation_checkpointing and fsdp_cpu_ram_efficient_loading must be false: "
            "train.use_gradient_checkpointing does the one, and every process loads the weights here"
        )


def requested_processes(launcher: Sequence[str]) -> int:
    """Processes that a command line of `accelerate launch` asks for, itself or in its yaml; 1 for any other."""
    if not any(re.search(r"(^|/)accelerate(-launch|\.commands\..*)?$", word) for word in launcher[:3]):
        return 1
    options = dict(re.findall(r"--(num[_-]processes|config[_-]file)[= ](\S+)", " ".join(launcher)))
    options = {name.replace("-", "_"): value for name, value in options.items()}
    if "num_processes" in options:
        return int(options["num_processes"])
    file = Path(options.get("config_file", ""))
    return yaml.safe_load(file.read_text(encoding="utf-8")).get("num_processes", 1) if file.is_file() else 1
