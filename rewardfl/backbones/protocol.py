"""What a model is to the rest of the house: the names that every backbone answers to, and what all of them share.

Everything that tells one model from another is behind `Backbone`: which networks there are and which of them answers at
a denoising step, what is known of a prompt and an image, how a network is called, how latents become frames. Nothing
outside of a backbone's own folder reads its conditioning.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from diffusers import ModelMixin
from torch import Tensor, nn

from rewardfl import lora
from rewardfl.weights.shards import Refused

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}  # of the frozen weights, by config word

# what the networks are told of a batch, every tensor (B, ...), under names that only the backbone knows
Conditioning = dict[str, Tensor]

Shape = tuple[int, int, int, int]  # (channels, frames, height, width) of one sample's latents

Caches = list[Tensor | str | None]  # what a decoder remembers from one chunk of latents to the next


@dataclass(frozen=True)
class Adapter:
    """The LoRA that is trained."""

    rank: int
    targets: tuple[str, ...]  # diffusers' names of linear layers, or ends of such names


@dataclass(frozen=True)
class Schedule:
    """The denoising steps of one schedule: step i goes from sigmas[i] to sigmas[i + 1].

    `experts` is the only answer to the question which expert a step belongs to; nothing else compares a sigma, or a
    timestep, with the boundary between them.
    """

    sigmas: Tensor  # (N + 1,) float32, descending; the last is 0
    timesteps: Tensor  # (N,) float32, what the experts are told: 1000 * sigma
    experts: tuple[str, ...]  # (N,) the name of the one that answers

    def __post_init__(self):
        if not bool(self.sigmas.isfinite().all() and (self.sigmas.diff() < 0).all()):
            listed = ", ".join(f"{sigma:g}" for sigma in self.sigmas[:8].tolist())
            raise Refused(
                f"sample.num_inference_steps: {len(self)} steps give this model the sigmas {listed}, which must be "
                "finite and fall from step to step; take another number of steps, or another sample.shift"
            )

    def __len__(self) -> int:
        """The number of steps."""
        return len(self.experts)

    @property
    def handover(self) -> int:
        """The first step that another expert answers than the first one; the number of steps where there is none."""
        return next((i for i, expert in enumerate(self.experts) if expert != self.experts[0]), len(self))

    def at(self, moment: float) -> "Schedule":
        """Return one step to 0 from the sigma at `moment`: 4 is that of step 4, 4.5 is half-way to that of step 5."""
        step = int(moment)
        part = moment - step
        sigma = (1 - part) * self.sigmas[step] + part * self.sigmas[step + 1]
        timestep = self.timesteps[step] if part == 0 else 1000 * sigma
        return Schedule(torch.stack([sigma, sigma.new_zeros(())]), timestep[None], (self.experts[step],))

    def until(self, final_step: int) -> "Schedule":
        """The schedule that stops after `final_step`, whose own step goes straight to sigma 0: its x0 prediction."""
        kept = final_step + 1
        sigmas = torch.cat([self.sigmas[:kept], self.sigmas.new_zeros(1)])
        return Schedule(sigmas, self.timesteps[:kept], self.experts[:kept])


class Experts(nn.Module):
    """All networks of a model as one module, so that a wrapper sees every trained parameter.

    A model with one network has one expert. outside: experts that are not trained and stay out of the module tree: DDP,
    DeepSpeed, FSDP and `.to` then leave them where offload.place put them. An expert may be None when no step will ask
    for it.
    """

    def __init__(self, experts: dict[str, nn.Module | None], outside: Sequence[str] = ()):
        super().__init__()
        self.inside = nn.ModuleDict({name: expert for name, expert in experts.items() if name not in outside})
        self.outside = {name: experts[name] for name in outside}  # a plain dict: no submodules

    def forward(self, name: str, **inputs: Tensor) -> Tensor:
        """What the expert called `name`, one of diffusers' transformers, gives; inputs: its own arguments by name."""
        expert = self.outside[name] if name in self.outside else self.inside[name]
        return expert(**inputs, return_dict=False)[0]


@dataclass(frozen=True)
class Decoded:
    """A decoded batch and what the decoder's `vjp` needs to go back without decoding again.

    video: (B, 3, F, H, W) in [-1, 1]. caches: by chunk, those that it started from; only those of every n-th
    chunk where they are kept by segments, which always include chunk 0.
    """

    video: Tensor
    caches: dict[int, list[Any]]


class Decoder(Protocol):
    """From latents (B, C, T, h, w) as they are sampled to video (B, 3, F, H, W) in [-1, 1], and its gradient.

    given: the batch's conditioning, which may hold latents that belong to the video and are not sampled.
    """

    def decode(self, latents: Tensor, given: Conditioning | None = None) -> Tensor:
        """The video, without gradient."""

    def decode_with_caches(self, latents: Tensor, caches: str = "keep", given: Conditioning | None = None) -> Decoded:
        """The video, for a `vjp` to come; caches: train.decode_caches."""

    def vjp(
        self, latents: Tensor, grad_video: Tensor, decoded: Decoded | None = None, given: Conditioning | None = None
    ) -> Tensor:
        """(d video / d latents)^T grad_video, (B, C, T, h, w)."""


