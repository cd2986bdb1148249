"""Evaluations next to each other on one page, and two groups of arms of one evaluation (tools/compare_runs.py)."""

import argparse
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rewardfl import outputs
from rewardfl.evaluation import records
from rewardfl.evaluation.arms import BASE, unique_names
from rewardfl.evaluation.figures import format_interval, is_ratio, make_table, pair_people, ratio_interval
from rewardfl.evaluation.report.pictures import draw_face_sim
from rewardfl.evaluation.report.report_page import Cell, embed, figure_cell, render
from rewardfl.evaluation.report.verdicts import CANARIES, MOVES, compared_arms, explain, main_judge, verdict

COMPARED_BLOCKS = ("data", "sampling", "judges")  # blocks of the settings in which compared evaluations must agree

COMPARED, OF_ARMS = ("face/face_sim", "face/identity_kept", *MOVES, *CANARIES), ("colour_shift", "frozen_share")

GROUP_FIGURES = ("look/face", "motion/flow", "motion/face_flow", "motion/sharpness", "motion/reversals")

Reports = Mapping[str, Mapping[str, Any]]  # contents of report.json by name


def compare_runs(args: argparse.Namespace) -> int:
    """Print the table of two groups of arms, or read, compare and write a page; return the exit code."""
    if args.first:
        folder = find_file(args.evaluations[0], records.FILE).parent
        print(compare_groups(folder, args.first.split(","), args.second.split(",")))
        return 0
    files = [find_file(folder, "report.json") for folder in args.evaluations]
    page = outputs.Target(option="--out", path=args.out, overwrite=args.overwrite, inputs=files)
    page.check()
    reports = dict(zip(unique_names(args.evaluations), map(read_report, files), strict=True))
    check_alike(reports)
    page.write(comparison_page(reports).encode())
    print(args.out)
    return 0


def find_file(folder: Path, name: str) -> Path:
    """Return a file of an evaluation, or of a run's evaluation. Raise FileNotFoundError if the folder holds none."""
    for path in (folder / name, folder / "evaluation" / name):
        if path.is_file():
            return path
    raise FileNotFoundError(f"{folder}: holds no {name}; name a run that was evaluated, or evaluate's --out")


def read_report(path: Path) -> dict[str, Any]:
    """Read the report of an evaluation of videos. Raise ValueError for another file or version."""
    report = records.parse_object(path.read_bytes())
    settings = report.get("settings") if "people" in report else None
    if not isinstance(settings, dict) or settings.get("records") != {"format": str(records.FORMAT)}:
        raise ValueError(f"{path}: is not a report on videos by this version of evaluate.py; evaluate again")
    return report


def check_alike(reports: Reports) -> None:
    """Raise ValueError with the first difference from the first evaluation in data, sampling or judges."""
    settings = {name: {key: report["settings"][key] for key in COMPARED_BLOCKS} for name, report in reports.items()}
    first = next(iter(settings))
    for name, others in settings.items():
        if problem := records.describe_difference(settings[first], others):
            raise ValueError(f"{name} and {first} differ: {problem}; evaluate them alike")


def comparison_page(reports: Reports) -> str:
    """Return the page. The last recogniser of the first evaluation decides."""
    arms = [
        arm | {"name": f"{name}: {arm['name']}", "people": f"{report['people']} people, {arm['clips']} clips"}
        for name, report in reports.items()
        for arm in report["arms"]
    ]
    joined = {"arms": arms, "real": next(iter(reports.values()))["real"]}
    judge = main_judge(joined)
    changes = [key.replace("face/", f"{judge}/") for key in COMPARED]
    rows = []
    for arm in (arm for arm in arms if arm["against"]):
        cells = [Cell(None, *figure_cell(arm, name, [judge])[1:]) for name in changes]
        rows.append(((arm["name"], arm["people"]), cells + [figure_cell(arm, name, [judge]) for name in OF_ARMS]))
    values = {
        "title": f"Comparison of {', '.join(reports)}",
        "head": [("run: arm", ""), *(explain(key, []) for key in (*COMPARED, *OF_ARMS))],
        "rows": rows,
        "curves": [embed("image/png", draw_face_sim(joined, judge))],
        "runs": [
            (name, report, [verdict(report, arm) for arm in compared_arms(report)], shlex.join(report["command"]))
            for name, report in reports.items()
        ],
    }
    return render("comparison.html", values)


def compare_groups(folder: Path, first: Sequence[str], second: Sequence[str]) -> str:
    """Return a Markdown table of two groups of arms and their paired difference, and the people that some arm lacks."""
    table_records = list(records.read_records(folder).values())
    arms = [BASE, *first, *second]
    if missing := sorted({*arms} - {record["arm"] for record in table_records}):
        raise ValueError(f"--first, --second: {folder} has no arm {', '.join(missing)}; its records.jsonl names them")
    table = make_table(table_records, arms)
    names = table.names(BASE)
    judges = [name.removesuffix("/face_sim") for name in names if name.endswith("/face_sim")]
    chosen = {*GROUP_FIGURES, *(f"{judge}/face_sim" for judge in table.scales)}
    chosen |= {f"{judge}/nonrigid" for judge in judges[-1:]}
    rows, left_out = ["| figure | first | second | first - second |", "|---|---|---|---|"], []
    for name in (name for name in names if name in chosen or name.startswith("rewards/")):
        pairs = pair_people(*(table.values(arm, name) for arm in arms))
        if not pairs.people:
            raise ValueError(f"--first, --second: {name} has no person in common; name arms of the same people")
        base, left, right = (values.mean(0) for values in pairs.values.split([1, len(first), len(second)]))
        label, start, unit = name, torch.zeros_like(base), torch.ones_like(base)
        if name.endswith("/face_sim"):
            label, scale = f"identity kept ({name.removesuffix('/face_sim')})", table.scales[name.partition("/")[0]]
            start, unit = torch.tensor([scale.another[person] for person in pairs.people]), scale.lengths(pairs.people)
        elif is_ratio(name):
            label, unit = f"{name} over the base's", base
        means = [f"{ratio_interval(side - start, unit)['mean']:.3f}" for side in (left, right)]
        rows.append(f"| {label} | {' | '.join(means)} | {format_interval(ratio_interval(left - right, unit), '+')} |")
        if pairs.left_out:
            left_out.append(f"left out, for lack of a clip in some arm: {', '.join(pairs.left_out)} ({label})")
    return "\n".join([*rows, *left_out])
