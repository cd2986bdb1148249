"""The held-out judge: a small network that detects the objects, in place of the checker's rules.

Objects as Points, Zhou et al. 2019, arXiv 1904.07850: a heat map of object centres for each kind of object.
"""

import math
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from rewardfl.rewards.scenes.checker import SceneChecker
from rewardfl.rewards.scenes.drawing import COLOURS, SHAPES, SIZE, Thing, draw_places, draw_scene

Log = Callable[[str], None]
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
        last = self[-1]
        assert isinstance(last, nn.Conv2d)
        nn.init.constant_(last.bias, -4.0)  # nearly all cells have none


class SceneJudge(SceneChecker):
    """SceneChecker with objects found by a Finder. weights_file: its tensors, .safetensors."""

    name = "scene_judge"
    weights = "assets/tiny_images/judge.safetensors"

    def __init__(self, weights_file: str | Path):
        super().__init__()
        self.finder = Finder().requires_grad_(False)
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


def _augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Return images a little blurred, tinted and noisy, like generated pictures."""
    count = len(images)
    blurred = F.avg_pool2d(F.pad(images, (1, 1, 1, 1), mode="replicate"), 3, 1)
    images = torch.lerp(images, blurred, 0.7 * torch.rand(count, 1, 1, 1, generator=generator))
    tint = 0.12 * torch.randn(count, 3, 1, 1, generator=generator)
    return images + tint + 0.06 * torch.randn(images.shape, generator=generator)


def _target_maps(places: list[list[Thing]]) -> Tensor:
    """Return (B, kinds, h, w): 1 in the cell of an object's centre, less around it."""
    side = SIZE // CELL
    grid = torch.arange(side) + 0.5
    maps = torch.zeros(len(places), len(KINDS), side, side)
    for i, things in enumerate(places):
        for thing in things:
            x, y = int(thing.x * side) + 0.5, int(thing.y * side) + 0.5
            near = torch.exp(-((grid[:, None] - y) ** 2 + (grid - x) ** 2) / 2)
            kind = KINDS.index(thing.kind)
            maps[i, kind] = torch.maximum(maps[i, kind], near)
    return maps


def train_finder(
    finder: Finder, count: int, steps: int, seed: int, log: Log, batch: int = 32, lr: float = 4e-3
) -> None:
    """Train with the paper's focal loss (equation 1), on `count` pictures drawn with `seed`."""
    generator = torch.Generator().manual_seed(seed)
    _, places = draw_places(count, generator)
    pictures, maps = torch.stack([draw_scene(things, generator) for things in places]), _target_maps(places)
    optimizer = torch.optim.AdamW(finder.parameters(), lr=lr)
    start = time.time()
    for step in range(steps):
        rate = lr * min(1, (step + 1) / 30) * (0.5 + 0.5 * math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = rate
        rows = torch.randint(0, count, (batch,), generator=generator)
        target = maps[rows]
        logits = finder(_augment(pictures[rows], generator))
        probability = logits.sigmoid()
        is_centre = target == 1
        positive = ((1 - probability) ** 2 * F.logsigmoid(logits))[is_centre].sum()
        negative = ((1 - target) ** 4 * probability**2 * F.logsigmoid(-logits))[~is_centre].sum()
        loss = -(positive + negative) / is_centre.sum()
        finder.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            log(f"judge {step} {time.time() - start:.0f}s loss {loss.item():.4f}")
