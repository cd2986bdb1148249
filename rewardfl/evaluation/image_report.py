"""Report of an evaluation of an image model: each arm's scores against its base's, prompt by prompt, and pictures."""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps

from rewardfl import data
from rewardfl.evaluation.arms import Arm
from rewardfl.evaluation.figures import ClipKey, Table, find_bases, interval, pair_people
from rewardfl.evaluation.report.pictures import draw_cell
from rewardfl.rewards.scoring import Term

DISAGREEMENTS = "disagreements.png"

SHOWN, SIDE = 24, 96  # rows of the grid, and the minimum height of a picture in it


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
        """Return the report: means over prompts with intervals, of the first of `pairs` and in `arms` of all."""
        compared = [
            {"name": arm.name, "steps": arm.steps, "adapter": str(arm.adapter), "strength": arm.strength}
            | {"origin": arm.origin, "against": base, **self.compare(arm.name, base)}
            for arm, base in self.pairs()
        ]
        arm, base = self.pairs()[0]
        lines = []
        for clip in sorted(self.table.figures[base]):
            line = {"line": self.table.records[base][clip]["line"], "prompt": self.prompts[clip.row], "seed": clip.seed}
            for name in self.table.names(base):  # null where invalid
                for side, which in (("before", base), ("after", arm.name)):
                    figures = self.table.figures[which].get(clip, {})
                    line[f"{name.removeprefix('rewards/')}/{side}"] = figures.get(name)
            lines.append(line)
        report = {"prompts": len({clip.row for clip in self.table.figures[base]}), "pairs": len(lines)}
        report |= {key: compared[0][key] for key in ("figures", "disagreements")}
        return report | {"arms": compared, "per_pair": lines}

    def compare(self, arm: str, base: str) -> dict:
        """Return an arm's figures before and after, and how often two readers disagree; win_rate: a tie counts half."""
        trained = {term.label for term in self.terms if term.weight > 0}
        figures, clips = {}, self.table.figures[arm].keys() | self.table.figures[base].keys()
        for name in self.table.names(base):
            label, before, after = (
                name.removeprefix("rewards/"),
                self.table.values(base, name),
                self.table.values(arm, name),
            )
            gain = {clip: after[clip] - before[clip] for clip in before.keys() & after.keys()}
            wins = {clip: (change > 0) + 0.5 * (change == 0) for clip, change in gain.items()}
            if gain:
                intervals = map(interval, pair_people(before, after, gain, wins).values)
                about = {"trained": label in trained, "left_out": len(clips) - len(gain)}
                figures[label] = about | dict(zip(("before", "after", "gain", "win_rate"), intervals, strict=True))
        counts: dict[str, dict[str, int]] = {}
        for _, side, readings in self.disagreements(arm, base):
            lower, higher = sorted(readings, key=lambda name: readings[name])
            counts.setdefault(f"{higher} above {lower}", {"before": 0, "after": 0})[side] += 1
        return {"figures": figures, "disagreements": counts}

    def disagreements(self, arm: str, base: str) -> list[tuple[ClipKey, str, dict[str, float]]]:
        """Return the pictures whose reward's second opinion differs, with "before" or "after" and both figures."""
        pictures = []
        for term in (term for term in self.terms if term.reward.second_opinion):
            names = [f"{term.label}/{part}" for part in term.reward.second_opinion]
            for side, which in (("before", base), ("after", arm)):
                for clip, figures in self.table.figures[which].items():
                    first, second = (figures.get(f"rewards/{name}", math.nan) for name in names)
                    if abs(first - second) > 0:
                        pictures.append((clip, side, dict(zip(names, (first, second), strict=True))))
        return pictures

    def draw(self, out: Path) -> None:
        """Draw out/grid.png, from the first reward's greatest loss to its greatest gain, and disagreements, if any."""
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
        pictures = self.disagreements(arm.name, base)
        pictures.sort(key=lambda picture: operator.sub(*picture[2].values()), reverse=True)
        cells = []
        for clip, side, readings in [picture for picture in pictures if picture[1] == "after"] or pictures:
            figures = [f"{name.rpartition('/')[2]} {value:.3g}" for name, value in readings.items()]
            cells.append(([arm.name if side == "after" else base], clip, figures))
        if cells:
            self._draw_sheet(out / DISAGREEMENTS, cells)

    def _draw_sheet(self, path: Path, cells: Sequence[tuple[list[str], ClipKey, list[str]]]) -> None:
        """Draw up to SHOWN evenly spaced cells: arms' pictures of a clip next to each other, and texts below."""
        sheet = []
        for i in np.linspace(0, len(cells) - 1, min(SHOWN, len(cells))).round().astype(int):
            arms, clip, texts = cells[i]
            files = [path.parent / self.table.records[arm][clip]["file"] for arm in arms]
            image = Image.fromarray(torch.cat([data.read_picture(file) for file in files], 1).numpy())
            image = ImageOps.scale(image, max(1, round(SIDE / image.height)), Image.Resampling.NEAREST)
            sheet.append(draw_cell(image, self.prompts[clip.row], ", ".join(texts)))
        data.write_picture(path, data.side_by_side(sheet)[None])
