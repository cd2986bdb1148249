"""What the training scripts do through accelerate: one process, DDP, FSDP2 or DeepSpeed ZeRO-2 alike.

An update is

    with job.one_update():
        for ...:
            with job.micro_batch(policy):
                ... forward passes and one `job.backward(loss)` ...
    norm = job.step(optimizer, parameters, max_norm)

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
from collections.abc import Callable, Mapping, Sequence
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
    ProjectConfiguration,
    broadcast_object_list,
    gather_object,
)
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rewardfl import machine
from rewardfl.files import printable
from rewardfl.memory.sharding import full_tensor, shard_like
from rewardfl.run.prepare import Share

# of a collective: the others wait while one process writes sample videos, or fills what is left of the cache
TIMEOUT = timedelta(hours=2)
REDUCE_BUCKET = 50_000_000  # float32 numbers that ZeRO-2 reduces at a time
DEEPSPEED = (0, 19, 8)  # the first version that this was measured with
T = TypeVar("T")


class LaunchError(ValueError):
    """The processes are not what the launcher was asked for, or cannot train. The message names the way out."""


class Job:
    """The processes of a run, through accelerate. Every method that gathers is called by all of them."""

    def __init__(
        self,
        max_grad_norm: float,
        unused_parameters: bool = False,
        cpu_threads: int | None = None,
        log_with: str = "none",
        output_dir: str | None = None,
    ):
        """Connect the processes. LaunchError when what runs is not what was asked for.

        max_grad_norm: what `step` will be given. unused_parameters: some backward passes leave out some parameters, as
        those through one of two trained experts do. cpu_threads: of each process on a CPU, by default its share.
        log_with, output_dir: the tracker, see Log, and the run's folder.
        """
        self.accelerator = make_accelerator(max_grad_norm, unused_parameters, log_with, output_dir)
        self.device = self.accelerator.device
        self.rank, self.world = self.accelerator.process_index, self.accelerator.num_processes
        self.main = self.accelerator.is_main_process
        self.share = Share(self.rank, self.world, quiet=not self.main)
        if self.device.type == "cpu":
            torch.set_num_threads(machine.threads_of_process(cpu_threads, self.world))

    def say(self, line: str) -> None:
        """Print a line, once on each machine."""
        self.accelerator.print(printable(line))

    def wait(self) -> None:
        """Until all processes have come here."""
        self.accelerator.wait_for_everyone()

    def gather(self, tensors: T) -> T:
        """The tensors, or what is in a list or dict of them, of all processes, concatenated along the first axis."""
        return self.accelerator.gather(tensors)

    def gather_lists(self, items: list) -> list:
        """The items of all processes in one list; they may be objects of any kind."""
        return gather_object(items)

    def largest(self, number: int) -> int:
        """The maximum over all processes."""
        return int(self.gather(torch.tensor([number], device=self.device)).max())

    def by_main(self, decide: Callable[[], T], refusal: type[Exception] | tuple[type[Exception], ...]) -> T:
        """What `decide` gives on the main process, or the `refusal` that it raises there, on all processes.

        So that none waits in a collective for one that was refused.
        """
        found: list = [None, None]
        if self.main:
            try:
                found[0] = decide()
            except refusal as error:
                found[1] = error
        broadcast_object_list(found)
        if found[1] is not None:
            raise found[1]
        return found[0]

    def processes_here(self) -> int:
        """Return the number of processes of the machine that has the most."""
        return self.largest(self.accelerator.local_process_index) + 1

    @property
    def sharding(self) -> str:
        """What is spread over the processes: none, zero2 or fsdp2."""
        kinds = {DistributedType.DEEPSPEED: "zero2", DistributedType.FSDP: "fsdp2"}
        return kinds.get(self.accelerator.distributed_type, "none")

    @property
    def home(self) -> torch.device:
        """Where trained experts belong before `prepare`.

        FSDP moves them block by block, and no GPU holds a whole one.
        """
        return torch.device("cpu") if self.sharding == "fsdp2" else self.device

    def prepare(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, block_classes: Sequence[str]
    ) -> tuple[nn.Module, AcceleratedOptimizer, list[nn.Parameter]]:
        """(what is called to train, the optimizer, the trained parameters: others than before under FSDP).

        With their final values in the model: ZeRO-2 takes its copy of them here. block_classes: the names of the
        classes of the model's blocks, which FSDP gathers one at a time.
        """
        accelerator = self.accelerator
        accumulation = accelerator.gradient_accumulation_steps
        if self.sharding == "zero2":
            accelerator.gradient_accumulation_steps = 1  # as its configuration says, or accelerate warns and takes that
        if self.sharding == "fsdp2":
            accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = list(block_classes)
        # DDP would send the frozen 28.6 GB from the first process to the others at its start, and every buffer in each
        # synchronised forward pass; all have loaded the same (invariants.check_loaded)
        frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
        buffers = [name for name, _ in model.named_buffers()]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, frozen + buffers)
        # the model is where it belongs; accelerate would move the weights that wait in host memory, too
        moved = [False, True] if self.sharding == "none" else None
        model, optimizer = accelerator.prepare(model, optimizer, device_placement=moved)
        accelerator.gradient_accumulation_steps = accumulation
        return model, optimizer, [parameter for parameter in model.parameters() if parameter.requires_grad]

    # ----------------------------------------------------------------------------------------------------------------
    # An update

    @property
    def _engine(self) -> Any:
        """DeepSpeed's engine, None without."""
        return self.accelerator.deepspeed_engine_wrapped.engine if self.sharding == "zero2" else None

    @property
    def backwards(self) -> int:
        """Backward passes of each process in an update; the last one reduces the gradients."""
        return self.accelerator.gradient_accumulation_steps

    @backwards.setter
    def backwards(self, count: int) -> None:
        self.accelerator.gradient_accumulation_steps = count

    def one_update(self) -> contextlib.AbstractContextManager:
        """Around all backwards of an update, on every process as many."""
        engine = self._engine
        return contextlib.nullcontext() if engine is None else engine.coalesce_grad_reduction()

    def micro_batch(self, policy: nn.Module) -> contextlib.AbstractContextManager:
        """Around the forward passes of one backward, and it; the last one of an update synchronises."""
        return self.accelerator.accumulate(policy)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss`, as it is: accelerate's division by its accumulation count is undone."""
        engine = self._engine
        if engine is None:
            self.accelerator.backward(loss * self.accelerator.gradient_accumulation_steps)
        else:
            engine.backward(loss, scale_wrt_gas=False)

    def step(self, optimizer: AcceleratedOptimizer, parameters: Sequence[nn.Parameter], max_norm: float) -> float:
        """Clip, update unless the gradient is not finite, and forget the gradients; their norm before clipping.

        The norm is that of the gradients of all processes, so all of them skip or none does. ZeRO-2 clips and skips by
        itself, by the same rule (max_norm is in its configuration), and has no norm to give where it skips but
        infinity.
        """
        engine = self._engine
        if engine is not None:
            engine.step()
            return float(engine.get_global_grad_norm())
        norm = float(full_tensor(self.accelerator.clip_grad_norm_(parameters, max_norm)))
        if math.isfinite(norm):
            optimizer.step()
        optimizer.zero_grad()
        return norm

    # ----------------------------------------------------------------------------------------------------------------
    # The optimizer's state, the same whatever runs: torch's AdamW's, by the position of the parameter

    def optimizer_state(self, optimizer: AcceleratedOptimizer, parameters: Sequence[nn.Parameter]) -> dict[str, Any]:
        """What `optimizer.state_dict()` of one process gives. On all processes, which may hold parts of it."""
        if self._engine is None:
            state = optimizer.state_dict()
            every = {i: {name: full_tensor(value) for name, value in of.items()} for i, of in state["state"].items()}
            return state | {"state": every}
        adam, flat = self._adam()
        state = adam.state[flat]  # of the part that is here: step, exp_avg, exp_avg_sq; nothing before the first update
        # a process may hold padding alone, but all step together
        parts = {name: value for name, value in state.items() if value.ndim}
        gathered = {
            i: {"step": state["step"].cpu().clone()}
            | {name: self._gather_part(parameter, value) for name, value in parts.items()}
            for i, parameter in enumerate(parameters)
            if parts
        }
        group = {name: value for name, value in adam.param_groups[0].items() if name != "params"}
        return {"state": gathered, "param_groups": [group | {"params": list(range(len(parameters)))}]}

    def load_optimizer_state(
        self, optimizer: AcceleratedOptimizer, parameters: Sequence[nn.Parameter], state: Mapping[str, Any]
    ) -> None:
        """Go on from an `optimizer_state`."""
        if self._engine is None:
            lying = {
                i: {name: shard_like(value, parameters[i]) if value.ndim else value for name, value in of.items()}
                for i, of in state["state"].items()
            }
            optimizer.load_state_dict({**state, "state": lying})
            return
        adam, flat = self._adam()
        group = {name: value for name, value in state["param_groups"][0].items() if name != "params"}
        adam.param_groups[0].update(group)
        if not state["state"]:
            return
        first = state["state"][0]
        parts = {name: torch.zeros_like(flat.data) for name, value in first.items() if value.ndim}
        for i, parameter in enumerate(parameters):
            inside, outside = _places(parameter) or (slice(0), slice(0))
            for name, part in parts.items():
                part[outside] = state["state"][i][name].flatten()[inside].to(part.device)
        adam.state[flat] = {"step": first["step"].clone()} | parts

    def _adam(self) -> tuple[torch.optim.Optimizer, nn.Parameter]:
        """(the optimizer that ZeRO-2 drives, this process's part of all parameters in one vector)."""
        adam = self._engine.optimizer.optimizer
        ((flat,),) = (group["params"] for group in adam.param_groups)
        return adam, flat

    def _gather_part(self, parameter: nn.Parameter, vector: Tensor) -> Tensor:
        """What the vectors of all processes hold for `parameter`, of its shape, on the CPU."""
        values = torch.zeros(parameter.numel(), dtype=vector.dtype, device=self.device)
        if (places := _places(parameter)) is not None:
            values[places[0]] = vector[places[1]].to(values.device)
        return self.accelerator.reduce(values, "sum").view_as(parameter).cpu()


def _places(parameter: nn.Parameter) -> tuple[slice, slice] | None:
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
