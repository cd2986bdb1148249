"""FLUX.2 klein: one network on packed latents. Its conditioning: text (B, 512, 3 d), of three layers of the encoder.

Its sampled latents are the VAE's 32 channels, normalised; the stock pipeline's are their patches of 128 channels.
"""

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import AutoencoderKLFlux2, Flux2Transformer2DModel
from diffusers.loaders import Flux2LoraLoaderMixin
from torch import Tensor
from transformers import Qwen3ForCausalLM

from rewardfl.backbones.image.flux import pack, packed_inputs, unpack
from rewardfl.backbones.image.pipeline import ATTENTION, JOINT, PATCH, ImageModelSpec
from rewardfl.backbones.protocol import Conditioning

TOKENS, LAYERS = 512, (9, 18, 27)  # prompts' padded length in diffusers' pipeline; layers of the text encoder


def _encode(pipe: Any, prompt: str, device: torch.device) -> Conditioning:
    text, _ = pipe.encode_prompt(prompt, device=device, max_sequence_length=TOKENS, text_encoder_out_layers=LAYERS)
    return {"text": text}


def _model_inputs(x: Tensor, times: Tensor, conditioning: Conditioning, guidance: float | None) -> dict[str, Any]:
    def positions(*sizes: int) -> Tensor:  # time, height, width, word
        return torch.cartesian_prod(*(torch.arange(n, device=x.device) for n in sizes)).expand(len(x), -1, -1)

    return packed_inputs(x, times, conditioning, guidance) | {
        "txt_ids": positions(1, 1, 1, conditioning["text"].shape[1]),
        "img_ids": positions(1, x.shape[2] // PATCH, x.shape[3] // PATCH, 1),
    }


def _mu(tokens: int, steps: int, scheduler: Mapping[str, Any]) -> float:
    """Compute diffusers' compute_empirical_mu, to the last bit."""
    at_10, at_200 = 8.73809524e-05 * tokens + 1.89833333, 0.00016927 * tokens + 0.45666666
    if tokens > 4300:
        return at_200
    slope = (at_200 - at_10) / 190.0
    return slope * steps + (at_200 - 200.0 * slope)


def _decode(vae: AutoencoderKLFlux2, latents: Tensor) -> Tensor:
    flat = latents.squeeze(2)
    mean, std = _statistics(vae, flat)
    flat = unpack(pack(flat) * std + mean, flat)
    return vae.decode(flat, return_dict=False)[0].unsqueeze(2)


def _encode_image(vae: AutoencoderKLFlux2, image: Tensor) -> Tensor:
    flat = vae.encode(image.squeeze(2)).latent_dist.mode()
    mean, std = _statistics(vae, flat)
    return unpack((pack(flat) - mean) / std, flat).unsqueeze(2)


def _statistics(vae: AutoencoderKLFlux2, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the statistics that normalise latents; they are of a batch normalisation that is never run."""
    mean, std = vae.bn.running_mean, torch.sqrt(vae.bn.running_var + vae.config.batch_norm_eps)
    return mean.to(like), std.to(like)


FLUX2_KLEIN = ImageModelSpec(
    published="FLUX.2 klein",
    pipeline="Flux2KleinPipeline",
    mixin=Flux2LoraLoaderMixin,
    transformer=Flux2Transformer2DModel,
    block_classes=("Flux2TransformerBlock", "Flux2SingleTransformerBlock"),
    layer_names={
        **ATTENTION, "ffn.0": "ff.linear_in", "ffn.2": "ff.linear_out", **JOINT,
        "qkv_mlp": "to_qkv_mlp_proj", "o_mlp": "attn.to_out",
    },
    encoders={"text_encoder": Qwen3ForCausalLM},
    encode=_encode,
    inputs=_model_inputs,
    velocity=unpack,
    vae=AutoencoderKLFlux2,
    decode=_decode,
    encode_image=_encode_image,
    mu=_mu,
    tokens=lambda limits: {"text_encoder": TOKENS},
    prompt_tokens={"tokenizer": TOKENS - 3},  # "<|im_start|>user\n" comes before the prompt
    shapes=lambda network, tokens: {"text": (TOKENS, network["joint_attention_dim"])},
)  # fmt: skip
