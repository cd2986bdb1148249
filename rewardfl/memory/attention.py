"""Attention kernels: their choice and their checks."""

import os

import torch
from diffusers import ModelMixin
from diffusers.models.attention import AttentionModuleMixin
from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend, dispatch_attention_fn
from diffusers.models.attention_processor import Attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

NATIVE = "native"  # torch chooses among its kernels
VARIABLE = "DIFFUSERS_ATTN_BACKEND"  # environment variable of diffusers' default backend
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05}  # share of a gradient's norm, far above rounding, below faults
RESULTS = ("an output", "a queries' gradient", "a keys' gradient", "a values' gradient")


class BackendError(ValueError):
    """A run cannot use its configured attention backend."""


def check_name(name: str, expert: ModelMixin) -> None:
    """Raise BackendError if diffusers has no such backend, or this type of network would not use it.

    expert: of the run's architecture, of any size, on any device.
    """
    if os.environ.get(VARIABLE, name) != name:
        raise BackendError(
            f"the environment's {VARIABLE} is {os.environ[VARIABLE]} and model.attention_backend is {name}; set only "
            "one of them"
        )
    if name == NATIVE:
        return
    names = [backend.value for backend in AttentionBackendName]
    if name not in names:
        raise BackendError(f"model.attention_backend {name} is none of diffusers': {', '.join(names)}")
    if name.endswith("_hub"):
        raise BackendError(
            f"model.attention_backend {name} would be downloaded; take one that is installed, or {NATIVE}"
        )
    modules = [module for module in expert.modules() if isinstance(module, Attention | AttentionModuleMixin)]
    processors = {type(module.processor) for module in modules}
    if unsupported := sorted(each.__name__ for each in processors if "_attention_backend" not in vars(each)):
        raise BackendError(
            f"model.attention_backend {name} would change nothing in this model, whose {', '.join(unsupported)} calls "
            f"torch's own attention; set it to {NATIVE}"
        )


def check_backward(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Raise BackendError if the backend is not installed, does not run on `device`, or has a wrong gradient there.

    A small attention's output and gradients are compared with results of torch's plain matrix products in float32.
    """
    if name == NATIVE:
        return
    generator = torch.Generator().manual_seed(0)
    # q, k, v and a cotangent
    *leaves, cotangent = [torch.randn(1, 256, 2, 128, generator=generator).to(device, dtype) for _ in range(4)]
    for leaf in leaves:
        leaf.requires_grad_()
    try:
        with attention_backend(name):
            out = dispatch_attention_fn(*leaves)
        gradients = torch.autograd.grad(out, leaves, cotangent)
    except (RuntimeError, NotImplementedError, ImportError, ValueError) as error:
        (first, *_) = str(error).splitlines() or [type(error).__name__]
        raise BackendError(
            f"model.attention_backend {name} cannot train on {device.type} in {dtype}: {first}; set it to {NATIVE}"
        ) from error
    plain = [leaf.detach().float().requires_grad_() for leaf in leaves]
    q, k, v = (leaf.transpose(1, 2) for leaf in plain)
    with sdpa_kernel(SDPBackend.MATH):
        target = scaled_dot_product_attention(q, k, v).transpose(1, 2)
    expected = (target.detach(), *torch.autograd.grad(target, plain, cotangent.float()))
    for result, value, right in zip(RESULTS, (out.detach(), *gradients), expected, strict=True):
        error = float((value.float() - right).norm() / right.norm())
        if not error <= TOLERANCE[dtype]:
            raise BackendError(
                f"model.attention_backend {name} gives {result} that is {error:.1%} away from attention's on this "
                f"machine, where {TOLERANCE[dtype]:.1%} would be rounding; set it to {NATIVE}"
            )
