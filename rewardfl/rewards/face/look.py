"""Similarity of a face's eyes and mouth to the real clip's, by pixels: recognisers ignore smeared eyes.

Frames are aligned by their landmarks. Each generated frame is compared with the nearest real frame, so that a blink or
a word at another time costs nothing.
"""

import torch
from torch import Tensor

from rewardfl.rewards.face.align import ARCFACE_TEMPLATE, align, similarity_transform

# rows and columns of the aligned crop of 112 x 112
PATCHES = {"eyes": (slice(34, 70), slice(18, 94)), "mouth": (slice(78, 108), slice(30, 82))}

MOUTH_MOVES = 0.06  # least `mouth_movement` of a talker: tiny real clips have 0.16, base videos 0.09, silent ones 0.04


def grey_patches(frames: Tensor, landmarks: Tensor) -> dict[str, Tensor]:
    """Return the grey patches (F, h, w) of frames (F, 3, H, W) in [-1, 1] by landmarks (F, 5, 2), with gradient."""
    crops = align(frames.float(), similarity_transform(landmarks, ARCFACE_TEMPLATE)).mean(1)
    return {name: crops[:, rows, columns] for name, (rows, columns) in PATCHES.items()}


@torch.no_grad()
def cut_patches(frames: Tensor, landmarks: Tensor) -> dict[str, Tensor]:
    """Return `grey_patches` as levels (F, h, w) uint8 on the CPU."""
    patches = grey_patches(frames, landmarks)
    return {name: (grey.clamp(-1, 1) * 127.5 + 127.5).round().byte().cpu() for name, grey in patches.items()}


def compare_look(generated: dict[str, Tensor], real: dict[str, Tensor]) -> float:
    """Return the look of a clip, in [-1, 1]: 1 where eyes and mouth are a real frame's, 0 where they are unlike any.

    It is each patch's best `similarity` with a real frame, mean over the second half of the frames and both patches.
    """
    best = [similarity(patches[len(patches) // 2 :], real[name]).amax(1) for name, patches in generated.items()]
    return float(torch.stack([values.mean() for values in best]).mean())


def mouth_movement(patches: Tensor) -> float:
    """Return how far a mouth opens and shuts in its patches (F, h, w) uint8.

    An open mouth is dark, or shows teeth: the brightness of the middle third, over the patch's median, changes and
    comes back. Returned is the 95 % quantile over the frames of the smaller change, from before and to later.
    """
    levels, third = patches.float(), patches.shape[2] // 3
    brightness = levels[:, :, third : 2 * third].mean((1, 2)) / levels.flatten(1).quantile(0.5, dim=1).clamp(min=1)
    both = torch.stack([brightness, -brightness])  # darker, or brighter
    before, later = both.cummax(1).values, both.flip(1).cummax(1).values.flip(1)
    return float((torch.minimum(before, later) - both).quantile(0.95, dim=1).max())


def similarity(first: Tensor, second: Tensor) -> Tensor:
    """Return (M, N): 2 cov / (var + var) of patches (M, h, w) and (N, h, w), blind to their brightness.

    It is the contrast and structure of SSIM (Wang et al. 2004, eq. 6 to 10, without constants) over an entire patch.
    """
    a, b = (patches.flatten(1).float() for patches in (first, second))
    a, b = a - a.mean(1, keepdim=True), b - b.mean(1, keepdim=True)
    spread = a.square().sum(1)[:, None] + b.square().sum(1)[None]
    return 2 * (a @ b.T) / spread.clamp(min=1e-6)
