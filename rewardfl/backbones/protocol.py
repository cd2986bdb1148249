"""The interface of every backbone to the rest of the package; all differences between models are behind it."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from diffusers import ModelMixin
from diffusers.loaders.lora_base import LoraBaseMixin
from torch import Tensor, nn

from rewardfl import lora
from rewardfl.backbones import stock
from rewardfl.copies import to_device
from rewardfl.weights import lora_files, shards
from rewardfl.weights.shards import InputError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}  # the frozen weights' dtypes, by config word
DecodeCaches = Literal["keep", "offload", "segment"]  # train.decode_caches

Conditioning = dict[str, Tensor]  # a batch's inputs to the networks, each (B, ...), under the backbone's names
Shape = tuple[int, int, int, int]  # (channels, frames, height, width) of one sample's latents
Caches = list[Tensor | str | None]  # a decoder's state between chunks of latents


@dataclass(frozen=True)
class Adapter:
    """The trained LoRA."""

    rank: int
    targets: tuple[str, ...]  # diffusers' names of linear layers, or ends of such names


@dataclass(frozen=True)
class Schedule:
    """The denoising steps: step i goes from sigmas[i] to sigmas[i + 1]. Only `experts` assigns them to experts."""

    sigmas: Tensor  # (N + 1,) float32, descending; the last is 0
    timesteps: Tensor  # (N,) float32, the experts' input: 1000 * sigma
    experts: tuple[str, ...]  # (N,) by name
    boundary: float = 0.0  # the lowest sigma of the first of two experts
    _on_device: dict[torch.device, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self):
        if not bool(self.sigmas.isfinite().all() and (self.sigmas.diff() < 0).all()):
            listed = ", ".join(f"{sigma:g}" for sigma in self.sigmas[:8].tolist())
            raise InputError(
                f"sample.num_inference_steps: {len(self)} steps give this model the sigmas {listed}, which do not fall"
            )

    def __len__(self) -> int:
        """Return the number of steps."""
        return len(self.experts)

    def timestep(self, step: int, device: torch.device) -> Tensor:
        """Return a step's timestep () on a device, where all are copied at the first call."""
        if device not in self._on_device:
            self._on_device[device] = self.timesteps.to(device)
        return self._on_device[device][step]

    @property
    def handover(self) -> int:
        """Return the first step of the second expert; the number of steps without one."""
        return self.experts.count(self.experts[0])

    def at(self, moment: float) -> "Schedule":
        """Return one step to 0 from the sigma at `moment`: 4 is step 4's sigma, 4.5 is half-way to step 5's.

        A moment never leaves the step's expert: the part of the interval above the boundary counts as all of it.
        """
        step, part = int(moment), moment % 1
        if self.boundary and step + 1 == self.handover < len(self):
            start, end = self.sigmas[step : step + 2].tolist()
            inside = max(0.0, min(1.0, (start - self.boundary) / (start - end)))  # share of the interval
            part = part if part <= inside else (part - inside) / (1 - inside) * inside
        sigma = (1 - part) * self.sigmas[step] + part * self.sigmas[step + 1]
        timestep = self.timesteps[step] if part == 0 else 1000 * sigma
        return Schedule(torch.stack([sigma, sigma.new_zeros(())]), timestep[None], (self.experts[step],))

    def until(self, final_step: int) -> "Schedule":
        """Return the schedule up to `final_step`, whose step goes straight to sigma 0: its x0 prediction."""
        count = final_step + 1
        sigmas = torch.cat([self.sigmas[:count], self.sigmas.new_zeros(1)])
        return Schedule(sigmas, self.timesteps[:count], self.experts[:count], self.boundary)


class Experts(nn.Module):
    """All networks of a model as one module, so that a wrapper sees every trained parameter.

    outside: untrained experts, which DeepSpeed, FSDP and `.to` leave where offload.move_expert put them.
    """

    def __init__(self, experts: Mapping[str, nn.Module], outside: Sequence[str] = ()):
        super().__init__()
        self.inside = nn.ModuleDict({name: expert for name, expert in experts.items() if name not in outside})
        self.outside = {name: experts[name] for name in outside if name in experts}  # a plain dict: no submodules

    def forward(self, name: str, **inputs: Tensor) -> Tensor:
        """Return the output of the expert `name`, one of diffusers' transformers, for its keyword arguments."""
        expert = self.outside[name] if name in self.outside else self.inside[name]
        return expert(**inputs, return_dict=False)[0]


