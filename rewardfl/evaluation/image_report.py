"""Report of an evaluation of an image model: each arm's scores against its base's, prompt by prompt, and pictures."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageOps
from torch import Tensor

from rewardfl import data
from rewardfl.evaluation.arms import Arm
from rewardfl.evaluation.figures import ClipKey, Table, find_bases, format_interval, interval, make_table, pair_people
from rewardfl.evaluation.records import Record
from rewardfl.rewards.scoring import Term

DISAGREEMENTS = "disagreements.png"

IMAGE_REPORTS = ("report.json", "grid.png", DISAGREEMENTS)  # written at the end

SHOWN, SIDE = 24, 96  # rows of the grid, and the minimum height of a picture in it

_Item = TypeVar("_Item")


class Disagreement(NamedTuple):
    """A picture whose two figures differ. figures: both by name, in the order of the reward's second_opinion."""

    clip: ClipKey
    side: str  # before | after
    figures: dict[str, float]

    @property
    def margin(self) -> float:
        first, second = self.figures.values()
        return first - second


@dataclass(frozen=True, kw_only=True)
class ImageReport:
    """Scores of all pictures. prompts: by row id. terms: the rewards that scored."""

    table: Table
    arms: Sequence[Arm]
    prompts: Mapping[str, str]
    terms: Sequence[Term]

    def summarise(self) -> dict:
        """Return the report: means over prompts with 95 % bootstrap intervals, as one prompt's noises are related.

        The top level compares the first arm that has a base; `arms` has all of them.
        """
        clips = sorted(self.table.figures[self.pairs()[0][1]])
        compared = [
            {"name": arm.name, "steps": arm.steps, "adapter": str(arm.adapter), "strength": arm.strength}
            | {"against": base, **self.compare(arm.name, base)}
            for arm, base in self.pairs()
        ]
        first = {key: compared[0][key] for key in ("figures", "disagreements")}
        report = {"prompts": len({clip.row for clip in clips}), "pairs": len(clips), **first, "arms": compared}
        return report | {"per_pair": [self.list_scores(clip) for clip in clips]}

    def pairs(self) -> list[tuple[Arm, str]]:
        """Return each arm that has a base, and the base's name."""
        bases = find_bases(self.arms)
        return [(arm, bases[arm.steps].name) for arm in self.arms if bases[arm.steps] is not arm]

    def compare(self, arm: str, base: str) -> dict:
        """Return an arm's figures before and after, and the number of its pictures that two readers read differently.

        win_rate: share of the pictures that score higher after; a tie counts half.
        """
        trained = {term.label: term.weight > 0 for term in self.terms}
        figures, clips = {}, self.table.figures[arm].keys() | self.table.figures[base].keys()
        for name in self.table.names(base):
            before, after = self.table.values(base, name), self.table.values(arm, name)
            common = before.keys() & after.keys()
            gain = {clip: after[clip] - before[clip] for clip in common}
            wins = {clip: (change > 0) + 0.5 * (change == 0) for clip, change in gain.items()}
            if common:
                keys = ("before", "after", "gain", "win_rate")
                values = map(interval, pair_people(before, after, gain, wins).values)
                label = name.removeprefix("rewards/")
                figures[label] = {"trained": trained.get(label, False), **dict(zip(keys, values, strict=True))}
                figures[label]["left_out"] = len(clips) - len(common)
        counts: dict[str, dict[str, int]] = {}
        for picture in self.disagreements(arm, base):
            higher, lower = sorted(picture.figures, key=lambda name: -picture.figures[name])
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
                    pictures.append(Disagreement(clip, side, figures))
        return [picture for picture in pictures if abs(picture.margin) > 0]

    def list_scores(self, clip: ClipKey) -> dict:
        """Return the scores of one prompt and noise, before and after, null where invalid."""
        arm, base = self.pairs()[0]
        sides = {"before": self.table.figures[base].get(clip, {}), "after": self.table.figures[arm.name].get(clip, {})}
        scores = {
            f"{name.removeprefix('rewards/')}/{side}": figures.get(name)
            for name in self.table.names(base)
            for side, figures in sides.items()
        }
        line = self.table.records[base][clip]["line"]
        return {"line": line, "prompt": self.prompts[clip.row], "seed": clip.seed} | scores

    def draw(self, out: Path) -> None:
        """Draw out/grid.png, and out/disagreements.png if there are any; remove an earlier one."""
        data.write_picture(out / "grid.png", data.side_by_side(self.draw_grid(out))[None])
        (out / DISAGREEMENTS).unlink(missing_ok=True)
        arm, base = self.pairs()[0]
        if pictures := self.disagreements(arm.name, base):
            shown = [picture for picture in pictures if picture.side == "after"] or pictures
            cells = []
            for picture in spread(sorted(shown, key=lambda picture: -picture.margin)):
                figures = [f"{name.rpartition('/')[2]} {value:.3g}" for name, value in picture.figures.items()]
                pixels = self.read(out, arm.name if picture.side == "after" else base, picture.clip)
                cells.append(draw_cell(pixels, self.prompts[picture.clip.row], ", ".join(figures)))
            data.write_picture(out / DISAGREEMENTS, data.side_by_side(cells)[None])

    def draw_grid(self, out: Path) -> list[Tensor]:
        """Draw all arms of up to SHOWN prompts, from the greatest loss to the greatest gain of the first reward."""
        arm, base = self.pairs()[0]
        score = f"rewards/{self.terms[0].label}"
        scores = {which.name: self.table.values(which.name, score) for which in self.arms}
        after, before = scores[arm.name], scores[base]
        clips = [clip for clip in self.table.figures[base] if clip.seed == 0]
        clips.sort(key=lambda clip: after[clip] - before[clip] if clip in after and clip in before else 0.0)
        cells = []
        for clip in spread(clips):
            row = torch.cat([self.read(out, which.name, clip) for which in self.arms], 1)
            texts = [f"{which.name} {scores[which.name].get(clip, math.nan):.3g}" for which in self.arms]
            cells.append(draw_cell(row, self.prompts[clip.row], ", ".join(texts)))
        return cells

    def read(self, out: Path, arm: str, clip: ClipKey) -> Tensor:
        """Read a picture (H, W, 3) uint8 of an arm."""
        return data.read_picture(out / self.table.records[arm][clip]["file"])


def make_report(
    records: Sequence[Record], arms: Sequence[Arm], rows: Sequence[data.Row], terms: Sequence[Term]
) -> ImageReport:
    """Make the report of these records."""
    table = make_table(records, [arm.name for arm in arms], threshold=0.0)
    return ImageReport(table=table, arms=arms, prompts={row.id: row.prompt for row in rows}, terms=terms)


def format_table(report: Mapping) -> str:
    """Format the report's figures for a terminal."""
    lines = [f"{report['prompts']} prompts, {report['pairs']} pairs; mean [95 % interval over prompts]"]
    for arm in report["arms"]:
        lines += ["", f"{arm['name']}, against {arm['against']}"]
        for name, figures in arm["figures"].items():
            words = " (trained on)" if figures["trained"] else ""
            left = f"   {figures['left_out']} pairs left out" if figures["left_out"] else ""
            texts = {key: format_interval(figures[key]) for key in ("before", "after", "gain", "win_rate")}
            lines += [f"{name}{words}", f"  before {texts['before']}   after {texts['after']}"]
            lines += [f"  gain {texts['gain']}   better after {texts['win_rate']}{left}"]
        for which, count in arm["disagreements"].items():
            lines += ["", f"{which}: {count['before']} pictures before, {count['after']} after ({DISAGREEMENTS})"]
    return "\n".join(lines)


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
