"""Videos by the ODE of the deployed sampler under the current weights: evaluation and sample videos."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rewardfl import lora, reward_flow
from rewardfl.backbones import protocol
from rewardfl.backbones.protocol import Conditioning, Decoder, Experts, Velocity
from rewardfl.noise import draw_noise, noise_seed
from rewardfl.training.conditions import Conditions
from rewardfl.training.plan import GroupPlan
from rewardfl.training.samples import Sample


@dataclass(frozen=True, kw_only=True)
class DeployedSampler:
    """The sampler of one run as it is deployed. With data.skip_bad_rows it replaces a clip with lost cache entries."""

    plan: GroupPlan
    model: Experts
    decoder: Decoder
    conditions: Conditions
    negative: Conditioning | None
    device: torch.device

    def base(self, clips: Sequence[Sample], row: int, n: int) -> tuple[int, Tensor, Tensor]:
        """Return what `generate` does without the policy adapter, in as many steps as a rollout takes."""
        with lora.reference(self.model):
            return self.generate(clips, row, n, self.plan.sample.num_inference_steps)

    def generate(
        self, clips: Sequence[Sample], row: int, n: int = 0, steps: int | None = None
    ) -> tuple[int, Tensor, Tensor]:
        """Return (row, its video (3, F, H, W), its latents) under the current weights.

        n: which of the row's noises. steps: their number; None takes the evaluation's.
        """
        settings, backbone = self.plan.sample, self.conditions.backbone
        steps = steps or self.plan.evaluation.eval_inference_steps or settings.num_inference_steps
        row, conditioning = self.conditions.read_or_substitute(clips, row, skip=self.plan.data.skip_bad_rows)
        shape, seed = self.conditions.latent_shape(clips[row]), noise_seed(self.plan.run.seed, -1, clips[row].row.id, n)
        conditioning = protocol.move_to(conditioning, self.device)
        schedule = backbone.schedule(steps, settings.shift, shape)
        velocity = Velocity(
            backbone=backbone, model=self.model, conditioning=conditioning, schedule=schedule, negative=self.negative,
            guidance=settings.guidance_scale,
        )  # fmt: skip
        x0 = reward_flow.rollout(velocity, draw_noise((1, *shape), seed, self.device), schedule.sigmas, keep=()).x0
        return row, self.decoder.decode(x0, conditioning)[0].float(), x0
