"""What computes attention, and whether the backward pass of checkpointed blocks computes it again."""

import contextlib
import os
from collections.abc import Callable
from typing import Any

import torch
from diffusers import ModelMixin
from diffusers.models.attention import AttentionModuleMixin
from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend, dispatch_attention_fn
from diffusers.models.attention_processor import Attention
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# torch's own kernels, whose first two inputs are queries and keys, (B, heads, tokens, head_dim)
KERNELS = {
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}

NATIVE = "native"  # torch chooses among its kernels

VARIABLE = "DIFFUSERS_ATTN_BACKEND"  # of the environment, what diffusers takes by default

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05}  # of a gradient's norm: rounding stays far below, faults above

WHAT = ("an output", "a queries' gradient", "a keys' gradient", "a values' gradient")

Contexts = tuple[contextlib.AbstractContextManager, contextlib.AbstractContextManager]

Kept = tuple[Any, ...]  # an attention's outputs, tensors and plain numbers


def is_self_attention(operator: Callable[..., Any], inputs: tuple[Any, ...]) -> bool:
    """Whether an operator is attention of tokens to just as many, which is what takes the time of a long video.

    That to a prompt's few hundred tokens is computed again in a moment, and keeps as much.
    """
    return operator in KERNELS and inputs[0].shape[-2] == inputs[1].shape[-2]


def keeping_outputs() -> tuple["_Keep", "_Take"]:
    """For checkpoint's context_fn: self-attention's outputs stay until the backward pass, all else is computed again.

    They stay on their device, with the sums that the kernel's backward pass needs: in each block tokens x heads x
    (head_dim numbers of the model's dtype and one float32). Gradients are the same to the last bit. torch's own
    create_selective_checkpoint_contexts wants both passes to be one list of operations, and the copies of
    rewardfl.memory.swap differ between them.
    """
    kept: list[Kept] = []
    return _Keep(kept), _Take(kept)


class _Keep(TorchDispatchMode):
    """The forward pass: keeps self-attention's outputs."""

    def __init__(self, kept: list[Kept]):
        super().__init__()
        self.kept = kept

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs = func(*args, **(kwargs or {}))
        if is_self_attention(func, args):
            self.kept.append(_copied(outputs))
        return outputs


class _Take(TorchDispatchMode):
    """The block is computed again: what has been kept is taken, in order. A graph may be walked back twice."""

    def __init__(self, kept: list[Kept]):
        super().__init__()
        self.kept, self.taken = kept, 0

    def __enter__(self):
        self.taken = 0
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not is_self_attention(func, args):
            return func(*args, **(kwargs or {}))
        outputs, self.taken = self.kept[self.taken], self.taken + 1
        return _copied(outputs)


def _copied(outputs: Kept) -> Kept:
    """A model may change its own in place; and those of a forward pass will hold the graph, which holds these."""
    return tuple(one.clone() if isinstance(one, Tensor) else one for one in outputs)


class BackendError(ValueError):
    """A run cannot use the attention backend that it asks for."""


def check_name(name: str, expert: ModelMixin, may_download: bool) -> None:
    """CannotTrain where diffusers has no such backend, or this kind of network would not use it.

    expert: of the run's architecture, of any size, on any device.
    """
    if os.environ.get(VARIABLE, name) != name:
        raise BackendError(
            f"the environment's {VARIABLE} is {os.environ[VARIABLE]} and model.attention_backend is {name}; unset the "
            "one and say it with the other"
        )
    if name == NATIVE:
        return
    if name not in [known.value for known in AttentionBackendName]:
        names = ", ".join(known.value for known in AttentionBackendName)
        raise BackendError(f"model.attention_backend {name} is none of diffusers': {names}")
    if name.endswith("_hub") and not may_download:
        raise BackendError(
            f"model.attention_backend {name} is a kernel that would be downloaded; set model.allow_download: true, or "
            f"attention_backend: {NATIVE}"
        )
    modules = [one for one in expert.modules() if isinstance(one, Attention | AttentionModuleMixin)]
    deaf = {type(one.processor) for one in modules if "_attention_backend" not in vars(type(one.processor))}
    if deaf:
        kinds = ", ".join(sorted(kind.__name__ for kind in deaf))
        raise BackendError(
            f"model.attention_backend {name} would change nothing in this model, whose {kinds} calls torch's own "
            f"attention; set it to {NATIVE}"
        )


def check_backward(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """CannotTrain where the backend is not installed, does not run on `device`, or has no right gradient there.

    A small attention's output and gradients are compared with those of plain matrix products in float32.
    """
    if name == NATIVE:
        return
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(1, 256, 2, 128, generator=generator) for _ in range(4)]  # q, k, v and a cotangent
    *leaves, cotangent = (one.to(device, dtype) for one in drawn)
    for leaf in leaves:
        leaf.requires_grad_()
    try:
        with attention_backend(name):
            out = dispatch_attention_fn(*leaves)
        gradients = torch.autograd.grad(out, leaves, cotangent) if out.requires_grad else ()
    except (RuntimeError, NotImplementedError, ImportError, ValueError) as error:
        (first, *_) = str(error).splitlines() or [type(error).__name__]
        raise BackendError(
            f"model.attention_backend {name} cannot train on {device.type} in {dtype}: {first}; set it to {NATIVE}"
        ) from error
    if not gradients:
        raise BackendError(
            f"model.attention_backend {name} has no backward pass, and every layer before it would learn nothing; set "
            f"it to {NATIVE}, or to another with one"
        )
    wanted = _by_products([one.detach().float() for one in leaves], cotangent.float())
    for what, mine, right in zip(WHAT, (out.detach(), *gradients), wanted, strict=True):
        error = float((mine.float() - right).norm() / right.norm())
        if not error <= TOLERANCE[dtype]:
            raise BackendError(
                f"model.attention_backend {name} gives {what} that is {error:.1%} away from attention's on this "
                f"machine, where {TOLERANCE[dtype]:.1%} would be rounding; set it to {NATIVE}"
            )


def _by_products(leaves: list[Tensor], cotangent: Tensor) -> tuple[Tensor, ...]:
    """Attention of (B, tokens, heads, head_dim), and its gradients, by its definition."""
    q, k, v = (leaf.requires_grad_() for leaf in leaves)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
    return (out.detach(), *torch.autograd.grad(out, (q, k, v), cotangent))
