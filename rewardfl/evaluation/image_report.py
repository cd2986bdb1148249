"""Report of an evaluation of an image model: each arm's scores against its base's, prompt by prompt, and pictures."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps

from rewardfl import data
from rewardfl.evaluation.arms import Arm
from rewardfl.evaluation.figures import ClipKey, Table, find_bases, format_interval, interval, pair_people
from rewardfl.evaluation.report.pictures import draw_cell
from rewardfl.rewards.scoring import Term

DISAGREEMENTS = "disagreements.png"

SHOWN, SIDE = 24, 96  # rows of the grid, and the minimum height of a picture in it


class Disagreement(NamedTuple):
    """A picture whose two figures differ. figures: both by name, in the order of the reward's second_opinion."""

    clip: ClipKey
    side: str  # before | after
    figures: dict[str, float]
    margin: float  # margin of the first figure over the second


@dataclass(frozen=True, kw_only=True)
class ImageReport:
    """Scores of all pictures. prompts: by row id. terms: the rewards that scored."""

    table: Table
    arms: Sequence[Arm]
    prompts: Mapping[str, str]
    terms: Sequence[Term]

    def pairs(self) -> list[tuple[Arm, str]]:
        """Return each arm that has a base, and the base's name; starts last."""
        bases = find_bases(self.arms)
        pairs = [(arm, bases[arm.steps].name) for arm in self.arms if bases[arm.steps] is not arm]
        return sorted(pairs, key=lambda pair: bool(pair[0].origin))

    def summarise(self) -> dict:
        """Return the report: means over prompts with 95 % bootstrap intervals, as one prompt's noises are related.

        The top level compares the first arm that has a base and is not a start; `arms` has all of them.
        """
        compared = [
            {"name": arm.name, "steps": arm.steps, "adapter": str(arm.adapter), "strength": arm.strength}
            | {"origin": arm.origin, "against": base, **self.compare(arm.name, base)}
            for arm, base in self.pairs()
        ]
        arm, base = self.pairs()[0]
        clips, sides = sorted(self.table.figures[base]), {"before": base, "after": arm.name}
        lines = []
        for clip in clips:
            line = {"line": self.table.records[base][clip]["line"], "prompt": self.prompts[clip.row], "seed": clip.seed}
            for name in self.table.names(base):  # null where invalid
                figures = {side: self.table.figures[which].get(clip, {}).get(name) for side, which in sides.items()}
                line |= {f"{name.removeprefix('rewards/')}/{side}": value for side, value in figures.items()}
            lines.append(line)
        report = {"prompts": len({clip.row for clip in clips}), "pairs": len(clips)}
        report |= {key: compared[0][key] for key in ("figures", "disagreements")}
        return report | {"arms": compared, "per_pair": lines}

    def compare(self, arm: str, base: str) -> dict:
        """Return an arm's figures before and after, and the number of its pictures that two readers read differently.

        win_rate: share of the pictures that score higher after; a tie counts half.
        """
        trained = {term.label for term in self.terms if term.weight > 0}
        figures, clips = {}, self.table.figures[arm].keys() | self.table.figures[base].keys()
        for name in self.table.names(base):
            before, after = self.table.values(base, name), self.table.values(arm, name)
            gain = {clip: after[clip] - before[clip] for clip in before.keys() & after.keys()}
            wins = {clip: (change > 0) + 0.5 * (change == 0) for clip, change in gain.items()}
            if gain:
                keys, label = ("before", "after", "gain", "win_rate"), name.removeprefix("rewards/")
                values = map(interval, pair_people(before, after, gain, wins).values)
                figures[label] = {"trained": label in trained, **dict(zip(keys, values, strict=True))}
                figures[label]["left_out"] = len(clips) - len(gain)
        counts: dict[str, dict[str, int]] = {}
        for picture in self.disagreements(arm, base):
            lower, higher = sorted(picture.figures, key=lambda name: picture.figures[name])
            counts.setdefault(f"{higher} above {lower}", {"before": 0, "after": 0})[picture.side] += 1
        return {"figures": figures, "disagreements": counts}

    def disagreements(self, arm: str, base: str) -> list[Disagreement]:
        """Return the pictures whose reward's second opinion differs from its first."""
        pictures = []
        for term in (term for term in self.terms if term.reward.second_opinion):
            names = [f"{term.label}/{part}" for part in term.reward.second_opinion]
            for side, which in (("before", base), ("after", arm)):
                for clip, measured in self.table.figures[which].items():
                    figures = {name: measured.get(f"rewards/{name}", math.nan) for name in names}
                    first, second = figures.values()
                    pictures += [Disagreement(clip, side, figures, first - second)] if abs(first - second) > 0 else []
        return pictures

    def draw(self, out: Path) -> None:
        """Draw out/grid.png: all arms of prompts, from the greatest loss to the greatest gain of the first reward.

        Draw out/disagreements.png if there are any; remove an earlier one.
        """
        (arm, base), score = self.pairs()[0], f"rewards/{self.terms[0].label}"
        scores = {which.name: self.table.values(which.name, score) for which in self.arms}
        after, before = scores[arm.name], scores[base]
        clips = [clip for clip in self.table.figures[base] if clip.seed == 0]
        clips.sort(key=lambda clip: after[clip] - before[clip] if clip in after and clip in before else 0.0)
        texts = {
            clip: [f"{name} {values.get(clip, math.nan):.3g}" for name, values in scores.items()] for clip in clips
        }
        self._draw_sheet(out / "grid.png", [(list(scores), clip, texts[clip]) for clip in clips])
        (out / DISAGREEMENTS).unlink(missing_ok=True)
        pictures = sorted(self.disagreements(arm.name, base), key=lambda picture: -picture.margin)
        cells = []
        for picture in [picture for picture in pictures if picture.side == "after"] or pictures:
            figures = [f"{name.rpartition('/')[2]} {value:.3g}" for name, value in picture.figures.items()]
            cells.append(([arm.name if picture.side == "after" else base], picture.clip, figures))
        if cells:
            self._draw_sheet(out / DISAGREEMENTS, cells)

    def _draw_sheet(self, path: Path, cells: Sequence[tuple[list[str], ClipKey, list[str]]]) -> None:
        """Draw up to SHOWN evenly spaced cells, the first and the last among them.

        Each has arms' pictures of a clip next to each other, enlarged to a height of about SIDE, and texts below.
        """
        sheet = []
        for i in np.linspace(0, len(cells) - 1, min(SHOWN, len(cells))).round().astype(int):
            arms, clip, texts = cells[i]
            files = [path.parent / self.table.records[arm][clip]["file"] for arm in arms]
            image = Image.fromarray(torch.cat([data.read_picture(file) for file in files], 1).numpy())
            image = ImageOps.scale(image, max(1, round(SIDE / image.height)), Image.Resampling.NEAREST)
            sheet.append(draw_cell(image, self.prompts[clip.row], ", ".join(texts)))
        data.write_picture(path, data.side_by_side(sheet)[None])


def format_table(report: Mapping) -> str:
    """Format the report's figures for a terminal."""
    lines = [f"{report['prompts']} prompts, {report['pairs']} pairs; mean [95 % interval over prompts]"]
    for arm in report["arms"]:
        lines += ["", f"{arm['name']}, against {arm['against']}"]
        for name, figures in arm["figures"].items():
            words = " (trained on)" if figures["trained"] else ""
            left = f"   {figures['left_out']} pairs left out" if figures["left_out"] else ""
            before, after, gain, wins = (format_interval(figures[k]) for k in ("before", "after", "gain", "win_rate"))
            lines += [
                f"{name}{words}",
                f"  before {before}   after {after}",
                f"  gain {gain}   better after {wins}{left}",
            ]
        for which, count in arm["disagreements"].items():
            lines += ["", f"{which}: {count['before']} pictures before, {count['after']} after ({DISAGREEMENTS})"]
    return "\n".join(lines)
