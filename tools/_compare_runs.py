"""Evaluations next to each other on one page: the work of tools/compare_runs.py."""

import argparse
import itertools
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, FiniteFloat, ValidationError, model_validator

from rewardfl.config.schema import shown
from rewardfl_tools import _common, _output, _page, _records, _svg, plot_metrics
from rewardfl_tools._meanings import CANARIES, MEANINGS, MOVES, healthy, judge_words, main_judge, outside
from rewardfl_tools._report_page import (
    CURVES_SAY,
    FRONT_SAYS,
    against_base,
    arm_curves,
    front_of,
    frozen_cell,
    places_of,
    real_curve,
    said,
)
from rewardfl_tools._verdict import verdict

ALIKE = ("records", "data", "sampling", "judges")  # blocks of the settings that must agree
TRAINING = ("reward/held_out", "reward/held_out/flow", "grad_norm")


class Interval(BaseModel):
    """A mean and its 95 % interval."""

    mean: FiniteFloat
    low: FiniteFloat
    high: FiniteFloat


class Change(BaseModel):
    """A figure of an arm against its base."""

    difference: Interval
    people_with_more: FiniteFloat
    ratio: Interval | None = None


class Figures(BaseModel):
    """The figures of an arm or of the real clips. per_frame: by recogniser."""

    figures: dict[str, Interval | None]
    per_frame: Annotated[dict[str, list[FiniteFloat]], Field(min_length=1)]


class ArmReport(Figures):
    """An arm of a report."""

    name: str
    clips: int
    decoded: bool
    against: str | None
    compared: dict[str, Change | None] = {}
    frozen_share: Interval | None = None
    colour_shift: Interval | None = None


class Report(BaseModel):
    """What the page needs of a report.json."""

    people: int
    version: str
    command: list[str]
    settings: dict[str, dict[str, str]]
    real: Figures
    arms: Annotated[list[ArmReport], Field(min_length=1)]

    @model_validator(mode="after")
    def _agrees(self) -> "Report":
        """Raise ValueError where an arm lacks a judge, its base, or what has become of its FaceSim."""
        judges, names = list(self.real.per_frame), [arm.name for arm in self.arms]
        for arm in self.arms:
            lacking = [judge for judge in judges if arm.against and f"{judge}/face_sim" not in arm.compared]
            if lacking or list(arm.per_frame) != judges or arm.against not in (None, *names):
                raise ValueError(f"arm {shown(arm.name)} lacks a base or a judge")
            moves = [arm.compared.get(key.replace("face/", f"{judges[-1]}/")) for key in MOVES]
            whole = not arm.against or {"frozen_share", "colour_shift"} <= arm.model_fields_set
            if not whole or any(move and move.ratio is None for move in moves):
                raise ValueError(f"arm {shown(arm.name)} lacks a figure against its base")
        return self


@dataclass(frozen=True)
class Evaluated:
    """An evaluation under a name. metrics: the lines of the run's metrics.jsonl; empty for a folder that is no run's.

    colour: the number of its first arm's.
    """

    name: str
    report: Mapping
    metrics: plot_metrics.Lines
    colour: int


def run(args: argparse.Namespace) -> int:
    """Read, compare, write: the exit code."""
    inputs = (report_file(folder) for folder in args.evaluations)
    metrics = (folder / "metrics.jsonl" for folder in args.evaluations)
    page = _output.File(
        option="--out", path=args.out, tool="rewardfl compare_runs", inputs=tuple(itertools.chain(inputs, metrics))
    )
    page.check()
    found = read_all(args.evaluations)
    problem = unlike(found)
    if problem and not args.anyway:
        raise ValueError(f"{problem}; evaluate them alike, or give --anyway to see them all the same")
    page.write(comparison_page(found, problem).encode())
    print(args.out)
    return 0


def read_all(folders: Sequence[Path]) -> list[Evaluated]:
    """The evaluations of runs, or of their own folders. FileNotFoundError, ValueError for what is none."""
    reports = [read_report(folder) for folder in folders]
    colours = itertools.accumulate((len(report["arms"]) for report in reports), initial=0)
    return [
        Evaluated(name, report, plot_metrics.read(folder) if (folder / "metrics.jsonl").is_file() else [], colour)
        for name, folder, report, colour in zip(plot_metrics.labels(folders), folders, reports, colours, strict=False)
    ]


def report_file(folder: Path) -> Path:
    """Return the place of an evaluation's report. FileNotFoundError where the folder holds none."""
    places = (folder / "report.json", folder / "evaluation" / "report.json")
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise FileNotFoundError(f"{folder}: holds no report.json; name a run that was evaluated, or evaluate's --out")
    return path


