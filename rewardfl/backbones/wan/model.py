"""Wan2.2 I2V as the samplers see it: its conditioning, which expert answers when, its velocity.

load.py loads it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanImageToVideoPipeline, WanTransformer3DModel
from torch import Tensor, nn

from rewardfl import lora
from rewardfl.flow import linear_sigmas

PARTS = {
    "high_noise": "transformer",
    "low_noise": "transformer_2",
}  # where a diffusers pipeline keeps each expert
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}  # of the frozen weights, by config word
TEXT_LENGTH = 512  # tokens; the length that diffusers' pipeline pads prompts to


@dataclass(frozen=True)
class Conditioning:
    """What the experts are told about a batch. text: (B, 512, d); image: (B, temporal factor + 16, T, h, w)."""

    text: Tensor
    image: Tensor

    @staticmethod
    def stack(items: Sequence["Conditioning"]) -> "Conditioning":
        return Conditioning(torch.cat([item.text for item in items]), torch.cat([item.image for item in items]))

    def rows(self, chosen: Sequence[int]) -> "Conditioning":
        """Of these samples of the batch alone."""
        return Conditioning(self.text[list(chosen)], self.image[list(chosen)])

    def latent_shape(self, channels: int) -> tuple[int, ...]:
        """(1, channels, T, h, w) of one of its samples' latents."""
        return (1, channels, *self.image.shape[2:])

    def to(self, device: torch.device) -> "Conditioning":
        return Conditioning(self.text.to(device), self.image.to(device))


@dataclass(frozen=True)
class Schedule:
    """The denoising steps of one schedule: step i goes from sigmas[i] to sigmas[i + 1].

    `experts` is the only answer to the question which expert a step belongs to; nothing else compares a sigma, or a
    timestep, with the boundary between them.
    """

    sigmas: Tensor  # (N + 1,) float32, descending; the last is 0
    timesteps: Tensor  # (N,) float32, what the experts are told: 1000 * sigma
    experts: tuple[str, ...]  # (N,) high_noise or low_noise

    def __len__(self) -> int:
        """The number of steps."""
        return len(self.experts)

    def until(self, final_step: int) -> "Schedule":
        """The schedule that stops after `final_step`, whose own step goes straight to sigma 0: its x0 prediction."""
        kept = final_step + 1
        sigmas = torch.cat([self.sigmas[:kept], self.sigmas.new_zeros(1)])
        return Schedule(sigmas, self.timesteps[:kept], self.experts[:kept])


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


class Experts(nn.Module):
    """Both experts behind one velocity, and one module, so that a wrapper sees every trained parameter.

    outside: experts that are not trained and stay out of the module tree: DDP, DeepSpeed, FSDP and `.to` then leave
    them where offload.place put them. An expert may be None when no step will ask for it.
    """

    def __init__(
        self,
        high_noise: WanTransformer3DModel | None,
        low_noise: WanTransformer3DModel | None,
        outside: Sequence[str] = (),
    ):
        super().__init__()
        experts = {"high_noise": high_noise, "low_noise": low_noise}
        self.inside = nn.ModuleDict({name: expert for name, expert in experts.items() if name not in outside})
        self.outside = {name: experts[name] for name in outside}  # a plain dict: no submodules

    def forward(self, name: str, x: Tensor, timestep: Tensor, text: Tensor, image: Tensor) -> Tensor:
        """Velocity (B, 16, T, h, w), float32 or finer, of the expert called `name` at latents x of the same shape.

        timestep: a scalar for the batch. It stays float32: 892.857 would be 892 in bfloat16.
        """
        expert = self.outside[name] if name in self.outside else self.inside[name]
        timestep = timestep.to(x.device).expand(len(x))
        inputs = torch.cat([x, image.to(x.dtype)], 1).to(expert.dtype)
        return expert(inputs, timestep, text.to(expert.dtype), return_dict=False)[0].to(x.dtype)


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


def encode(pipe: WanImageToVideoPipeline, prompt: str, image: Tensor, num_frames: int) -> Conditioning:
    """Conditioning of one sample. image: (3, H, W) in [-1, 1], the clip's first frame."""
    return Conditioning(encode_text(pipe, prompt), encode_image(pipe, image, num_frames))


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


class Velocity:
    """`velocity(x, step)` for one batch's conditioning: what the samplers call. `model` is the prepared module.

    guidance: scale of classifier-free guidance away from the text `negative` (1 or B, 512, d), as the undistilled model
    is sampled (3.5); 1 is none, takes half the time, and is what training and distilled models use.
    """

    def __init__(
        self,
        model: nn.Module,
        conditioning: Conditioning,
        schedule: Schedule,
        negative: Tensor | None = None,
        guidance: float = 1.0,
    ):
        if guidance != 1 and negative is None:
            raise ValueError(f"guidance {guidance:g} needs the embedding of a negative prompt")
        self.model, self.conditioning, self.schedule = model, conditioning, schedule
        self.negative, self.guidance = negative, guidance

    def __call__(self, x: Tensor, step: int) -> Tensor:
        """(B, 16, T, h, w) of latents x at the schedule's denoising step."""
        expert, timestep = self.schedule.experts[step], self.schedule.timesteps[step]
        velocity = self.model(expert, x, timestep, self.conditioning.text, self.conditioning.image)
        if self.guidance == 1:
            return velocity
        negative = self.negative.expand(len(x), -1, -1)
        away = self.model(expert, x, timestep, negative, self.conditioning.image)
        return away + self.guidance * (velocity - away)

    def reference(self, x: Tensor, step: int) -> Tensor:
        """The velocity of the model as it was before training: the policy adapter is off."""
        with lora.reference(self.model):
            return self(x, step)


class LinearFlowEuler(FlowMatchEulerDiscreteScheduler):
    """diffusers' Euler scheduler on `flow.linear_sigmas`, for a stock pipeline that is to sample as we do.

    The pipeline calls set_timesteps(n) without sigmas, and the parent then shifts an already shifted range:
    with shift 5 and 8 steps its last sigma is 0.024, not 0.417.
    """

    def set_timesteps(self, num_inference_steps: int, device: torch.device | None = None) -> None:
        super().set_timesteps(num_inference_steps, device=device)
        self.sigmas = linear_sigmas(num_inference_steps, self.config.shift)
        self.timesteps = (1000 * self.sigmas[:-1]).to(device)
