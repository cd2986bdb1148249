"""Training of the held-out judge's network."""

import math
import time

import torch
import torch.nn.functional as F
from torch import Tensor

from rewardfl.rewards.scenes.checker import Thing
from rewardfl.rewards.scenes.judge import CELL, KINDS, Finder
from tiny_images.drawing import SIZE, draw_places, draw_scene
from tiny_world.video import Log


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
    torch.nn.init.constant_(finder[-1].bias, -4.0)  # nearly all cells have no centre
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
