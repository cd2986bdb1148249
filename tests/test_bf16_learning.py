"""benchmarks/bf16_learning.py: products of bfloat16 tensors in float32, rounded once, forward and backward."""

import torch
from torch import nn

from benchmarks.bf16_learning import ProductsInFloat32


def test_products_are_rounded_once():
    torch.manual_seed(0)
    layer, x = nn.Linear(24, 16).bfloat16(), torch.randn(5, 24).bfloat16().requires_grad_()
    wide = nn.Linear(24, 16)
    wide.load_state_dict({name: value.float() for name, value in layer.state_dict().items()})
    y = x.detach().float().requires_grad_()
    given = torch.randn(5, 16).bfloat16()
    with ProductsInFloat32() as mode:
        found = layer(x)
        found.backward(given)
    expected = wide(y)
    expected.backward(given.float())
    assert mode.count == 3 and torch.equal(found, expected.bfloat16())
    assert torch.equal(x.grad, y.grad.bfloat16()) and torch.equal(layer.weight.grad, wide.weight.grad.bfloat16())


def test_attention_keeps_its_normaliser_and_others_are_left_alone():
    torch.manual_seed(0)
    q = torch.randn(1, 2, 6, 8).bfloat16().requires_grad_()
    with ProductsInFloat32() as mode:
        found = nn.functional.scaled_dot_product_attention(q, q, q)
        found.sum().backward()
        wide = q.detach().float().requires_grad_()
        expected = nn.functional.scaled_dot_product_attention(wide, wide, wide)
        expected.sum().backward()
    assert mode.count == 2 and torch.equal(found, expected.bfloat16())
    assert torch.allclose(q.grad.float(), wide.grad, atol=0.05) and expected.dtype == torch.float32
