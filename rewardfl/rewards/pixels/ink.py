"""The colour of a written word against the colour that its prompt names, on the tiny words (assets/tiny_words)."""

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rewardfl.rewards import Reward, RewardOutput
from rewardfl.rewards.base import Reference, score_clips

INKS = {"black": (0.05, 0.05, 0.08), "red": (0.72, 0.06, 0.08), "green": (0.02, 0.4, 0.12), "blue": (0.08, 0.14, 0.7)}
GROUNDS = {"white": (0.96, 0.96, 0.96), "yellow": (0.98, 0.88, 0.42), "pink": (0.98, 0.76, 0.82)}

_find_colours = re.compile(rf"\bin ({'|'.join(INKS)}) on ({'|'.join(GROUNDS)})$").search


class WordInk(Reward):
    """The share of the letters' pixels that is nearer to the prompt's ink, in RGB, than to the other inks.

    The letters' pixels are those whose distance from the prompt's ground is more than 0.8 of the largest one.
    """

    name = "word_ink"
    uses_prompt = True
    range = "[0, 1]"
    has_cap = True
    compares_with = "nothing"  # but the prompt

    @staticmethod
    def prompt_problem(prompt: str) -> str:
        how = f"end it with ' in INK on GROUND', of the inks {', '.join(INKS)} and the grounds {', '.join(GROUNDS)}"
        return "" if _find_colours(prompt) else f"the prompt names no ink and ground; {how}"

    def reference(self, video: Tensor, prompt: str = "") -> dict[str, Tensor]:
        """Return the number of the prompt's ink, and its ground's colour (3,) in [0, 1]."""
        match = _find_colours(prompt)
        if match is None:
            raise ValueError(f"reward word_ink: {self.prompt_problem(prompt)}, got {prompt!r}")
        return {"ink": torch.tensor([*INKS].index(match[1])), "ground": torch.tensor(GROUNDS[match[2]])}

    @torch.no_grad()
    def forward(self, video: Tensor, batch: Sequence[Reference]) -> RewardOutput:
        """Score videos (B, 3, F, H, W) in [-1, 1]."""
        return score_clips(video, batch, self._score_clip, [])

    def _score_clip(self, clip: Tensor, reference: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, float]]:
        pixels = (clip.float().flatten(1).T + 1) / 2  # (P, 3)
        distance = (pixels - reference["ground"].to(pixels)).norm(dim=1)
        letters = pixels[distance > 0.8 * distance.max()]
        nearest = torch.cdist(letters, torch.tensor([*INKS.values()]).to(pixels)).argmin(1)
        return (nearest == reference["ink"].to(nearest)).float().mean(), {}
