"""Wan2.2-I2V-A14B as the seam asks for it: two experts, a boundary between them, a clip's first frame as an input."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from diffusers import WanImageToVideoPipeline
from torch import Tensor, nn

from rewardfl.backbones.seam import Conditioning, Schedule, Shape
from rewardfl.backbones.wan import load, model
from rewardfl.backbones.wan.decoder import WanDecoder

Load = Callable[[tuple[str, ...]], WanImageToVideoPipeline]  # parts -> a frozen pipeline that has them, on the CPU


@dataclass(frozen=True)
class Wan22I2V:
    """The seam's Backbone. Its conditioning: text (B, 512, d) and image (B, temporal factor + 16, T, h, w).

    boundary: sigma at or above which the high-noise expert answers; spatial, temporal, channels: the VAE's. files: None
    for a model that is in memory.
    """

    load: Load
    boundary: float
    dtype: torch.dtype
    spatial: int
    temporal: int
    channels: int
    files: load.Layout | None = None

    experts: ClassVar = tuple(model.PARTS)

    def schedule(self, steps: int, shift: float) -> Schedule:
        return model.schedule(steps, shift, self.boundary)

    def latent_shape(self, height: int, width: int, num_frames: int) -> Shape:
        return (
            self.channels, (num_frames - 1) // self.temporal + 1, height // self.spatial, width // self.spatial
        )  # fmt: skip

    def text_encoder(self, device: torch.device) -> Callable[[str], Conditioning]:
        pipe = self.load(("text_encoder",)).to(device)
        return lambda prompt: {"text": model.encode_text(pipe, prompt)}

    def image_encoder(self, device: torch.device) -> Callable[[Tensor, int], Conditioning]:
        pipe = self.load(("vae",)).to(device)
        return lambda image, num_frames: {"image": model.encode_image(pipe, image, num_frames)}

    def collate(self, items: Sequence[Conditioning]) -> Conditioning:
        return {name: torch.cat([item[name] for item in items]) for name in items[0]}

    def load_expert(self, name: str) -> nn.Module:
        return self.load((name,)).components[model.PARTS[name]]

    def load_decoder(self, device: torch.device) -> WanDecoder:
        return WanDecoder(self.load(("vae_decoder",)).vae.to(device))

    def velocity(self, experts: nn.Module, x: Tensor, step: int, schedule: Schedule, given: Conditioning) -> Tensor:
        return model.velocity(experts, x, step, schedule, given, self.dtype)


def of_files(layout: load.Layout, boundary: float, dtype: torch.dtype, distilled: tuple[str, str, str]) -> Wan22I2V:
    """The model of `layout`; distilled: model.distill_lora_high, _low and _mode. Refused where one cannot be read."""
    high, low, mode = distilled
    vae = load.config_of(layout, "vae")
    return Wan22I2V(
        partial(load.load_pipeline, layout, dtype, load.read_distilled(high, low), mode),
        boundary,
        dtype,
        vae.get("scale_factor_spatial", 8),
        vae.get("scale_factor_temporal", 4),
        vae.get("z_dim", 16),
        layout,
    )


def of_pipeline(pipe: WanImageToVideoPipeline, dtype: torch.dtype) -> Wan22I2V:
    """The model of a pipeline that is loaded."""
    return Wan22I2V(
        lambda parts: pipe,
        pipe.config.boundary_ratio,
        dtype,
        pipe.vae_scale_factor_spatial,
        pipe.vae_scale_factor_temporal,
        pipe.vae.config.z_dim,
    )
