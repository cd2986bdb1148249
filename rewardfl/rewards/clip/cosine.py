"""Scores by the cosine of frame and prompt in a CLIP of transformers."""

from pathlib import Path
from typing import Literal, Unpack

from torch import Tensor

from rewardfl.config.schema import Positive
from rewardfl.rewards.clip.network import PromptReward, load_clip
from rewardfl.rewards.frames import FrameSettings
from rewardfl.rewards.settings import ExistingPath


class ClipScoreReward(PromptReward):
    """Does a frame show what the prompt says? CLIPScore, Hessel et al. 2021, arXiv 2104.08718.

    weight * max(cosine(frame, prompt), 0), section 3 of the paper, where w = 2.5 stretches it to about [0, 1].
    weight: 100 is per cent of the cosine, the scale of torchmetrics' clip_score. The paper's prefix "A photo depicts"
    is not added. Below a cosine of 0 the gradient is 0; natural pairs have 0.1 to 0.35. model_dir: any CLIP.
    tokenizer_dir: "" for the tokenizer in model_dir. Other settings: FrameReward.
    """

    name = "clip_score"
    weights = "any CLIP (transformers folder), e.g. openai/clip-vit-large-patch14"
    licence = "OpenAI's CLIP: MIT (github.com/openai/CLIP)"
    range = "[0, weight]"

    def __init__(
        self,
        model_dir: ExistingPath,
        tokenizer_dir: ExistingPath | Literal[""] = "",
        weight: Positive = 100.0,
        **frame_settings: Unpack[FrameSettings],
    ):
        model = load_clip(model_dir)
        super().__init__(model, tokenizer_dir or model_dir, [Path(model_dir)], **frame_settings)
        self.weight = weight

    def from_cosine(self, cosine: Tensor) -> Tensor:
        return self.weight * cosine.clamp(min=0)


class PickScoreReward(PromptReward):
    """Which of two images would people pick for this prompt? Pick-a-Pic, Kirstain et al. 2023, arXiv 2305.01569.

    exp(logit_scale) * cosine(frame, prompt) / divisor: section 4 of the paper, a CLIP ViT-H/14 tuned on choices.
    model_dir: yuvalkirstain/PickScore_v1. tokenizer_dir: a folder with CLIP's tokenizer, "" for model_dir; the authors
    use laion/CLIP-ViT-H-14-laion2B-s32B-b79K's. divisor: 26 is Flow-GRPO's scale (about 0.8), 1 the published
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
