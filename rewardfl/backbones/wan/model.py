"""Wan2.2 I2V as the samplers see it: what its conditioning is, which expert answers when, how one is called."""

from pathlib import Path

import torch
from diffusers import WanImageToVideoPipeline
from torch import Tensor, nn

from rewardfl import lora
from rewardfl.backbones.seam import Conditioning, Schedule
from rewardfl.flow import linear_sigmas

PARTS = {
    "high_noise": "transformer",
    "low_noise": "transformer_2",
}  # where a diffusers pipeline keeps each expert
TEXT_LENGTH = 512  # tokens; the length that diffusers' pipeline pads prompts to


def schedule(num_steps: int, shift: float, boundary: float) -> Schedule:
    """flow.linear_sigmas with the expert of each step; boundary: the pipeline's boundary_ratio, in sigma.

    As diffusers' pipeline decides it (pipeline_wan_i2v.py, __call__): the high-noise expert answers where the float32
    timestep is at or above 1000 * boundary. At a tie that is not what comparing sigmas gives: 0.9 in float32 is below
    0.9, and 1000 times it is 900.
    """
    sigmas = linear_sigmas(num_steps, shift)
    timesteps = 1000 * sigmas[:-1]
    is_high = (timesteps >= 1000 * boundary).tolist()
    return Schedule(sigmas, timesteps, tuple("high_noise" if high else "low_noise" for high in is_high))


def attach_adapters(pipe: WanImageToVideoPipeline, checkpoint: Path) -> None:
    """Add a checkpoint folder's adapters (transformer/, transformer_2/) to the pipeline's experts."""
    found = [expert for expert, part in PARTS.items() if (checkpoint / part / lora.WEIGHTS_NAME).is_file()]
    if not found:
        raise FileNotFoundError(
            f"no adapter in {checkpoint}: it should hold transformer/{lora.WEIGHTS_NAME} or "
            f"transformer_2/{lora.WEIGHTS_NAME}, as checkpoints/step-* of a run do"
        )
    for expert in found:
        lora.attach_adapter(pipe.components[PARTS[expert]], checkpoint / PARTS[expert])


@torch.no_grad()
def encode_text(pipe: WanImageToVideoPipeline, prompt: str) -> Tensor:
    """(1, 512, d), by the pipeline's own code, which needs its text encoder and tokenizer alone."""
    text, _ = pipe.encode_prompt(
        prompt, do_classifier_free_guidance=False, max_sequence_length=TEXT_LENGTH, device=pipe.text_encoder.device
    )
    return text


@torch.no_grad()
def encode_image(pipe: WanImageToVideoPipeline, image: Tensor, num_frames: int) -> Tensor:
    """(1, temporal factor + C, T, h, w): mask and image latents, by the pipeline's own code, which needs its VAE."""
    height, width = image.shape[1:]
    device = pipe.vae.device
    placeholder = torch.empty(latent_shape(pipe, height, width, num_frames), device=device)
    _, condition = pipe.prepare_latents(
        image[None].to(device, torch.float32), 1, pipe.vae.config.z_dim, height, width, num_frames,
        torch.float32, device, latents=placeholder,
    )  # fmt: skip
    return condition


def latent_shape(pipe: WanImageToVideoPipeline, height: int, width: int, num_frames: int) -> tuple[int, ...]:
    """(1, C, T, h, w) of one sample's latents."""
    frames = (num_frames - 1) // pipe.vae_scale_factor_temporal + 1
    spatial = pipe.vae_scale_factor_spatial
    return (1, pipe.vae.config.z_dim, frames, height // spatial, width // spatial)


def velocity(
    model: nn.Module, x: Tensor, step: int, schedule: Schedule, given: Conditioning, dtype: torch.dtype
) -> Tensor:
    """(B, 16, T, h, w), float32 or finer, at latents x of the same shape.

    given: text (B, 512, d) and image (B, temporal factor + 16, T, h, w), as encode_text and encode_image make them.
    dtype: that the experts compute in.
    """
    output = model(
        schedule.experts[step],
        hidden_states=torch.cat([x, given["image"].to(x.dtype)], 1).to(dtype),
        # it stays float32: 892.857 would be 892 in bfloat16
        timestep=schedule.timesteps[step].to(x.device).expand(len(x)),
        encoder_hidden_states=given["text"].to(dtype),
    )
    return output.to(x.dtype)