def read_report(folder: Path) -> dict:
    """Return the report of an evaluation of videos. ValueError for one of something else."""
    path = report_file(folder)
    try:
        Report.model_validate_json(path.read_bytes())
    except ValidationError as error:
        problem = _common.first_problem(error)
        raise ValueError(
            f"{path}: is no report of videos as evaluate.py writes it ({problem}); evaluate again"
        ) from None
    return json.loads(path.read_bytes())


def unlike(found: Sequence[Evaluated]) -> str:
    """How the first that differs from the first one differs, in data, sampling or judges; empty where none does."""
    first, *others = found
    for one in others:
        blocks = ({block: each.report["settings"].get(block, {}) for block in ALIKE} for each in (first, one))
        if problem := _records.difference(*blocks):
            return f"{one.name} cannot be compared with {first.name}: {problem}"
    return ""


# --------------------------------------------------------------------------------------------------------------------
# The page


def comparison_page(found: Sequence[Evaluated], problem: str) -> str:
    """problem: how they are not alike, which the page then says first."""
    title = f"Comparison of {', '.join(one.name for one in found)}"
    return _page.page(title, [f"<h1>{escape(title)}</h1>", *_body(found, problem)])


def _body(found: Sequence[Evaluated], problem: str) -> Iterator[str]:
    if problem:
        words = f"{problem}. They are shown because of --anyway, and a difference between them may come from that."
        yield f'<div class="verdict bad"><p>{escape(words)}</p></div>'
    yield (
        '<p class="soft">Every arm is held against the base of its own evaluation: × a ratio, + or - a difference, '
        "with 95 % bootstrap intervals over people; ⚠ where that is not healthy.</p>"
    )
    yield rows_table(found)
    yield "<h2>What likeness costs in motion</h2>" + FRONT_SAYS
    places = [place for one in found for place in places_of(one.report, f"{one.name}: ", one.colour)]
    judge = judge_words(main_judge(found[0].report))
    yield f'<div class="pictures"><div>{front_of(places, judge)}</div></div>'
    yield "<h2>FaceSim along the clip</h2>" + CURVES_SAY
    yield f'<div class="pictures"><div>{_svg.curves(curves_of(found), ("frame", "FaceSim"), (0, 1))}</div></div>'
    drawn = {key: training(found, key) for key in TRAINING}
    if any(drawn.values()):
        parts = "".join(f"<div><h3>{key}</h3>{picture}</div>" for key, picture in drawn.items() if picture)
        yield f'<h2>While they trained</h2><div class="pictures">{parts}</div>'
    yield "<h2>In words</h2>"
    for one in found:
        yield f"<h3>{escape(one.name)}</h3>"
        yield from (said(verdict(one.report, arm)) for arm in one.report["arms"] if arm["against"])
        yield f"<p>rewardfl {escape(one.report['version'])}</p><pre>{escape(shlex.join(one.report['command']))}</pre>"


def rows_table(found: Sequence[Evaluated]) -> str:
    """A row for each arm that has a base; a column for each figure."""
    keys = ("face/face_sim", *MOVES, *CANARIES)
    known = [*(MEANINGS[key] for key in keys), MEANINGS["colour_shift"], MEANINGS["frozen_share"]]
    rows = []
    for one in found:
        judge = main_judge(one.report)
        for arm in (arm for arm in one.report["arms"] if arm["against"]):
            cells = []
            for key in keys:
                figure = arm["compared"].get(key.replace("face/", f"{judge}/"))
                cells.append(against_base(figure, outside(figure, MEANINGS[key])) if figure else "-")
            own = [_page.figure(arm["colour_shift"]), frozen_cell(arm)]
            people = f"{one.report['people']} people, {arm['clips']} clips"
            rows.append([_page.explained(f"{one.name}: {arm['name']}", people), *cells, *own])
    head = ["run: arm", *(_page.explained(one.label, one.says + healthy(one)) for one in known)]
    return _page.table(head, rows, tight=True)


def curves_of(found: Sequence[Evaluated]) -> list[_svg.Curve]:
    """Every arm's curve by its main judge, a base that several have once, and the first one's real clips."""
    curves: list[_svg.Curve] = []
    for one in found:
        own = arm_curves(one.report, main_judge(one.report), f"{one.name}: ", one.colour)
        known = [other.points for other in curves]
        for curve, arm in zip(own, one.report["arms"], strict=True):
            if arm["against"] or curve.points not in known:
                curves.append(curve)
    return [*curves, real_curve(found[0].report, main_judge(found[0].report))]


def training(found: Sequence[Evaluated], key: str) -> str:
    """The curves of a metric over each other; empty where no run has it. A run has the colour of its first adapter."""
    lines = [
        _svg.Curve(one.name, list(zip(*plot_metrics.points(one.metrics, key), strict=True)), one.colour + 1)
        for one in found
    ]
    return _svg.curves([line for line in lines if line.points], ("step", key))
