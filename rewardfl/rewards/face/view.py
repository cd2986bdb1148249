"""Small zooms and shifts of frames, to which a detector must be indifferent."""

import hashlib
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from rewardfl.rewards.face.align import Faces


@dataclass(frozen=True)
class View:
    """Moves a frame's pixel q to zoom * (q - centre) + centre + shift."""

    zoom: float
    shift: tuple[float, float]  # x, y in frame pixels

    def of(self, frames: Tensor) -> Tensor:
        """Return (N, 3, H, W) frames through this view, with gradient: bilinear, the outer pixels repeated outside."""
        grids = []
        for size, shift in zip((frames.shape[-1], frames.shape[-2]), self.shift, strict=True):
            centre = (size - 1) / 2
            pixel = torch.arange(size, device=frames.device, dtype=frames.dtype)
            # align_corners=True puts -1 and 1 on the centres of the outer pixels, which are size - 1 apart
            grids.append((pixel - centre - shift) / self.zoom / max(centre, 0.5))
        y, x = torch.meshgrid(grids[1], grids[0], indexing="ij")
        grid = torch.stack([x, y], -1).expand(len(frames), -1, -1, -1)
        return F.grid_sample(frames, grid, mode="bilinear", padding_mode="border", align_corners=True)

    def undo(self, faces: Faces, frames: Tensor) -> Faces:
        """Return faces detected in `of(frames)` in the pixels of `frames` (N, 3, H, W)."""
        centre = torch.tensor([(frames.shape[-1] - 1) / 2, (frames.shape[-2] - 1) / 2])
        shift = torch.tensor(self.shift)

        def back(points: Tensor) -> Tensor:
            return (points - centre - shift) / self.zoom + centre

        boxes = back(faces.boxes.view(-1, 2, 2)).view(-1, 4)
        return replace(faces, boxes=boxes, landmarks=back(faces.landmarks))


def clip_seed(video: Tensor, purpose: str = "") -> int:
    """Return a seed for random draws on a clip (3, F, H, W); each purpose has its own.

    It depends on the clip's mean, to 1e-4, so that a resumed run and other numbers of processes draw the same: sums in
    another order differ by far less. Another noise or step gives another seed.
    """
    mean = round(video.detach().double().mean().nan_to_num().item() * 1e4)
    # hashed: neighbouring means must not give related draws
    return int.from_bytes(hashlib.sha256(f"{mean}{purpose}".encode()).digest()[:7], "big")
