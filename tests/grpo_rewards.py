"""Rewards that fail, for test_train_flow_grpo.py: each says by a file which call it is."""

import threading

import torch

from rewardfl.rewards import Reward, RewardOutput


class Fails(Reward):
    """The mean of the red channel; one sample of each batch of two is `how` it says: raises, nan, or hangs."""

    name = "fails"
    how = ""

    def forward(self, video, batch):
        # samples differ by their noise alone, so the redder one is the same whatever the batch it comes in
        score = video[:, 0].flatten(1).mean(1)
        if len(video) == 2:
            Fails.redder = float(score.max())
        chosen = score == Fails.redder
        if self.how == "raises" and chosen.any():
            raise RuntimeError("the judge is not at home")
        if self.how == "hangs":
            threading.Event().wait()
        if self.how == "nan":
            score = score.where(~chosen, torch.nan)
        return RewardOutput(score, torch.ones(len(video), dtype=torch.bool), {})


class Raises(Fails):
    how = "raises"


class Nan(Fails):
    how = "nan"


class Hangs(Fails):
    how, concurrent = "hangs", True


class Broken(Reward):
    """Raises for every sample."""

    name = "broken"

    def forward(self, video, batch):
        raise KeyError("nobody")