@dataclass(frozen=True)
class Decoded:
    """A decoded batch, and the state with which the decoder's `vjp` need not decode again."""

    video: Tensor  # (B, 3, F, H, W) in [-1, 1]
    caches: dict[int, Any]  # by chunk, the caches before it; with segments only for every n-th chunk from chunk 0
    graphs: dict[int, Any] = field(default_factory=dict)  # by the chunk after them: graphs of the last chunks


class Decoder(Protocol):
    """The map from sampled latents (B, C, T, h, w) to video (B, 3, F, H, W) in [-1, 1], and its gradient."""

    def decode(self, latents: Tensor, conditioning: Conditioning | None = None) -> Tensor:
        """Return the video, without gradient."""

    def decode_with_caches(
        self,
        latents: Tensor,
        conditioning: Conditioning | None = None,
        caches: DecodeCaches = "keep",
        kept_chunks: int = 0,
    ) -> Decoded:
        """Return the video and the state for a later `vjp`. kept_chunks: the last ones, whose graph is kept."""

    def vjp(
        self,
        latents: Tensor,
        grad_video: Tensor,
        decoded: Decoded | None = None,
        conditioning: Conditioning | None = None,
    ) -> Tensor:
        """Return (d video / d latents)^T grad_video, (B, C, T, h, w)."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """The files of a model and its settings; the configuration's section `model` documents them."""

    model_paths: str = ""
    tokenizer_path: str = ""
    origin_paths: str = ""
    boundary: float | None = None  # the sigma between two experts; None: from the files
    embedded_guidance: float | None = None  # input of a guidance-distilled network
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    distilled: tuple[str, str] = ("", "")  # LoRAs of the first and the second expert
    distill_mode: Literal["fuse", "adapter"] = "fuse"


@dataclass(frozen=True, eq=False, kw_only=True)
class ExpertOnMeta:
    """A network of one block on the meta device; a network with several types of blocks has one for each type."""

    count: int  # number of blocks of this type in the complete network
    build: Callable[[Adapter | None], ModelMixin]  # the network of one block, frozen but for the adapter
    x: Tensor  # one sample's latents; requires a gradient
    run: Callable[[ModelMixin], Tensor]  # the network's output for x
    streams: tuple[str, ...]  # a block's arguments with a gradient, which checkpointing keeps


@dataclass(frozen=True, kw_only=True)
class ChunksOnMeta:
    """A module that runs chunk after chunk with caches between them, on the meta device."""

    count: int
    latents: Tensor  # the input of each chunk; requires a gradient
    run: Callable[[Tensor, Caches], tuple[Tensor, Caches]]
    caches: Caches  # before the first chunk
    vjp_context: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext  # for `run` with a graph


@dataclass(frozen=True, kw_only=True)
class OnMeta:
    """A model's parts on the meta device for one video, measured by `rewardfl.estimate`."""

    experts: Mapping[str, tuple[ExpertOnMeta, ...]]  # by type of block; equal networks are one object
    vae: nn.Module
    decoder: ChunksOnMeta
    encode_clip: Callable[[], object]  # by the VAE; of an image model nothing
    vision: nn.Module | None  # a second encoder of the image
    text_encoder: nn.Module
    encode_text: Callable[[], object]
    conditioning: Mapping[str, Tensor]  # one sample's, as it is cached


