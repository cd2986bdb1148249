"""Wan2.2-I2V-A14B as the seam asks for it: two experts, a boundary between them, a clip's first frame as an input."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from diffusers import ModelMixin
from torch import Tensor, nn

from rewardfl import lora
from rewardfl.backbones.seam import DTYPES, Adapter, Conditioning, OnMeta, Schedule, Shape, Source
from rewardfl.backbones.wan import files, load, meta, model
from rewardfl.backbones.wan.decoder import WanDecoder
from rewardfl.weights.shards import Refused

if TYPE_CHECKING:  # its module asks transformers for torchvision, aloud
    from diffusers import WanImageToVideoPipeline

Load = Callable[[Sequence[str]], "WanImageToVideoPipeline"]  # parts -> a frozen pipeline that has them, on the CPU


@dataclass(frozen=True)
class Wan22I2V:
    """The seam's Backbone. Its conditioning: text (B, 512, d) and image (B, temporal factor + 16, T, h, w).

    boundary: sigma at or above which the high-noise expert answers; spatial, temporal, channels: the VAE's. positions:
    how many patches along an axis both experts can tell apart. layout: the files, None for a model that is in memory;
    source: what was asked for.
    """

    load: Load
    boundary: float
    dtype: torch.dtype
    spatial: int
    temporal: int
    channels: int
    positions: int
    layout: files.Layout | None = None
    source: Source = Source()

    experts: ClassVar = tuple(model.PARTS)
    block_classes: ClassVar = ("WanTransformerBlock",)
    # the names of Wan's original code, as Alibaba's ROLL and DiffSynth configure them
    layer_names: ClassVar = {
        "q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out.0", "ffn.0": "ffn.net.0.proj", "ffn.2": "ffn.net.2",
    }  # fmt: skip

    def described_by(self) -> str:
        published = self.layout.configs == files.PUBLISHED
        return f"{self.layout.configs}{' (published; no configurations in model.model_paths)' if published else ''}"

    def schedule(self, steps: int, shift: float, latent_shape: Shape) -> Schedule:
        """The same for latents of every shape."""
        return model.schedule(steps, shift, self.boundary)

    def latent_shape(self, height: int, width: int, num_frames: int) -> Shape:
        frames = (num_frames - 1) // self.temporal + 1
        return (self.channels, frames, height // self.spatial, width // self.spatial)

    def check_clips(self, height: int, width: int, num_frames: int, max_pixels: int | None = None) -> None:
        problems = []
        # 16 is what diffusers' pipeline demands of every model, so that the trained one can be used there; 2 is the
        # transformer's patch
        multiple = math.lcm(16, self.spatial * 2)
        if max_pixels is not None and multiple != 16:
            problems.append(
                f"data.max_pixels gives sides in multiples of 16, this VAE takes multiples of {multiple}; remove "
                "max_pixels and set data.height and data.width"
            )
        for key, size in {"height": height, "width": width}.items():
            if size % multiple and max_pixels is None:
                near = _neighbours(size, multiple, 0)
                problems.append(f"data.{key} must be a multiple of {multiple}, got {size}; try {near}")
        # one latent frame would be the given image alone: nothing generated, nothing to reward
        if num_frames % self.temporal != 1 % self.temporal or num_frames <= 1:
            near = _neighbours(num_frames, self.temporal, 1)
            problems.append(f"data.num_frames must be {self.temporal}k+1 for this VAE, got {num_frames}; try {near}")
        side = self.positions * self.spatial * 2
        most = {"num_frames": (num_frames, (self.positions - 1) * self.temporal + 1)}
        if max_pixels is None:
            most |= {"height": (height, side), "width": (width, side)}
        else:  # of a square clip
            most["max_pixels"] = (max_pixels, side**2)
        problems += [
            f"data.{key} must be at most {limit}, got {value}: the model knows {self.positions} positions along an "
            "axis (rope_max_seq_len of its transformers' config.json)"
            for key, (value, limit) in most.items()
            if value > limit
        ]
        if problems:
            raise Refused("\n".join(problems))

    def differences(self, shift: float) -> list[str]:
        return files.differences(self.layout, self.boundary, shift)

    def linear_layers(self) -> list[str]:
        return files.linear_layers(self.layout.opened["low_noise"])

    def adapter_shapes(self, expert: str, adapter: Adapter) -> dict[str, tuple[int, ...]]:
        config = files.config_of(self.layout, model.PARTS[expert])
        empty = model.new_expert(config, torch.float32, config["num_layers"], adapter)
        return {name: tuple(value.shape) for name, value in empty.named_parameters() if value.requires_grad}

    def weight_files(self) -> dict[str, list[Path]]:
        high, low, _ = self.source.distilled
        distilled = {"distill_high": high, "distill_low": low}
        return files.files(self.layout) | {name: [Path(path)] for name, path in distilled.items() if path}

    def settings(self) -> dict[str, Any]:
        parts = {part: files.config_of(self.layout, part) for part in (*model.PARTS.values(), "vae")}
        plain = {
            part: {key: value for key, value in config.items() if not key.startswith("_")}  # the version that wrote it
            for part, config in parts.items()
        }
        return plain | {"boundary_ratio": files.boundary_ratio(self.layout.configs)}

    def parts_of(self, expert: str) -> list[str]:
        high, low, mode = self.source.distilled
        distilled = {"high_noise": ("distill_high", high), "low_noise": ("distill_low", low)}
        name, path = distilled[expert]
        return [expert, name, mode] if path else [expert]

    def on_meta(self, height: int, width: int, num_frames: int) -> OnMeta:
        shape = self.latent_shape(height, width, num_frames)
        return meta.on_meta(self.layout, self.dtype, shape, (num_frames, height, width))

    def text_encoder(self, device: torch.device) -> Callable[[str], Conditioning]:
        pipe = self.load(["text_encoder"]).to(device)

        @torch.no_grad()
        def encode(prompt: str) -> Conditioning:
            """By the pipeline's own code, which needs its text encoder and tokenizer alone."""
            text, _ = pipe.encode_prompt(
                prompt, do_classifier_free_guidance=False, max_sequence_length=model.TEXT_LENGTH, device=device
            )
            return {"text": text}

        return encode

    def image_encoder(self, device: torch.device) -> Callable[[Tensor, int], Conditioning]:
        pipe = self.load(["vae"]).to(device)

        @torch.no_grad()
        def encode(image: Tensor, num_frames: int) -> Conditioning:
            """Mask and image latents, by the pipeline's own code, which needs its VAE."""
            height, width = image.shape[1:]
            placeholder = torch.empty(1, *self.latent_shape(height, width, num_frames), device=device)
            _, condition = pipe.prepare_latents(
                image[None].to(device, torch.float32), 1, self.channels, height, width, num_frames,
                torch.float32, device, latents=placeholder,
            )  # fmt: skip
            return {"image": condition}

        return encode

    def load_expert(self, name: str) -> ModelMixin:
        return self.load([name]).components[model.PARTS[name]]

    def load_decoder(self, device: torch.device) -> WanDecoder:
        return WanDecoder(self.load(["vae_decoder"]).vae.to(device))

    def collate(self, items: Sequence[Conditioning]) -> Conditioning:
        return {name: torch.cat([item[name] for item in items]) for name in items[0]}

    def velocity(self, experts: nn.Module, x: Tensor, step: int, schedule: Schedule, given: Conditioning) -> Tensor:
        output = experts(
            schedule.experts[step],
            hidden_states=torch.cat([x, given["image"].to(x.dtype)], 1).to(self.dtype),
            # it stays float32: 892.857 would be 892 in bfloat16
            timestep=schedule.timesteps[step].to(x.device).expand(len(x)),
            encoder_hidden_states=given["text"].to(self.dtype),
        )
        return output.to(x.dtype)

    def guide(self, velocity: Tensor, away: Tensor, scale: float) -> Tensor:
        return away + scale * (velocity - away)

    def save_adapter(self, name: str, expert: ModelMixin, folder: Path, state: dict[str, Tensor]) -> None:
        model.save_adapter(expert, folder / model.PARTS[name], state)

    def attach_adapters(self, experts: Mapping[str, ModelMixin], checkpoint: Path) -> None:
        found = [name for name, part in model.PARTS.items() if (checkpoint / part / lora.WEIGHTS_NAME).is_file()]
        if not found:
            raise FileNotFoundError(
                f"no adapter in {checkpoint}: it should hold transformer/{lora.WEIGHTS_NAME} or "
                f"transformer_2/{lora.WEIGHTS_NAME}, as checkpoints/step-* of a run do"
            )
        for name in found:
            lora.attach_adapter(experts[name], checkpoint / model.PARTS[name])

    def load_adapter(self, name: str, expert: ModelMixin, folder: Path) -> None:
        lora.load_adapter(expert, folder / model.PARTS[name])


