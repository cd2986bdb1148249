"""Videos by the ODE of the deployed sampler, and eval/*: scores of held-out clips during training."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rewardfl import lora, reward_flow
from rewardfl.backbones.protocol import Conditioning, Decoder, Experts, Velocity, move_to
from rewardfl.config import DataConfig
from rewardfl.noise import draw_noise, noise_seed
from rewardfl.rewards import FaceIdentityReward, async_scoring
from rewardfl.rewards import metrics as reward_metrics
from rewardfl.rewards.face.identity_kept import Scale, ThroughVae, find_scale, why_no_scale
from rewardfl.rewards.scoring import Term, concat_results
from rewardfl.training.clip_scan import load_video
from rewardfl.training.conditions import Conditions
from rewardfl.training.distributed import Distributed
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
        conditioning = move_to(conditioning, self.device)
        schedule = backbone.schedule(steps, settings.shift, shape)
        velocity = Velocity(
            backbone=backbone, model=self.model, conditioning=conditioning, schedule=schedule, negative=self.negative,
            guidance=settings.guidance_scale,
        )  # fmt: skip
        x0 = reward_flow.rollout(velocity, draw_noise((1, *shape), seed, self.device), schedule.sigmas, keep=()).x0
        return row, self.decoder.decode(x0, conditioning)[0].float(), x0


@torch.no_grad()
def find_scales(
    settings: DataConfig,
    job: Distributed,
    terms: Sequence[Term],
    conditions: Conditions,
    decoder: Decoder,
    clips: Sequence[Sample],
) -> dict[int, Scale]:
    """Return {index of a face reward that follows one person: scale of identity kept, from clips through the VAE}."""
    judges = {
        i: term.reward
        for i, term in enumerate(terms)
        if isinstance(term.reward, FaceIdentityReward) and term.reward.people == "largest"
    }
    if not clips or not judges:
        return {}
    has_clips = all(sample.row.video is not None for sample in clips)
    missing = "" if has_clips else "a row of evaluation.eval_clips has no video"
    if reason := why_no_scale(len({sample.row.who for sample in clips}), missing):
        job.print(f"note: eval/* has no identity kept: {reason}")
        return {}
    conditions.fill_latents(clips, lambda sample: load_video(settings, sample.row), job.device, job.shard)
    job.wait()
    through_vae = []
    for sample in job.shard.take(clips):
        conditioning = move_to(conditions.conditioning(sample), job.device)
        video = decoder.decode(conditions.clip_latents(sample).to(job.device), conditioning)[0].float()
        for i, judge in judges.items():
            pool = sample.references[i]["embeddings"]
            score = judge.identity.score(video, pool)
            face_sim, face = (0.0, torch.zeros_like(pool[0])) if score is None else (score.mean.item(), score.embedding)
            through_vae.append(
                (i, ThroughVae(person=sample.row.who, face_sim=face_sim, face=face.cpu(), pool=pool.mean(0).cpu()))
            )
    through_vae = job.gather_lists(through_vae)
    scales = {i: find_scale([clip for judge, clip in through_vae if judge == i]) for i in judges}
    return {i: scale for i, scale in scales.items() if scale is not None}


@torch.no_grad()
def evaluate(
    noises: int,
    job: Distributed,
    terms: Sequence[Term],
    pools: Sequence[async_scoring.WorkerPool | None],
    clips: Sequence[Sample],
    generate: Callable[[int, int], tuple[int, Tensor, Tensor]],
    scales: Mapping[int, Scale],
) -> dict[str, float]:
    """Return eval/*: the rewards' scores of `noises` videos of each clip. Each process scores its shard.

    generate: (row, index of its noise) -> (row, its video (3, F, H, W), its latents). scales: of `find_scales`.
    """
    outputs, people = [], []
    for (row, n), in_shard in job.shard.padded(itertools.product(range(len(clips)), range(noises))):
        row, video, _ = generate(row, n)
        if in_shard:
            pending = async_scoring.submit(terms, video[None], [clips[row].references], pools)
            outputs.append(async_scoring.collect(pending))
            people.append(clips[row].row.who)
    outputs, people = job.gather_lists(outputs), job.gather_lists(people)
    metrics = {"eval/failed": reward_metrics.failed_fraction(outputs)}
    metrics |= reward_metrics.deviations(terms, outputs, "eval")
    for i, scale in scales.items():
        parts = concat_results([results[i] for results in outputs]).output.parts
        if "face_score" in parts:  # missing where the judge failed for every clip
            prefix = "eval" if i == 0 else f"eval/{terms[i].label}"
            metrics[f"{prefix}/identity_kept"] = scale.place_mean(mean_by_person(people, parts["face_score"].tolist()))
    return metrics | reward_metrics.means(terms, outputs, "eval", metrics)


def mean_by_person(people: Sequence[str], values: Sequence[float]) -> dict[str, float]:
    """Return the mean of the values of each person that are not nan."""
    by_person: dict[str, list[float]] = {}
    for person, value in zip(people, values, strict=True):
        if not math.isnan(value):
            by_person.setdefault(person, []).append(value)
    return {person: sum(numbers) / len(numbers) for person, numbers in by_person.items()}