@dataclass(frozen=True)
class Source:
    """Which files a model is opened from and how it is to be run; the configuration's section `model` says what for."""

    model_paths: str = ""
    tokenizer_path: str = ""
    origin_paths: str = ""
    allow_download: bool = False
    boundary: float | None = None  # the sigma between two experts; None: as the files say
    embedded_guidance: float | None = None  # what a network that has learned from a guided one is told
    dtype: str = "bfloat16"
    distilled: tuple[str, str, str] = ("", "", "fuse")  # LoRAs of the first and the second expert, and the mode


@dataclass(frozen=True, eq=False)
class ExpertOnMeta:
    """A network of one block on the meta device. A network that has several kinds of blocks is one for each kind."""

    count: int  # how many blocks of this kind the whole network has
    build: Callable[[Adapter | None], ModelMixin]  # the network of one block, frozen but for the adapter
    x: Tensor  # one sample's latents; requires a gradient
    run: Callable[[ModelMixin], Tensor]  # the network's answer to x
    streams: tuple[str, ...]  # a block's arguments that a gradient goes back through, and checkpointing keeps


@dataclass(frozen=True)
class ChunksOnMeta:
    """A module that runs chunk after chunk with caches between them, on the meta device."""

    module: nn.Module
    count: int
    chunk: Callable[[int], Tensor]  # the input of chunk i; all but the first are alike
    run: Callable[[Tensor, Caches, bool], tuple[Tensor, Caches]]  # input, caches, whether it is the first
    caches: Caches  # before the first chunk
    # around `run` and its backward pass, which keeps what training keeps of it, and computes the rest again
    checkpointed: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext


@dataclass(frozen=True)
class OnMeta:
    """A model's parts on the meta device for one video: what `rewardfl.estimate` measures."""

    experts: Mapping[str, tuple[ExpertOnMeta, ...]]  # by kind of block; two networks that are alike are one object
    vae: nn.Module
    decoder: ChunksOnMeta
    image_encoder: ChunksOnMeta | None  # None for a model that takes no image
    vision: nn.Module | None  # what else sees the image
    text_encoder: nn.Module
    encode_text: Callable[[], object]
    conditioning: Mapping[str, Tensor]  # of one sample, as it is cached


