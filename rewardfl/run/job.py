"""What the training scripts do through accelerate: one process, DDP, FSDP2 or DeepSpeed ZeRO-2 alike.

An update is

    with one_update(accelerator):
        for ...:
            with accelerator.accumulate(policy):
                ... forward passes and one `backward` ...
    norm = step(accelerator, optimizer, parameters, max_norm)

and the gradients are reduced over the processes once, whatever the number of backwards. Under DDP and FSDP2 the last
backward does it (accelerate counts them), under ZeRO-2 the end of `one_update`.

DeepSpeed is driven through its engine, not through accelerate's wrapper of it, which calls `engine.step()` inside the
last backward: before anything could be checked, and before a reduction that spans all backwards. DeepSpeed's own
accumulation, which reduces in every backward, is not used either: with optimizer offload it adds to what an earlier
update left in its buffers for a parameter that does not take part in the first backward, as one of two experts does.
"""

import contextlib
import math
import os
import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
import yaml
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    broadcast_object_list,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rewardfl.config import AnyConfig, trainable_experts
from rewardfl.sharding import placed, whole

# of a collective: the others wait while one process writes sample videos, or fills what is left of the cache
TIMEOUT = timedelta(hours=2)
REDUCE_BUCKET = 50_000_000  # float32 numbers that ZeRO-2 reduces at a time
DEEPSPEED = (0, 19, 8)  # the first version that this was measured with
T = TypeVar("T")


class LaunchError(ValueError):
    """The processes are not what the launcher was asked for, or cannot train. The message names the way out."""


# --------------------------------------------------------------------------------------------------------------------
# Start


