"""Videos by the ODE of the deployed sampler under the current weights: evaluation and sample videos."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rewardfl import lora, reward_flow
from rewardfl.backbones import protocol
from rewardfl.backbones.protocol import Backbone, Conditioning, Decoder, Experts, Velocity
from rewardfl.config.schema import WholeSampleConfig
from rewardfl.noise import draw_noise, noise_seed
from rewardfl.training.conditions import Conditions
from rewardfl.training.samples import Sample


@dataclass(frozen=True, kw_only=True)
class DeployedSampler:
    """The sampler of one run as it is deployed. steps: their number; skip: replace a clip with lost cache entries."""

    backbone: Backbone
    model: Experts
    decoder: Decoder
    conditions: Conditions
    negative: Conditioning | None
    settings: WholeSampleConfig
    steps: int
    seed: int
    skip: bool
    device: torch.device

    def base(self, clips: Sequence[Sample], row: int, n: int) -> tuple[int, Tensor, Tensor]:
        """Return what `generate` does without the policy adapter, in as many steps as a rollout takes."""
        with lora.reference(self.model):
            return replace(self, steps=self.settings.num_inference_steps).generate(clips, row, n)

    def generate(self, clips: Sequence[Sample], row: int, n: int = 0) -> tuple[int, Tensor, Tensor]:
        """Return (row, its video (3, F, H, W), its latents) under the current weights; n: which of its noises."""
        row, conditioning = self.conditions.read_or_substitute(clips, row, skip=self.skip)
        shape, seed = self.conditions.latent_shape(clips[row]), noise_seed(self.seed, -1, clips[row].row.id, n)
        conditioning = protocol.move_to(conditioning, self.device)
        schedule = self.backbone.schedule(self.steps, self.settings.shift, shape)
        velocity = Velocity(
            backbone=self.backbone, model=self.model, conditioning=conditioning, schedule=schedule,
            negative=self.negative, guidance=self.settings.guidance_scale,
        )  # fmt: skip
        x0 = reward_flow.rollout(velocity, draw_noise((1, *shape), seed, self.device), schedule.sigmas, keep=()).x0
        return row, self.decoder.decode(x0, conditioning)[0].float(), x0
