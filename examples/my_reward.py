"""Your own reward: python -m rewardfl.rewards score --trust-code --reward examples/my_reward.py:Contrast -- V.mp4"""

import torch

from rewardfl.rewards import Reward, RewardOutput


class Contrast(Reward):
    """Standard deviation of the generated frames' brightness over `target`; a clip of one grey is invalid."""

    name = "my_contrast"  # in logs and cache keys; unique to the class
    differentiable = True  # reward feedback learning needs the gradient, Flow-GRPO does not

    def __init__(self, target: float = 0.5):  # the arguments are the settings in the configuration
        super().__init__()
        self.target = target

    def forward(self, video, batch):
        """Score video (B, 3, F, H, W) in [-1, 1]; batch: the output of `reference` for each sample, {} here."""
        grey = video[:, :, 1:].mean(1).flatten(1)  # frame 0 is the input image
        spread = grey.std(1)
        valid = torch.tensor([reference is not None for reference in batch], device=video.device) & (spread > 0)
        return RewardOutput(spread / self.target, valid, {"brightness": grey.detach().mean(1)})
