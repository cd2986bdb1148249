"""Qwen-Image: one network on packed latents, a VAE of Wan's type. Its conditioning: text (B, T, d); mask (B, T)."""

from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
from diffusers.loaders import QwenImageLoraLoaderMixin
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration

from rewardfl.backbones import stock
from rewardfl.backbones.image.flux import pack, packed_inputs, unpack
from rewardfl.backbones.image.pipeline import ATTENTION, JOINT, PATCH, ImageModelSpec
from rewardfl.backbones.protocol import Conditioning

TOKENS = 128  # tokens of a prompt, only for the estimate: prompts are not padded


def _encode(pipe: Any, prompt: str, device: torch.device) -> Conditioning:
    text, _ = pipe.encode_prompt(prompt, device=device)
    return {"text": text, "mask": torch.ones(text.shape[:2], dtype=torch.long, device=device)}


def _model_inputs(x: Tensor, times: Tensor, conditioning: Conditioning, guidance: float | None) -> dict[str, Any]:
    frame = [(1, x.shape[2] // PATCH, x.shape[3] // PATCH)]
    mask = conditioning["mask"]
    return packed_inputs(x, times, conditioning, guidance) | {
        "encoder_hidden_states_mask": None if mask.all() else mask,  # as in the pipeline: a mask changes kernels
        "img_shapes": [frame] * len(x),
    }


def _guide(velocity: Tensor, away: Tensor, scale: float) -> Tensor:
    """Apply guidance, but keep each token's norm."""
    towards, away = pack(velocity.squeeze(2)), pack(away.squeeze(2))
    guided = away + scale * (towards - away)
    guided = guided * (towards.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True))
    return unpack(guided, velocity.squeeze(2)).unsqueeze(2)


def _encode_image(vae: AutoencoderKLQwenImage, image: Tensor) -> Tensor:
    latents = vae.encode(image).latent_dist.mode()
    mean, scale = stock.latent_statistics(vae, torch.float32)
    return (latents - mean.to(latents)) * scale.to(latents)


def _decode(vae: AutoencoderKLQwenImage, latents: Tensor) -> Tensor:
    mean, scale = stock.latent_statistics(vae, torch.float32)
    return vae.decode(latents / scale.to(latents) + mean.to(latents), return_dict=False)[0]


QWEN_IMAGE = ImageModelSpec(
    published="Qwen-Image",
    pipeline="QwenImagePipeline",
    mixin=QwenImageLoraLoaderMixin,
    transformer=QwenImageTransformer2DModel,
    block_classes=("QwenImageTransformerBlock",),
    layer_names={**ATTENTION, "ffn.0": "img_mlp.net.0.proj", "ffn.2": "img_mlp.net.2", **JOINT},
    encoders={"text_encoder": Qwen2_5_VLForConditionalGeneration},
    encode=_encode,
    inputs=_model_inputs,
    velocity=unpack,
    guide=_guide,
    vae=AutoencoderKLQwenImage,
    decode=_decode,
    encode_image=_encode_image,
    tokens=lambda limits: {"text_encoder.model.language_model": TOKENS},  # without its vision part
    prompt_tokens={"tokenizer": 1024},
    shapes=lambda network, tokens: {"text": (TOKENS, network["joint_attention_dim"]), "mask": (TOKENS,)},
)  # fmt: skip
