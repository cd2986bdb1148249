"""How much of a colour do the frames have? For tests and first runs: the simplest reward with a gradient."""

from collections.abc import Mapping

from torch import Tensor

from rewardfl.rewards.frames import FrameReward


class ColourReward(FrameReward):
    """Mean over pixels of red * R + green * G + blue * B, channels from 0 to 1; by default how red a frame is.

    Its gradient never ends: what it does to a video beyond [-1, 1] is the decoder's business. Other settings:
    FrameReward.
    """

    name = "colour"
    differentiable = True
    licence = "this project's"
    range = "[-1, 1] by default"

    def __init__(
        self,
        red: float = 1.0,
        green: float = -0.5,
        blue: float = -0.5,
        frames: str | int = "all",
        pooling: str = "mean",
        first_frame: bool = False,
        chunk: int = 8,
    ):
        super().__init__(frames, pooling, first_frame, chunk)
        self.channels = (red, green, blue)

    def score_frames(self, frames: Tensor, reference: Mapping[str, Tensor]) -> Tensor:
        means = ((frames + 1) / 2).mean((2, 3))  # (N, 3)
        return means @ means.new_tensor(self.channels)
