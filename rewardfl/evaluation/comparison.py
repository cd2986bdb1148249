"""Evaluations next to each other on one page (tools/compare_runs.py)."""

import argparse
import shlex
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rewardfl import outputs
from rewardfl.evaluation import metric_curves, records
from rewardfl.evaluation.arm_groups import compare_groups
from rewardfl.evaluation.report import pictures
from rewardfl.evaluation.report.report_page import Cell, embed, figure_cell, render
from rewardfl.evaluation.report.verdicts import CANARIES, MOVES, compared_arms, explain, main_judge, verdict
from rewardfl.evaluation.report_file import COMPARED_BLOCKS, find_report, read_report

COMPARED, WHOLE = ("face/face_sim", "face/identity_kept", *MOVES, *CANARIES), ("colour_shift", "frozen_share")


class Evaluated(NamedTuple):
    """A named evaluation."""

    name: str
    report: Mapping


def run(args: argparse.Namespace) -> int:
    """Print the table of two groups of arms, or read, compare and write a page; return the exit code."""
    if args.first:
        folder = args.evaluations[0]
        folder = folder if (folder / records.FILE).is_file() else folder / "evaluation"
        print(compare_groups(folder, args.first.split(","), args.second.split(",")))
        return 0
    reports = [find_report(folder) for folder in args.evaluations]
    page = outputs.Target(option="--out", path=args.out, overwrite=args.overwrite, inputs=reports)
    page.check()
    evaluations = [
        Evaluated(name, read_report(folder))
        for name, folder in zip(metric_curves.run_labels(args.evaluations), args.evaluations, strict=True)
    ]
    try:
        check_alike(evaluations)
        content = comparison_page(evaluations)
    except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
        files = ", ".join(map(str, reports))
        raise ValueError(f"{files}: one is not a report of evaluate.py ({error!r}); evaluate again") from error
    page.write(content.encode())
    print(args.out)
    return 0


def check_alike(evaluations: Sequence[Evaluated]) -> None:
    """Raise ValueError with the first difference from the first evaluation in data, sampling or judges."""
    settings = [{block: run.report["settings"][block] for block in COMPARED_BLOCKS} for run in evaluations]
    for run, others in zip(evaluations, settings, strict=True):
        if problem := records.describe_difference(settings[0], others):
            raise ValueError(f"{run.name} and {evaluations[0].name} differ: {problem}; evaluate them alike")


def comparison_page(evaluations: Sequence[Evaluated]) -> str:
    """Return the page."""
    joined = join_reports(evaluations)
    judge = main_judge(joined)
    changes = [key.replace("face/", f"{judge}/") for key in COMPARED]
    rows = []
    for arm in (arm for arm in joined["arms"] if arm["against"]):
        cells = [Cell(None, *figure_cell(arm, name, [judge])[1:]) for name in changes]
        rows.append(((arm["name"], arm["people"]), cells + [figure_cell(arm, name, [judge]) for name in WHOLE]))
    curves: dict[tuple, metric_curves.Curve] = {}
    for curve in pictures.face_sim_curves(joined, judge):  # a base that several share is drawn once
        curves.setdefault(tuple(curve.points), curve)
    values = {
        "title": f"Comparison of {', '.join(run.name for run in evaluations)}",
        "head": [("run: arm", ""), *(explain(key, []) for key in (*COMPARED, *WHOLE))],
        "rows": rows,
        "curves": [embed("image/png", pictures.draw_face_sim({judge: list(curves.values())}))],
        "runs": [
            (run, [verdict(run.report, arm) for arm in compared_arms(run.report)], shlex.join(run.report["command"]))
            for run in evaluations
        ],
    }
    return render("comparison.html", values)


def join_reports(evaluations: Sequence[Evaluated]) -> dict:
    """Join the arms of all reports, to be judged by the last recogniser."""
    arms = [
        arm | {"name": f"{run.name}: {arm['name']}", "people": f"{run.report['people']} people, {arm['clips']} clips"}
        for run in evaluations
        for arm in run.report["arms"]
    ]
    return {"arms": arms, "real": evaluations[0].report["real"]}
