"""Two rewards for first runs and tests: --trust-code reward.terms.score.name=examples/toys.py:Colour loads one."""

import io
from typing import Unpack

import torch
from PIL import Image

from rewardfl.data import to_uint8
from rewardfl.rewards.frames import FrameReward, FrameSettings


class Colour(FrameReward):
    """Mean over pixels of red * R + green * G + blue * B, channels from 0 to 1; by default the redness of a frame."""

    name = "colour"
    differentiable = True

    def __init__(
        self, red: float = 1.0, green: float = -0.5, blue: float = -0.5, **frame_settings: Unpack[FrameSettings]
    ):
        super().__init__(**frame_settings)
        self.register_buffer("channels", torch.tensor([red, green, blue]), persistent=False)

    def score_frames(self, frames, reference):
        means = ((frames + 1) / 2).mean((2, 3))  # (N, 3)
        return means @ self.channels.to(means)


class JpegSize(FrameReward):
    """Minus the kilobytes of a frame as JPEG: DDPO's compressibility (Black et al. 2023, arXiv 2305.13301)."""

    name = "jpeg_size"

    def __init__(self, quality: int = 95, **frame_settings: Unpack[FrameSettings]):
        super().__init__(**frame_settings)
        self.quality = quality

    def score_frames(self, frames, reference):
        sizes = []
        for frame in to_uint8(frames.transpose(0, 1)):
            buffer = io.BytesIO()
            Image.fromarray(frame.cpu().numpy()).save(buffer, "JPEG", quality=self.quality)
            sizes.append(-buffer.tell() / 1000)
        return torch.tensor(sizes, device=frames.device) + 0 * frames.mean((1, 2, 3))  # NaN for a broken frame
