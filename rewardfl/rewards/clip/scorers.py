"""Rewards of frames by a CLIP: LAION's aesthetic predictor, CLIPScore, PickScore and HPS v2.1."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Unpack

from torch import Tensor, nn
from transformers import CLIPConfig, CLIPModel

from rewardfl.config.schema import Positive
from rewardfl.rewards.clip.network import ImageTower, PromptReward, check_state, letterbox, load_clip, load_weights
from rewardfl.rewards.frames import FrameReward, FrameSettings
from rewardfl.rewards.settings import ExistingPath

WIDTH = 768  # width of CLIP ViT-L/14's embedding

# open_clip's ViT-H-14. gelu is exact; OpenAI's models have quick_gelu, ViT-H-14 of LAION does not
VIT_H_14 = {
    "projection_dim": 1024,
    "vision_config": {
        "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 16,
        "hidden_act": "gelu", "image_size": 224, "patch_size": 14,
    },
    "text_config": {
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
        "hidden_act": "gelu", "vocab_size": 49408, "max_position_embeddings": 77,
    },
}  # fmt: skip

# open_clip's names -> transformers'
_RENAMED = {
    r"^visual\.transformer\.resblocks": "vision_model.encoder.layers",
    r"^transformer\.resblocks": "text_model.encoder.layers",
    r"\.ln_([12])\.": r".layer_norm\1.",
    r"\.mlp\.c_fc\.": ".mlp.fc1.",
    r"\.mlp\.c_proj\.": ".mlp.fc2.",
    r"\.attn\.out_proj\.": ".self_attn.out_proj.",
    r"^visual\.class_embedding$": "vision_model.embeddings.class_embedding",
    r"^visual\.positional_embedding$": "vision_model.embeddings.position_embedding.weight",
    r"^visual\.conv1\.": "vision_model.embeddings.patch_embedding.",
    r"^visual\.ln_pre\.": "vision_model.pre_layrnorm.",
    r"^visual\.ln_post\.": "vision_model.post_layernorm.",
    r"^visual\.proj$": "visual_projection.weight",
    r"^token_embedding\.": "text_model.embeddings.token_embedding.",
    r"^positional_embedding$": "text_model.embeddings.position_embedding.weight",
    r"^ln_final\.": "text_model.final_layer_norm.",
    r"^text_projection$": "text_projection.weight",
}


class AestheticReward(FrameReward):
    """Would people find a frame beautiful? LAION's improved aesthetic predictor (C. Schuhmann, 2022).

    The mean rating, from 1 to 10, by a linear regression on CLIP ViT-L/14's unit image embedding. model_dir:
    openai/clip-vit-large-patch14 in transformers' layout. head: sac+logos+ava1-l14-linearMSE.pth. Other settings:
    FrameReward.
    """

    name = "aesthetic"
    differentiable = True
    weights = "openai/clip-vit-large-patch14 (transformers folder); sac+logos+ava1-l14-linearMSE.pth"
    licence = "CLIP: MIT; head: Apache-2.0 (github.com/christophschuhmann/improved-aesthetic-predictor)"
    range = "about 1 to 10"

    def __init__(self, model_dir: ExistingPath, head: ExistingPath, **frame_settings: Unpack[FrameSettings]):
        super().__init__(**frame_settings)
        self.head = load_head(head)
        model = load_clip(model_dir)
        if model.config.projection_dim != WIDTH:
            width = model.config.projection_dim
            raise ValueError(f"{model_dir} embeds images in {width} numbers, not {WIDTH}; give CLIP ViT-L/14")
        self.image = ImageTower(model)

    def score_frames(self, frames: Tensor, reference: Mapping[str, Tensor]) -> Tensor:
        return self.head(self.image(frames))[:, 0]


def load_head(path: str | Path) -> nn.Sequential:
    """Load the predictor's frozen layers, unit embeddings (N, 768) to (N, 1); raise ValueError for another file.

    github.com/christophschuhmann/improved-aesthetic-predictor: linear layers without activations between them. An
    Identity stands for the published head's dropout.
    """
    head = nn.Sequential(
        nn.Linear(WIDTH, 1024), nn.Identity(), nn.Linear(1024, 128), nn.Identity(), nn.Linear(128, 64), nn.Identity(),
        nn.Linear(64, 16), nn.Linear(16, 1),
    )  # fmt: skip
    state = {name.removeprefix("layers."): value for name, value in load_weights(path).items()}
    check_state(path, "the head of the aesthetic predictor", state, head.state_dict())
    head.load_state_dict(state)
    return head.eval().requires_grad_(requires_grad=False)


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


class Hpsv2Reward(PromptReward):
    """Which of two images would people prefer for this prompt? HPS v2.1, Wu et al. 2023, arXiv 2306.09341.

    cosine(frame, prompt) of a CLIP ViT-H/14 tuned on preferences, as hpsv2.score returns it, without logit_scale.
    checkpoint: HPS_v2.1_compressed.pt (or HPS_v2_compressed.pt) of xswu/HPSv2. tokenizer_dir: a folder with CLIP's
    tokenizer, e.g. laion/CLIP-ViT-H-14-laion2B-s32B-b79K or openai/clip-vit-large-patch14. Plain prompts give the same
    tokens as open_clip's tokenizer, which also fixes broken Unicode and HTML entities. Other settings: FrameReward.
    """

    name = "hpsv2"
    weights = "HPS_v2.1_compressed.pt of xswu/HPSv2; CLIP tokenizer"
    licence = "Apache-2.0 (github.com/tgxs002/HPSv2)"
    range = "[-1, 1], about 0.2 to 0.35"

    def __init__(self, checkpoint: ExistingPath, tokenizer_dir: ExistingPath, **frame_settings: Unpack[FrameSettings]):
        model = load_open_clip(checkpoint)
        super().__init__(model, tokenizer_dir, [Path(checkpoint)], **frame_settings)
        self.image.preprocess = letterbox


def load_open_clip(path: str | Path) -> CLIPModel:
    """Load open_clip's ViT-H-14 as transformers' CLIPModel in float32; raise ValueError for any other file."""
    converted = from_open_clip(load_weights(path, "state_dict"))
    model = CLIPModel(CLIPConfig(**VIT_H_14)).float()  # the checkpoint may be in half precision
    check_state(path, "open_clip's ViT-H-14", converted, model.state_dict())
    model.load_state_dict(converted)
    return model


def from_open_clip(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert open_clip's names and layouts to transformers'; keep names that open_clip's CLIP does not have."""
    converted = {}
    for name, value in state.items():
        for pattern, replacement in _RENAMED.items():
            name = re.sub(pattern, replacement, name)
        if ".attn.in_proj_" in name:  # query, key and value in one tensor
            for letter, third in zip("qkv", value.chunk(3), strict=True):
                converted[name.replace(".attn.in_proj_", f".self_attn.{letter}_proj.")] = third
        else:
            converted[name] = value.T if name in ("visual_projection.weight", "text_projection.weight") else value
    return converted
