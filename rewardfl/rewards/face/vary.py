"""Random variations of face crops and their seed, so that a reward pays for the person and not for one picture."""

import hashlib

import torch
import torch.nn.functional as F
from torch import Tensor

from rewardfl.copies import to_device


def vary_crops(crops: Tensor, generator: torch.Generator) -> Tensor:
    """Return crops (N, 3, H, W) in [-1, 1] as another camera might show them, with gradient.

    Flip, lower resolution, greyness, exposure, colour, noise and a covered rectangle are drawn for each crop from
    `generator`, on the CPU.
    """
    count, _, height, width = crops.shape

    def draw(*shape: int) -> Tensor:
        return to_device(torch.rand(count, *shape, generator=generator), crops.device)

    crops = torch.where(draw(1, 1, 1) < 0.5, crops.flip(-1), crops)
    side = int(torch.randint(height // 3, height, (1,), generator=generator))
    coarse = F.interpolate(crops, size=(side, side), mode="bilinear", antialias=True)
    crops = crops + draw(1, 1, 1) * (F.interpolate(coarse, size=(height, width), mode="bilinear") - crops)
    crops = crops + draw(1, 1, 1) * (crops.mean(1, keepdim=True) - crops)
    gain, shift = 1 + 0.6 * (draw(3, 1, 1) - 0.5), 0.6 * (draw(3, 1, 1) - 0.5)
    noise = to_device(torch.randn(crops.shape, generator=generator), crops.device)
    crops = (crops * gain + shift + 0.05 * draw(1, 1, 1) * noise).clamp(-1, 1)
    return torch.where(_covered(draw(4), height, width), shift, crops)


def _covered(drawn: Tensor, height: int, width: int) -> Tensor:
    """Return (N, 1, H, W) bool: a rectangle of up to 0.4 of each side. drawn: (N, 4) in [0, 1), sizes and corner."""
    sides = 0.4 * drawn[:, :2]
    starts = drawn[:, 2:] * (1 - sides)
    inside = []
    for axis, size in enumerate((height, width)):
        centre = (torch.arange(size, device=drawn.device) + 0.5) / size
        start = starts[:, axis, None]
        inside.append((centre >= start) & (centre < start + sides[:, axis, None]))
    return (inside[0][:, :, None] & inside[1][:, None, :])[:, None]


def clip_seed(video: Tensor, purpose: str = "") -> int:
    """Return a seed for random draws on a clip (3, F, H, W); each purpose has its own.

    It depends on the clip's mean, to 1e-4, so that a resumed run and other numbers of processes draw the same: sums in
    another order differ by far less. Another noise or step gives another seed.
    """
    mean = round(video.detach().double().mean().nan_to_num().item() * 1e4)
    # hashed: neighbouring means must not give related draws
    return int.from_bytes(hashlib.sha256(f"{mean}{purpose}".encode()).digest()[:7], "big")
