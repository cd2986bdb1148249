"""Evaluation of one adapter of an image model (tools/evaluate.py): pictures before and after it."""

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageOps
from torch import Tensor
from tqdm import tqdm

from rewardfl import config, data, outputs
from rewardfl.backbones.protocol import Backbone
from rewardfl.evaluation import arms
from rewardfl.evaluation.arms import Arm, Job, Sampler
from rewardfl.evaluation.figures import format_interval, interval
from rewardfl.files import atomic_write, escape_control
from rewardfl.rewards import RewardError, build_terms, resolve_rewards
from rewardfl.rewards.base import NONFINITE
from rewardfl.rewards.scoring import Reference, Term, score_safely
from rewardfl.training import clip_scan, plan, setup_model, setup_rewards

PICTURE = "images/{:04d}_seed{}.png"  # of a pair: index of its row, number of its noise

DISAGREEMENTS = "disagreements.png"

ARMS = ("before", "after")

_Item = TypeVar("_Item")

SHOWN, SIDE = 24, 96  # pairs in the grid, and the minimum height of a picture in it


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One prompt and noise. picture: uint8 (H, 2 W, 3), of both arms. scores: (before, after) by label[/part]."""

    row: data.Row
    seed: int
    picture: Tensor
    scores: dict[str, tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Disagreement:
    """A picture, uint8 (H, W, 3), of one arm, and two figures of it that differ, by name and in their order."""

    prompt: str
    arm: str
    picture: Tensor
    figures: dict[str, float]

    @property
    def margin(self) -> float:
        first, second = self.figures.values()
        return first - second


@torch.no_grad()
def run(args: argparse.Namespace, arm: Arm, folder: outputs.Folder) -> int:
    """Score pictures before and after an adapter by the run's rewards; return the exit code."""
    cfg, out, device = arms.load_config(args), folder.path, torch.device(args.device)
    rows = data.load_metadata(cfg.data.file_name, "--data")
    names = [PICTURE.format(row.index, seed) for row in rows for seed in range(args.seeds)]
    names += ["report.json", "grid.png", DISAGREEMENTS]
    folder.claim(names)
    (out / DISAGREEMENTS).unlink(missing_ok=True)
    (out / "images").mkdir(exist_ok=True)
    resolved = resolve_rewards(config.list_reward_specs(cfg, for_evaluation=True))
    specs = [(replace(spec, settings={**cls.evaluation_settings, **spec.settings}), cls) for spec, cls in resolved]
    plan.check_frames(cfg.data.num_frames, specs)
    terms = build_terms(specs, device)
    backbone = setup_model.open_model(cfg)
    problems = []
    for row in rows:
        header = data.inspect_row(row, cfg.data.num_frames, cfg.data.fps, takes_image=backbone.takes_image)
        texts = [*header.problems]
        texts += filter(None, [plan.size_problem(cfg.data, backbone, row.size)])
        # each term separately, because a call with all of them checks only the trained ones
        texts += [text for term in terms for text in setup_rewards.missing_references(cfg, row, [term])]
        problems += [(row.line, text) for text in texts]
    rows, bad = data.usable_rows(rows, problems, skip_bad_rows=cfg.data.skip_bad_rows)
    for line in bad:
        print(escape_control(f"skipped: {line}"))
    examples = {row.id: (row, clip_scan.load_sized_example(cfg.data, row)) for row in rows}
    sampler = load_sampler(cfg.sample, cfg.data.num_frames, backbone, examples, arm.adapter, args.experts, device)
    references = {
        key: [term.reward.reference(example.reference.to(device), row.prompt) for term in terms]
        for key, (row, example) in examples.items()
    }
    jobs = [(row, seed) for seed in range(args.seeds) for row in rows]
    pairs = sample_pairs(sampler, terms, arm, arms.batches(jobs, sampler.sizes, args.batch), references)
    report = summarise_images(pairs, {term.label: term.weight > 0 for term in terms}) | {"command": sys.argv}
    opinions = [[f"{term.label}/{part}" for part in term.reward.second_opinion] for term in terms]
    disagreements = [item for both in opinions if both for item in find_disagreements(pairs, *both)]
    report["disagreements"] = count_disagreements(disagreements)
    for pair in pairs:
        data.write_picture(out / PICTURE.format(pair.row.index, pair.seed), pair.picture[None])
    atomic_write(out / "report.json", json.dumps(report, indent=2) + "\n")
    draw_image_grid(pairs, out / "grid.png")
    if disagreements:
        draw_disagreements(disagreements, out / DISAGREEMENTS)
    print(format_table(report))
    print(f"\nreport: {out / 'report.json'}\npictures: {out / 'grid.png'}, {out / 'images'}")
    return 0