@dataclass(frozen=True, kw_only=True)
class Backbone(Protocol):
    """A trainable model, opened by the headers of its files; only the methods that say so load weights."""

    folder: Path  # a pipeline's configurations, as stock.read_config takes them
    parts: Mapping[str, str]  # {expert (model.trainable_models: dit, dit2), by its steps: its folder in a pipeline}
    dtype: torch.dtype  # in which the networks compute
    lora_loader: type[LoraBaseMixin]  # the stock pipeline's mixin
    weight_files: Mapping[str, list[Path]]  # by part, which identify the weights; empty for a described model
    block_classes: tuple[str, ...]  # names of its blocks' classes, which FSDP gathers one at a time
    layer_names: Mapping[str, str]  # {short name that lora.lora_target_modules may use: diffusers' name}
    pixels_per_token: int  # on a side of one token: the VAE's factor times the patch
    takes_image: bool = False  # whether an image, by default the clip's first frame, is an input of the networks
    frame_rate: float = 1.0  # frames per second of its videos

    @property
    def experts(self) -> tuple[str, ...]:
        """Return the names of its networks in the order of their steps."""
        return tuple(self.parts)

    def described_by(self) -> str:
        """Return the source of the model's shape, in words."""
        published = Path(__file__).parent in self.folder.parents
        return f"{self.folder}{' (published; no configurations in model.model_paths)' if published else ''}"

    def schedule(self, steps: int, shift: float | None, latent_shape: Shape) -> Schedule:
        """Return the steps by the stock scheduler's own arithmetic. shift: of the sigmas; None for the scheduler's."""

    def latent_shape(self, height: int, width: int, num_frames: int) -> Shape:
        """Return the shape of one sample's sampled latents."""

    def check_clips(self, height: int, width: int, num_frames: int, max_pixels: int | None = None) -> None:
        """Raise InputError for clips of an unsupported size; with max_pixels, height and width are ignored."""

    def check_split(self, processes: int, height: int, width: int, num_frames: int) -> None:
        """Raise InputError if `processes` cannot have equal parts of a clip's tokens and attention heads."""
        raise InputError(f"train.context_parallel {processes}: this model does not split its tokens; set it to 1")

    def differences(self, shift: float | None, guidance: float) -> list[str]:
        """Return a line for each setting of the run that differs from the checkpoint's."""

    def empty_expert(self, expert: str) -> ModelMixin:
        """Return a network on the meta device."""

    def linear_layers(self) -> list[str]:
        """Return diffusers' names of the linear layers of an expert."""
        modules = self.empty_expert(self.experts[-1]).named_modules()
        return [name for name, module in modules if isinstance(module, nn.Linear)]

    def adapter_shapes(self, expert: str, adapter: Adapter) -> dict[str, tuple[int, ...]]:
        """Return {parameter of the policy adapter: its shape} of an expert."""
        model = self.empty_expert(expert)
        lora.inject(model, adapter.rank, adapter.rank, list(adapter.targets), seed=0)
        return {name: tuple(value.shape) for name, value in model.named_parameters() if value.requires_grad}

    def settings(self) -> dict[str, Any]:
        """Return the other settings that change the model's outputs, as plain JSON."""

    def prompt_limits(self) -> Mapping[Path, int]:
        """Return {a tokenizer's folder: tokens of a prompt that its encoder reads}; none for a described model."""
        return {}

    def parts_of(self, expert: str) -> list[str]:
        """Return the names in weight_files of an expert's weights, and how they are combined."""
        return [expert]

    def on_meta(self, height: int, width: int, num_frames: int) -> OnMeta:
        """Return the model's parts without memory, for videos of this size."""

    def text_encoder(self, device: torch.device) -> Callable[[str], Conditioning]:
        """Load the text encoder; return the function that encodes a prompt, for a batch of one."""

    def image_encoder(self, device: torch.device) -> Callable[[Tensor | None, int], Conditioning]:
        """Load the image encoder; return the function of an image (3, H, W) in [-1, 1] and the number of frames."""
        return lambda image, num_frames: {}

    def video_encoder(self, device: torch.device) -> Callable[[Tensor], Tensor]:
        """Load the VAE; return the function from clips (B, 3, F, H, W) in [-1, 1] to (B, *latent_shape) float32.

        It returns the mode of the VAE's posterior, normalised, without a first latent frame that is conditioning.
        """

    def load_expert(self, name: str) -> ModelMixin:
        """Load a network, frozen and on the CPU."""

    def load_decoder(self, device: torch.device) -> Decoder:
        """Load the decoder, frozen."""

    def collate(self, items: Sequence[Conditioning]) -> Conditioning:
        """Return one batch of several."""

    def velocity(
        self, model: nn.Module, x: Tensor, step: int, schedule: Schedule, conditioning: Conditioning
    ) -> Tensor:
        """Return noise - x0 at latents x (B, C, T, h, w), in the dtype of x. model: Experts, or their wrapper."""

    def guide(self, velocity: Tensor, away: Tensor, scale: float) -> Tensor:
        """Return the velocity guided by the prompt's and the negative prompt's velocities, as in the stock pipeline."""
        return away + scale * (velocity - away)

    def save_adapter(self, name: str, expert: ModelMixin, folder: Path, state: dict[str, Tensor]) -> None:
        """Write an expert's adapter below a checkpoint's folder, as the stock pipeline loads it."""
        stock.save_adapter(self.lora_loader, expert, folder / self.parts[name], state)

    def load_adapter(self, name: str, expert: ModelMixin, folder: Path) -> None:
        """Fill an expert's adapter from such a folder. Raise ValueError or FileNotFoundError if it does not fit."""
        lora.load_adapter(expert, folder / self.parts[name])

    def attach_adapters(self, experts: Mapping[str, ModelMixin], checkpoint: Path) -> None:
        """Add a checkpoint's adapters to plain experts, for inference. Raise FileNotFoundError without any."""
        trained = [name for name, part in self.parts.items() if (checkpoint / part / lora.WEIGHTS_NAME).is_file()]
        if not trained:
            files = " or ".join(f"{part}/{lora.WEIGHTS_NAME}" for part in self.parts.values())
            raise FileNotFoundError(f"no adapter in {checkpoint}: it should hold {files}, as checkpoints/step-* do")
        for name in trained:
            for adapter in lora.read_for(experts[name], checkpoint / self.parts[name] / lora.WEIGHTS_NAME):
                self.check_not_merged(name, adapter)
                lora.attach_adapter(experts[name], adapter)

    def check_not_merged(self, expert: str, adapter: lora_files.Lora) -> None:
        """Raise InputError if the metadata of an expert's files lists a LoRA that is merged into them."""
        for file in self.weight_files.get(expert, []):
            if lora_files.is_merged(adapter, shards.read_header(file)[1]):
                raise InputError(f"{adapter.path} is merged into {file} already; give the model without it")


