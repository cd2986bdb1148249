"""The processes of a run through accelerate: one process, data parallelism, FSDP2 or DeepSpeed ZeRO-2.

An update is

    with job.gradient_reduction():
        for ...:
            with job.accumulate(policy):
                ... forward passes and one `job.backward(loss)` ...
    norm = job.step(optimizer, parameters, max_norm)

The gradients are reduced over the processes once, whatever the number of backwards: under data parallelism in `step`,
under FSDP2 in the last backward (accelerate counts them), under ZeRO-2 at the end of `gradient_reduction`.

Data parallelism takes no wrapper: DistributedDataParallel cannot keep the graphs of several forwards. DeepSpeed is
driven through its engine: accelerate's wrapper calls `engine.step()` inside the last backward. DeepSpeed's accumulation
reduces in every backward, and with offload adds to stale buffers of an expert that the first backward left out.
"""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, broadcast_object_list, gather_object, recursively_apply
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from rewardfl import machine
from rewardfl.files import escape_control
from rewardfl.memory import context_parallel
from rewardfl.memory.sharding import Sharding, full_tensor, shard_like
from rewardfl.training.launch import make_accelerator
from rewardfl.training.shard import Shard

_T = TypeVar("_T")


def _part_slices(parameter: nn.Parameter) -> tuple[slice, slice] | None:
    """Return (slice of the flattened parameter, slice of ZeRO-2's vector) of this process's part; None without one."""
    mapping = vars(parameter)["_hp_mapping"]
    if mapping is None:
        return None
    inside, outside = mapping.lp_fragment_address, mapping.get_hp_fragment_address()
    return slice(inside.start, inside.start + inside.numel), slice(outside.start, outside.start + outside.numel)


