"""What a model is to the rest of the house: the names that every backbone answers to, and what all of them share.

Everything that tells one model from another is behind `Backbone`: which networks there are and which of them answers at
a denoising step, what is known of a prompt and an image, how a network is called, how latents become frames. Nothing
outside of a backbone's own folder reads its conditioning.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from rewardfl import lora

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}  # of the frozen weights, by config word
# what the networks are told of a batch, every tensor (B, ...), under names that only the backbone knows
Conditioning = dict[str, Tensor]
Shape = tuple[int, int, int, int]  # (channels, frames, height, width) of one sample's latents
Caches = list[Tensor | str | None]  # what a decoder remembers from one chunk of latents to the next


@dataclass(frozen=True)
class Schedule:
    """The denoising steps of one schedule: step i goes from sigmas[i] to sigmas[i + 1].

    `experts` is the only answer to the question which expert a step belongs to; nothing else compares a sigma, or a
    timestep, with the boundary between them.
    """

    sigmas: Tensor  # (N + 1,) float32, descending; the last is 0
    timesteps: Tensor  # (N,) float32, what the experts are told: 1000 * sigma
    experts: tuple[str, ...]  # (N,) the name of the one that answers

    def __len__(self) -> int:
        """The number of steps."""
        return len(self.experts)

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
    caches: dict[int, Caches]


class Decoder(Protocol):
    """From latents (B, C, T, h, w) as the networks see them to video (B, 3, F, H, W) in [-1, 1], and its gradient."""

    def decode(self, latents: Tensor) -> Tensor:
        """The video, without gradient."""

    def decode_with_caches(self, latents: Tensor, caches: str = "keep") -> Decoded:
        """The video, for a `vjp` to come; caches: train.decode_caches."""

    def vjp(self, latents: Tensor, grad_video: Tensor, decoded: Decoded | None = None) -> Tensor:
        """(d video / d latents)^T grad_video, (B, C, T, h, w)."""


class Backbone(Protocol):
    """A model that can be trained, opened by the headers of its files. Its methods load weights where they say so."""

    experts: tuple[str, ...]  # in the order in which they answer
    dtype: torch.dtype  # what the networks compute in

    def schedule(self, steps: int, shift: float) -> Schedule:
        """The denoising steps."""

    def latent_shape(self, height: int, width: int, num_frames: int) -> Shape:
        """The shape of one sample's latents."""

    def text_encoder(self, device: torch.device) -> Callable[[str], Conditioning]:
        """Load what encodes prompts; the function that does, for a batch of one."""

    def image_encoder(self, device: torch.device) -> Callable[[Tensor, int], Conditioning]:
        """Load what encodes an image, (3, H, W) in [-1, 1], and its clip's number of frames, for a batch of one."""

    def collate(self, items: Sequence[Conditioning]) -> Conditioning:
        """One batch of several."""

    def load_expert(self, name: str) -> nn.Module:
        """A network, frozen and on the CPU."""

    def load_decoder(self, device: torch.device) -> Decoder:
        """The decoder, frozen."""

    def velocity(self, model: nn.Module, x: Tensor, step: int, schedule: Schedule, given: Conditioning) -> Tensor:
        """The velocity, noise - x0, at latents x (B, C, T, h, w) of a denoising step, of the shape and dtype of x.

        model: Experts, or what wraps them; it is called once.
        """


class Velocity:
    """`velocity(x, step)` for one batch's conditioning: what the samplers call. `model` is the prepared module.

    guidance: scale of classifier-free guidance away from `negative`, the conditioning of another prompt (for one sample
    or for B), as an undistilled model is sampled; 1 is none, takes half the time, and is what training and distilled
    models use.
    """

    def __init__(
        self,
        backbone: Backbone,
        model: nn.Module,
        conditioning: Conditioning,
        schedule: Schedule,
        negative: Conditioning | None = None,
        guidance: float = 1.0,
    ):
        if guidance != 1 and negative is None:
            raise ValueError(f"guidance {guidance:g} needs the embedding of a negative prompt")
        self.backbone, self.model, self.conditioning, self.schedule = backbone, model, conditioning, schedule
        self.negative, self.guidance = negative, guidance

    def __call__(self, x: Tensor, step: int) -> Tensor:
        """(B, C, T, h, w) of latents x at the schedule's denoising step."""
        velocity = self.backbone.velocity(self.model, x, step, self.schedule, self.conditioning)
        if self.guidance == 1:
            return velocity
        negative = {name: value.expand(len(x), *value.shape[1:]) for name, value in self.negative.items()}
        away = self.backbone.velocity(self.model, x, step, self.schedule, self.conditioning | negative)
        return away + self.guidance * (velocity - away)

    def reference(self, x: Tensor, step: int) -> Tensor:
        """The velocity of the model as it was before training: the policy adapter is off."""
        with lora.reference(self.model):
            return self(x, step)


def to(conditioning: Conditioning, device: str | torch.device) -> Conditioning:
    """The same on a device."""
    return {name: value.to(device) for name, value in conditioning.items()}


def rows(conditioning: Conditioning, chosen: Sequence[int]) -> Conditioning:
    """The conditioning of these samples of the batch alone."""
    return {name: value[list(chosen)] for name, value in conditioning.items()}
