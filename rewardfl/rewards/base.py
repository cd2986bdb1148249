"""What every reward is: a module from videos to one score per sample."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


class RewardError(ValueError):
    """A reward that cannot be had, or does not keep its contract. The message names its place or its class."""


class Unavailable(RuntimeError):
    """A reward that answers nobody now, whatever the sample: a batch's samples are not tried one by one."""


@dataclass
class RewardOutput:
    """Scores of B samples. Where `valid` is False the score is 0, with a zero gradient, and means nothing."""

    score: Tensor  # (B,) float32, always finite; with gradient to the video if the reward is differentiable
    valid: Tensor  # (B,) bool
    parts: dict[str, Tensor]  # name -> (B,) for the log, without gradient; NaN where not measured


class Reward(nn.Module):
    """Subclasses set `name`, the attributes that are true of them, and forward.

    Their settings are the named arguments of their constructor; `rewards.build` checks a config against them.
    """

    name: str = ""  # in configs, tables and cache keys
    differentiable: bool = False  # has the score a gradient to the video?
    uses_prompt: bool = False  # does `reference` depend on the prompt?
    fewest_frames: int = 1  # that it can judge; 2 where it looks at what changes from frame to frame
    concurrent: bool = False  # may calls run in threads, several at a time? For rewards that wait, as for a server
    parallel: int = 4  # how many at a time, of a concurrent reward
    place: str = "settings"  # where its settings stand, for messages: build_terms puts the configuration's key here
    weights: str = ""  # the files that it needs; empty for none
    licence: str = ""  # of the weights, or of the code where there are none
    range: str = ""  # of the score
    nothing_found: str = "nothing to compare with was found in"  # what is said of a clip without a reference

    @property
    def compares_with(self) -> str:
        """What `reference` needs of a row of the table: a clip, a picture (it is shown two frames of it), or nothing.

        A row without it is refused when the reward is trained on. Of a class without a `reference` of its own: nothing.
        """
        return "nothing" if type(self).reference is Reward.reference else "clip"

    def reference(self, video: Tensor, prompt: str = "") -> dict[str, Tensor] | None:
        """What this reward keeps of a sample's real clip (3, F, H, W) in [-1, 1] and its prompt.

        The clip is there where the reward `compares_with` one; without a clip it is of no frames (F = 0).
        It is computed once per sample, cached under `fingerprint` (and the prompt where `uses_prompt`), and handed
        back to `forward`. None if the clip is of no use. A reward that needs neither keeps an empty dict: every
        sample is usable.
        """
        return {}

    def fingerprint(self) -> dict[str, object]:
        """All that `reference` depends on beside clip and prompt, as plain JSON values: weights, settings."""
        return {"name": self.name}

    def held(
        self, video: Tensor, batch: Sequence[Mapping[str, Tensor] | None]
    ) -> tuple[Tensor, Sequence[Mapping[str, Tensor] | None]]:
        """What a concurrent reward's call holds on to until its turn comes; `forward` is then given this.

        In CPU memory, since several wait. A subclass whose forward needs less than the float32 pixels keeps less.
        """
        return video.cpu(), batch

    def forward(self, video: Tensor, batch: Sequence[Mapping[str, Tensor] | None]) -> RewardOutput:
        """Score (B, 3, F, H, W) videos in [-1, 1] against one reference each; None makes a sample invalid."""
        raise NotImplementedError


def no_score(video: Tensor) -> Tensor:
    """() float32 0 with a zero gradient to all of `video`, whatever it holds: the score of an invalid sample."""
    return video[:0].sum().float()  # a sum over no pixels, since NaN * 0 is NaN


def by_sample(
    video: Tensor,
    batch: Sequence[Mapping[str, Tensor] | None],
    judge_one: Callable[[Tensor, Mapping[str, Tensor]], tuple[Tensor | None, dict[str, float]]],
    names: Sequence[str],
) -> RewardOutput:
    """The output of a reward that looks at one clip (3, F, H, W) of the batch at a time.

    judge_one: clip, reference -> score, None for an invalid sample, and what is known of the parts called `names`.
    """
    pairs = list(zip(video, batch, strict=True))
    found = [(None, {}) if reference is None else judge_one(clip, reference) for clip, reference in pairs]
    scores = [no_score(clip) if score is None else score for clip, (score, _) in zip(video, found, strict=True)]
    rows = torch.tensor([[known.get(name, math.nan) for name in names] for _, known in found], device=video.device)
    valid = torch.tensor([score is not None for score, _ in found], device=video.device)
    return RewardOutput(torch.stack(scores), valid, dict(zip(names, rows.unbind(1), strict=True)))
