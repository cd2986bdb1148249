"""Training of two tiny AutoencoderKLWan, both with 4x spatial and 2x temporal compression and 16 latent channels."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, WanResample, unpatchify
from torch import Tensor

from tiny_world.people import Motion, draw_motion, draw_people, drift, render

SPATIAL, TEMPORAL, LATENT_CHANNELS = 4, 2, 16


def new_vae(base_dim: int = 12, dim_mult: tuple[int, ...] = (1, 2, 3)) -> AutoencoderKLWan:
    """Return an untrained VAE whose causal convolutions start as image convolutions: the taps of past frames are zero.

    diffusers' init averages over time by equal temporal taps, which takes long to unlearn.
    """
    vae = AutoencoderKLWan(
        base_dim=base_dim, z_dim=LATENT_CHANNELS, dim_mult=list(dim_mult), num_res_blocks=1, attn_scales=[],
        temperal_downsample=[False, True], scale_factor_spatial=SPATIAL, scale_factor_temporal=TEMPORAL,
    )  # fmt: skip
    start_as_images(vae)
    return vae


def new_residual_vae(base_dim: int = 24) -> AutoencoderKLWan:
    """Return an untrained VAE like Wan2.2-TI2V-5B's: residual, with patches of 2 x 2 pixels. It starts as new_vae's."""
    vae = AutoencoderKLWan(
        base_dim=base_dim, z_dim=LATENT_CHANNELS, dim_mult=[2, 2], num_res_blocks=1, attn_scales=[],
        temperal_downsample=[True], is_residual=True, in_channels=12, out_channels=12, patch_size=2,
        scale_factor_spatial=SPATIAL, scale_factor_temporal=TEMPORAL,
    )  # fmt: skip
    start_as_images(vae)
    return vae


def start_as_images(vae: AutoencoderKLWan) -> None:
    """Make frames independent: zero the causal convolutions' taps of past frames, and resample in time by copies."""
    for module in vae.modules():
        if isinstance(module, torch.nn.Conv3d) and module.kernel_size == (3, 3, 3):
            module.weight.data[:, :, :-1] = 0
            module.weight.data[:, :, -1] *= math.sqrt(3)
    for module in vae.modules():
        if isinstance(module, WanResample) and module.mode in ("downsample3d", "upsample3d"):
            start_as_copy(module.time_conv)


def start_as_copy(time_conv: WanCausalConv3d) -> None:
    """Make downsampling in time the mean of two frames, and upsampling the frame twice."""
    outputs, inputs = time_conv.weight.shape[:2]
    identity = torch.eye(inputs)
    time_conv.weight.data *= 0.1
    time_conv.bias.data.zero_()
    if outputs == inputs:
        time_conv.weight.data[:, :, 1, 0, 0] += 0.5 * identity
        time_conv.weight.data[:, :, 2, 0, 0] += 0.5 * identity
    else:
        time_conv.weight.data[:, :, 2, 0, 0] += torch.cat([identity, identity])


@contextlib.contextmanager
def single_frames() -> Iterator[None]:
    """Run causal convolutions in 2-D: exact for clips of one frame, whose past is zero, and four times as fast."""
    original = WanCausalConv3d.forward

    def forward(self: WanCausalConv3d, x: Tensor, cache_x: Tensor | None = None) -> Tensor:
        pad = self._padding[0]
        return F.conv2d(x[:, :, 0], self.weight[:, :, -1], self.bias, self.stride[1:], pad)[:, :, None]

    WanCausalConv3d.forward = forward
    try:
        yield
    finally:
        WanCausalConv3d.forward = original


def training_clips(count: int, generator: torch.Generator) -> Tensor:
    """Draw clips (count, 3, F, H, W) of random people who drift, as in clips of the experts."""
    traits = draw_people(count, generator)
    motion, _ = draw_motion(count, generator)
    return render(drift(traits, generator), motion, generator)[0]


def training_frames(count: int, generator: torch.Generator) -> Tensor:
    """Draw single frames (count, 3, 1, H, W) of random people."""
    motion, _ = draw_motion(count, generator)
    moment = Motion(*(value[:, :1] for value in vars(motion).values()))
    return render(draw_people(count, generator), moment, generator)[0]


def raw_decode(vae: AutoencoderKLWan, latents: Tensor) -> Tensor:
    """Decode without vae.decode's clamp, whose gradient is zero for pixels out of range."""
    x = vae.post_quant_conv(latents)
    cache: list = [None] * vae._cached_conv_counts["decoder"]
    chunks = [
        vae.decoder(x[:, :, i : i + 1], feat_cache=cache, feat_idx=[0], first_chunk=i == 0) for i in range(x.shape[2])
    ]
    video = torch.cat(chunks, 2)
    return video if vae.config.patch_size is None else unpatchify(video, vae.config.patch_size)


def psnr(a: Tensor, b: Tensor) -> float:
    """Return the peak signal-to-noise ratio in dB of tensors in [-1, 1]."""
    return float(10 * torch.log10(4 / (a - b).square().mean()))


def learning_rate(step: int, steps: int, peak: float, warmup: int = 50) -> float:
    """Return the rate at `step`: linear over `warmup` steps, then down to 1e-6 along a cosine."""
    return peak * min(1, (step + 1) / warmup) * (0.5 + 0.5 * math.cos(math.pi * step / steps)) + 1e-6


def train_vae(
    vae: AutoencoderKLWan, frames: bool, steps: int, batch: int, lr: float, seed: int, log: Callable[[str], None],
    teacher: AutoencoderKLWan | None = None,
) -> None:  # fmt: skip
    """Train by reconstruction and a tiny KL, on single frames (frames=True, cheap) or whole clips.

    teacher: a VAE whose latents are the targets, so that its expert can read this VAE's latents.
    """
    trained = [parameter for parameter in vae.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr, betas=(0.9, 0.98), weight_decay=1e-4)
    generator = torch.Generator().manual_seed(seed)
    start, running = time.time(), None
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = learning_rate(step, steps, lr)
        clips = training_frames(batch, generator) if frames else training_clips(batch, generator)
        with single_frames() if frames else contextlib.nullcontext():
            posterior = vae.encode(clips).latent_dist
            decoded = raw_decode(vae, posterior.sample(generator))
            if teacher is not None:
                with torch.no_grad():
                    target = teacher.encode(clips).latent_dist.mode()
        error = decoded - clips
        kl = posterior.kl().mean() / posterior.mean[0].numel()
        loss = error.square().mean() + 0.1 * error.abs().mean() + 3e-6 * kl
        if teacher is not None:
            loss = loss + 0.03 * (posterior.mode() - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        mse = float(error.detach().square().mean())
        running = mse if running is None else 0.97 * running + 0.03 * mse
        if step % 50 == 0:
            log(f"vae {step} {time.time() - start:.0f}s psnr {10 * math.log10(4 / running):.2f}")


@torch.no_grad()
def set_latent_statistics(vae: AutoencoderKLWan, seed: int, count: int) -> None:
    """Write the mean and standard deviation of each latent channel over `count` clips into the VAE's config."""
    clips = training_clips(count, torch.Generator().manual_seed(seed))
    latents = torch.cat([vae.encode(part).latent_dist.mode() for part in clips.split(8)])
    latents = latents.transpose(0, 1).flatten(1)
    vae.register_to_config(latents_mean=latents.mean(1).tolist(), latents_std=latents.std(1).tolist())
