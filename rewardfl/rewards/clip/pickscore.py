"""Which of two images would people pick for this prompt? Pick-a-Pic, Kirstain et al. 2023, arXiv 2305.01569."""

from pathlib import Path
from typing import Literal, Unpack

from torch import Tensor

from rewardfl.config.schema import Positive
from rewardfl.rewards.clip.network import PromptReward, load_clip
from rewardfl.rewards.frames import FrameSettings
from rewardfl.rewards.settings import ExistingPath


class PickScoreReward(PromptReward):
    """exp(logit_scale) * cosine(frame, prompt) / divisor: section 4 of the paper, a CLIP ViT-H/14 tuned on choices.

    model_dir: yuvalkirstain/PickScore_v1. tokenizer_dir: a folder with CLIP's tokenizer, "" for model_dir; the authors
    use that of laion/CLIP-ViT-H-14-laion2B-s32B-b79K. divisor: 26 is Flow-GRPO's scale (about 0.8), 1 the published
    scale (about 20), where a difference of d means odds of exp(d). Other settings: FrameReward.
    """

    name = "pickscore"
    weights = "yuvalkirstain/PickScore_v1 (transformers folder); CLIP tokenizer"
    licence = "MIT (github.com/yuvalkirstain/PickScore)"
    range = "about 16 to 26, divided by divisor"

    def __init__(
        self,
        model_dir: ExistingPath,
        tokenizer_dir: ExistingPath | Literal[""] = "",
        divisor: Positive = 1.0,
        **frame_settings: Unpack[FrameSettings],
    ):
        model = load_clip(model_dir)
        super().__init__(model, tokenizer_dir or model_dir, [Path(model_dir)], **frame_settings)
        self.scale = model.logit_scale.exp().item() / divisor

    def from_cosine(self, cosine: Tensor) -> Tensor:
        return self.scale * cosine
