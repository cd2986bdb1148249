"""Evaluations next to each other on one page (tools/compare_runs.py)."""

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rewardfl.evaluation import metric_curves, records
from rewardfl.evaluation.report import pictures
from rewardfl.evaluation.report.report_page import render
from rewardfl.evaluation.report.tables import TableRow, figure_cell
from rewardfl.evaluation.report.verdicts import CANARIES, MEANINGS, MOVES, healthy, judge_words, main_judge, verdict
from rewardfl.files import sha256
from rewardfl.merging import output

ALIKE = ("data", "sampling", "judges")  # blocks of the settings that must agree

COMPARED, WHOLE = ("face/face_sim", "face/identity_kept", *MOVES, *CANARIES), ("colour_shift", "frozen_share")

TRAINING = ("reward/held_out", "reward/held_out/flow", "grad_norm")


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
    """Read the report of an evaluation of videos. Raise ValueError unless this version wrote it as it is."""
    path = report_file(folder)
    entry = output.Folder(path.parent, records.TOOL).listed().get(path.name)
    digest = sha256(path)
    if not entry or entry.get("sha256", digest) != digest:
        raise ValueError(f"{path}: is not as evaluate.py wrote it, by the manifest next to it; evaluate again")
    report = json.loads(path.read_bytes())
    if report.get("settings", {}).get("records") != {"format": str(records.FORMAT)}:
        raise ValueError(f"{path}: is of images, or of another version of evaluate.py; evaluate again")
    return report


def describe_mismatch(evaluations: Sequence[Evaluated]) -> str:
    """Describe the first difference from the first evaluation in data, sampling or judges; empty where none is."""
    settings = [{block: run.report["settings"][block] for block in ALIKE} for run in evaluations]
    for run, others in zip(evaluations, settings, strict=True):
        if problem := records.describe_difference(settings[0], others):
            return f"{run.name} cannot be compared with {evaluations[0].name}: {problem}"
    return ""


def comparison_page(evaluations: Sequence[Evaluated], problem: str) -> str:
    """Return the page. problem: how the evaluations differ, which the page shows first."""
    judge = main_judge(evaluations[0].report)
    columns = [MEANINGS[key] for key in (*COMPARED, *WHOLE)]
    markers = [pictures.make_markers(run.report, f"{run.name}: ", run.colour) for run in evaluations]
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
        "front": pictures.front_chart(sum(markers, []), judge),
        "curves": [pictures.curves_chart(f"By {judge_words(judge)}", curves(evaluations))],
        "training": [chart for key in TRAINING for chart in training(evaluations, key)],
        "runs": runs,
    }
    return render("comparison.html", values)


def rows(evaluations: Sequence[Evaluated]) -> list[TableRow]:
    """Return a row for each arm that has a base, with a cell for each figure."""
    rows: list[TableRow] = []
    for run in evaluations:
        judge = main_judge(run.report)
        for arm in (arm for arm in run.report["arms"] if arm["against"]):
            names = [key.replace("face/", f"{judge}/") for key in COMPARED]
            cells = [replace(figure_cell(arm, name, [judge]), figure=None) for name in names]
            cells += [figure_cell(arm, name, [judge]) for name in WHOLE]
            people = f"{run.report['people']} people, {arm['clips']} clips"
            rows.append(((f"{run.name}: {arm['name']}", people), cells))
    return rows


def curves(evaluations: Sequence[Evaluated]) -> list[pictures.Curve]:
    """Return every arm's curve by its main judge, a shared base once, and the real clips of the first evaluation."""
    curves: list[pictures.Curve] = []
    for run in evaluations:
        drawn = [curve.points for curve in curves]
        run_curves = pictures.arm_curves(run.report, main_judge(run.report), f"{run.name}: ", run.colour)
        arms = zip(run_curves, run.report["arms"], strict=True)
        curves += [curve for curve, arm in arms if arm["against"] or curve.points not in drawn]
    return [*curves, pictures.real_curve(evaluations[0].report, main_judge(evaluations[0].report))]


def training(evaluations: Sequence[Evaluated], key: str) -> list[pictures.Chart]:
    """Return a chart of a metric of all runs; nothing where no run has it. A run has its first adapter's colour."""
    lines = []
    for run in evaluations:
        if points := metric_curves.metric_points(run.metrics, key):
            lines.append(pictures.Curve(run.name, points, pictures.arm_colour(run.colour + 1)))
    return [pictures.curves_chart(key, lines, ("step", key))] if lines else []
