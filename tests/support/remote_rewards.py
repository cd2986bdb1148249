"""A reward that test_remote.py serves."""

import time

import torch

from rewardfl.rewards import Reward, RewardOutput


class Likeness(Reward):
    """Mean over pixels, times a number of the prompt, minus the distance to the real clip's mean if there is one.

    Clips whose first red value is below -0.9 are invalid; the prompt says what else goes wrong.
    """

    name, differentiable = "likeness", True
    compares_with = "nothing"  # necessarily

    def __init__(self, gain: float = 1.0, seconds: float = 0.0):
        super().__init__()
        self.gain, self.seconds = gain, seconds
        self.batches: list[int] = []  # the number of clips of each call
        self.scoring = 0

    def reference(self, video, prompt=""):
        real = video.mean() if video.numel() else torch.tensor(float("nan"))
        return {"prompt": torch.tensor(list(prompt.encode()), dtype=torch.uint8), "real": real}

    def forward(self, video, batch):
        assert self.scoring == 0, "two at a time on the device"
        self.scoring += 1
        time.sleep(self.seconds)
        self.batches.append(len(video))
        results = [self._sample(clip, reference) for clip, reference in zip(video, batch, strict=True)]
        self.scoring -= 1
        score, valid, mean, real = zip(*results, strict=True)
        parts = {"mean": torch.stack(mean), "real": torch.stack(real)}
        return RewardOutput(torch.stack(score), torch.tensor(valid), parts)

    def _sample(self, video, reference):
        nothing, nan = video[:0].sum(), torch.tensor(float("nan"))
        if reference is None or video[0, 0, 0, 0] < -0.9:
            return nothing, False, nan, nan
        prompt = bytes(reference["prompt"].tolist()).decode()
        if prompt == "fails":
            self.scoring -= 1
            raise RuntimeError("no memory for that")
        if prompt == "not finite":
            return nan, True, nan, nan
        mean = video.mean()
        away = torch.nan_to_num((mean - reference["real"]).abs())
        return self.gain * len(prompt) * mean - away, True, mean, reference["real"]