def make_accelerator(cfg: AnyConfig, accumulation: int) -> Accelerator:
    """The Accelerator of a training script, checked. accumulation: backwards per update of each process.

    LaunchError when what runs is not what was asked for. DeepSpeed's configuration gets here what it would
    otherwise not get at all: a `gradient_clipping` of "auto" is 1.0, whatever `clip_grad_norm_` is told.
    """
    check_environment(os.environ, _launcher())
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    handlers = [
        DistributedDataParallelKwargs(
            find_unused_parameters=len(trainable_experts(cfg)) > 1, gradient_as_bucket_view=True
        ),
        # accelerate takes DeepSpeed on a CPU for one process unless it is told the backend; plain DDP must not be told
        InitProcessGroupKwargs(backend="gloo", timeout=TIMEOUT)
        if deepspeed and not torch.cuda.is_available()
        else InitProcessGroupKwargs(timeout=TIMEOUT),
    ]
    accelerator = Accelerator(
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=accumulation, sync_with_dataloader=False),
        kwargs_handlers=handlers,
    )
    check_processes(accelerator, os.environ)
    if deepspeed:
        accelerator.state.deepspeed_plugin.deepspeed_config |= {
            "gradient_clipping": cfg.train.max_grad_norm,
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
    asked = asked_processes(launcher)
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
    if accelerator.mixed_precision != "no":
        raise LaunchError(f"accelerate's mixed_precision is {accelerator.mixed_precision}; set mixed_precision: no")
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


def asked_processes(launcher: Sequence[str]) -> int:
    """Processes that a command line of `accelerate launch` asks for, itself or in its yaml; 1 for any other."""
    if not any(re.search(r"(^|/)accelerate(-launch|\.commands\..*)?$", word) for word in launcher[:3]):
        return 1
    options = dict(re.findall(r"--(num[_-]processes|config[_-]file)[= ](\S+)", " ".join(launcher)))
    options = {name.replace("-", "_"): value for name, value in options.items()}
    if "num_processes" in options:
        return int(options["num_processes"])
    file = Path(options.get("config_file", ""))
    return yaml.safe_load(file.read_text(encoding="utf-8")).get("num_processes", 1) if file.is_file() else 1


def _launcher() -> list[str]:
    """The parent process's command line: accelerate leaves no other trace of a wish that it does not fulfil."""
    try:
        return psutil.Process().parent().cmdline()
    except (psutil.Error, AttributeError):  # gone, not ours, or there is none
        return []


def sharding(accelerator: Accelerator) -> str:
    """What is spread over the processes: none, zero2 or fsdp2."""
    kinds = {DistributedType.DEEPSPEED: "zero2", DistributedType.FSDP: "fsdp2"}
    return kinds.get(accelerator.distributed_type, "none")


def by_main(accelerator: Accelerator, decide: Callable[[], T], refusal: type[Exception]) -> T:
    """What `decide` gives on the main process, or the `refusal` that it raises there, on all processes.

    So that none waits in a collective for one that was refused.
    """
    found: list = [None, None]
    if accelerator.is_main_process:
        try:
            found[0] = decide()
        except refusal as error:
            found[1] = error
    broadcast_object_list(found)
    if found[1] is not None:
        raise found[1]
    return found[0]


def home(accelerator: Accelerator) -> torch.device:
    """Where trained experts belong before `prepare`: FSDP moves them block by block, and no GPU holds a whole one."""
    sharded = accelerator.distributed_type == DistributedType.FSDP
    return torch.device("cpu") if sharded else accelerator.device


def prepare(
    accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[nn.Module, AcceleratedOptimizer, list[nn.Parameter]]:
    """(what is called to train, the optimizer, the trained parameters: others than before under FSDP).

    With their final values in the model: ZeRO-2 takes its copy of them here.
    """
    accumulation = accelerator.gradient_accumulation_steps
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        accelerator.gradient_accumulation_steps = 1  # as its configuration says, or accelerate warns and takes that
    # DDP would send the frozen 28.6 GB from the first process to the others at its start, and every buffer in each
    # synchronised forward pass; all have loaded the same (invariants.check_loaded)
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    buffers = [name for name, _ in model.named_buffers()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, frozen + buffers)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.gradient_accumulation_steps = accumulation
    return model, optimizer, [parameter for parameter in model.parameters() if parameter.requires_grad]


# --------------------------------------------------------------------------------------------------------------------
# An update


def _engine(accelerator: Accelerator):
    """DeepSpeed's engine, None without."""
    deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
    return accelerator.deepspeed_engine_wrapped.engine if deepspeed else None


def one_update(accelerator: Accelerator) -> contextlib.AbstractContextManager:
    """Around all backwards of an update, on every process as many."""
    engine = _engine(accelerator)
    return contextlib.nullcontext() if engine is None else engine.coalesce_grad_reduction()


def backward(accelerator: Accelerator, loss: Tensor) -> None:
    """Add the gradients of `loss`, as it is: accelerate's division by its accumulation count is undone."""
    engine = _engine(accelerator)
    if engine is None:
        accelerator.backward(loss * accelerator.gradient_accumulation_steps)
    else:
        engine.backward(loss, scale_wrt_gas=False)


def step(
    accelerator: Accelerator, optimizer: AcceleratedOptimizer, parameters: Sequence[nn.Parameter], max_norm: float
) -> float:
    """Clip, update unless the gradient is not finite, and forget the gradients; their norm before clipping.

    The norm is that of the gradients of all processes, so all of them skip or none does. ZeRO-2 clips and skips by
    itself, by the same rule (max_norm is in its configuration), and has no norm to give where it skips but infinity.
    """
    engine = _engine(accelerator)
    if engine is not None:
        engine.step()
        return float(engine.get_global_grad_norm())
    norm = float(whole(accelerator.clip_grad_norm_(parameters, max_norm)))
    if math.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad()
    return norm


# --------------------------------------------------------------------------------------------------------------------
# The optimizer's state, the same whatever runs: torch's AdamW's, by the position of the parameter


def optimizer_state(
    accelerator: Accelerator, optimizer: AcceleratedOptimizer, parameters: Sequence[nn.Parameter]
) -> dict[str, Any]:
    """What `optimizer.state_dict()` of one process gives. On all processes, which may hold parts of it."""
    if _engine(accelerator) is None:
        state = optimizer.state_dict()
        return state | {"state": {i: {name: whole(v) for name, v in of.items()} for i, of in state["state"].items()}}
    adam, flat = _adam(accelerator)
    state = adam.state[flat]  # of the part that is here: step, exp_avg, exp_avg_sq; nothing before the first update
    # a process may hold padding alone, but all step together
    parts = {name: value for name, value in state.items() if value.ndim}
    gathered = {
        i: {"step": state["step"].cpu().clone()}
        | {name: _gather_part(accelerator, parameter, value) for name, value in parts.items()}
        for i, parameter in enumerate(parameters)
        if parts
    }
    group = {name: value for name, value in adam.param_groups[0].items() if name != "params"}
    return {"state": gathered, "param_groups": [group | {"params": list(range(len(parameters)))}]}


def load_optimizer_state(
    accelerator: Accelerator,
    optimizer: AcceleratedOptimizer,
    parameters: Sequence[nn.Parameter],
    state: dict[str, Any],
) -> None:
    """Go on from an `optimizer_state`."""
    if _engine(accelerator) is None:
        lying = {
            i: {name: placed(value, parameters[i]) if value.ndim else value for name, value in of.items()}
            for i, of in state["state"].items()
        }
        optimizer.load_state_dict(state | {"state": lying})
        return
    adam, flat = _adam(accelerator)
    adam.param_groups[0].update({name: value for name, value in state["param_groups"][0].items() if name != "params"})
    if not state["state"]:
        return
    first = state["state"][0]
    parts = {name: torch.zeros_like(flat.data) for name, value in first.items() if value.ndim}
    for i, parameter in enumerate(parameters):
        for name, part in parts.items():
            _copy_part(parameter, state["state"][i][name], part)
    adam.state[flat] = {"step": first["step"].clone()} | parts


def _adam(accelerator: Accelerator) -> tuple[torch.optim.Optimizer, nn.Parameter]:
    """(the optimizer that ZeRO-2 drives, this process's part of all parameters in one vector)."""
    adam = _engine(accelerator).optimizer.optimizer
    ((flat,),) = (group["params"] for group in adam.param_groups)
    return adam, flat


def _places(parameter: nn.Parameter) -> tuple[slice, slice] | None:
    """(where in the flattened parameter, where in the vector) the part is that is on this process; None without one."""
    mapping = parameter._hp_mapping
    if mapping is None:
        return None
    inside, outside = mapping.lp_fragment_address, mapping.get_hp_fragment_address()
    return (
        slice(inside.start, inside.start + inside.numel),
        slice(outside.start, outside.start + outside.numel),
    )


def _gather_part(accelerator: Accelerator, parameter: nn.Parameter, vector: Tensor) -> Tensor:
    """What the vectors of all processes hold for `parameter`, of its shape, on the CPU."""
    values, places = torch.zeros(parameter.numel(), dtype=vector.dtype, device=accelerator.device), _places(parameter)
    if places is not None:
        inside, outside = places
        values[inside] = vector[outside].to(values.device)
    return accelerator.reduce(values, "sum").view_as(parameter).cpu()


def _copy_part(parameter: nn.Parameter, value: Tensor, vector: Tensor) -> None:
    """Put this process's part of `value`, of the parameter's shape, into its place in the vector."""
    places = _places(parameter)
    if places is not None:
        inside, outside = places
        vector[outside] = value.flatten()[inside].to(vector.device)
