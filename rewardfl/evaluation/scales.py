"""Scales of rewards on given clips (tools/reward_scales.py)."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from rewardfl import command_line, data
from rewardfl import config as configuration
from rewardfl.evaluation import arms, judging
from rewardfl.files import escape_control
from rewardfl.rewards import build_terms
from rewardfl.rewards.scoring import Reference, Term
from rewardfl.training import plan, setup_rewards
from rewardfl.training.clip_scan import load_sized_example


@dataclass(frozen=True, kw_only=True)
class RewardScale:
    """Scores of one reward on n videos, NaN where invalid. Gradients are NaN also where the reward has no gradient."""

    term: Term
    scores: Tensor  # (n,)
    norms: Tensor  # (n,) Euclidean, of d score / d video
    cosines: Tensor  # (n,) of that gradient with the first reward's

    @property
    def pull(self) -> float:
        """Return the mean norm of weight * gradient / std, the gradient in the loss."""
        return self.term.weight * float(self.norms.nanmean()) / self.term.std


def print_scales(args: argparse.Namespace) -> int:
    """Sample, score and print; return the exit code."""
    device = torch.device(command_line.resolve_device(args.device))
    cfg = configuration.load(args.config, args.overrides, configuration.RewardFlConfig)
    backbone = plan.open_model(cfg)
    terms = build_terms(plan.find_rewards(cfg, backbone), device)
    judges = judging.Judges(faces={}, terms=terms, periods=(), device=str(device))
    usable: dict[str, tuple[data.Row, judging.References]] = {}
    rows = data.load_metadata(cfg.data.file_name)
    for row in data.assign_images(rows, cfg.run.seed) if backbone.takes_image else rows:
        try:
            if problems := [row.problem] if row.problem else setup_rewards.missing_references(row, terms):
                raise data.DataError("; ".join(problems))
            references = judging.prepare_row(judges, row, load_sized_example(cfg.data, row), skip=False)[0]
            if references.terms.get(terms[0].label) is None:
                raise data.DataError(f"{terms[0].reward.nothing_found} {row.reference}")
            usable[row.id] = row, references
        except data.DataError as error:
            print(escape_control(f"skipped: line {row.line}: {error}"))
        if len(usable) == args.rows:
            break
    if not usable:
        raise data.DataError(f"{cfg.data.file_name}: no clip can be used")
    base = arms.Arm(name=arms.BASE, steps=cfg.sample.num_inference_steps)
    inputs = ((row, references.image) for row, references in usable.values())
    with torch.no_grad():  # the videos come from the noise of training's first epoch
        conditioning = arms.encode_inputs(cfg.sample, cfg.data.num_frames, backbone, inputs, device)
        model, decoder = arms.load_model(backbone, None, args.experts, device)
        sampler = arms.Sampler(
            sampling=cfg.sample, num_frames=cfg.data.num_frames, backbone=backbone, experts=model, decoder=decoder,
            conditioning=conditioning, sizes={key: references.size for key, (_, references) in usable.items()},
            device=device,
        )  # fmt: skip
        rows = tqdm([row for row, _ in usable.values()], desc="sampling")
        videos = [sampler.sample([(row, cfg.run.seed)], base)[0] for row in rows]
    compared = [[references.terms.get(term.label) for term in terms] for _, references in usable.values()]
    print(format_scales(measure_scales(terms, videos, compared)))
    return 0


def measure_scales(
    terms: Sequence[Term], videos: Sequence[Tensor], references: Sequence[Sequence[Reference]]
) -> list[RewardScale]:
    """Score every video (3, F, H, W) by every reward, one at a time. references: by video and then by reward."""
    rows = []
    for video, video_references in zip(videos, references, strict=True):
        first, row = None, []
        for term, reference in zip(terms, video_references, strict=True):
            score, gradient = score_and_gradient(term, video, reference)
            first = gradient if term is terms[0] else first
            norm = math.nan if gradient is None else float(gradient.double().norm())
            row.append((score, norm, cosine(gradient, first)))
        rows.append(row)
    figures = torch.tensor(rows, dtype=torch.float64).permute(1, 2, 0)  # (terms, 3, videos)
    return [
        RewardScale(term=term, scores=scores, norms=norms, cosines=cosines)
        for term, (scores, norms, cosines) in zip(terms, figures, strict=True)
    ]


def score_and_gradient(term: Term, video: Tensor, reference: Reference) -> tuple[float, Tensor | None]:
    """Return the score of a video (3, F, H, W), NaN where invalid, and d score / d video if there is one."""
    video = video[None].detach().requires_grad_(term.reward.differentiable)
    output = term.reward(video, [reference])
    if not output.valid:
        return math.nan, None
    gradient = torch.autograd.grad(output.score.sum(), video)[0][0] if term.reward.differentiable else None
    return float(output.score.detach()), gradient


def cosine(a: Tensor | None, b: Tensor | None) -> float:
    """Return the cosine of two gradients; NaN where one is missing or zero, as above a reward's cap."""
    if a is None or b is None or not a.any() or not b.any():
        return math.nan
    return float(torch.nn.functional.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0))


def shares(scales: Sequence[RewardScale]) -> list[float]:
    """Return each reward's share of the sum of all weighted gradients' norms; 0 for those that only measure."""
    pulls = [scale.pull if scale.term.weight > 0 else 0.0 for scale in scales]
    total = sum(pull for pull in pulls if not math.isnan(pull))
    return [pull / total if total > 0 else math.nan for pull in pulls]


def equal_weight(scale: RewardScale, first: RewardScale) -> float:
    """Return the weight that gives this reward the pull of the first one; NaN where one has no gradient."""
    per_weight = float(scale.norms.nanmean()) / scale.term.std
    return first.pull / per_weight if per_weight > 0 else math.nan


def format_scales(scales: Sequence[RewardScale]) -> str:
    """Return a table of the rewards. Invalid scores are left out, and counted next to the reward's name."""
    rows: list[tuple[str, ...]] = [("reward", "mean", "std", "gradient", "cosine", "weight", "share", "equal at")]
    for scale, share in zip(scales, shares(scales), strict=True):
        term, valid = scale.term, scale.scores[~scale.scores.isnan()]
        name = (
            term.label
            if len(valid) == len(scale.scores)
            else f"{term.label} ({len(valid)} of {len(scale.scores)} clips)"
        )
        std = float(valid.std()) if len(valid) > 1 else math.nan
        gradient = (float(values.nanmean()) for values in (scale.norms, scale.cosines))
        figures = (float(valid.mean()), std, *gradient, term.weight, 100 * share, equal_weight(scale, scales[0]))
        texts = ["-" if math.isnan(figure) else f"{figure:.3g}" for figure in figures]
        rows.append((name, *texts[:5], f"{texts[5]} %", texts[6]))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
