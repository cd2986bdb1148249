"""Wan2.2 I2V on the meta device: its parts at the real size, without memory, for what measures what they cost."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from diffusers import AutoencoderKLWan
from torch import Tensor
from transformers import UMT5Config, UMT5EncoderModel

from rewardfl.backbones.seam import Caches, ChunksOnMeta, ExpertOnMeta, OnMeta, Shape
from rewardfl.backbones.wan import files
from rewardfl.backbones.wan.model import PARTS, TEXT_LENGTH, new_expert


def meta(*shape: int, dtype: torch.dtype, grad: bool = False) -> Tensor:
    """A tensor that has no numbers."""
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


def on_meta(layout: files.Layout, dtype: torch.dtype, shape: Shape, video: tuple[int, int, int]) -> OnMeta:
    """The model's parts. shape: (C, T, h, w) of the latents; video: frames, height and width."""
    with torch.device("meta"):
        vae = AutoencoderKLWan.from_config(files.config_of(layout, "vae"))
        text = UMT5EncoderModel(UMT5Config(**files.config_of(layout, "text_encoder"))).to(dtype).eval()
        tokens = torch.empty(1, TEXT_LENGTH, dtype=torch.long)
    vae.requires_grad_(False)
    for parameter in vae.parameters():
        parameter.data = parameter.data.to(dtype)
    configs = {name: files.config_of(layout, part) for name, part in PARTS.items()}
    experts: dict[str, ExpertOnMeta] = {}
    for name, config in configs.items():
        alike = next((other for other in experts if configs[other] == config), None)
        experts[name] = experts[alike] if alike else expert_on_meta(config, dtype, shape)
    text_dim = configs["low_noise"]["text_dim"]
    return OnMeta(
        shape=shape,
        video=(vae.config.in_channels, *video),
        dtype=dtype,
        experts=experts,
        vae=vae,
        decoder=decoder_on_meta(vae, dtype, shape),
        image_encoder=encoder_on_meta(vae, dtype, video),
        text_encoder=text,
        encode_text=lambda: text(tokens),
        conditioning={
            "text": meta(1, TEXT_LENGTH, text_dim, dtype=dtype),
            # diffusers' pipeline makes it float32, whatever the VAE's dtype
            "image": meta(1, vae.config.scale_factor_temporal + shape[0], *shape[1:], dtype=torch.float32),
        },
    )


def expert_on_meta(config: Mapping[str, Any], dtype: torch.dtype, shape: Shape) -> ExpertOnMeta:
    """An expert of one block, and one sample's inputs; shape: (C, T, h, w) of its latents."""
    tokens = math.prod(size // patch for size, patch in zip(shape[1:], config["patch_size"], strict=True))
    head, width = config["attention_head_dim"], config["attention_head_dim"] * config["num_attention_heads"]
    x = meta(1, config["in_channels"], *shape[1:], dtype=dtype, grad=True)
    timestep, prompt = meta(1, dtype=torch.float32), meta(1, TEXT_LENGTH, config["text_dim"], dtype=dtype)
    # what a block gets: hidden (B, S, D), text (B, 512, D), time (B, 6, D), rotary
    hidden = meta(1, tokens, width, dtype=dtype, grad=True)
    text, time = meta(1, TEXT_LENGTH, width, dtype=dtype), meta(1, 6, width, dtype=dtype)
    rotary = meta(1, tokens, 1, head, dtype=torch.float32), meta(1, tokens, 1, head, dtype=torch.float32)
    return ExpertOnMeta(
        layers=config["num_layers"],
        tokens=tokens,
        build=partial(new_expert, config, dtype, 1),
        x=x,
        run=lambda model: model(x, timestep, prompt, return_dict=False)[0],
        blocks=lambda model: model.blocks,
        block_input=hidden,
        block_shared=(text, time, *rotary),
        run_block=lambda block: block(hidden, text, time, rotary),
    )


def decoder_on_meta(vae: AutoencoderKLWan, dtype: torch.dtype, shape: Shape) -> ChunksOnMeta:
    """The VAE's decoder, a latent frame at a time."""
    channels, frames, height, width = shape

    def run(x: Tensor, caches: Caches, first: bool) -> tuple[Tensor, Caches]:
        after = list(caches)
        video = vae.decoder(vae.post_quant_conv(x), feat_cache=after, feat_idx=[0], first_chunk=first)
        return video.clamp(-1, 1), after

    def frame_of(_: int) -> Tensor:
        return meta(1, channels, 1, height, width, dtype=dtype, grad=True)

    return ChunksOnMeta(vae, frames, frame_of, run, [None] * vae._cached_conv_counts["decoder"])


def encoder_on_meta(vae: AutoencoderKLWan, dtype: torch.dtype, video: tuple[int, int, int]) -> ChunksOnMeta:
    """The VAE's encoder on a whole clip of these frames, height and width, chunk by chunk."""
    frames, height, width = video
    factor = vae.config.scale_factor_temporal

    def run(x: Tensor, caches: Caches, first: bool) -> tuple[Tensor, Caches]:
        after = list(caches)
        return vae.encoder(x, feat_cache=after, feat_idx=[0]), after

    def chunk(i: int) -> Tensor:
        return meta(1, vae.config.in_channels, factor if i else 1, height, width, dtype=dtype)

    return ChunksOnMeta(vae, 1 + (frames - 1) // factor, chunk, run, [None] * vae._cached_conv_counts["encoder"])
