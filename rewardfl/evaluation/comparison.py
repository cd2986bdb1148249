"""Evaluations next to each other on one page (tools/compare_runs.py)."""

import argparse
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
from rewardfl.evaluation.report import charts
from rewardfl.evaluation.report.meanings import CANARIES, MEANINGS, MOVES, healthy, judge_words, main_judge
from rewardfl.evaluation.report.report_page import figure_cell
from rewardfl.evaluation.report.templates import TableRow, render
from rewardfl.evaluation.report.verdicts import verdict
from rewardfl.merging import output

ALIKE = ("records", "data", "sampling", "judges")  # blocks of the settings that must agree

COMPARED, WHOLE = ("face/face_sim", "face/identity_kept", *MOVES, *CANARIES), ("colour_shift", "frozen_share")

TRAINING = ("reward/held_out", "reward/held_out/flow", "grad_norm")


class Interval(BaseModel):
    mean: FiniteFloat
    low: FiniteFloat
    high: FiniteFloat


class Change(BaseModel):
    difference: Interval
    people_with_more: FiniteFloat
    ratio: Interval | None = None


class Figures(BaseModel):
    figures: dict[str, Interval | None]
    per_frame: Annotated[dict[str, list[FiniteFloat]], Field(min_length=1)]  # by recogniser


class ArmReport(Figures):
    name: str
    clips: int
    decoded: bool
    against: str | None
    compared: dict[str, Change | None] = {}
    frozen_share: Interval | None = None
    colour_shift: Interval | None = None


class Report(BaseModel):
    """The part of a report.json that the page needs."""

    people: int
    version: str
    command: list[str]
    settings: dict[str, dict[str, str]]
    real: Figures
    arms: Annotated[list[ArmReport], Field(min_length=1)]

    @model_validator(mode="after")
    def _agrees(self) -> "Report":
        """Raise ValueError where an arm lacks a judge, its base, or a figure against its base."""
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


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """A named evaluation. metrics: lines of metrics.jsonl, empty for no run. colour: the number of its first arm's."""

    name: str
    report: Mapping
    metrics: metric_curves.Lines
    colour: int


def run(args: argparse.Namespace) -> int:
    """Read, compare and write; return the exit code."""
    reports = (report_file(folder) for folder in args.evaluations)
    inputs = (*reports, *(folder / "metrics.jsonl" for folder in args.evaluations))
    page = output.File(option="--out", path=args.out, tool="rewardfl compare_runs", inputs=inputs)
    page.check()
    evaluations = read_all(args.evaluations)
    problem = describe_mismatch(evaluations)
    if problem and not args.anyway:
        raise ValueError(f"{problem}; evaluate them alike, or give --anyway to see them all the same")
    page.write(comparison_page(evaluations, problem).encode())
    print(args.out)
    return 0


def read_all(folders: Sequence[Path]) -> list[Evaluated]:
    """Read the evaluations of runs or evaluation folders. Raise FileNotFoundError or ValueError for other folders."""
    evaluations, colour = [], 0
    for name, folder in zip(metric_curves.run_labels(folders), folders, strict=True):
        report, is_run = read_report(folder), (folder / "metrics.jsonl").is_file()
        metrics = metric_curves.read_metrics(folder) if is_run else []
        evaluations.append(Evaluated(name=name, report=report, metrics=metrics, colour=colour))
        colour += len(report["arms"])
    return evaluations


def report_file(folder: Path) -> Path:
    """Return the file of an evaluation's report. Raise FileNotFoundError where the folder holds none."""
    for path in (folder / "report.json", folder / "evaluation" / "report.json"):
        if path.is_file():
            return path
    raise FileNotFoundError(f"{folder}: holds no report.json; name a run that was evaluated, or evaluate's --out")


