"""The backbone of the Wan models. A Variant describes each of them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import ModelMixin, WanTransformer3DModel
from diffusers.loaders import WanLoraLoaderMixin
from PIL import Image
from torch import Tensor, nn

from rewardfl.backbones import stock
from rewardfl.backbones.protocol import DTYPES, Backbone, Conditioning, OnMeta, Schedule, Shape, Source
from rewardfl.backbones.wan import files, load, model
from rewardfl.backbones.wan.decoder import WanDecoder, lay_out_for_cudnn
from rewardfl.backbones.wan.variants import VARIANTS, Variant
from rewardfl.data import to_uint8
from rewardfl.weights.shards import InputError

Load = Callable[[Sequence[str]], Any]  # parts -> a frozen WanImageToVideoPipeline that has them, on the CPU

_PATCH = 2  # latents on a side of one token, of every published transformer


@dataclass(frozen=True, kw_only=True)
class Wan(Backbone):
    """The Backbone of Wan models.

    Its conditioning: text (B, 512, d). For an image next to the noise, image (B, temporal factor + C, T, h, w), mask
    and latents. For an image as the first latent frame, image (B, C, 1, h, w). In Wan2.1 also clip (B, 257, d).
    """

    variant: Variant
    load: Load
    boundary: float | None  # the lowest sigma of the first of two experts
    spatial: int  # this and the next two: the VAE's factors and latent channels
    temporal: int
    channels: int
    positions: int  # number of patches along an axis in every expert
    source: Source = Source()

    def schedule(self, steps: int, shift: float | None, latent_shape: Shape) -> Schedule:
        """Return the schedule, which is the same for latents of every shape."""
        if shift is None:
            raise InputError("sample.shift must be a number for this model, got null; Wan2.2's is 5")
        return model.schedule(steps, shift, self.experts, self.boundary)

    def latent_shape(self, height: int, width: int, num_frames: int) -> Shape:
        frames = (num_frames - 1) // self.temporal + (self.variant.image != "frame")
        return (self.channels, frames, height // self.spatial, width // self.spatial)

    def check_clips(self, height: int, width: int, num_frames: int, max_pixels: int | None = None) -> None:
        # diffusers' pipeline demands 16 of every model; beyond the positions, rotary embeddings do not exist
        multiple, longest = math.lcm(16, self.pixels_per_token), self.positions * self.pixels_per_token
        problems = stock.size_problems(height, width, max_pixels, multiple=multiple, longest=longest)
        least, most = self.temporal + 1, (self.positions - 1) * self.temporal + 1  # one frame would be the image
        if num_frames % self.temporal != 1 % self.temporal or not least <= num_frames <= most:
            problems.append(
                f"data.num_frames must be {self.temporal}k+1 for this VAE, from {least} to {most}, got {num_frames}"
            )
        if problems:
            raise InputError("\n".join(problems))

    def check_split(self, processes: int, height: int, width: int, num_frames: int) -> None:
        frames = (num_frames - 1) // self.temporal + 1
        tokens = frames * (height // self.pixels_per_token) * (width // self.pixels_per_token)
        config = stock.read_config(self.folder, self.parts[self.experts[0]])
        for name, count in {"tokens": tokens, "attention heads": config["num_attention_heads"]}.items():
            if count % processes:
                raise InputError(f"train.context_parallel {processes} does not divide the {count} {name}; change it")

    def differences(self, shift: float | None, guidance: float) -> list[str]:
        """Compare only the boundary: converted checkpoints state another shift than their originals."""
        stated = stock.read_config(self.folder, "model_index").get("boundary_ratio")
        if None in (stated, self.boundary) or stated == self.boundary:
            return []
        return [f"model.min_timestep_boundary is {self.boundary:g}, the checkpoint says {stated:g}"]

    def empty_expert(self, expert: str) -> ModelMixin:
        return stock.new_on_meta(WanTransformer3DModel, stock.read_config(self.folder, self.parts[expert]))

    def settings(self) -> dict[str, Any]:
        parts = {part: stock.read_config(self.folder, part) for part in (*self.parts.values(), "vae")}
        boundary = {} if self.boundary is None else {"boundary_ratio": files.boundary_ratio(self.folder)}
        return stock.settings(parts) | boundary

    def prompt_limits(self) -> Mapping[Path, int]:
        return {tokenizer: model.TEXT_LENGTH for tokenizer in self.weight_files.get("text_encoder", [])[1:]}

    def parts_of(self, expert: str) -> list[str]:
        name = DISTILLATIONS[self.experts.index(expert)]
        return [expert, name, self.source.distill_mode] if name in self.weight_files else [expert]

    def on_meta(self, height: int, width: int, num_frames: int) -> OnMeta:
        shape = self.latent_shape(height, width, num_frames)
        return model.on_meta(self.folder, self.variant, self.dtype, shape, (num_frames, height, width))

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
            return super().image_encoder(device)
        pipe = self.load(["vae", "image_encoder"] if variant.clip else ["vae"]).to(device)

        @torch.no_grad()
        def encode(image: Tensor | None, num_frames: int) -> Conditioning:
            """Return mask and image latents, or only image latents, and CLIP's features, by the pipeline's own code."""
            assert image is not None, "this model takes an image"
            height, width = image.shape[1:]
            frames = (num_frames - 1) // self.temporal + 1
            size = (1, self.channels, frames, height // self.spatial, width // self.spatial)
            placeholder = torch.empty(size, device=device)
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
        mean, scale = stock.latent_statistics(vae, torch.float32)

        @torch.no_grad()
        def encode_video(video: Tensor) -> Tensor:
            posterior = vae.encode(video.to(device, vae.dtype)).latent_dist
            return ((posterior.mode().float() - mean) * scale)[:, :, skipped:]

        return encode_video

    def load_expert(self, name: str) -> ModelMixin:
        return self.load([name]).components[self.variant.parts[name]]

    def load_decoder(self, device: torch.device) -> WanDecoder:
        vae = self.load(["vae_decoder"]).vae.to(device)
        vae = lay_out_for_cudnn(vae) if device.type == "cuda" else vae
        return WanDecoder(vae, frame_given=self.variant.image == "frame")

    def collate(self, items: Sequence[Conditioning]) -> Conditioning:
        return {name: torch.cat([item[name] for item in items]) for name in items[0]}

    def velocity(
        self, experts: nn.Module, x: Tensor, step: int, schedule: Schedule, conditioning: Conditioning
    ) -> Tensor:
        # the time stays float32: 892.857 would be 892 in bfloat16
        time, latents, more = schedule.timestep(step, x.device), x, {}
        if self.variant.image == "channels":
            latents = torch.cat([x, conditioning["image"].to(x.dtype)], 1)
        elif self.variant.image == "frame":
            latents = torch.cat([conditioning["image"].to(x.dtype), x], 2)
        if self.variant.token_times:  # a time for each patch, as in the pipeline; the image's are 0
            tokens, image_frames = x.shape[3] // _PATCH * (x.shape[4] // _PATCH), latents.shape[2] - x.shape[2]
            time = torch.cat([time.new_zeros(tokens * image_frames), time.expand(tokens * x.shape[2])])
        if self.variant.clip:
            more["encoder_hidden_states_image"] = conditioning["clip"].to(self.dtype)
        output = experts(
            schedule.experts[step],
            hidden_states=latents.to(self.dtype),
            timestep=time.expand(len(x), *time.shape),
            encoder_hidden_states=conditioning["text"].to(self.dtype),
            **more,
        )
        if self.variant.image == "frame":
            output = output[:, :, 1:]
        return output.to(x.dtype)


DISTILLATIONS = ("distill_high", "distill_low")  # names in weight_files, by the order of the experts


def open_wan(name: str, source: Source) -> Wan:
    """Open a model by its files' headers, with its distillation. Raise InputError as in `files`."""
    variant = VARIANTS[name]
    layout = files.find_files(variant, source)
    experts = files.open_experts(layout)
    loras = load.read_distilled(variant.experts, *source.distilled)
    load.check_distilled(loras, experts)
    load_parts = partial(load.load_pipeline, layout, experts, DTYPES[source.dtype], loras, source.distill_mode)
    distillations = {name: [Path(path)] for name, path in zip(DISTILLATIONS, source.distilled, strict=True) if path}
    weight_files = layout.weight_files(experts) | distillations
    return replace(_describe(variant, layout.configs, source), load=load_parts, weight_files=weight_files)