@torch.no_grad()
def load_sampler(
    sampling: arms.Sampling,
    num_frames: int,
    backbone: Backbone,
    examples: Mapping[str, tuple[data.Row, data.Example]],
    adapter: Path | None,
    experts: arms.InferencePlacement,
    device: torch.device,
) -> Sampler:
    """Load the run's model with the checkpoint's adapter. examples: by row id."""
    inputs = ((row, example.image) for row, example in examples.values())
    conditioning = dict(arms.encode_inputs(sampling, num_frames, backbone, inputs, device))
    sizes = {key: example.size for key, (_, example) in examples.items()}
    model, decoder = arms.load_model(backbone, adapter, experts, device)
    return Sampler(
        sampling=sampling, num_frames=num_frames, backbone=backbone, experts=model, decoder=decoder,
        conditioning=conditioning.__getitem__, sizes=sizes, device=device,
    )  # fmt: skip


def sample_pairs(
    sampler: Sampler,
    terms: Sequence[Term],
    after: Arm,
    batches: Sequence[Sequence[Job]],
    references: Mapping[str, Sequence[Reference]],
) -> list[Pair]:
    """Sample the jobs before and after the adapter, and score them. references: by row id, one for each term."""
    before, pairs = Arm(name=arms.BASE, steps=after.steps), []
    for batch in tqdm(batches, desc="evaluating"):
        pictures = [sampler.sample(batch, arm) for arm in (before, after)]
        scores = [score_all(terms, images, [references[row.id] for row, _ in batch]) for images in pictures]
        for i, (row, seed) in enumerate(batch):
            picture = torch.cat([data.to_uint8(images[i])[0].cpu() for images in pictures], 1)
            figures = {key: (float(scores[0][key][i]), float(scores[1][key][i])) for key in scores[0]}
            pairs.append(Pair(row=row, seed=seed, picture=picture, scores=figures))
    return pairs


def score_all(terms: Sequence[Term], pictures: Tensor, references: Sequence[Sequence[Reference]]) -> dict[str, Tensor]:
    """Return {figure: (B,)} of pictures (B, 3, 1, H, W), NaN where invalid. Raise RewardError where all fail."""
    scores: dict[str, Tensor] = {}
    for i, term in enumerate(terms):
        result = score_safely(term.reward, pictures, [reference[i] for reference in references])
        if result.failed.all():
            raise RewardError(f"{term.key}: {result.problems[0]}")
        scores[term.label] = result.output.score.where(result.output.valid, torch.nan)
        scores |= {f"{term.label}/{name}": part for name, part in result.output.parts.items() if name != NONFINITE}
    return scores


def summarise_images(pairs: Sequence[Pair], trained: dict[str, bool]) -> dict:
    """Return the report: means over prompts with 95 % bootstrap intervals, as one prompt's noises are not independent.

    trained: by a reward's label. win_rate: share of the pairs whose picture scores higher after; a tie counts half.
    """
    prompts = sorted({pair.row.id for pair in pairs})
    report: dict = {"prompts": len(prompts), "pairs": len(pairs), "figures": {}}
    for name in dict.fromkeys(name for pair in pairs for name in pair.scores):
        by_prompt: dict[str, list] = {prompt: [] for prompt in prompts}
        for pair in pairs:
            a, b = pair.scores.get(name, (math.nan, math.nan))
            if math.isfinite(a) and math.isfinite(b):
                by_prompt[pair.row.id].append((a, b, b - a, (b > a) + 0.5 * (b == a)))
        rows = [np.mean(scores, 0) for scores in by_prompt.values() if scores]
        if rows:
            before, after, gain, wins = map(interval, torch.tensor(np.array(rows)).float().unbind(1))
            report["figures"][name] = {
                "trained": trained.get(name, False), "before": before, "after": after, "gain": gain, "win_rate": wins,
                "left_out": len(pairs) - sum(map(len, by_prompt.values())),
            }  # fmt: skip
    report["per_pair"] = [
        {"line": pair.row.line, "prompt": pair.row.prompt, "seed": pair.seed}
        | {
            f"{name}/{arm}": value if math.isfinite(value) else None
            for name, both in pair.scores.items()
            for arm, value in zip(ARMS, both, strict=True)
        }
        for pair in pairs
    ]
    return report


