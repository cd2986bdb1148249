"""The amount of a colour in the frames, the simplest reward with a gradient, for tests and first runs."""

from collections.abc import Mapping
from typing import Unpack

import torch
from torch import Tensor

from rewardfl.config.schema import Number
from rewardfl.rewards.frames import FrameReward, FrameSettings


class ColourReward(FrameReward):
    """Mean over pixels of red * R + green * G + blue * B, channels from 0 to 1; by default the redness of a frame.

    The gradient is not limited to videos in [-1, 1]. Other settings: FrameReward.
    """

    name = "colour"
    differentiable = True
    licence = "this project's"
    range = "[-1, 1] by default"
    channels: Tensor

    def __init__(
        self, red: Number = 1.0, green: Number = -0.5, blue: Number = -0.5, **frame_settings: Unpack[FrameSettings]
    ):
        super().__init__(**frame_settings)
        self.register_buffer("channels", torch.tensor([red, green, blue]), persistent=False)

    def score_frames(self, frames: Tensor, reference: Mapping[str, Tensor]) -> Tensor:
        means = ((frames + 1) / 2).mean((2, 3))  # (N, 3)
        return means @ self.channels.to(means)
