"""A reward that the tests of the reward server serve, and its inputs."""

import time

import torch

from rewardfl import data
from rewardfl.rewards import Reward, RewardOutput
from rewardfl.rewards.remote import RemoteReward

PROMPTS = ["a person, talking", "", "eine Frau in München", "他在说话", 'quotes " and \\ and \x01']


def make_frames(count, shape=(4, 6, 8), seed=0):
    """Return (count, F, H, W, 3) uint8; the first pixel is bright: ScaledMean calls the clips valid."""
    frames = torch.randint(0, 256, (count, *shape, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    frames[:, 0, 0, 0] = 200
    return frames


def make_videos(frames):
    return torch.stack([data.to_float(clip) for clip in frames]).contiguous()


VIDEO, REAL = make_videos(make_frames(5)), make_videos(make_frames(5, (5, 4, 6), seed=1))


class ScaledMean(Reward):
    """Mean over pixels, times the length of the prompt, minus the distance to the real clip's mean if there is one.

    Clips whose first red value is below -0.9 are invalid. The prompts "fails" and "not finite" do what they say.
    """

    name, differentiable = "scaled_mean", True
    compares_with = "nothing"  # a real clip is optional

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
        self.batches.append(len(video))
        self.scoring += 1
        try:
            time.sleep(self.seconds)
            rows = [self._sample(clip, reference) for clip, reference in zip(video, batch, strict=True)]
        finally:
            self.scoring -= 1
        score, mean, real = torch.tensor(rows).T
        return RewardOutput(score, video[:, 0, 0, 0, 0] >= -0.9, {"mean": mean, "real": real})

    def _sample(self, video, reference):
        prompt = bytes(reference["prompt"].tolist()).decode()
        if prompt == "fails":
            raise RuntimeError("no memory for that")
        if prompt == "not finite":
            return [float("nan")] * 3
        mean, real = video.mean(), reference["real"]
        return [self.gain * len(prompt) * mean - torch.nan_to_num((mean - real).abs()), mean, real]


def make_client(url, **settings):
    """Return a RemoteReward that notes its pauses in `pauses` instead of waiting."""
    reward = RemoteReward(**{"url": url, "timeout": 10, **settings})
    reward.pauses = []
    reward.sleep = reward.pauses.append
    return reward
