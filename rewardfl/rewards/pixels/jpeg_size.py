"""The JPEG size of the frames: DDPO's compressibility, Black et al. 2023, arXiv 2305.13301, section 5."""

import io
from collections.abc import Mapping
from typing import Annotated, Unpack

import torch
from PIL import Image
from pydantic import Field
from torch import Tensor

from rewardfl.rewards.frames import FrameReward, FrameSettings


class JpegSizeReward(FrameReward):
    """Minus the kilobytes (1000 bytes) of a frame as JPEG; the authors' code saves in quality 95.

    A reward without gradient for Flow-GRPO, which any model can learn visibly. Other settings: FrameReward.
    """

    name = "jpeg_size"
    licence = "this project's"
    range = "below 0"

    def __init__(self, quality: Annotated[int, Field(ge=1, le=95)] = 95, **frame_settings: Unpack[FrameSettings]):
        super().__init__(**frame_settings)
        self.quality = quality

    def score_frames(self, frames: Tensor, reference: Mapping[str, Tensor]) -> Tensor:
        levels = ((frames.float() + 1) * 127.5).round().clamp(0, 255)
        sizes = torch.full((len(frames),), torch.nan)  # NaN for a frame that is not finite
        for i, frame in enumerate(levels):
            if frame.isfinite().all():
                buffer = io.BytesIO()
                image = Image.fromarray(frame.permute(1, 2, 0).to("cpu", torch.uint8).numpy())
                image.save(buffer, "JPEG", quality=self.quality)
                sizes[i] = buffer.tell() / 1000
        return -sizes.to(frames.device)
