"""The data anchor of a run: which clips, moments and noises, and the data loss that is measured at every save."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from tqdm import tqdm

from rewardfl import anchor
from rewardfl.backbones.protocol import Conditioning, Schedule, Velocity, move_to
from rewardfl.copies import to_device
from rewardfl.data.cache import CacheError
from rewardfl.noise import draw_noise, noise_seed
from rewardfl.training.conditions import Conditions
from rewardfl.training.distributed import Distributed
from rewardfl.training.plan import RunPlan
from rewardfl.training.samples import Batch, Rollout, Sample


@dataclass(frozen=True, kw_only=True)
class AnchorOutcome:
    """The data anchor of one pass of B samples."""

    loss: Tensor  # (B,), 0 without an anchor
    has_clip: Tensor  # (B,) bool, whether a sample has latents


@dataclass(frozen=True, kw_only=True)
class Anchors:
    """The data anchor of a run. With data.skip_bad_rows a clip with a lost cache entry has none."""

    plan: RunPlan
    conditions: Conditions
    samples: Sequence[Sample]
    device: torch.device

    def accumulate(
        self, job: Distributed, policy: nn.Module, batch: Batch | Rollout, update: int, share: float
    ) -> AnchorOutcome:
        """Accumulate the gradients of `share` times the weighted loss of one forward pass's samples; return the losses.

        Raise CacheError for lost latents, unless data.skip_bad_rows.
        """
        members, settings, seed = batch.members, self.plan.anchor, self.plan.run.seed
        if settings.weight == 0:
            losses = torch.zeros(len(members), device=self.device)
            return AnchorOutcome(loss=losses, has_clip=losses.bool())
        x0, has_clip = self.latents([member.row for member in members])
        conditioning = move_to(batch.conditioning, self.device)
        draws = []
        in_range = settings.sigmas == "trained_range"
        moments = anchor.draw_moments(settings.draws, self.plan.anchor_steps, seed, update, whole_range=in_range)
        for n, moment in enumerate(moments):
            names = [f"anchor/{self.samples[member.row].row.id}/{member.member}" for member in members]
            seeds = [noise_seed(seed, update, name, n) for name in names]
            draws.append(self._draw(policy, conditioning, batch.schedule.at(moment), seeds, x0))
        weights, micro_batch = share * settings.weight * has_clip, partial(job.accumulate, policy)
        losses = anchor.accumulate(draws, x0, weights, backward=job.backward, micro_batch=micro_batch)
        return AnchorOutcome(loss=losses, has_clip=has_clip)

    def metrics(self, outcome: AnchorOutcome) -> dict[str, float]:
        """Return the anchor's part of actor/loss, and with an anchor actor/anchor_loss, the mean over the clips."""
        metrics = {"actor/loss": self.plan.anchor.weight * float(outcome.loss.mean())}
        if self.plan.anchor.weight:
            metrics["actor/anchor_loss"] = float(outcome.loss.sum() / outcome.has_clip.sum().clamp(min=1))
        return metrics

    def latents(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the rows' clip_latents (B, C, T, h, w), 0 without a clip, and bool (B,) whether there are any."""
        latents, present = [], []
        for row in rows:
            sample, x0 = self.samples[row], None
            try:
                x0 = self.conditions.clip_latents(sample) if sample.row.video or sample.base_latents else None
            except CacheError as error:
                if not self.plan.data.skip_bad_rows:
                    raise
                tqdm.write(f"skipped: {sample.row.id} has no anchor: {error}")
            present.append(x0 is not None)
            latents.append(torch.zeros(1, *self.conditions.latent_shape(sample)) if x0 is None else x0)
        return to_device(torch.cat(latents), self.device), torch.tensor(present, device=self.device)

    @torch.no_grad()
    def data_loss(self, job: Distributed, model: nn.Module) -> dict[str, float]:
        """Return {"actor/data_loss": mean over the measured clips and anchor steps}; {} without clips. Collective.

        The noises are the same at every call. With data.skip_bad_rows, a clip with lost latents is left out.
        """
        clips = [row for row, sample in enumerate(self.samples) if sample.row.video is not None]
        losses = []
        for row, in_shard in job.shard.padded(clips[: self.plan.anchor.measured_clips]):
            sample = self.samples[row]
            schedule = self.plan.schedule(self.conditions.latent_shape(sample))
            x0, has_clip = self.latents([row])
            conditioning = move_to(self.conditions.conditioning(sample), self.device)
            for step in self.plan.anchor_steps:
                seeds = [noise_seed(self.plan.run.seed, -1, f"anchor/{sample.row.id}", step)]
                draw = self._draw(model, conditioning, schedule.at(step), seeds, x0, to_data=True)
                loss = anchor.velocity_misfit(draw, x0)
                losses += loss.tolist() if in_shard and has_clip else []
        losses = job.gather_lists(losses)
        return {"actor/data_loss": sum(losses) / len(losses)} if losses else {}

    def _draw(
        self,
        network: nn.Module,
        conditioning: Conditioning,
        at: Schedule,
        seeds: Sequence[int],
        x0: Tensor,
        *,
        to_data: bool = False,
    ) -> anchor.Draw:
        """Return a draw at the one step of `at`. The velocity is the prompt's own, without guidance."""
        velocity = Velocity(backbone=self.conditions.backbone, model=network, conditioning=conditioning, schedule=at)
        references = {"data": None, "reference": partial(velocity.reference, step=0)}
        reference = references["data" if to_data else self.plan.anchor.target]
        noise = torch.cat([draw_noise((1, *x0.shape[1:]), seed, self.device) for seed in seeds])
        return anchor.Draw(velocity=partial(velocity, step=0), sigma=at.sigmas[0], noise=noise, reference=reference)
