"""The processes of a run through accelerate: one process, DDP, FSDP2 or DeepSpeed ZeRO-2 alike.

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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, broadcast_object_list, gather_object
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rewardfl import machine
from rewardfl.files import printable
from rewardfl.memory.sharding import full_tensor, shard_like
from rewardfl.training.launch import _placements, make_accelerator
from rewardfl.training.shard import Shard

T = TypeVar("T")


class Distributed:
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
        self.share = Shard(self.rank, self.world, quiet=not self.main)
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
            inside, outside = _placements(parameter) or (slice(0), slice(0))
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
        if (places := _placements(parameter)) is not None:
            values[places[0]] = vector[places[1]].to(values.device)
        return self.accelerator.reduce(values, "sum").view_as(parameter).cpu()