def format_table(report: dict) -> str:
    """Format the report's figures for a terminal."""
    lines = [f"{report['prompts']} prompts, {report['pairs']} pairs; mean [95 % interval over prompts]", ""]
    for name, figures in report["figures"].items():
        words = " (trained on)" if figures["trained"] else ""
        left = f"   {figures['left_out']} pairs left out" if figures["left_out"] else ""
        before, after, gain, wins = (format_interval(figures[key]) for key in ("before", "after", "gain", "win_rate"))
        lines += [f"{name}{words}", f"  before {before}   after {after}", f"  gain {gain}   better after {wins}{left}"]
    for which, count in report["disagreements"].items():
        lines += ["", f"{which}: {count['before']} pictures before, {count['after']} after ({DISAGREEMENTS})"]
    return "\n".join(lines)


def find_disagreements(pairs: Sequence[Pair], first: str, second: str) -> list[Disagreement]:
    """Return the pictures whose two figures are measured and differ."""
    pictures = []
    for pair in pairs:
        width = pair.picture.shape[1] // 2
        for i, arm in enumerate(ARMS):
            figures = {name: pair.scores[name][i] for name in (first, second)}
            half = pair.picture[:, i * width : (i + 1) * width]
            pictures.append(Disagreement(prompt=pair.row.prompt, arm=arm, picture=half, figures=figures))
    return [picture for picture in pictures if abs(picture.margin) > 0]


def count_disagreements(disagreements: Sequence[Disagreement]) -> dict[str, dict[str, int]]:
    """Return {"A above B": {arm: number of pictures}} for the names A and B of two figures."""
    counts: dict[str, dict[str, int]] = {}
    for disagreement in disagreements:
        figures = disagreement.figures
        higher, lower = sorted(figures, key=lambda name: -figures[name])
        by_arm = counts.setdefault(f"{higher} above {lower}", dict.fromkeys(ARMS, 0))
        by_arm[disagreement.arm] += 1
    return counts


def draw_image_grid(pairs: Sequence[Pair], path: Path) -> None:
    """Draw before | after of up to SHOWN prompts, from the greatest loss to the greatest gain of the first reward."""
    scored = [(next(iter(pair.scores.values())), pair) for pair in pairs if pair.seed == 0]
    scored.sort(key=lambda item: item[0][1] - item[0][0] if math.isfinite(item[0][1] - item[0][0]) else 0.0)
    cells = [
        draw_cell(pair.picture, pair.row.prompt, f"before {before:.3g}, after {after:.3g}")
        for (before, after), pair in spread(scored)
    ]
    data.write_picture(path, data.side_by_side(cells)[None])


def draw_disagreements(disagreements: Sequence[Disagreement], path: Path) -> None:
    """Draw up to SHOWN pictures after the adapter, or before it where there are none, by falling margin."""
    shown = [item for item in disagreements if item.arm == "after"] or disagreements
    cells = []
    for item in spread(sorted(shown, key=lambda item: -item.margin)):
        figures = [f"{name.rpartition('/')[2]} {value:.3g}" for name, value in item.figures.items()]
        cells.append(draw_cell(item.picture, item.prompt, ", ".join(figures)))
    data.write_picture(path, data.side_by_side(cells)[None])


def spread(items: Sequence[_Item]) -> list[_Item]:
    """Return up to SHOWN evenly spaced items, the first and the last among them."""
    return [items[i] for i in np.linspace(0, len(items) - 1, min(SHOWN, len(items))).round().astype(int)]


def draw_cell(picture: Tensor, above: str, below: str) -> Tensor:
    """Draw a picture uint8 (H, W, 3), enlarged to a height of about SIDE, between two lines of text."""
    image = Image.fromarray(picture.numpy())
    image = ImageOps.scale(image, max(1, round(SIDE / image.height)), Image.Resampling.NEAREST)
    cell = ImageOps.expand(image, (4, 16, 4, 18), "white")
    ImageDraw.Draw(cell).text((4, 2), above[: image.width // 6], fill="black")
    ImageDraw.Draw(cell).text((4, 17 + image.height), below, fill="black")
    return torch.from_numpy(np.array(cell))
