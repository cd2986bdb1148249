"""A Wan2.2-I2V-shaped pipeline with random weights, small enough to differentiate in float64."""

import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from rewardfl.backbones import seam
from rewardfl.backbones.wan.backbone import Wan22I2V
from rewardfl.flow import linear_sigmas
from rewardfl_tools.tiny_world.vae import new_vae
from rewardfl_tools.tiny_world.video import new_expert, new_pipeline

HEIGHT, WIDTH, FRAMES = 32, 32, 5
LAYERS = list(Wan22I2V.layer_names.values())  # that a LoRA may adapt


def random_pipeline(dtype: torch.dtype = torch.float32):
    """Both experts differ; the VAE's convolutions in time matter; latents are normalised by odd numbers."""
    torch.manual_seed(0)
    pipe = new_pipeline(new_vae(4, (1, 1, 2)), layers=(1, 1))
    pipe.register_modules(transformer=new_expert(1, 2, 12), transformer_2=new_expert(2, 2, 12))
    for module in (pipe.vae, pipe.transformer, pipe.transformer_2):
        for parameter in module.parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)
        module.eval().requires_grad_(False)
    pipe.vae.register_to_config(
        latents_mean=torch.linspace(-0.3, 0.3, 16).tolist(), latents_std=torch.linspace(0.7, 1.6, 16).tolist()
    )
    pipe.text_encoder.requires_grad_(False)
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(dtype) if dtype != torch.float32 else pipe


def backbone_of(pipe) -> Wan22I2V:
    """The model of a pipeline that is loaded."""
    return Wan22I2V(
        lambda parts: pipe,
        pipe.config.boundary_ratio,
        pipe.transformer_2.dtype,
        pipe.vae_scale_factor_spatial,
        pipe.vae_scale_factor_temporal,
        pipe.vae.config.z_dim,
        min(expert.config.rope_max_seq_len for expert in (pipe.transformer, pipe.transformer_2)),
    )


def latent_shape(pipe, height: int, width: int, num_frames: int) -> tuple[int, ...]:
    """(1, C, T, h, w) of one sample's latents."""
    return (1, *backbone_of(pipe).latent_shape(height, width, num_frames))


def encode_text(pipe, prompt) -> torch.Tensor:
    return backbone_of(pipe).text_encoder(torch.device("cpu"))(prompt)["text"]


def experts_of(pipe, outside=()) -> seam.Experts:
    return seam.Experts({"high_noise": pipe.transformer, "low_noise": pipe.transformer_2}, outside)


def encode(pipe, prompt, image, num_frames) -> seam.Conditioning:
    backbone, device = backbone_of(pipe), torch.device("cpu")
    return backbone.text_encoder(device)(prompt) | backbone.image_encoder(device)(image, num_frames)


class LinearFlowEuler(FlowMatchEulerDiscreteScheduler):
    """diffusers' Euler scheduler on `flow.linear_sigmas`, for a stock pipeline that is to sample as we do.

    The pipeline calls set_timesteps(n) without sigmas, and the parent then shifts an already shifted range:
    with shift 5 and 8 steps its last sigma is 0.024, not 0.417.
    """

    def set_timesteps(self, num_inference_steps: int, device: torch.device | None = None) -> None:
        super().set_timesteps(num_inference_steps, device=device)
        self.sigmas = linear_sigmas(num_inference_steps, self.config.shift)
        self.timesteps = (1000 * self.sigmas[:-1]).to(device)
