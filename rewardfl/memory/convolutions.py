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
        # as modules call them: x, weight, bias, stride, padding, dilation, groups
        is_module_call = func in (torch.conv2d, torch.conv3d) and len(args) == 7
        if is_module_call and not any(isinstance(part, Tensor) and part.requires_grad for part in args[1:3]):
            return _FrozenConvolution.apply(func, *args)
        return func(*args, **(kwargs or {}))


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
