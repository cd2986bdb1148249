"""Convolutions whose graph holds no activation: the gradient of the input needs only the weight.

torch saves the input of each convolution for the gradient of its weight, frozen or not. In a VAE's decoder these inputs
are most of the graph.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class FrozenConvolutions(TorchFunctionMode):
    """Runs convolutions with frozen weights without saving their inputs; values and gradients are the same bits."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.conv2d, torch.conv3d) and not kwargs and _is_plain(*args):
            return _FrozenConvolution.apply(func, *args)
        return func(*args, **(kwargs or {}))


def _is_plain(x: Tensor, weight: Tensor, bias: Tensor | None = None, *how: Any) -> bool:
    """Return whether weight and bias are frozen, the input has a batch, and stride, padding and dilation are tuples."""
    is_frozen = not weight.requires_grad and (bias is None or not bias.requires_grad)
    return is_frozen and x.ndim == weight.ndim and len(how) == 4 and all(isinstance(part, tuple) for part in how[:3])


class _FrozenConvolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, convolve: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None, *how: Any
    ) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.size, ctx.strides, ctx.how = x.shape, x.stride(), how  # stride, padding, dilation, groups
        return convolve(x, weight, bias, *how)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (weight,), (grad,) = ctx.saved_tensors, grads
        stride, padding, dilation, groups = ctx.how
        x = torch.empty_strided(ctx.size, ctx.strides, dtype=grad.dtype, device=grad.device)  # only its form is read
        geometry = (stride, padding, dilation, False, [0], groups)
        grad_x = torch.ops.aten.convolution_backward(grad, x, weight, None, *geometry, (True, False, False))[0]
        return None, grad_x, None, None, None, None, None, None
