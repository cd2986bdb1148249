"""A Wan2.2-I2V-shaped pipeline with random weights, small enough to differentiate in float64."""

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from diffusers.loaders import WanLoraLoaderMixin
from transformers import CLIPImageProcessorPil, CLIPVisionConfig, CLIPVisionModel

from rewardfl import lora
from rewardfl.backbones import protocol, stock
from rewardfl.backbones.wan.backbone import Wan
from rewardfl.backbones.wan.variants import LAYERS as LAYER_NAMES
from rewardfl.backbones.wan.variants import VARIANTS
from rewardfl.flow import linear_sigmas
from tiny_world.vae import new_vae
from tiny_world.video import new_expert, new_pipeline

HEIGHT, WIDTH, FRAMES = 32, 32, 5
I2V = VARIANTS["wan2_2"]
LAYERS = list(LAYER_NAMES.values())  # that a LoRA may adapt


def random_pipeline(dtype: torch.dtype = torch.float32):
    """Both experts differ; the VAE's convolutions in time matter; latents are normalised by odd numbers."""
    torch.manual_seed(0)
    pipe = new_pipeline(new_vae(4, (1, 1, 2)), layers=1)
    torch.manual_seed(0)  # whatever the experts that are replaced have drawn
    pipe.register_modules(transformer=new_expert(1, 2, 12), transformer_2=new_expert(2, 2, 12))
    for module in (pipe.vae, pipe.transformer, pipe.transformer_2):
        for parameter in module.parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)
        module.eval().requires_grad_(requires_grad=False)
    pipe.vae.register_to_config(
        latents_mean=torch.linspace(-0.3, 0.3, 16).tolist(), latents_std=torch.linspace(0.7, 1.6, 16).tolist()
    )
    pipe.text_encoder.requires_grad_(requires_grad=False)
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(dtype) if dtype != torch.float32 else pipe


def random_variant(name: str) -> WanImageToVideoPipeline | WanPipeline:
    """Return a pipeline of a variant (backbones/wan/variants.py), with random weights; what encodes text as above."""
    variant, pipe = VARIANTS[name], random_pipeline()
    if variant == I2V:
        return pipe
    torch.manual_seed(1)
    vae = residual_vae() if variant.token_times else pipe.vae
    latents = vae.config.z_dim
    transformers = {}
    for part in variant.parts.values():
        channels = {"channels": 2 * latents + vae.config.scale_factor_temporal}.get(variant.image, latents)
        transformers[part] = WanTransformer3DModel.from_config(
            {key: value for key, value in pipe.transformer.config.items() if not key.startswith("_")}
            | {"in_channels": channels, "out_channels": latents}
            | ({"image_dim": 32, "added_kv_proj_dim": 24} if variant.clip else {})
        )
    common = {"tokenizer": pipe.tokenizer, "text_encoder": pipe.text_encoder, "vae": vae, "scheduler": pipe.scheduler}
    common |= transformers | {"expand_timesteps": variant.token_times}
    if "transformer_2" in transformers:
        common["boundary_ratio"] = 0.875
    if variant.clip:
        size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
        common["image_encoder"] = CLIPVisionModel(CLIPVisionConfig(image_size=224, patch_size=14, **size))
        common["image_processor"] = CLIPImageProcessorPil()
    pipe = (WanPipeline if variant.image == "none" else WanImageToVideoPipeline)(**common)
    for part in (*transformers, *(["image_encoder"] if variant.clip else [])):
        for parameter in pipe.components[part].parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)
        pipe.components[part].eval().requires_grad_(requires_grad=False)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def residual_vae() -> AutoencoderKLWan:
    """As Wan2.2-TI2V-5B's: residual, two pixels a side to one before it, 48 channels."""
    vae = AutoencoderKLWan(
        base_dim=4, decoder_base_dim=6, z_dim=48, dim_mult=[1, 2, 2], num_res_blocks=1, attn_scales=[],
        temperal_downsample=[False, True], is_residual=True, in_channels=12, out_channels=12, patch_size=2,
        scale_factor_spatial=8, scale_factor_temporal=2, latents_mean=torch.linspace(-0.3, 0.3, 48).tolist(),
        latents_std=torch.linspace(0.7, 1.6, 48).tolist(),
    )  # fmt: skip
    for parameter in vae.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return vae.eval().requires_grad_(requires_grad=False)


def backbone_of(pipe) -> Wan:
    """The model of a pipeline that is loaded."""
    return Wan(
        variant=I2V, parts=I2V.parts, folder=Path(), weight_files={}, lora_loader=WanLoraLoaderMixin, takes_image=True,
        block_classes=("WanTransformerBlock",), layer_names=LAYER_NAMES,
        pixels_per_token=2 * pipe.vae_scale_factor_spatial,
        load=lambda parts: pipe, boundary=pipe.config.boundary_ratio, dtype=pipe.transformer_2.dtype,
        spatial=pipe.vae_scale_factor_spatial, temporal=pipe.vae_scale_factor_temporal, channels=pipe.vae.config.z_dim,
        positions=min(expert.config.rope_max_seq_len for expert in (pipe.transformer, pipe.transformer_2)),
    )  # fmt: skip


def latent_shape(pipe, height: int, width: int, num_frames: int) -> tuple[int, ...]:
    """(1, C, T, h, w) of one sample's latents."""
    return (1, *backbone_of(pipe).latent_shape(height, width, num_frames))


def encode_text(pipe, prompt) -> torch.Tensor:
    return backbone_of(pipe).text_encoder(torch.device("cpu"))(prompt)["text"]


def experts_of(pipe, outside=()) -> protocol.Experts:
    return protocol.Experts({"high_noise": pipe.transformer, "low_noise": pipe.transformer_2}, outside)


def encode(pipe, prompt, image, num_frames) -> protocol.Conditioning:
    backbone, device = backbone_of(pipe), torch.device("cpu")
    return backbone.text_encoder(device)(prompt) | backbone.image_encoder(device)(image, num_frames)


def save_adapter(model, folder):
    stock.save_adapter(WanLoraLoaderMixin, model, folder, lora.adapter_state(model))


class LinearFlowEuler(FlowMatchEulerDiscreteScheduler):
    """diffusers' Euler scheduler on `flow.linear_sigmas`, for a stock pipeline that is to sample as we do.

    The pipeline calls set_timesteps(n) without sigmas, and the parent then shifts an already shifted range:
    with shift 5 and 8 steps its last sigma is 0.024, not 0.417.
    """

    def set_timesteps(self, num_inference_steps: int, device: torch.device | None = None) -> None:
        super().set_timesteps(num_inference_steps, device=device)
        self.sigmas = linear_sigmas(num_inference_steps, self.config.shift)
        self.timesteps = (1000 * self.sigmas[:-1]).to(device)
