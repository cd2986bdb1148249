"""FLUX.1: one network on packed latents. Its conditioning: text (B, 512, d) of T5; pooled (B, p) of CLIP."""

from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from diffusers.loaders import FluxLoraLoaderMixin
from torch import Tensor
from transformers import CLIPTextModel, T5EncoderModel

from rewardfl.backbones.image.pipeline import ATTENTION, JOINT, PATCH, ImageModelSpec
from rewardfl.backbones.protocol import Conditioning

CLIP_TOKENS, T5_TOKENS = 77, 512  # the lengths that diffusers' pipeline pads prompts to


def _encode(pipe: Any, prompt: str, device: torch.device) -> Conditioning:
    text, pooled, _ = pipe.encode_prompt(prompt, None, device=device, max_sequence_length=T5_TOKENS)
    return {"text": text, "pooled": pooled}


def _model_inputs(x: Tensor, times: Tensor, conditioning: Conditioning, guidance: float | None) -> dict[str, Any]:
    height, width = x.shape[2] // PATCH, x.shape[3] // PATCH
    positions = torch.zeros(height, width, 3, device=x.device, dtype=x.dtype)
    positions[..., 1] += torch.arange(height, device=x.device, dtype=x.dtype)[:, None]
    positions[..., 2] += torch.arange(width, device=x.device, dtype=x.dtype)
    return packed_inputs(x, times, conditioning, guidance) | {
        "pooled_projections": conditioning["pooled"],
        "txt_ids": x.new_zeros(conditioning["text"].shape[1], 3),
        "img_ids": positions.flatten(0, 1),
    }


def packed_inputs(x: Tensor, times: Tensor, conditioning: Conditioning, guidance: float | None) -> dict[str, Any]:
    """Return the inputs that FLUX.1, FLUX.2 and Qwen-Image share."""
    return {
        "hidden_states": pack(x),
        "timestep": times.to(x.dtype) / 1000,  # rounded twice, as the pipeline does
        "guidance": None if guidance is None else times.new_full((len(x),), guidance),
        "encoder_hidden_states": conditioning["text"],
    }


def pack(x: Tensor) -> Tensor:
    """Reshape (B, C, h, w) to (B, hw / 4, 4 C): the four latents of a patch side by side."""
    batch, channels, height, width = x.shape
    patches = x.view(batch, channels, height // PATCH, PATCH, width // PATCH, PATCH).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(batch, height * width // PATCH**2, channels * PATCH**2)


def unpack(tokens: Tensor, x: Tensor) -> Tensor:
    """Return the tokens in the shape of x, (B, C, h, w)."""
    batch, channels, height, width = x.shape
    patches = tokens.view(batch, height // PATCH, width // PATCH, channels, PATCH, PATCH).permute(0, 3, 1, 4, 2, 5)
    return patches.reshape(x.shape)


FLUX = ImageModelSpec(
    published="FLUX.1",
    pipeline="FluxPipeline",
    mixin=FluxLoraLoaderMixin,
    transformer=FluxTransformer2DModel,
    block_classes=("FluxTransformerBlock", "FluxSingleTransformerBlock"),
    layer_names={**ATTENTION, "ffn.0": "ff.net.0.proj", "ffn.2": "ff.net.2", **JOINT, "mlp": "proj_mlp"},
    encoders={"text_encoder": CLIPTextModel, "text_encoder_2": T5EncoderModel},
    tokenizers=("tokenizer", "tokenizer_2"),
    encode=_encode,
    inputs=_model_inputs,
    velocity=unpack,
    tokens=lambda limits: {"text_encoder": CLIP_TOKENS, "text_encoder_2": T5_TOKENS},
    prompt_tokens={"tokenizer": CLIP_TOKENS, "tokenizer_2": T5_TOKENS},
    shapes=lambda network, tokens: {
        "text": (T5_TOKENS, network["joint_attention_dim"]), "pooled": (network["pooled_projection_dim"],),
    },
)  # fmt: skip
