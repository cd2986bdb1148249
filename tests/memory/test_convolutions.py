"""Convolutions that save no input, against torch's own."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rewardfl.memory.convolutions import FrozenConvolutions

CASES = [
    nn.Conv2d(4, 6, 3, stride=2, padding=1),
    nn.Conv2d(4, 6, (3, 1), dilation=2, groups=2, bias=False),
    nn.Conv3d(4, 6, 3, padding=(0, 1, 1)),
]


def input_and_gradient(convolution, x):
    leaf = x.clone().requires_grad_()
    out = convolution(leaf)
    out.backward(torch.ones_like(out).cumsum(-1))
    return out.detach(), leaf.grad


@pytest.mark.parametrize("module", CASES, ids=str)
def test_frozen_convolutions_give_the_same_bits(module):
    module.requires_grad_(requires_grad=False)
    x = torch.randn(2, 4, *[7] * (module.weight.ndim - 2))
    out, gradient = input_and_gradient(module, x)
    with FrozenConvolutions():
        actual = input_and_gradient(module, x)
    assert torch.equal(actual[0], out) and torch.equal(actual[1], gradient)


@pytest.mark.parametrize("trained", ["weight", "bias"])
def test_a_trained_parameter_has_its_gradient(trained):
    module, x = nn.Conv2d(4, 6, 3).requires_grad_(requires_grad=False), torch.randn(1, 4, 5, 5)
    getattr(module, trained).requires_grad_()
    with FrozenConvolutions():
        module(x).sum().backward()
    assert getattr(module, trained).grad is not None


def test_keywords_are_not_lost():
    x, weight = torch.randn(1, 4, 5, 5), torch.randn(6, 4, 3, 3)

    def convolve(x):
        return F.conv2d(x, weight, padding=1)

    out, gradient = input_and_gradient(convolve, x)
    with FrozenConvolutions():
        actual = input_and_gradient(convolve, x)
    assert torch.equal(actual[0], out) and torch.equal(actual[1], gradient)
