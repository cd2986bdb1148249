"""The backbone of text-to-image models in diffusers' layout: an image is a video of one frame, (B, 3, 1, H, W)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, ModelMixin
from diffusers.loaders.lora_base import LoraBaseMixin
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, PreTrainedModel

from rewardfl import lora
from rewardfl.backbones import stock
from rewardfl.backbones.protocol import (
    DTYPES,
    Adapter,
    Backbone,
    ChunksOnMeta,
    Conditioning,
    DecodeCaches,
    Decoded,
    ExpertOnMeta,
    OnMeta,
    Schedule,
    Shape,
    Source,
)
from rewardfl.memory.convolutions import FrozenConvolutions
from rewardfl.weights import shards
from rewardfl.weights.shards import InputError

EXPERT = "transformer"  # the single network's name in the pipelines
PATCH = 2  # latents on a side of one token

# configurations of published models, a file for each; docs/images.md has the sources
PUBLISHED = Path(__file__).parent / "published"

# short names of the layers: of the image's stream, and of a separate text stream
ATTENTION = {"q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out.0"}
JOINT = {"add_q": "add_q_proj", "add_k": "add_k_proj", "add_v": "add_v_proj", "add_o": "to_add_out"}


def decode_flat(vae: AutoencoderKL, latents: Tensor) -> Tensor:
    """Decode (B, C, 1, h, w) to (B, 3, 1, H, W) by a two-dimensional VAE, in the pipelines' own arithmetic."""
    flat = latents.squeeze(2) / vae.config.scaling_factor + vae.config.shift_factor
    return vae.decode(flat, return_dict=False)[0].unsqueeze(2)


def encode_flat(vae: AutoencoderKL, image: Tensor) -> Tensor:
    """Return the latents (B, C, 1, h, w) of pixels (B, 3, 1, H, W): the inverse of `decode_flat`."""
    flat = vae.encode(image.squeeze(2)).latent_dist.mode()
    return ((flat - vae.config.shift_factor) * vae.config.scaling_factor).unsqueeze(2)


def sigmas_to_last(steps: int) -> list[float]:
    """Return an even range from 1 to 1 / steps, as in most of diffusers' pipelines."""
    return np.linspace(1.0, 1 / steps, steps).tolist()


def mu_by_tokens(tokens: int, steps: int, config: Mapping[str, Any]) -> float:
    """Return the logarithm of the shift, linear in an image's tokens, as in diffusers' calculate_shift."""
    few, base = config["base_image_seq_len"], config["base_shift"]
    slope = (config["max_shift"] - base) / (config["max_image_seq_len"] - few)
    return tokens * slope + (base - slope * few)


@dataclass(frozen=True, kw_only=True)
class ImageModelSpec:
    """One architecture of text-to-image models."""

    published: str  # its name
    pipeline: str  # diffusers' class
    mixin: type[LoraBaseMixin]  # the pipeline's loader of LoRAs
    transformer: type[ModelMixin]
    block_classes: tuple[str, ...]
    layer_names: Mapping[str, str]
    encoders: Mapping[str, type[PreTrainedModel]]  # by the pipeline's names, as the tokenizers
    encode: Callable[[Any, str, torch.device], Conditioning]  # by a pipeline of only the text's parts
    # latents (B, C, h, w), times (B,) from 1000 to 0, conditioning, embedded guidance -> the network's arguments
    inputs: Callable[[Tensor, Tensor, Conditioning, float | None], dict[str, Any]]
    velocity: Callable[[Any, Tensor], Tensor]  # the network's output, these latents -> velocity, of their shape
    tokens: Callable[[Mapping[str, int]], Mapping[str, int]]  # limits -> {text encoder, or its module: prompt's length}
    prompt_tokens: Mapping[str, int]  # {tokenizer: tokens of a prompt that are read}; one of two equal tokenizers
    # the network's configuration, tokens -> the shapes of `encode`'s output for one sample
    shapes: Callable[[Mapping[str, Any], Mapping[str, int]], dict[str, tuple[int, ...]]]
    tokenizers: tuple[str, ...] = ("tokenizer",)
    guide: Callable[[Tensor, Tensor, float], Tensor] | None = None  # as in Backbone, at the pipeline's scale
    vae: type[ModelMixin] = AutoencoderKL
    decode: Callable[[Any, Tensor], Tensor] = decode_flat  # vae, sampled latents -> pixels, of one frame
    encode_image: Callable[[Any, Tensor], Tensor] = encode_flat  # the inverse, by the mode of the posterior
    sigmas: Callable[[int], Sequence[float] | None] = sigmas_to_last  # by steps; None for the scheduler's default
    # tokens, steps, the scheduler's configuration -> the logarithm of a shift by size
    mu: Callable[[int, int, Mapping[str, Any]], float] = mu_by_tokens
    longest_side: Callable[[Mapping[str, Any]], int | None] = lambda network: None  # in latents; None for any
    streams: tuple[str, ...] = ("hidden_states", "encoder_hidden_states")  # as in ExpertOnMeta


