"""Batches of reward feedback learning, and videos from the same noises."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rewardfl import lora, reward_flow
from rewardfl.backbones import protocol
from rewardfl.backbones.protocol import Conditioning, Decoder, Experts, Velocity
from rewardfl.copies import to_device
from rewardfl.noise import draw_noise, training_noise_seed
from rewardfl.training.conditions import Conditions, read_or_substitute
from rewardfl.training.plan import RewardFlPlan
from rewardfl.training.samples import Batch, Sample
from rewardfl.training.shard import Shard


@dataclass(frozen=True, kw_only=True)
class BatchBuilder:
    """Builds the batches of reward feedback learning: x is each clip's noise, or its cached boundary latents.

    With data.skip_bad_rows another clip replaces a clip that the cache has lost.
    """

    plan: RewardFlPlan
    conditions: Conditions
    samples: Sequence[Sample]
    device: torch.device

    @property
    def cached(self) -> bool:
        """Return whether the first expert's steps are in the cache."""
        return self.plan.memory.untrained == "boundary_cache"

    def batch(self, visits: Sequence[tuple[int, int]]) -> Batch:
        """Build the batch of (epoch, row); sample videos have epoch -1. Raise CacheError for a lost entry."""
        skip = self.plan.data.skip_bad_rows
        taken = [read_or_substitute(self.samples, row, partial(self._read, epoch), skip=skip) for epoch, row in visits]
        rows = [row for row, _ in taken]
        conditioning = self.conditions.backbone.collate([conditioning for _, (conditioning, _) in taken])
        schedule = self.plan.schedule(self.conditions.latent_shape(self.samples[rows[0]]))
        return Batch(
            rows=rows,
            replaced=[row != requested for row, (_, requested) in zip(rows, visits, strict=True)],
            conditioning=protocol.move_to(conditioning, self.device),
            x=to_device(torch.cat([x for _, (_, x) in taken]), self.device),
            schedule=schedule,
            start_step=schedule.handover if self.cached else 0,
        )

    def fill(self, share: Shard) -> None:
        """Compute the boundary latents that the cache lacks, for training and for the first samples' videos."""
        count = self.plan.sample.noises_per_sample
        epochs = range(count) if isinstance(count, int) else range(0)
        noises = [(sample, self._noise_seed(sample, epoch)) for sample in self.samples for epoch in epochs]
        noises += [(sample, self._noise_seed(sample, -1)) for sample in self.samples[: self.plan.run.sample_videos]]
        self.conditions.fill_boundary(noises, self.plan.schedule, self.device, share)

    def _noise_seed(self, sample: Sample, epoch: int) -> int:
        return training_noise_seed(self.plan.run.seed, epoch, sample.row.id, self.plan.sample.noises_per_sample)

    def _read(self, epoch: int, row: int) -> tuple[protocol.Conditioning, Tensor]:
        sample = self.samples[row]
        seed, shape = self._noise_seed(sample, epoch), self.conditions.latent_shape(sample)
        if self.cached:
            x = self.conditions.boundary_latents(sample, seed, self.plan.schedule(shape))
        else:
            x = draw_noise((1, *shape), seed)
        return self.conditions.conditioning(sample), x


@dataclass(frozen=True, kw_only=True)
class TrainingSampler:
    """The sampler of reward feedback learning: videos from the noises, or boundary latents, that it trains on."""

    builder: BatchBuilder
    model: Experts
    decoder: Decoder
    negative: Conditioning | None

    def base(self, clips: Sequence[Sample], row: int, n: int) -> tuple[int, Tensor, Tensor]:
        """Return what `generate` does without the policy adapter."""
        with lora.reference(self.model):
            return self.generate(clips, row, n)

    def generate(self, _: Sequence[Sample], row: int, n: int = -1) -> tuple[int, Tensor, Tensor]:
        """Return (row, its video (3, F, H, W), its latents) from the noise of epoch n, by default a separate one."""
        batch = self.builder.batch([(n, row)])
        velocity = Velocity(
            backbone=self.builder.conditions.backbone, model=self.model, conditioning=batch.conditioning,
            schedule=batch.schedule, negative=self.negative, guidance=self.builder.plan.sample.guidance_scale,
        )  # fmt: skip
        x0 = reward_flow.rollout(velocity, batch.x, batch.schedule.sigmas, keep=(), start=batch.start_step).x0
        return batch.rows[0], self.decoder.decode(x0, batch.conditioning)[0], x0