@dataclass(frozen=True, eq=False, kw_only=True)
class Velocity:
    """The samplers' `velocity(x, step)` for one batch's conditioning. `model` is the prepared module.

    guidance: scale of classifier-free guidance away from `negative`, another prompt's conditioning for one sample or B;
    1 is none. guidance_gradient: both, or conditional: the velocity of the negative prompt is a constant.
    """

    backbone: Backbone
    model: nn.Module
    conditioning: Conditioning
    schedule: Schedule
    negative: Conditioning | None = None
    guidance: float = 1.0
    guidance_gradient: Literal["both", "conditional"] = "both"

    def __call__(self, x: Tensor, step: int) -> Tensor:
        """Return the velocity at latents x (B, C, T, h, w) of the schedule's denoising step."""
        velocity = self.backbone.velocity(self.model, x, step, self.schedule, self.conditioning)
        if self.guidance == 1:
            return velocity
        assert self.negative is not None, "guidance needs a negative prompt"
        negative = {name: value.expand(len(x), *value.shape[1:]) for name, value in self.negative.items()}
        differentiates = {"both": torch.is_grad_enabled(), "conditional": False}[self.guidance_gradient]
        with torch.set_grad_enabled(differentiates):
            away = self.backbone.velocity(self.model, x, step, self.schedule, self.conditioning | negative)
        return self.backbone.guide(velocity, away, self.guidance)

    def reference(self, x: Tensor, step: int) -> Tensor:
        """Return the velocity without the policy adapter; it can be differentiated by x, once."""
        if torch.is_grad_enabled() and x.requires_grad:
            return _Reference.apply(x, self, step)
        with lora.reference(self.model):
            return self(x, step)


class _Reference(torch.autograd.Function):
    """A reference velocity with a backward pass without the adapter: checkpointed blocks are recomputed in it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, velocity: Velocity, step: int) -> Tensor:
        ctx.x, ctx.model = x.detach().requires_grad_(), velocity.model
        with torch.enable_grad(), lora.reference(ctx.model):
            ctx.graph = velocity(ctx.x, step)
        return ctx.graph.detach()

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None, None]:
        with torch.enable_grad(), lora.reference(ctx.model):
            (pull,) = torch.autograd.grad(ctx.graph, ctx.x, cotangent)
        del ctx.graph
        return pull, None, None


def move_to(conditioning: Conditioning, device: str | torch.device) -> Conditioning:
    """Return the conditioning on a device."""
    return {name: to_device(value, device) for name, value in conditioning.items()}


def select_rows(conditioning: Conditioning, chosen: Sequence[int]) -> Conditioning:
    """Return the conditioning of these samples of the batch."""
    return {name: value[list(chosen)] for name, value in conditioning.items()}
