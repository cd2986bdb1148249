"""Stable Diffusion 3 and 3.5. Its conditioning: text (B, 77 + 256, d) of CLIP, then of T5; pooled (B, p)."""

from typing import Any

import torch
from diffusers import SD3Transformer2DModel
from diffusers.loaders import SD3LoraLoaderMixin
from torch import Tensor
from transformers import CLIPTextModelWithProjection, T5EncoderModel

from rewardfl.backbones.image.pipeline import ATTENTION, JOINT, ImageModelSpec
from rewardfl.backbones.protocol import Conditioning

T5_TOKENS = 256  # a prompt's length in diffusers' pipeline


def _encode(pipe: Any, prompt: str, device: torch.device) -> Conditioning:
    length = min(T5_TOKENS, pipe.tokenizer_3.model_max_length)
    text, _, pooled, _ = pipe.encode_prompt(
        prompt, None, None, do_classifier_free_guidance=False, max_sequence_length=length, device=device
    )
    return {"text": text, "pooled": pooled}


def _model_inputs(x: Tensor, times: Tensor, conditioning: Conditioning, guidance: float | None) -> dict[str, Any]:
    return {
        "hidden_states": x,
        "timestep": times,
        "encoder_hidden_states": conditioning["text"],
        "pooled_projections": conditioning["pooled"],
    }


SD3 = ImageModelSpec(
    published="Stable Diffusion 3",
    pipeline="StableDiffusion3Pipeline",
    mixin=SD3LoraLoaderMixin,
    transformer=SD3Transformer2DModel,
    block_classes=("JointTransformerBlock",),
    layer_names={**ATTENTION, "ffn.0": "ff.net.0.proj", "ffn.2": "ff.net.2", **JOINT},
    encoders={
        "text_encoder": CLIPTextModelWithProjection,
        "text_encoder_2": CLIPTextModelWithProjection,
        "text_encoder_3": T5EncoderModel,
    },
    tokenizers=("tokenizer", "tokenizer_2", "tokenizer_3"),
    encode=_encode,
    inputs=_model_inputs,
    velocity=lambda output, x: output,
    sigmas=lambda steps: None,
    longest_side=lambda network: network["pos_embed_max_size"] * network["patch_size"],
    tokens=lambda limits: {
        "text_encoder": limits["tokenizer"], "text_encoder_2": limits["tokenizer"],
        "text_encoder_3": limits["tokenizer_3"],
    },
    prompt_tokens={"tokenizer": 77, "tokenizer_3": T5_TOKENS},
    shapes=lambda network, tokens: {
        "text": (tokens["text_encoder"] + tokens["text_encoder_3"], network["joint_attention_dim"]),
        "pooled": (network["pooled_projection_dim"],),
    },
)  # fmt: skip
