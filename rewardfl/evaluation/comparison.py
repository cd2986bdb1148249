"""Evaluations next to each other on one page: the work of tools/compare_runs.py."""

import argparse
import itertools
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, FiniteFloat, ValidationError, model_validator

from rewardfl import command_line
from rewardfl.config.schema import shown
from rewardfl.evaluation import metric_curves, records
from rewardfl.evaluation.report.charts import (
    Chart,
    Curve,
    arm_colour,
    arm_curves,
    curves_chart,
    front_chart,
    make_markers,
    real_curve,
)
from rewardfl.evaluation.report.meanings import CANARIES, MEANINGS, MOVES, healthy, judge_words, main_judge
from rewardfl.evaluation.report.report_page import figure_cell
from rewardfl.evaluation.report.templates import TableRow, render
from rewardfl.evaluation.report.verdicts import verdict
from rewardfl.merging import output

ALIKE = ("records", "data", "sampling", "judges")  # blocks of the settings that must agree

COMPARED, WHOLE = ("face/face_sim", "face/identity_kept", *MOVES, *CANARIES), ("colour_shift", "frozen_share")

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
    metrics: metric_curves.Lines
    colour: int


def run(args: argparse.Namespace) -> int:
    """Read, compare, write: the exit code."""
    inputs = (report_file(folder) for folder in args.evaluations)
    metrics = (folder / "metrics.jsonl" for folder in args.evaluations)
    page = output.File(
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
        Evaluated(
            name, report, metric_curves.read_metrics(folder) if (folder / "metrics.jsonl").is_file() else [], colour
        )
        for name, folder, report, colour in zip(metric_curves.labels(folders), folders, reports, colours, strict=False)
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
        problem = command_line.first_problem(error)
        raise ValueError(
            f"{path}: is no report of videos as evaluate.py writes it ({problem}); evaluate again"
        ) from None
    return json.loads(path.read_bytes())


def unlike(found: Sequence[Evaluated]) -> str:
    """How the first that differs from the first one differs, in data, sampling or judges; empty where none does."""
    first, *others = found
    for one in others:
        blocks = ({block: each.report["settings"].get(block, {}) for block in ALIKE} for each in (first, one))
        if problem := records.difference(*blocks):
            return f"{one.name} cannot be compared with {first.name}: {problem}"
    return ""


def comparison_page(found: Sequence[Evaluated], problem: str) -> str:
    """Return the page. problem: how the evaluations differ, which the page then says first."""
    judge = main_judge(found[0].report)
    columns = [MEANINGS[key] for key in (*COMPARED, *WHOLE)]
    arms = [place for one in found for place in make_markers(one.report, f"{one.name}: ", one.colour)]
    runs = [
        {
            "name": one.name,
            "verdicts": [verdict(one.report, arm) for arm in one.report["arms"] if arm["against"]],
            "version": one.report["version"],
            "command": shlex.join(one.report["command"]),
        }
        for one in found
    ]
    values = {
        "title": f"Comparison of {', '.join(one.name for one in found)}",
        "problem": problem,
        "head": [("run: arm", ""), *((one.label, one.says + healthy(one)) for one in columns)],
        "rows": rows(found),
        "front": front_chart(arms, judge),
        "curves": [curves_chart(f"By {judge_words(judge)}", curves(found))],
        "training": [chart for key in TRAINING for chart in training(found, key)],
        "runs": runs,
    }
    return render("comparison.html", values)


def rows(found: Sequence[Evaluated]) -> list[TableRow]:
    """Return a row for each arm that has a base, with a cell for each figure."""
    rows = []
    for one in found:
        judge = main_judge(one.report)
        for arm in (arm for arm in one.report["arms"] if arm["against"]):
            names = [key.replace("face/", f"{judge}/") for key in COMPARED]
            cells = [replace(figure_cell(arm, name, [judge]), figure=None) for name in names]
            cells += [figure_cell(arm, name, [judge]) for name in WHOLE]
            people = f"{one.report['people']} people, {arm['clips']} clips"
            rows.append(TableRow((f"{one.name}: {arm['name']}", people), cells))
    return rows


def curves(found: Sequence[Evaluated]) -> list[Curve]:
    """Return every arm's curve by its main judge, a base that several have once, and the first one's real clips."""
    curves: list[Curve] = []
    for one in found:
        drawn = arm_curves(one.report, main_judge(one.report), f"{one.name}: ", one.colour)
        known = [other.points for other in curves]
        for curve, arm in zip(drawn, one.report["arms"], strict=True):
            if arm["against"] or curve.points not in known:
                curves.append(curve)
    return [*curves, real_curve(found[0].report, main_judge(found[0].report))]


def training(found: Sequence[Evaluated], key: str) -> list[Chart]:
    """Return the curves of a metric over each other; nothing where no run has it.

    A run has the colour of its first adapter.
    """
    lines = [
        Curve(one.name, list(zip(*metric_curves.points(one.metrics, key), strict=True)), arm_colour(one.colour + 1))
        for one in found
    ]
    drawn = [line for line in lines if line.points]
    return [curves_chart(key, drawn, ("step", key))] if drawn else []
