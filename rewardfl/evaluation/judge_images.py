"""Before and after an adapter of an image model: the work of tools/evaluate.py where a sample is one picture."""

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor
from tqdm import tqdm

from rewardfl import config, data
from rewardfl.backbones.protocol import Backbone
from rewardfl.evaluation.arms import BASE, Arm, Sampler, batches, check_adapter, encode_inputs, load_model
from rewardfl.evaluation.intervals import format_interval, interval
from rewardfl.files import printable
from rewardfl.merging import output
from rewardfl.rewards import RewardError, build_terms, find_terms
from rewardfl.rewards.contract import NONFINITE
from rewardfl.rewards.scoring import Reference, Term, score_safely
from rewardfl.training import clip_scan, plan, setup_model, setup_rewards

ARMS = ("before", "after")

SHOWN, SIDE = 24, 96  # pairs in the grid, and the least height of a picture in it


@dataclass(frozen=True)
class Pair:
    """One prompt and noise: both pictures, uint8 (H, W, 3), and what each reward says of them.

    scores: figure -> arm -> value, NaN where it has none; a figure is a reward's label, or label/part.
    """

    row: data.Row
    seed: int
    made: dict[str, Tensor]
    scores: dict[str, dict[str, float]]


def run(cfg: config.AnyConfig, arm: Arm, args: argparse.Namespace, folder: output.Folder) -> int:
    """Before and after an adapter, by the run's rewards: the exit code. Raises what is wrong with the input."""
    out, places = folder.path, [row.index for row in data.load_metadata(cfg.data.file_name, "--data")]
    names = [picture_file(index, seed) for index in places for seed in range(args.seeds)]
    names += ["report.json", "grid.png"]
    folder.claim(names)
    (out / "images").mkdir(exist_ok=True)
    found = find_terms(config.wanted_rewards(cfg))
    setup_rewards.check_frames(cfg, found)
    terms = build_terms(found, torch.device(args.device))
    pairs = evaluate_images(cfg, terms, arm, args)
    report = summarise_images(pairs, {term.label: term.weight > 0 for term in terms}) | {"command": sys.argv}
    for pair in pairs:
        beside = torch.cat([pair.made[arm] for arm in ARMS], 1)
        data.write_picture(out / picture_file(pair.row.index, pair.seed), beside[None])
    (out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    draw_image_grid(pairs, out / "grid.png")
    folder.seal(names)
    print(format_table(report))
    print(f"\nreport: {out / 'report.json'}\npictures: {out / 'grid.png'}, {out / 'images'}")
    return 0


def picture_file(index: int, seed: int) -> str:
    """Return the name of a pair's picture, below the evaluation's folder."""
    return f"images/{index:04d}_seed{seed}.png"


@torch.no_grad()
def evaluate_images(cfg: config.AnyConfig, terms: Sequence[Term], arm: Arm, args: argparse.Namespace) -> list[Pair]:
    """Sample and score every prompt and seed. FileNotFoundError where there is no adapter."""
    check_adapter(arm.adapter)
    backbone, device = setup_model.open_model(cfg), torch.device(args.device)
    rows = look_at_rows(cfg, backbone, terms)
    examples = {row.id: (row, clip_scan.load_sized_example(cfg, row)) for row in rows}
    kept = {
        key: [term.reward.reference(example.reference.to(device), row.prompt) for term in terms]
        for key, (row, example) in examples.items()
    }
    sampler = sampler_of(cfg, backbone, examples, arm.adapter, args.experts, device)
    arms = {"before": Arm(BASE, arm.steps), "after": arm}
    jobs = [(row, seed) for seed in range(args.seeds) for row in rows]
    pairs = []
    with tqdm(batches(jobs, sampler.sizes, args.batch), desc="evaluating") as bar:
        for batch in bar:
            pictures = {name: sampler.sample(batch, arm) for name, arm in arms.items()}
            told = [kept[row.id] for row, _ in batch]
            scores = {arm: scores_of(terms, pictures[arm], told) for arm in ARMS}
            for i, (row, seed) in enumerate(batch):
                made = {arm: data.to_uint8(pictures[arm][i])[0].cpu() for arm in ARMS}
                both = {name: {arm: float(scores[arm][name][i]) for arm in ARMS} for name in scores["before"]}
                pairs.append(Pair(row, seed, made, both))
    return pairs


def sampler_of(
    cfg: config.AnyConfig,
    backbone: Backbone,
    examples: Mapping[str, tuple[data.Row, data.Example]],
    adapter: Path | None,
    experts: str,
    device: torch.device,
) -> Sampler:
    """The run's model with the checkpoint's adapter. examples: by the row's id. experts: as offload.place takes it."""
    told = dict(encode_inputs(cfg, backbone, ((row, one.image) for row, one in examples.values()), device))
    sizes = {key: example.size for key, (_, example) in examples.items()}
    model, decoder = load_model(backbone, adapter, experts, device)
    return Sampler(cfg, backbone, model, decoder, told.__getitem__, sizes, device)


def look_at_rows(cfg: config.AnyConfig, backbone: Backbone, terms: Sequence[Term]) -> list[data.Row]:
    """The rows that every reward can judge. DataError lists all others; data.skip_bad_rows: they are said."""
    rows = data.load_metadata(cfg.data.file_name, "--data")
    takes, problems = backbone.takes_image, []
    for row in rows:
        found = data.row_problems(row, cfg.data.num_frames, cfg.data.fps, takes)
        found += filter(None, [plan.size_problem(cfg, backbone, row.size)])
        # a term at a time: also those that the run only measured, and never said that they had nothing to compare with
        found += [said for term in terms for said in setup_rewards.missing_references(cfg, row, [term])]
        problems += [(row.line, problem) for problem in found]
    good, bad = data.usable_rows(rows, problems, cfg.data.skip_bad_rows)
    for line in bad:
        print(printable(f"skipped: {line}"))
    return good


def scores_of(terms: Sequence[Term], pictures: Tensor, references: Sequence[Sequence[Reference]]) -> dict[str, Tensor]:
    """{figure: (B,)} of pictures (B, 3, 1, H, W), NaN for what a reward could not score.

    RewardError when a reward has failed on all of them.
    """
    found: dict[str, Tensor] = {}
    for i, term in enumerate(terms):
        judged = score_safely(term.reward, pictures, [reference[i] for reference in references])
        if judged.failed.all():
            raise RewardError(f"{term.key}: {judged.problems[0]}")
        found[term.label] = judged.output.score.where(judged.output.valid, torch.nan)
        parts = {name: part for name, part in judged.output.parts.items() if name != NONFINITE}  # these are left out
        found |= {f"{term.label}/{name}": part for name, part in parts.items()}
    return found


def summarise_images(pairs: Sequence[Pair], trained: dict[str, bool]) -> dict:
    """All figures of the report: means over prompts with 95 % bootstrap intervals over them, as one prompt's noises
    are not independent. trained: by a reward's label. win_rate: of pairs, those whose picture scored higher after, a
    tie counts half."""
    prompts = sorted({pair.row.id for pair in pairs})
    report: dict = {"prompts": len(prompts), "pairs": len(pairs), "figures": {}}
    for name in dict.fromkeys(name for pair in pairs for name in pair.scores):
        rows, left_out = [], 0
        for prompt in prompts:
            scores = [pair.scores.get(name, {}) for pair in pairs if pair.row.id == prompt]
            both = [(one["before"], one["after"]) for one in scores if all(map(math.isfinite, one.values())) and one]
            left_out += len(scores) - len(both)
            if both:
                rows.append(np.mean([(a, b, b - a, (b > a) + 0.5 * (b == a)) for a, b in both], 0))
        if rows:
            before, after, gain, wins = map(interval, torch.tensor(np.array(rows)).float().unbind(1))
            report["figures"][name] = {
                "trained": trained.get(name, False), "before": before, "after": after, "gain": gain, "win_rate": wins,
                "left_out": left_out,
            }  # fmt: skip
    report["per_pair"] = [
        {
            "line": pair.row.line, "prompt": pair.row.prompt, "seed": pair.seed,
            **{
                f"{name}/{arm}": value if math.isfinite(value) else None
                for name, both in pair.scores.items() for arm, value in both.items()
            },
        }
        for pair in pairs
    ]  # fmt: skip
    return report


def format_table(report: dict) -> str:
    """The report's figures for a terminal."""
    lines = [f"{report['prompts']} prompts, {report['pairs']} pairs; mean [95 % interval over prompts]", ""]
    for name, figures in report["figures"].items():
        words = " (trained on)" if figures["trained"] else ""
        left = f"   {figures['left_out']} pairs left out" if figures["left_out"] else ""
        lines.append(f"{name}{words}")
        lines.append(f"  before {format_interval(figures['before'])}   after {format_interval(figures['after'])}")
        lines.append(
            f"  gain {format_interval(figures['gain'])}   better after {format_interval(figures['win_rate'])}{left}"
        )
    return "\n".join(lines)


def draw_image_grid(pairs: Sequence[Pair], path: Path, columns: int = 3) -> None:
    """before | after of up to SHOWN prompts, from the greatest loss to the greatest gain of the first reward."""
    (name, *_) = pairs[0].scores
    gains = [pair.scores[name]["after"] - pair.scores[name]["before"] for pair in pairs]
    order = sorted(range(len(pairs)), key=lambda i: gains[i] if math.isfinite(gains[i]) else 0.0)
    first = [pairs[i] for i in order if pairs[i].seed == 0]
    chosen = [first[round(i)] for i in np.linspace(0, len(first) - 1, min(SHOWN, len(first)))]
    height, width = (max(pair.made["before"].shape[axis] for pair in chosen) for axis in (0, 1))
    larger = max(1, round(SIDE / height))
    height, width = larger * height, larger * width
    cell = (2 * width + 14, height + 34)
    sheet = Image.new("RGB", (columns * cell[0], -(-len(chosen) // columns) * cell[1]), "white")
    pen = ImageDraw.Draw(sheet)
    for i, pair in enumerate(chosen):
        left, top = i % columns * cell[0] + 4, i // columns * cell[1]
        pen.text((left, top + 2), pair.row.prompt[: 2 * width // 6], fill="black")
        for k, arm in enumerate(ARMS):
            picture = Image.fromarray(pair.made[arm].numpy())
            picture = picture.resize((larger * picture.width, larger * picture.height), Image.Resampling.NEAREST)
            sheet.paste(picture, (left + k * (width + 2), top + 16))
            pen.text((left + k * (width + 2), top + 17 + height), f"{arm} {pair.scores[name][arm]:.3g}", fill="black")
    sheet.save(path)
