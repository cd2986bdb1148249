"""Blocks that torch compiles: fewer and larger kernels for the same function, with other rounding."""

from collections.abc import Sequence
from types import MethodType

import torch
from diffusers import ModelMixin

from rewardfl.memory.attention import BackendError

# One expert's blocks may be compiled with a graph and without, the adapter on and off, for a clip's shape, then any
# shape, and for a batch of one and of several. torch's own limit is 8 for all experts together.
FORMS = 32


def compile_blocks(expert: ModelMixin, block_classes: Sequence[str]) -> None:
    """Compile the forward passes of the blocks (names of their classes), each class once, when they are first called.

    A block's hooks stay outside, above all those that bring its weights (rewardfl.memory.swap); diffusers'
    compile_repeated_blocks compiles them too, and fails. A block that torch cannot compile in one graph, or would
    compile in more than FORMS forms, is an error.
    """
    blocks = [module for module in expert.modules() if type(module).__name__ in block_classes]
    for block_class in {type(block) for block in blocks}:
        forward = torch.compile(  # type: ignore[call-overload]  # the overloads that torch declares lack the last two
            block_class.forward, fullgraph=True, recompile_limit=FORMS, isolate_recompiles=True
        )
        for block in blocks:
            if type(block) is block_class:
                block.forward = MethodType(forward, block)


def check_compiler(device: torch.device) -> None:
    """Raise BackendError if torch cannot compile a function with a gradient for `device`."""
    double = torch.compile(lambda x: x + x)
    x = torch.ones(64, device=device, requires_grad=True)
    try:
        double(x).sum().backward()
    except RuntimeError as error:
        (first, *_) = str(error).splitlines() or [type(error).__name__]
        raise BackendError(
            f"train.compile_blocks: torch cannot compile for {device.type} on this machine: {first}; install what it "
            "asks for (a C++ compiler, for a GPU Triton), or set compile_blocks: false"
        ) from error