@dataclass(frozen=True, kw_only=True)
class ImageModel(Backbone):
    """The Backbone of an image model. Its conditioning is its spec's."""

    spec: ImageModelSpec
    configs: Mapping[str, Mapping[str, Any]]  # by part, with the scheduler's and the tokenizers'
    guidance: float | None  # the network's input, if it takes one
    spatial: int  # the pixels on a side of one latent

    def schedule(self, steps: int, shift: float | None, latent_shape: Shape) -> Schedule:
        """Return the stock scheduler's steps, as in the stock pipeline; a given shift is the same at all sizes."""
        fixed = {} if shift is None else {"shift": shift, "use_dynamic_shifting": False}
        scheduler = FlowMatchEulerDiscreteScheduler.from_config({**self.configs["scheduler"], **fixed})
        config, (height, width) = scheduler.config, latent_shape[2:]
        tokens = height // PATCH * (width // PATCH)
        mu = self.spec.mu(tokens, steps, config) if config.use_dynamic_shifting else None
        scheduler.set_timesteps(steps, sigmas=self.spec.sigmas(steps), mu=mu)
        return Schedule(scheduler.sigmas, scheduler.timesteps, self.experts * steps)

    def latent_shape(self, height: int, width: int, num_frames: int) -> Shape:
        vae = self.configs["vae"]
        channels = vae["z_dim"] if "z_dim" in vae else vae["latent_channels"]
        return (channels, num_frames, height // self.spatial, width // self.spatial)

    def check_clips(self, height: int, width: int, num_frames: int, max_pixels: int | None = None) -> None:
        side = self.spec.longest_side(self.configs[EXPERT])
        problems = stock.size_problems(
            height, width, max_pixels, multiple=self.pixels_per_token, longest=side and side * self.spatial
        )
        if num_frames != 1:
            problems.append(f"data.num_frames must be 1, got {num_frames}: {self.spec.published} makes images")
        if problems:
            raise InputError("\n".join(problems))

    def differences(self, shift: float | None, guidance: float) -> list[str]:
        config, lines = self.configs["scheduler"], []
        stated = "one by the image's size" if config.get("use_dynamic_shifting") else f"{config.get('shift', 1):g}"
        if shift is not None and f"{shift:g}" != stated:
            lines.append(f"sample.shift is {shift:g}, the checkpoint says {stated} (null)")
        if guidance != 1 and stock.read_config(self.folder, "model_index").get("is_distilled"):
            lines.append(
                f"sample.guidance_scale is {guidance:g}, the checkpoint is distilled: its pipeline has none (1)"
            )
        return lines

    def empty_expert(self, expert: str) -> ModelMixin:
        return stock.new_on_meta(self.spec.transformer, self.configs[expert])

    def settings(self) -> dict[str, Any]:
        return stock.settings(self.configs)

    @property
    def _limits(self) -> dict[str, int]:
        """Return the spec's prompt_tokens; a tokenizer may allow less."""
        limits = self.spec.prompt_tokens.items()
        return {name: min(most, self.configs.get(name, {}).get("model_max_length", most)) for name, most in limits}

    def prompt_limits(self) -> Mapping[Path, int]:
        return {self.folder / name: most for name, most in self._limits.items()} if self.weight_files else {}

    def on_meta(self, height: int, width: int, num_frames: int) -> OnMeta:
        shape = self.latent_shape(height, width, num_frames)
        vae = stock.cast(stock.new_on_meta(self.spec.vae, self.configs["vae"]), self.dtype)
        encoders = {name: stock.new_on_meta(cls, self.configs[name]) for name, cls in self.spec.encoders.items()}
        text, tokens = stock.cast(nn.ModuleDict(encoders), self.dtype).eval(), self.spec.tokens(self._limits)
        shapes = self.spec.shapes(self.configs[EXPERT], tokens)
        conditioning = {
            name: torch.ones(1, *shape, dtype=torch.long)  # the numbers of a mask are read
            if name == "mask"
            else torch.empty(1, *shape, dtype=self.dtype, device="meta")
            for name, shape in shapes.items()
        }

        def encode_text() -> None:
            for name, length in tokens.items():
                ids = torch.zeros(1, length, dtype=torch.long, device="meta")
                text.get_submodule(name)(ids, output_hidden_states=True)

        latents = torch.empty(1, *shape, dtype=self.dtype, device="meta", requires_grad=True)
        return OnMeta(
            experts={EXPERT: self._network_on_meta(latents, conditioning)},
            vae=vae.requires_grad_(requires_grad=False),
            decoder=ChunksOnMeta(
                count=1,
                latents=latents,
                run=lambda x, *_: (self.spec.decode(vae, x), []),
                caches=[],
                vjp_context=FrozenConvolutions,
            ),
            encode_clip=lambda: None,
            vision=None,
            text_encoder=text,
            encode_text=encode_text,
            conditioning=conditioning,
        )

    def _network_on_meta(self, latents: Tensor, conditioning: Conditioning) -> tuple[ExpertOnMeta, ...]:
        """Return a network of one block for each type: the blocks of one list with equal weight shapes are one type."""
        flat, time = latents.detach().squeeze(2).requires_grad_(), torch.empty(1, device="meta")
        guidance = 1.0 if self.configs[EXPERT].get("guidance_embeds") else None

        def run(model: ModelMixin) -> Tensor:
            inputs = self.spec.inputs(flat, time, conditioning, guidance)
            return self.spec.velocity(model(**inputs, return_dict=False)[0], flat)

        equal_blocks: dict[tuple[str, tuple], list[int]] = {}
        for name, blocks in _block_lists(self.empty_expert(EXPERT), self.block_classes):
            for i, block in enumerate(blocks):
                equal_blocks.setdefault((name, tuple(value.shape for value in block.parameters())), []).append(i)
        builds = [(partial(self._one_block, name, equal[0]), len(equal)) for (name, _), equal in equal_blocks.items()]
        streams = self.spec.streams
        return tuple(ExpertOnMeta(count=n, build=build, x=flat, run=run, streams=streams) for build, n in builds)

    def _one_block(self, name: str, index: int, adapter: Adapter | None) -> ModelMixin:
        """Return a network with one block, `index` of the list `name`, with the adapter's targets that it has."""
        model = self.empty_expert(EXPERT)
        for list_name, blocks in _block_lists(model, self.block_classes):
            setattr(model, list_name, nn.ModuleList([blocks[index]] if list_name == name else []))
        stock.cast(model, self.dtype).requires_grad_(requires_grad=False)
        layers = " ".join([*(name for name, module in model.named_modules() if isinstance(module, nn.Linear)), ""])
        targets = [target for target in (adapter.targets if adapter else ()) if f".{target} " in layers]
        if adapter and targets:
            lora.inject(model, adapter.rank, adapter.rank, targets, seed=0)
        return model

    def text_encoder(self, device: torch.device) -> Callable[[str], Conditioning]:
        parts: dict[str, Any] = {EXPERT: None, "vae": None}
        parts["scheduler"] = FlowMatchEulerDiscreteScheduler.from_config(dict(self.configs["scheduler"]))
        for name in self.spec.tokenizers:
            parts[name] = AutoTokenizer.from_pretrained(self.folder / name, local_files_only=True)
        for name, cls in self.spec.encoders.items():
            parts[name] = self._load(name, cls)
        pipe = stock.import_class("diffusers", self.spec.pipeline)(**parts).to(device)

        @torch.no_grad()
        def encode(prompt: str) -> Conditioning:
            return self.spec.encode(pipe, prompt, device)

        return encode

    def video_encoder(self, device: torch.device) -> Callable[[Tensor], Tensor]:
        vae = self._load("vae", self.spec.vae).to(device)

        @torch.no_grad()
        def encode_video(video: Tensor) -> Tensor:
            return self.spec.encode_image(vae, video.to(device, vae.dtype)).float()

        return encode_video

    def load_expert(self, name: str) -> ModelMixin:
        return self._load(name, self.spec.transformer)

    def load_decoder(self, device: torch.device) -> "ImageDecoder":
        vae = self._load("vae", self.spec.vae)
        vae.encoder = nn.Identity()  # some VAEs count its modules
        vae.quant_conv = None
        return ImageDecoder(vae.to(device), self.spec.decode)

    def collate(self, items: Sequence[Conditioning]) -> Conditioning:
        """Pad texts of several lengths with zeros, which a spec with such texts masks."""
        return {
            name: pad_sequence([row for item in items for row in item[name]], batch_first=True) for name in items[0]
        }

    def velocity(
        self, experts: nn.Module, x: Tensor, step: int, schedule: Schedule, conditioning: Conditioning
    ) -> Tensor:
        times = schedule.timestep(step, x.device).expand(len(x))  # they stay float32
        cast = {
            name: value.to(self.dtype) if value.is_floating_point() else value for name, value in conditioning.items()
        }
        latents = x.squeeze(2).to(self.dtype)
        output = experts(schedule.experts[step], **self.spec.inputs(latents, times, cast, self.guidance))
        return self.spec.velocity(output, latents).to(x.dtype).unsqueeze(2)

    def guide(self, velocity: Tensor, away: Tensor, scale: float) -> Tensor:
        return (self.spec.guide or super().guide)(velocity, away, scale)

    def _load(self, part: str, cls: type[nn.Module]) -> Any:
        model = stock.load_pretrained(cls, self.folder / part, self.dtype)
        return model.requires_grad_(requires_grad=False).eval()


@dataclass(frozen=True)
class ImageDecoder:
    """The Decoder: autograd through the VAE's decoder, whose convolutions are frozen."""

    vae: Any
    pixels: Callable[[Any, Tensor], Tensor]  # the spec's decode

    def _image(self, latents: Tensor) -> Tensor:
        """Return (B, 3, 1, H, W), with a graph where gradients are enabled."""
        return self.pixels(self.vae, latents.to(self.vae.dtype)).clamp(-1, 1)

    @torch.no_grad()
    def decode(self, latents: Tensor, conditioning: Conditioning | None = None) -> Tensor:
        return self._image(latents)

    def decode_with_caches(
        self,
        latents: Tensor,
        conditioning: Conditioning | None = None,
        caches: DecodeCaches = "keep",
        kept_chunks: int = 0,
    ) -> Decoded:
        """Return the image without caches: it is one chunk."""
        return Decoded(self.decode(latents), {})

    def vjp(
        self,
        latents: Tensor,
        grad_video: Tensor,
        decoded: Decoded | None = None,
        conditioning: Conditioning | None = None,
    ) -> Tensor:
        """Return (B, C, 1, h, w), image by image: one graph is as large as all else of a step together."""
        gradients: list[Tensor] = []
        for x, grad in zip(latents.split(1), grad_video.split(1), strict=True):
            leaf = x.detach().requires_grad_()
            with torch.enable_grad(), FrozenConvolutions():
                image = self._image(leaf)
            gradients += torch.autograd.grad(image, [leaf], grad.to(image.dtype))
        return torch.cat(gradients)


def _block_lists(model: nn.Module, block_classes: Sequence[str]) -> list[tuple[str, nn.ModuleList]]:
    """Return the lists of blocks, by the network's names of them."""
    return [
        (name, module)
        for name, module in model.named_children()
        if isinstance(module, nn.ModuleList) and any(type(block).__name__ in block_classes for block in module)
    ]


def open_image_model(spec: ImageModelSpec, name: str, source: Source) -> ImageModel:
    """Open a pipeline folder by its headers. Raise InputError unless the tensors are exactly this model's."""
    model = describe_image_model(spec, name, source)
    if PUBLISHED in model.folder.parents:
        raise InputError(f"model.model_paths: {source.model_paths} has no weights; download {model.folder.stem}")
    others = ("vae", *spec.encoders, *spec.tokenizers)
    if absent := [part for part in (EXPERT, *others) if not (model.folder / part).is_dir()]:
        raise InputError(f"model.model_paths: {model.folder} has no {absent[0]} folder")
    checkpoint = stock.open_network(model.folder / EXPERT)
    shapes = {name: value.shape for name, value in checkpoint.tensors.items()}
    stock.check_tensors(checkpoint.path, shapes, model.empty_expert(EXPERT).state_dict(), "its config.json")
    for part in others:
        if part not in spec.tokenizers:
            shards.open_checkpoint(model.folder / part)
        shards.check_folder(model.folder / part)
    vae, *encoders = (model.folder / part for part in others)
    weights = {EXPERT: list(checkpoint.files), "text_encoder": encoders, "vae": [vae]}
    return replace(model, weight_files=weights)


def describe_image_model(spec: ImageModelSpec, name: str, source: Source) -> ImageModel:
    """Return the model of a folder's configurations; of a missing folder the published ones that its name names."""
    folder = Path(source.model_paths)
    if not folder.exists():
        names = sorted(path.stem for path in PUBLISHED.iterdir())
        if folder.name not in names:
            raise InputError(
                f"model.model_paths: there is no {folder}; give a folder, or the name {' or '.join(names)}"
            )
        folder = PUBLISHED / f"{folder.name}.json"
    elif not (folder / "model_index.json").is_file():
        raise InputError(f"model.model_paths: {folder} is no diffusers pipeline folder (no model_index.json in it)")
    pipeline = stock.read_config(folder, "model_index").get("_class_name")
    if pipeline != spec.pipeline:
        raise InputError(
            f"model.model_name: {name} is a {spec.pipeline}, but {folder} is a {pipeline}; set model.model_name to "
            "the model that it is"
        )
    configs = {part: stock.read_config(folder, part) for part in (EXPERT, "vae", *spec.encoders, "scheduler")}
    for part in spec.tokenizers:
        path = folder / part / "tokenizer_config.json"
        if path.is_file() and (length := shards.read_json_object(path).get("model_max_length")):
            configs[part] = {"model_max_length": length}
    if configs["scheduler"].get("stochastic_sampling"):  # the rollouts here are the ODE
        raise InputError(f"{folder}/scheduler/scheduler_config.json: stochastic_sampling must be false; set it")
    guided, guidance = configs[EXPERT].get("guidance_embeds", False), source.embedded_guidance
    if guided and guidance is None:
        raise InputError(f"model.embedded_guidance: {folder} takes a guidance as input; set it (published: 3.5)")
    unused = {
        "model.embedded_guidance": None if guided else guidance, "model.tokenizer_path": source.tokenizer_path,
        "model.model_id_with_origin_paths": source.origin_paths, "model.min_timestep_boundary": source.boundary,
        "model.distill_lora_high": source.distilled[0], "model.distill_lora_low": source.distilled[1],
    }  # fmt: skip
    stock.refuse_settings(spec.published, unused)
    vae = configs["vae"]
    spatial = 2 ** len(vae.get("temperal_downsample") or vae["block_out_channels"][1:])
    return ImageModel(
        folder=folder, parts={EXPERT: EXPERT}, dtype=DTYPES[source.dtype], lora_loader=spec.mixin, weight_files={},
        block_classes=spec.block_classes, layer_names=spec.layer_names, pixels_per_token=spatial * PATCH,
        spec=spec, configs=configs, guidance=guidance, spatial=spatial,
    )  # fmt: skip
