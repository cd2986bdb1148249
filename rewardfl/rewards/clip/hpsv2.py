"""Which of two images would people prefer for this prompt? HPS v2.1, Wu et al. 2023, arXiv 2306.09341."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Unpack

import torch.nn.functional as F
from torch import Tensor
from transformers import CLIPConfig, CLIPModel

from rewardfl.rewards.clip.network import PromptReward, check_state, load_weights, normalise, unit_range
from rewardfl.rewards.frames import FrameSettings
from rewardfl.rewards.settings import ExistingPath

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


class Hpsv2Reward(PromptReward):
    """cosine(frame, prompt) of a CLIP ViT-H/14 tuned on preferences, as hpsv2.score returns it, without logit_scale.

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

    def embed(self, frames: Tensor) -> Tensor:
        return self.image.embed(letterbox(frames.to(self.image.projection.weight), self.image.size))

    def from_cosine(self, cosine: Tensor) -> Tensor:
        return cosine


def letterbox(frames: Tensor, size: int) -> Tensor:
    """Resize full frames (N, 3, H, W) in [-1, 1] to (N, 3, size, size) with black bars, HPSv2's transform.

    Bicubic to a longer edge of `size` pixels, on floats that may overshoot [0, 1], then CLIP's normalisation. With
    antialias, torchvision's default since 0.17. HPSv2's torchvision had none for tensors; without it the gradient would
    miss most of the pixels.
    """
    scale = size / max(frames.shape[-2:])
    height, width = (round(edge * scale) for edge in frames.shape[-2:])
    resized = F.interpolate(unit_range(frames), (height, width), mode="bicubic", antialias=True)
    above, left = (size - height) // 2, (size - width) // 2
    return normalise(F.pad(resized, (left, size - width - left, above, size - height - above)))


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