def _neighbours(value: int, multiple: int, offset: int) -> str:
    """The numbers multiple * k + offset (k >= 1) next to `value`, in words."""
    below = (value - offset) // multiple
    return " or ".join(str(multiple * k + offset) for k in (below, below + 1) if k >= 1)


def open(source: Source) -> Wan22I2V:
    """The model of files whose headers are checked, with the distillation that belongs to it. Refused: see files."""
    layout = files.find_files(source.model_paths, source.tokenizer_path, source.origin_paths, source.allow_download)
    layout = files.open_files(layout)
    high, low, mode = source.distilled
    return _of_layout(
        layout, source, partial(load.load_pipeline, layout, DTYPES[source.dtype], load.read_distilled(high, low), mode)
    )


def describe(source: Source) -> Wan22I2V:
    """The model of a folder of configurations, which has no weights to load."""
    layout = files.Layout(files.source_of(source.model_paths), {})
    return _of_layout(layout, source, _has_no_weights)


def _of_layout(layout: files.Layout, source: Source, load_parts: Load) -> Wan22I2V:
    vae = files.config_of(layout, "vae")
    return Wan22I2V(
        load_parts,
        files.boundary_ratio(layout.configs) if source.boundary is None else source.boundary,
        DTYPES[source.dtype],
        vae.get("scale_factor_spatial", 8),
        vae.get("scale_factor_temporal", 4),
        vae.get("z_dim", 16),
        min(files.config_of(layout, part).get("rope_max_seq_len", 1024) for part in model.PARTS.values()),
        layout,
        source,
    )


def _has_no_weights(parts: Sequence[str]) -> "WanImageToVideoPipeline":
    raise Refused(f"a described model has no weights to load ({', '.join(parts)})")
