"""The backbone of the Wan models. A Variant describes each of them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from diffusers import ModelMixin
from diffusers.loaders import WanLoraLoaderMixin
from PIL import Image
from torch import Tensor, nn

from rewardfl import lora
from rewardfl.backbones import stock
from rewardfl.backbones.protocol import DTYPES, Adapter, Conditioning, OnMeta, Schedule, Shape, Source
from rewardfl.backbones.wan import files, load, meta, model
from rewardfl.backbones.wan.decoder import WanDecoder
from rewardfl.backbones.wan.variants import VARIANTS, Variant
from rewardfl.data import to_uint8
from rewardfl.weights.shards import InputError

if TYPE_CHECKING:  # its module makes transformers print a note on torchvision
    from diffusers import WanImageToVideoPipeline

Load = Callable[[Sequence[str]], "WanImageToVideoPipeline"]  # parts -> a frozen pipeline that has them, on the CPU

PATCH = 2  # latents on a side of one token, of every published transformer


@dataclass(frozen=True, kw_only=True)
class Wan:
    """The Backbone of Wan models.

    Its conditioning: text (B, 512, d). For an image next to the noise, image (B, temporal factor + C, T, h, w), mask
    and latents. For an image as the first latent frame, image (B, C, 1, h, w). In Wan2.1 also clip (B, 257, d).

    boundary: the lowest sigma of the first of two experts. spatial, temporal, channels: the VAE's. positions: the
    number of patches along an axis in every expert. layout: the files, None for a model in memory. source: as
    configured.
    """

    variant: Variant
    load: Load
    boundary: float | None
    dtype: torch.dtype
    spatial: int
    temporal: int
    channels: int
    positions: int
    layout: files.Layout | None = None
    source: Source = Source()

    block_classes: ClassVar = ("WanTransformerBlock",)

    @property
    def experts(self) -> tuple[str, ...]:
        return self.variant.experts

    @property
    def takes_image(self) -> bool:
        return self.variant.image != "none"

    @property
    def layer_names(self) -> Mapping[str, str]:
        return self.variant.layer_names

    @property
    def pixels_per_token(self) -> int:
        return self.spatial * PATCH

    def described_by(self) -> str:
        published = files.PUBLISHED in self.layout.configs.parents
        return f"{self.layout.configs}{' (published; no configurations in model.model_paths)' if published else ''}"

    def schedule(self, steps: int, shift: float | None, latent_shape: Shape) -> Schedule:
        """Return the schedule, which is the same for latents of every shape."""
        if shift is None:  # converted checkpoints state another one than their originals
            raise InputError("sample.shift must be a number for this model, got null; Wan2.2's is 5")
        return model.schedule(steps, shift, self.experts, self.boundary)

    def latent_shape(self, height: int, width: int, num_frames: int) -> Shape:
        frames = (num_frames - 1) // self.temporal + (self.variant.image != "frame")
        return (self.channels, frames, height // self.spatial, width // self.spatial)

    def check_clips(self, height: int, width: int, num_frames: int, max_pixels: int | None = None) -> None:
        problems = []
        # diffusers' pipeline demands 16 of every model
        multiple = math.lcm(16, self.pixels_per_token)
        if max_pixels is not None and multiple != 16:
            problems.append(
                f"data.max_pixels gives sides in multiples of 16, this VAE takes multiples of {multiple}; remove "
                "max_pixels and set data.height and data.width"
            )
        for key, size in {"height": height, "width": width}.items():
            if size % multiple and max_pixels is None:
                near = _neighbours(size, multiple, 0)
                problems.append(f"data.{key} must be a multiple of {multiple}, got {size}; try {near}")
        if num_frames == 1:  # one latent frame would be the conditioning's image: nothing to reward
            least = self.temporal + 1
            problems.append(f"data.num_frames must be at least {least}, got 1: this model makes videos; try {least}")
        elif num_frames % self.temporal != 1 % self.temporal:
            near = _neighbours(num_frames, self.temporal, 1)
            problems.append(f"data.num_frames must be {self.temporal}k+1 for this VAE, got {num_frames}; try {near}")
        side = self.positions * self.pixels_per_token
        limits = {"num_frames": (num_frames, (self.positions - 1) * self.temporal + 1)}
        if max_pixels is None:
            limits |= {"height": (height, side), "width": (width, side)}
        else:  # of a square clip
            limits["max_pixels"] = (max_pixels, side**2)
        problems += [
            f"data.{key} must be at most {limit}, got {value}: the model knows {self.positions} positions along an "
            "axis (rope_max_seq_len of its transformers' config.json)"
            for key, (value, limit) in limits.items()
            if value > limit
        ]
        if problems:
            raise InputError("\n".join(problems))

    def differences(self, shift: float | None, guidance: float) -> list[str]:
        return files.config_mismatches(self.layout, self.boundary, shift)

    def linear_layers(self) -> list[str]:
        return files.linear_layers(self.layout.opened[self.experts[-1]])

    def adapter_shapes(self, expert: str, adapter: Adapter) -> dict[str, tuple[int, ...]]:
        config = files.read_part_config(self.layout, self.variant.parts[expert])
        empty = model.new_expert(config, torch.float32, config["num_layers"], adapter)
        return {name: tuple(value.shape) for name, value in empty.named_parameters() if value.requires_grad}

    def weight_files(self) -> dict[str, list[Path]]:
        high, low, _ = self.source.distilled
        distilled = {"distill_high": high, "distill_low": low}
        return files.files(self.layout) | {name: [Path(path)] for name, path in distilled.items() if path}

    def settings(self) -> dict[str, Any]:
        parts = {part: files.read_part_config(self.layout, part) for part in (*self.variant.parts.values(), "vae")}
        plain = {
            part: {key: value for key, value in config.items() if not key.startswith("_")}  # the version that wrote it
            for part, config in parts.items()
        }
        return plain | ({} if self.boundary is None else {"boundary_ratio": files.boundary_ratio(self.layout.configs)})

    def parts_of(self, expert: str) -> list[str]:
        *paths, mode = self.source.distilled
        name, path = list(zip(("distill_high", "distill_low"), paths, strict=True))[self.experts.index(expert)]
        return [expert, name, mode] if path else [expert]

    def on_meta(self, height: int, width: int, num_frames: int) -> OnMeta:
        shape = self.latent_shape(height, width, num_frames)
        return meta.on_meta(self.layout, self.dtype, shape, (num_frames, height, width))

    def text_encoder(self, device: torch.device) -> Callable[[str], Conditioning]:
        pipe = self.load(["text_encoder"]).to(device)

        @torch.no_grad()
        def encode(prompt: str) -> Conditioning:
            text, _ = pipe.encode_prompt(
                prompt, do_classifier_free_guidance=False, max_sequence_length=model.TEXT_LENGTH, device=device
            )
            return {"text": text}

        return encode

    def image_encoder(self, device: torch.device) -> Callable[[Tensor | None, int], Conditioning]:
        variant = self.variant
        if not self.takes_image:
            return lambda image, num_frames: {}
        pipe = self.load(["vae", "image_encoder"] if variant.clip else ["vae"]).to(device)

        @torch.no_grad()
        def encode(image: Tensor, num_frames: int) -> Conditioning:
            """Return mask and image latents, or these alone, and CLIP's features, by the pipeline's own code."""
            height, width = image.shape[1:]
            frames = (num_frames - 1) // self.temporal + 1
            placeholder = torch.empty(
                1, self.channels, frames, height // self.spatial, width // self.spatial, device=device
            )
            _, condition, *_ = pipe.prepare_latents(
                image[None].to(device, torch.float32), 1, self.channels, height, width, num_frames,
                torch.float32, device, latents=placeholder,
            )  # fmt: skip
            if not variant.clip:
                return {"image": condition}
            picture = Image.fromarray(to_uint8(image[:, None])[0].cpu().numpy())
            return {"image": condition, "clip": pipe.encode_image(picture, device)}

        return encode

    def video_encoder(self, device: torch.device) -> Callable[[Tensor], Tensor]:
        vae = self.load(["vae"]).vae.to(device)
        skipped = int(self.variant.image == "frame")
        mean, std = (
            torch.tensor(values, device=device).view(1, -1, 1, 1, 1)
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )

        @torch.no_grad()
        def encode_video(video: Tensor) -> Tensor:
            posterior = vae.encode(video.to(device, vae.dtype)).latent_dist
            return ((posterior.mode().float() - mean) * (1.0 / std))[:, :, skipped:]

        return encode_video

    def load_expert(self, name: str) -> ModelMixin:
        return self.load([name]).components[self.variant.parts[name]]

    def load_decoder(self, device: torch.device) -> WanDecoder:
        return WanDecoder(self.load(["vae_decoder"]).vae.to(device), frame_given=self.variant.image == "frame")

    def collate(self, items: Sequence[Conditioning]) -> Conditioning:
        return {name: torch.cat([item[name] for item in items]) for name in items[0]}

    def velocity(self, experts: nn.Module, x: Tensor, step: int, schedule: Schedule, given: Conditioning) -> Tensor:
        # the time stays float32: 892.857 would be 892 in bfloat16
        time, latents, more = schedule.timesteps[step].to(x.device), x, {}
        if self.variant.image == "channels":
            latents = torch.cat([x, given["image"].to(x.dtype)], 1)
        elif self.variant.image == "frame":
            latents = torch.cat([given["image"].to(x.dtype), x], 2)
        if self.variant.token_times:  # of patches, as in the pipeline; the image's are 0
            tokens, image_frames = x.shape[3] // PATCH * (x.shape[4] // PATCH), latents.shape[2] - x.shape[2]
            time = torch.cat([time.new_zeros(tokens * image_frames), time.expand(tokens * x.shape[2])])
        if self.variant.clip:
            more["encoder_hidden_states_image"] = given["clip"].to(self.dtype)
        output = experts(
            schedule.experts[step],
            hidden_states=latents.to(self.dtype),
            timestep=time.expand(len(x), *time.shape),
            encoder_hidden_states=given["text"].to(self.dtype),
            **more,
        )
        if self.variant.image == "frame":
            output = output[:, :, 1:]
        return output.to(x.dtype)

    def guide(self, velocity: Tensor, away: Tensor, scale: float) -> Tensor:
        return away + scale * (velocity - away)

    def save_adapter(self, name: str, expert: ModelMixin, folder: Path, state: dict[str, Tensor]) -> None:
        stock.save_adapter(WanLoraLoaderMixin, expert, folder / self.variant.parts[name], state)

    def attach_adapters(self, experts: Mapping[str, ModelMixin], checkpoint: Path) -> None:
        stock.attach_adapters(self.variant.parts, experts, checkpoint)

    def load_adapter(self, name: str, expert: ModelMixin, folder: Path) -> None:
        lora.load_adapter(expert, folder / self.variant.parts[name])


def _neighbours(value: int, multiple: int, offset: int) -> str:
    """Return the numbers multiple * k + offset (k >= 1) next to `value`, in words."""
    below = (value - offset) // multiple
    return " or ".join(str(multiple * k + offset) for k in (below, below + 1) if k >= 1)


def open(name: str, source: Source) -> Wan:
    """Open a model by its files' headers, with its distillation. Raise InputError as in `files`."""
    variant = VARIANTS[name]
    layout = files.find_files(
        variant, source.model_paths, source.tokenizer_path, source.origin_paths, source.allow_download
    )
    layout = files.open_files(layout)
    first, second, mode = source.distilled
    distilled = load.read_distilled(variant.experts, first, second)
    return _make_wan(layout, source, partial(load.load_pipeline, layout, DTYPES[source.dtype], distilled, mode))