class Backbone(Protocol):
    """A model that can be trained, opened by the headers of its files. Its methods load weights where they say so.

    All that is refused raises `Refused` with the key of the configuration, the value and the way out.
    """

    @property
    def experts(self) -> tuple[str, ...]:
        """The names of its networks in the order in which they answer; model.trainable_models says dit, dit2."""

    @property
    def block_classes(self) -> tuple[str, ...]:
        """The names of the classes of its blocks, which FSDP gathers one at a time."""

    @property
    def layer_names(self) -> Mapping[str, str]:
        """{short name that lora.lora_target_modules may use: diffusers' name}."""

    @property
    def dtype(self) -> torch.dtype:
        """What the networks compute in."""

    @property
    def takes_image(self) -> bool:
        """Whether a clip's first frame, or the image given for it, is among what the networks are told."""

    @property
    def pixels_per_token(self) -> int:
        """Pixels on a side of what the network knows as one place: the VAE's factor times the patch."""

    # ---- what headers and configurations tell

    def described_by(self) -> str:
        """Where the model's shape is read from, in words."""

    def schedule(self, steps: int, shift: float | None, latent_shape: Shape) -> Schedule:
        """The denoising steps of latents of this shape, by the stock scheduler's own arithmetic.

        shift: of the sigmas; None for what the model's own scheduler says, Refused where that cannot be known.
        """

    def latent_shape(self, height: int, width: int, num_frames: int) -> Shape:
        """The shape of one sample's latents, of those that are sampled."""

    def check_clips(self, height: int, width: int, num_frames: int, max_pixels: int | None = None) -> None:
        """Refuse clips of a size that the model cannot take; with max_pixels height and width are not used."""

    def differences(self, shift: float | None, guidance: float) -> list[str]:
        """A line for each setting in which the run differs from what the checkpoint says of itself."""

    def linear_layers(self) -> list[str]:
        """diffusers' names of the linear layers of an expert."""

    def adapter_shapes(self, expert: str, adapter: Adapter) -> dict[str, tuple[int, ...]]:
        """{parameter of the policy adapter: its shape} of an expert."""

    def weight_files(self) -> dict[str, list[Path]]:
        """The files of each part (text_encoder, vae, the experts, distillations): what identifies the weights."""

    def settings(self) -> dict[str, Any]:
        """What else the model's answers depend on, as plain JSON."""

    def parts_of(self, expert: str) -> list[str]:
        """Which of weight_files an expert's answers depend on, and how they are put together."""

    def on_meta(self, height: int, width: int, num_frames: int) -> OnMeta:
        """The model's parts without memory, for videos of this size."""

    # ---- what loads weights

    def text_encoder(self, device: torch.device) -> Callable[[str], Conditioning]:
        """Load what encodes prompts; the function that does, for a batch of one."""

    def image_encoder(self, device: torch.device) -> Callable[[Tensor | None, int], Conditioning]:
        """Load what encodes an image, (3, H, W) in [-1, 1], and its clip's number of frames, for a batch of one.

        The image may be None where the model takes none.
        """

    def video_encoder(self, device: torch.device) -> Callable[[Tensor], Tensor]:
        """Load what encodes clips (B, 3, F, H, W) in [-1, 1], and return the function that does.

        It returns the latents that are sampled, (B, *latent_shape) float32: the mode of the VAE's posterior, in the
        stock pipeline's normalisation. Where the first latent frame is conditioning, it is left out.
        """

    def load_expert(self, name: str) -> ModelMixin:
        """A network, frozen and on the CPU."""

    def load_decoder(self, device: torch.device) -> Decoder:
        """The decoder, frozen."""

    # ---- what the loops call

    def collate(self, items: Sequence[Conditioning]) -> Conditioning:
        """One batch of several."""

    def velocity(self, model: nn.Module, x: Tensor, step: int, schedule: Schedule, given: Conditioning) -> Tensor:
        """The velocity, noise - x0, at latents x (B, C, T, h, w) of a denoising step, of the shape and dtype of x.

        model: Experts, or what wraps them; it is called once.
        """

    def guide(self, velocity: Tensor, away: Tensor, scale: float) -> Tensor:
        """The guided velocity, of those of the prompt and of the negative one, as the stock pipeline has it."""

    def save_adapter(self, name: str, expert: ModelMixin, folder: Path, state: dict[str, Tensor]) -> None:
        """Write an expert's adapter below a checkpoint's folder, as the stock pipeline loads it.

        state: lora.adapter_state of the expert, which all processes have gathered. OSError when the disk is full.
        """

    def load_adapter(self, name: str, expert: ModelMixin, folder: Path) -> None:
        """Fill an expert's adapter from such a folder. ValueError or FileNotFoundError where it has another."""

    def attach_adapters(self, experts: Mapping[str, ModelMixin], checkpoint: Path) -> None:
        """Add a checkpoint's adapters to plain experts, for inference. FileNotFoundError where it has none."""


@dataclass(frozen=True, eq=False)
class Velocity:
    """`velocity(x, step)` for one batch's conditioning: what the samplers call. `model` is the prepared module.

    guidance: scale of classifier-free guidance away from `negative`, the conditioning of another prompt (for one sample
    or for B), as an undistilled model is sampled; 1 is none, takes half the time, and is what training and distilled
    models use. away_gradient: whether the answer to the negative prompt is differentiated, too; else it is a constant.
    """

    backbone: Backbone
    model: nn.Module
    conditioning: Conditioning
    schedule: Schedule
    negative: Conditioning | None = None
    guidance: float = 1.0
    away_gradient: bool = True

    def __post_init__(self) -> None:
        if self.guidance != 1 and self.negative is None:
            raise ValueError(f"guidance {self.guidance:g} needs the embedding of a negative prompt")

    def __call__(self, x: Tensor, step: int) -> Tensor:
        """(B, C, T, h, w) of latents x at the schedule's denoising step."""
        velocity = self.backbone.velocity(self.model, x, step, self.schedule, self.conditioning)
        if self.guidance == 1:
            return velocity
        negative = {name: value.expand(len(x), *value.shape[1:]) for name, value in self.negative.items()}
        with torch.set_grad_enabled(self.away_gradient and torch.is_grad_enabled()):
            away = self.backbone.velocity(self.model, x, step, self.schedule, self.conditioning | negative)
        return self.backbone.guide(velocity, away, self.guidance)

    def reference(self, x: Tensor, step: int) -> Tensor:
        """Return the velocity of the model as it was before training: the policy adapter is off.

        Where gradients are enabled and x requires one, it can be differentiated by x, once.
        """
        if torch.is_grad_enabled() and x.requires_grad:
            return _Reference.apply(x, self, step)
        with lora.reference(self.model):
            return self(x, step)


class _Reference(torch.autograd.Function):
    """A reference velocity whose graph is also walked back with the adapter off: checkpoints compute blocks again."""

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
    """The same on a device."""
    return {name: value.to(device) for name, value in conditioning.items()}


def select_rows(conditioning: Conditioning, chosen: Sequence[int]) -> Conditioning:
    """The conditioning of these samples of the batch alone."""
    return {name: value[list(chosen)] for name, value in conditioning.items()}
