"""Context parallelism: several processes compute the velocity of one clip, each with a part of its tokens.

diffusers splits the tokens before the first block and gathers the velocity after the last one (DeepSpeed-Ulysses, arXiv
2309.14509). Its backward pass leaves every process with the gradients of its own tokens; `split_tokens` completes them.
"""

from typing import Any

import torch
from diffusers import ContextParallelConfig, ModelMixin
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def make_mesh(device: torch.device, processes: int, processes_per_clip: int) -> DeviceMesh:
    """Return the mesh (clips at once, 1, processes of a clip) under diffusers' names. Collective."""
    shape = (processes // processes_per_clip, 1, processes_per_clip)
    return init_device_mesh(device.type, shape, mesh_dim_names=("clips", "ring", "ulysses"))


def split_tokens(expert: ModelMixin, mesh: DeviceMesh) -> None:
    """Split the tokens of every call of an expert over the processes of a clip.

    These call it together, with equal inputs, and have equal gradients of its output. The gradient of the hidden states
    is then complete. The mean over processes of a parameter's gradient is the mean over clips.
    """
    group, processes = mesh["ulysses"].get_group(), mesh["ulysses"].size()

    def mean_over_processes(gradient: Tensor) -> Tensor:
        total = gradient.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total, group=group)
        return total / processes

    def before(_: nn.Module, args: tuple[()], inputs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
        states = inputs["hidden_states"]
        if states.requires_grad:
            states = states.view_as(states)  # the caller's tensor keeps no hook
            states.register_hook(mean_over_processes)
        return args, inputs | {"hidden_states": states}

    def after(_: nn.Module, args: tuple[()], outputs: tuple[Tensor]) -> None:
        if outputs[0].requires_grad:
            outputs[0].register_hook(lambda gradient: gradient * processes)

    expert.register_forward_pre_hook(before, with_kwargs=True)
    expert.register_forward_hook(after)
    expert.enable_parallelism(config=ContextParallelConfig(ulysses_degree=processes, mesh=mesh))
