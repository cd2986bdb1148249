"""The held-out judge: a small network that detects the objects, in place of the checker's rules.

Objects as Points, Zhou et al. 2019, arXiv 1904.07850: a heat map of object centres for each kind of object.
"""

from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from rewardfl.rewards.scenes.checker import COLOURS, SHAPES, SceneChecker, Thing

KINDS = list(product(COLOURS, SHAPES))
CELL = 2  # pixels on a side of a cell of the maps
SURE = 0.5  # minimum probability of an object


class Finder(nn.Sequential):
    """(B, 3, H, W) in [-1, 1] -> (B, kinds, H / CELL, W / CELL), the logit of an object's centre in the cell."""

    def __init__(self, width: int = 24):
        layers: list[nn.Module] = [nn.Conv2d(3, width, 5, stride=CELL, padding=2), nn.ReLU()]
        for dilation in (1, 2, 3, 1):
            layers += [nn.Conv2d(width, width, 3, padding=dilation, dilation=dilation), nn.ReLU()]
        layers.append(nn.Conv2d(width, len(KINDS), 1))
        super().__init__(*layers)


class SceneJudge(SceneChecker):
    """SceneChecker with objects found by a Finder. weights_file: its tensors, .safetensors."""

    name = "scene_judge"
    weights = "assets/tiny_images/judge.safetensors"

    def __init__(self, weights_file: str | Path):
        super().__init__()
        self.finder = Finder().requires_grad_(requires_grad=False)
        try:
            self.finder.load_state_dict(load_file(weights_file))
        except (OSError, SafetensorError, RuntimeError) as error:
            message = f"reward 'scene_judge': weights_file {weights_file} is not the judge's: {error}"
            raise ValueError(message) from error

    @torch.no_grad()
    def things_in(self, image: Tensor) -> list[Thing]:
        probability = self.finder(image[None].float()).sigmoid()
        peaks = (probability == F.max_pool2d(probability, 3, 1, 1)) & (probability > SURE)
        height, width = probability.shape[2:]
        return [
            Thing(colour=KINDS[kind][0], shape=KINDS[kind][1], x=(column + 0.5) / width, y=(row + 0.5) / height)
            for _, kind, row, column in peaks.nonzero().tolist()
        ]