def describe(name: str, source: Source) -> Wan:
    """Return the model of a folder of configurations, without weights."""
    layout = files.Layout(
        variant=VARIANTS[name], configs=files.find_configs(VARIANTS[name], source.model_paths), experts={}
    )
    return _make_wan(layout, source, _refuse_load)


def _make_wan(layout: files.Layout, source: Source, load_parts: Load) -> Wan:
    vae, variant = files.read_part_config(layout, "vae"), layout.variant
    if source.embedded_guidance is not None:
        raise InputError(
            f"model.embedded_guidance: {variant.published} is told none, got {source.embedded_guidance:g}; remove it "
            "(sample.guidance_scale is what guides it)"
        )
    boundary = source.boundary
    if len(variant.experts) > 1:
        boundary = files.boundary_ratio(layout.configs) if boundary is None else boundary
    elif boundary is not None:
        raise InputError(
            f"model.min_timestep_boundary: {variant.published} has one expert and no border, got {boundary:g}; "
            "remove it"
        )
    return Wan(
        variant=variant,
        load=load_parts,
        boundary=boundary,
        dtype=DTYPES[source.dtype],
        spatial=vae.get("scale_factor_spatial", 8),
        temporal=vae.get("scale_factor_temporal", 4),
        channels=vae.get("z_dim", 16),
        positions=min(
            files.read_part_config(layout, part).get("rope_max_seq_len", 1024) for part in variant.parts.values()
        ),
        layout=layout,
        source=source,
    )


def _refuse_load(parts: Sequence[str]) -> "WanImageToVideoPipeline":
    raise InputError(f"a described model has no weights to load ({', '.join(parts)})")
