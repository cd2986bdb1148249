"""Rewards that fail, for test_train_flow_grpo.py: each says by a file which call it is."""

import threading

import torch

from rewardfl.rewards import Reward, RewardOutput


class Fails(Reward):
    """The mean of the red channel; one sample of each batch of two is `how` it says: raises, nan, or hangs."""

    name = "fails"
    how = ""

    def forward(self, video, batch):
        # samples differ only by their noise, so the redder one does not depend on its batch
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
    how, concurrent, call_timeout = "hangs", True, 0.5


class Names(Reward):
    """The mean of the red channel, with parts whose names the scripts use themselves: each is 100."""

    name, differentiable = "names", True
    parts = (
        "kl", "valid", "score", "row", "finite", "replaced", "total", "mean", "valid_fraction", "std_in_group",
        "failed", "held_out", "loss", "red", "score_std",
    )  # fmt: skip

    def forward(self, video, batch):
        valid = torch.tensor([reference is not None for reference in batch], device=video.device)
        hundred = torch.full((len(video),), 100.0, device=video.device)
        return RewardOutput(video[:, 0].flatten(1).mean(1), valid, dict.fromkeys(self.parts, hundred))


class Unnamed(Names):
    """The same without parts."""

    parts = ()


class Dies(Names):
    """Has a score only for the clip on which it is tried, and for the first two batches."""

    differentiable = False

    def __init__(self):
        super().__init__()
        self.batches = 0

    def forward(self, video, batch):
        self.batches += 1
        output = super().forward(video, batch)
        return RewardOutput(output.score * (1.0 if self.batches <= 3 else torch.nan), output.valid, output.parts)


class Never(Reward):
    """Has no finite score for any sample."""

    name, differentiable = "never", True

    def forward(self, video, batch):
        return RewardOutput(video.flatten(1).mean(1) * torch.nan, torch.ones(len(video), dtype=torch.bool), {})