class Distributed:
    """The processes of a run, through accelerate. Every method that gathers is called by all of them."""

    def __init__(
        self,
        max_grad_norm: float,
        *,
        cpu_threads: int | None = None,
        processes_per_clip: int = 1,
        log_with: str = "none",
        output_dir: str | None = None,
    ):
        """Connect the processes. Raise LaunchError if they differ from the launcher's request.

        max_grad_norm: as for `step`. cpu_threads: of each process on a CPU; None divides the cores.
        processes_per_clip: processes in a row that compute the same clips, each with a part of the tokens.
        """
        self.accelerator = make_accelerator(max_grad_norm, log_with=log_with, output_dir=output_dir)
        self.device = self.accelerator.device
        self.rank, self.world = self.accelerator.process_index, self.accelerator.num_processes
        self.main = self.accelerator.is_main_process
        self.processes_per_clip = processes_per_clip
        self.data_rank, self.data_world = self.rank // processes_per_clip, self.world // processes_per_clip
        self.first_of_clip = self.rank % processes_per_clip == 0
        self.shard = Shard(self.rank, self.world, quiet=not self.main, processes_per_clip=processes_per_clip)
        if self.device.type == "cpu":
            torch.set_num_threads(machine.threads_of_process(cpu_threads, self.world))

    def print(self, line: str) -> None:
        """Print a line, once on each machine."""
        self.accelerator.print(escape_control(line))

    def wait(self) -> None:
        """Wait until all processes have come here."""
        self.accelerator.wait_for_everyone()

    def gather(self, tensors: _T) -> _T:
        """Gather the tensors (one, a list or a dict) of all clips' processes, concatenated along the first axis."""
        gathered, parts, step = self.accelerator.gather(tensors), (self.world, -1), self.processes_per_clip
        return recursively_apply(lambda tensor: tensor.unflatten(0, parts)[::step].flatten(0, 1), gathered)

    def gather_lists(self, items: list) -> list:
        """Gather the items of all processes, any objects, in one list."""
        return gather_object(items)

    def all_reduce_max(self, number: int) -> int:
        """Return the maximum over all processes."""
        return int(self.accelerator.gather(torch.tensor([number], device=self.device)).max())

    @cached_property
    def clip_mesh(self) -> DeviceMesh:
        """Return the mesh of context_parallel.make_mesh. The first call is collective."""
        return context_parallel.make_mesh(self.device, self.world, self.processes_per_clip)

    def broadcast_in_clip(self, tensor: Tensor) -> Tensor:
        """Return the tensor of a clip's first process on all of them: rewards may differ by rounding, or be remote."""
        if self.processes_per_clip > 1:
            torch.distributed.broadcast(tensor, group=self.clip_mesh["ulysses"].get_group(), group_src=0)
        return tensor

    def run_on_main(self, decide: Callable[[], _T], refusal: type[Exception] | tuple[type[Exception], ...]) -> _T:
        """Run `decide` on the main process, and return its result or raise its `refusal` on all processes."""
        result: list = [None, None]
        if self.main:
            try:
                result[0] = decide()
            except refusal as error:
                result[1] = error
        broadcast_object_list(result)
        if result[1] is not None:
            raise result[1]
        return result[0]

    @property
    def sharding(self) -> Sharding:
        """Return the type of sharding over the processes."""
        names: dict[DistributedType, Sharding] = {DistributedType.DEEPSPEED: "zero2", DistributedType.FSDP: "fsdp2"}
        return names.get(self.accelerator.distributed_type, "none")

    @property
    def home(self) -> torch.device:
        """Return the device of trained experts before `prepare`; the CPU under FSDP, which moves them by block."""
        return torch.device("cpu") if self.sharding == "fsdp2" else self.device

    def prepare(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, block_classes: Sequence[str]
    ) -> tuple[nn.Module, AcceleratedOptimizer, list[nn.Parameter]]:
        """Return (wrapped model, optimizer, trained parameters). FSDP replaces the parameters, ZeRO-2 copies them.

        block_classes: class names of the model's blocks, which FSDP gathers one at a time.
        """
        accelerator = self.accelerator
        if self.sharding == "none":  # the model is placed already
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            return model, accelerator.prepare(optimizer), trained
        accumulation = accelerator.gradient_accumulation_steps
        if self.sharding == "zero2":
            accelerator.gradient_accumulation_steps = 1  # as in DeepSpeed's configuration, or accelerate warns
        if self.sharding == "fsdp2":
            accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = list(block_classes)
        model, optimizer = accelerator.prepare(model, optimizer)
        accelerator.gradient_accumulation_steps = accumulation
        return model, optimizer, [parameter for parameter in model.parameters() if parameter.requires_grad]

    @property
    def _engine(self) -> Any:
        return self.accelerator.deepspeed_engine_wrapped.engine if self.sharding == "zero2" else None

    def reduce_in_backward(self, number: int) -> None:
        """Reduce the gradients in this backward pass of the next updates, their last one on each process."""
        self.accelerator.gradient_accumulation_steps, self.accelerator.step = number, 0

    def gradient_reduction(self, *, skip: bool = False) -> contextlib.AbstractContextManager:
        """Return the context of all backwards of an update, equally many on every process; skip: of none, no graph."""
        if skip:
            return torch.no_grad()
        engine = self._engine
        return contextlib.nullcontext() if engine is None else engine.coalesce_grad_reduction()

    def accumulate(self, policy: nn.Module) -> contextlib.AbstractContextManager:
        """Return the context of one backward and its forward passes. The last of an update synchronises."""
        return self.accelerator.accumulate(policy)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss`. Accelerate's division by its accumulation count is undone."""
        if not torch.is_grad_enabled():  # gradient_reduction(skip=True)
            return
        engine = self._engine
        if engine is None:
            self.accelerator.backward(loss * self.accelerator.gradient_accumulation_steps)
        else:
            engine.backward(loss, scale_wrt_gas=False)

    def step(self, optimizer: AcceleratedOptimizer, parameters: Sequence[nn.Parameter], max_norm: float) -> float:
        """Clip the gradients, update where they are finite, and clear them. Return their norm before clipping.

        The norm is over all processes, so all of them skip or none does. ZeRO-2 follows the same rule by itself
        (max_norm is in its configuration). Where it skips, its norm is infinity.
        """
        engine = self._engine
        if engine is not None:
            engine.step()
            return float(engine.get_global_grad_norm())
        if self.sharding == "none" and self.world > 1:
            self._average_gradients(parameters)
        norm = float(full_tensor(self.accelerator.clip_grad_norm_(parameters, max_norm)))
        if math.isfinite(norm):
            optimizer.step()
        optimizer.zero_grad()
        return norm

    def _average_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Replace the gradients by their means over the processes. A missing one is 0, unless all lack it."""
        has_gradient = torch.tensor([float(parameter.grad is not None) for parameter in parameters], device=self.device)
        counts = self.accelerator.reduce(has_gradient, "sum").tolist()
        for parameter, count in zip(parameters, counts, strict=True):
            if count:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = self.accelerator.reduce(gradient, "mean")

    def optimizer_state(self, optimizer: AcceleratedOptimizer, parameters: Sequence[nn.Parameter]) -> dict[str, Any]:
        """Return the state_dict of a plain AdamW, whatever the sharding. Collective: it gathers all parts."""
        if self._engine is None:
            state = optimizer.state_dict()
            moments = {i: {name: full_tensor(value) for name, value in of.items()} for i, of in state["state"].items()}
            return state | {"state": moments}
        adam, flat = self._adam()
        state = adam.state[flat]  # this process's part: step, exp_avg, exp_avg_sq; empty before the first update
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
        """Restore an `optimizer_state`."""
        if self._engine is None:
            sharded = {
                i: {name: shard_like(value, parameters[i]) if value.ndim else value for name, value in of.items()}
                for i, of in state["state"].items()
            }
            optimizer.load_state_dict({**state, "state": sharded})
            return
        adam, flat = self._adam()
        group = {name: value for name, value in state["param_groups"][0].items() if name != "params"}
        adam.param_groups[0].update(group)
        if not state["state"]:
            return
        first = state["state"][0]
        parts = {name: torch.zeros_like(flat.data) for name, value in first.items() if value.ndim}
        for i, parameter in enumerate(parameters):
            inside, outside = _part_slices(parameter) or (slice(0), slice(0))
            for name, part in parts.items():
                part[outside] = state["state"][i][name].flatten()[inside].to(part.device)
        adam.state[flat] = {"step": first["step"].clone()} | parts

    def _adam(self) -> tuple[torch.optim.Optimizer, nn.Parameter]:
        """Return (AdamW of ZeRO-2, this process's part of all parameters in one vector)."""
        adam = self._engine.optimizer.optimizer
        ((flat,),) = (group["params"] for group in adam.param_groups)
        return adam, flat

    def _gather_part(self, parameter: nn.Parameter, vector: Tensor) -> Tensor:
        """Gather the values of `parameter` from all processes' vectors, in its shape, on the CPU."""
        values = torch.zeros(parameter.numel(), dtype=vector.dtype, device=self.device)
        if (slices := _part_slices(parameter)) is not None:
            values[slices[0]] = vector[slices[1]].to(values.device)
        return self.accelerator.reduce(values, "sum").view_as(parameter).cpu()