def describe_wan(name: str, source: Source) -> Wan:
    """Return the model of a folder of configurations, without weights."""
    return _describe(VARIANTS[name], files.find_configs(VARIANTS[name], source.model_paths), source)


def _describe(variant: Variant, folder: Path, source: Source) -> Wan:
    vae, *networks = (stock.read_config(folder, part) for part in ("vae", *variant.parts.values()))
    two, boundary, spatial = len(variant.experts) > 1, source.boundary, vae.get("scale_factor_spatial", 8)
    of_two = {"model.min_timestep_boundary": boundary, "model.distill_lora_low": source.distilled[1]}
    unused = {"model.embedded_guidance": source.embedded_guidance} | ({} if two else of_two)
    stock.refuse_settings(variant.published, unused)
    return Wan(
        folder=folder,
        parts=variant.parts,
        dtype=DTYPES[source.dtype],
        lora_loader=WanLoraLoaderMixin,
        weight_files={},
        block_classes=("WanTransformerBlock",),
        layer_names=variant.layer_names,
        pixels_per_token=spatial * _PATCH,
        takes_image=variant.image != "none",
        frame_rate=variant.frame_rate,
        variant=variant,
        load=_refuse_load,
        boundary=files.boundary_ratio(folder) if two and boundary is None else boundary,
        spatial=spatial,
        temporal=vae.get("scale_factor_temporal", 4),
        channels=vae.get("z_dim", 16),
        positions=min(network.get("rope_max_seq_len", 1024) for network in networks),
        source=source,
    )


def _refuse_load(parts: Sequence[str]) -> None:
    raise InputError(f"a described model has no weights to load ({', '.join(parts)})")
