"""A Wan model without weights: the steps of its experts, and its parts on the meta device to measure their cost."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed
from torch import Tensor
from transformers import CLIPVisionModel, UMT5EncoderModel

from rewardfl import lora
from rewardfl.backbones import stock
from rewardfl.backbones.protocol import Adapter, Caches, ChunksOnMeta, ExpertOnMeta, OnMeta, Schedule, Shape
from rewardfl.backbones.wan import files
from rewardfl.backbones.wan.decoder import lean_graph, run_chunk
from rewardfl.backbones.wan.variants import Variant
from rewardfl.flow import linear_sigmas
from rewardfl.weights import wan_names

TEXT_LENGTH = 512  # tokens; the length that diffusers' pipeline pads prompts to
CLIP_TOKENS = 257  # tokens of a picture: CLIP-H's 16 x 16 patches and its class
meta = partial(torch.empty, device="meta")


def schedule(num_steps: int, shift: float, experts: Sequence[str], boundary: float | None) -> Schedule:
    """Return flow.linear_sigmas with the expert of each step; boundary: the pipeline's boundary_ratio, None for one.

    As in diffusers' pipeline_wan_i2v.py, the first expert computes the steps whose float32 timestep is at or above
    1000 * boundary. Comparing sigmas differs at a tie: 0.9 in float32 is below 0.9, and 1000 times it is 900.
    """
    sigmas = linear_sigmas(num_steps, shift)
    timesteps = 1000 * sigmas[:-1]
    is_first = (timesteps >= 1000 * (boundary or 0.0)).tolist()
    names = tuple(experts[0] if first else experts[1] for first in is_first)
    return Schedule(sigmas, timesteps, names, boundary or 0.0)


def empty_expert(config: Mapping[str, Any]) -> WanTransformer3DModel:
    """Build an expert without memory for its weights. The rotary tables are in no file, so they are computed."""
    model = stock.new_on_meta(WanTransformer3DModel, config)
    model.rope = WanRotaryPosEmbed(
        model.config.attention_head_dim, model.config.patch_size, model.config.rope_max_seq_len
    )
    return model


def new_expert(
    config: Mapping[str, Any], dtype: torch.dtype, layers: int, adapter: Adapter | None
) -> WanTransformer3DModel:
    """Build an expert of `layers` blocks on the meta device, in the dtypes of loading and of `lora.inject`."""
    model = stock.new_on_meta(WanTransformer3DModel, dict(config) | {"num_layers": layers})
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if wan_names.stays_float32(name) else dtype)
    model.requires_grad_(requires_grad=False)
    if adapter:
        lora.inject(model, adapter.rank, adapter.rank, list(adapter.targets), seed=0)
    return model


def on_meta(folder: Path, variant: Variant, dtype: torch.dtype, shape: Shape, video: tuple[int, int, int]) -> OnMeta:
    """Return the model's parts. shape: (C, T, h, w) of the sampled latents; video: frames, height and width."""
    vae = stock.new_on_meta(AutoencoderKLWan, stock.read_config(folder, "vae"))
    stock.cast(vae, dtype).requires_grad_(requires_grad=False)
    text = stock.new_on_meta(UMT5EncoderModel, stock.read_config(folder, "text_encoder")).to(dtype).eval()
    tokens = meta(1, TEXT_LENGTH, dtype=torch.long)
    configs = {name: stock.read_config(folder, part) for name, part in variant.parts.items()}
    all_frames = (shape[0], shape[1] + (variant.image == "frame"), *shape[2:])  # with the conditioning's frame
    experts: dict[str, tuple[ExpertOnMeta, ...]] = {}
    for name, config in configs.items():
        same = next((expert for expert in experts if configs[expert] == config), None)
        experts[name] = experts[same] if same else (expert_on_meta(config, dtype, all_frames, variant),)
    last, vision = configs[variant.experts[-1]], None
    conditioning = {"text": meta(1, TEXT_LENGTH, last["text_dim"], dtype=dtype)}
    # diffusers' pipeline makes the VAE's outputs float32, whatever its dtype
    if variant.image == "channels":
        conditioning["image"] = meta(1, vae.config.scale_factor_temporal + shape[0], *shape[1:])
    elif variant.image == "frame":
        conditioning["image"] = meta(1, shape[0], 1, *shape[2:])
    if variant.clip:
        conditioning["clip"] = meta(1, CLIP_TOKENS, last["image_dim"], dtype=dtype)
        home = folder if (folder / "image_encoder").is_dir() else files.published(variant)
        vision = stock.new_on_meta(CLIPVisionModel, stock.read_config(home, "image_encoder")).to(dtype)

    def encode_clip() -> object:
        pixels = meta(1, 3, *video)  # float32, which the pipeline holds meanwhile
        return vae.encode(pixels.to(dtype))

    return OnMeta(
        experts=experts,
        vae=vae,
        decoder=_decoder_on_meta(vae, dtype, all_frames),
        encode_clip=encode_clip,
        vision=vision,
        text_encoder=text,
        encode_text=lambda: text(tokens),
        conditioning=conditioning,
    )


def expert_on_meta(config: Mapping[str, Any], dtype: torch.dtype, shape: Shape, variant: Variant) -> ExpertOnMeta:
    """Return an expert of one block and one sample's inputs; shape: (C, T, h, w), without the image's channels."""
    tokens = math.prod(size // patch for size, patch in zip(shape[1:], config["patch_size"], strict=True))
    x = meta(1, config["in_channels"], *shape[1:], dtype=dtype, requires_grad=True)
    timestep = meta(1, tokens) if variant.token_times else meta(1)
    prompt = meta(1, TEXT_LENGTH, config["text_dim"], dtype=dtype)
    clip = meta(1, CLIP_TOKENS, config["image_dim"], dtype=dtype) if variant.clip else None

    def run(model: Any) -> Tensor:
        return model(x, timestep, prompt, clip, return_dict=False)[0]

    build = partial(new_expert, config, dtype, 1)
    return ExpertOnMeta(count=config["num_layers"], build=build, x=x, run=run, streams=("hidden_states",))


def _decoder_on_meta(vae: AutoencoderKLWan, dtype: torch.dtype, shape: Shape) -> ChunksOnMeta:
    """Return the VAE's decoder, one latent frame per chunk."""
    channels, frames, height, width = shape

    def run(x: Tensor, caches: Caches) -> tuple[Tensor, Caches]:
        video, after = run_chunk(vae, x, caches, forget=torch.is_grad_enabled())
        return video.clamp(-1, 1), after

    caches: Caches = [None] * vae._cached_conv_counts["decoder"]
    latents = meta(1, channels, 1, height, width, dtype=dtype, requires_grad=True)
    return ChunksOnMeta(
        count=frames, latents=latents, run=run, caches=caches, vjp_context=partial(lean_graph, vae.decoder),
    )  # fmt: skip
