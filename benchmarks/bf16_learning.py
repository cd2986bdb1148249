"""A run in bfloat16 on a CPU that has no such arithmetic, where torch takes thirty times as long over matrix products.

    PYTHONPATH=. python benchmarks/bf16_learning.py train_reward_fl.py --config configs/tiny_face.yaml \\
        model.dtype=bfloat16 run.output_dir=outputs/bf16 run.cpu_threads=1

The script runs as it is. Matrix products, convolutions and attention of bfloat16 tensors are computed in float32 and
rounded once, which is what a GPU's units do: they add up in float32. Everything else is torch's own bfloat16.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten
ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default
PRODUCTS = {
    aten.mm.default,
    aten.bmm.default,
    aten.addmm.default,
    aten.baddbmm.default,
    aten.convolution.default,
    aten.convolution_backward.default,
    ATTENTION,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
}


class ProductsInFloat32(TorchDispatchMode):
    """Products of bfloat16 tensors are computed in float32 and rounded once; attention's normaliser stays as it is."""

    def __init__(self):
        super().__init__()
        self.count = 0  # of products that were computed so

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in PRODUCTS or not any(isinstance(a, Tensor) and a.dtype == torch.bfloat16 for a in args):
            return func(*args, **kwargs)
        self.count += 1
        wide, named = (tree_map_only(Tensor, _widened, given) for given in (args, kwargs))
        found = func(*wide, **named)
        if func is ATTENTION:
            return (found[0].bfloat16(), *found[1:])
        return tree_map_only(Tensor, lambda value: value.bfloat16(), found)


def _widened(value: Tensor) -> Any:
    return value.float() if value.dtype == torch.bfloat16 else value


def main() -> int:
    script = importlib.import_module(Path(sys.argv[1]).stem)
    sys.argv = sys.argv[1:]
    with ProductsInFloat32() as mode:
        code = script.main()
    print(f"{mode.count} products were computed in float32")
    return code


if __name__ == "__main__":
    sys.exit(main())