def read_report(folder: Path) -> dict:
    """Read the report of an evaluation of videos. Raise ValueError for another one."""
    path = report_file(folder)
    try:
        Report.model_validate_json(path.read_bytes())
    except ValidationError as error:
        problem = command_line.format_first_problem(error)
        text = f"{path}: is no report of videos as evaluate.py writes it ({problem}); evaluate again"
        raise ValueError(text) from None
    return json.loads(path.read_bytes())


def describe_mismatch(evaluations: Sequence[Evaluated]) -> str:
    """Describe the first difference from the first evaluation in data, sampling or judges; empty where none is."""
    first, *rest = evaluations
    settings = {block: first.report["settings"].get(block, {}) for block in ALIKE}
    for run in rest:
        if problem := records.describe_difference(
            settings, {block: run.report["settings"].get(block, {}) for block in ALIKE}
        ):
            return f"{run.name} cannot be compared with {first.name}: {problem}"
    return ""


def comparison_page(evaluations: Sequence[Evaluated], problem: str) -> str:
    """Return the page. problem: how the evaluations differ, which the page shows first."""
    judge = main_judge(evaluations[0].report)
    columns = [MEANINGS[key] for key in (*COMPARED, *WHOLE)]
    markers = [marker for run in evaluations for marker in charts.make_markers(run.report, f"{run.name}: ", run.colour)]
    runs = [
        {
            "name": run.name,
            "verdicts": [verdict(run.report, arm) for arm in run.report["arms"] if arm["against"]],
            "version": run.report["version"],
            "command": shlex.join(run.report["command"]),
        }
        for run in evaluations
    ]
    values = {
        "title": f"Comparison of {', '.join(run.name for run in evaluations)}",
        "problem": problem,
        "head": [("run: arm", ""), *((column.label, column.says + healthy(column)) for column in columns)],
        "rows": rows(evaluations),
        "front": charts.front_chart(markers, judge),
        "curves": [charts.curves_chart(f"By {judge_words(judge)}", curves(evaluations))],
        "training": [chart for key in TRAINING for chart in training(evaluations, key)],
        "runs": runs,
    }
    return render("comparison.html", values)


def rows(evaluations: Sequence[Evaluated]) -> list[TableRow]:
    """Return a row for each arm that has a base, with a cell for each figure."""
    rows = []
    for run in evaluations:
        judge = main_judge(run.report)
        for arm in (arm for arm in run.report["arms"] if arm["against"]):
            names = [key.replace("face/", f"{judge}/") for key in COMPARED]
            cells = [replace(figure_cell(arm, name, [judge]), figure=None) for name in names]
            cells += [figure_cell(arm, name, [judge]) for name in WHOLE]
            people = f"{run.report['people']} people, {arm['clips']} clips"
            rows.append(TableRow((f"{run.name}: {arm['name']}", people), cells))
    return rows


def curves(evaluations: Sequence[Evaluated]) -> list[charts.Curve]:
    """Return every arm's curve by its main judge, a shared base once, and the real clips of the first evaluation."""
    curves: list[charts.Curve] = []
    for run in evaluations:
        drawn = [curve.points for curve in curves]
        run_curves = charts.arm_curves(run.report, main_judge(run.report), f"{run.name}: ", run.colour)
        for curve, arm in zip(run_curves, run.report["arms"], strict=True):
            if arm["against"] or curve.points not in drawn:
                curves.append(curve)
    return [*curves, charts.real_curve(evaluations[0].report, main_judge(evaluations[0].report))]


def training(evaluations: Sequence[Evaluated], key: str) -> list[charts.Chart]:
    """Return a chart of a metric of all runs; nothing where no run has it. A run has its first adapter's colour."""
    lines = [
        charts.Curve(
            run.name,
            list(zip(*metric_curves.metric_points(run.metrics, key), strict=True)),
            charts.arm_colour(run.colour + 1),
        )
        for run in evaluations
    ]
    drawn = [line for line in lines if line.points]
    return [charts.curves_chart(key, drawn, ("step", key))] if drawn else []
