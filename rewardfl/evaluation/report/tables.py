"""The figures of an evaluation as tables, for the page and for a terminal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rewardfl.evaluation.figures import Interval
from rewardfl.evaluation.report.verdicts import (
    FROZEN_MOST,
    describe_unhealthy,
    frozen,
    healthy,
    judge_words,
    main_judge,
    meaning,
)


@dataclass(frozen=True)
class Cell:
    """A figure and its change against the base. problem: why the change is not healthy; empty where it is."""

    figure: Interval | None
    change: Mapping | None = None
    problem: str = ""


_Name = tuple[str, str]  # of a row or column, with a line below; empty for none

TableRow = tuple[_Name, Sequence[Cell]]


@dataclass(frozen=True, kw_only=True)
class FigureTable:
    """A table with two headings."""

    title: str
    subtitle: str = ""
    head: Sequence[_Name]
    rows: Sequence[TableRow]


def digits(value: Interval, *, signed: bool = False) -> list[str]:
    """Format mean, low and high with as many digits as the largest of them needs."""
    largest = max(map(abs, value.values()))
    count = 1 if largest >= 100 else 4 if 0 < largest < 0.1 else 3
    return [f"{value[key]:{'+' if signed else ''}.{count}f}" for key in ("mean", "low", "high")]


def make_tables(report: Mapping) -> list[FigureTable]:
    """Return a table for each question; a row per figure, a column per arm, and the real clips last."""
    judges = list(report["real"]["per_frame"])
    names = list(dict.fromkeys(name for arm in report["arms"] for name in arm["figures"]))
    moves = [f"{judges[-1]}/{key}" for key in ("speed", "nonrigid")]
    motion = [name for name in names if name.startswith("motion/") and name != "motion/sharpness"]
    canaries = [name for name in names if name.startswith("canary/")]
    sections = [
        ("", f"By {judge_words(judge)}", [n for n in names if n.startswith(f"{judge}/") and n not in moves])
        for judge in reversed(judges)
    ] + [
        ("Does it still move?", "", [*moves, *motion, "frozen_share"]),
        ("These reward stillness: may only fall", "", [name for name in names if name.startswith("still/")]),
        ("Canaries: was the reward hacked?", "", ["motion/sharpness", *canaries, "colour_shift"]),
    ]
    sections[0] = ("Is the person kept?", *sections[0][1:])
    if rest := [name for name in names if name.partition("/")[0] not in ("motion", "still", "canary", *judges)]:
        sections.append(("Published protocols and other rewards", "", rest))
    head = [(name, "") for name in ("figure", *(arm["name"] for arm in report["arms"]), "real clips")]
    tables = [
        FigureTable(title=title, subtitle=below, head=head, rows=[_figure_row(report, name) for name in rows])
        for title, below, rows in sections
    ]
    return [*tables, _strata(report)]


def _figure_row(report: Mapping, name: str) -> TableRow:
    judges = list(report["real"]["per_frame"])
    figure = meaning(name, judges)
    cells = [*(figure_cell(arm, name, judges) for arm in report["arms"]), Cell(report["real"]["figures"].get(name))]
    return (figure.label, figure.says + healthy(figure)), cells


def figure_cell(arm: Mapping, name: str, judges: Sequence[str]) -> Cell:
    """Return a figure of an arm, and its change against the arm's base, marked where it is not healthy."""
    if name in ("frozen_share", "colour_shift"):  # figures of an arm and its base
        problem = f"healthy: {FROZEN_MOST:g} at most" if name == "frozen_share" and frozen(arm) else ""
        return Cell(arm.get(name), problem=problem)
    change = arm.get("compared", {}).get(name)
    return Cell(arm["figures"].get(name), change, describe_unhealthy(change, meaning(name, judges)))


def _strata(report: Mapping) -> FigureTable:
    """Return the table of FaceSim by the width of the face."""
    name, (smallest, *_) = f"{main_judge(report)}/face_sim", report["face_sizes"]
    rows: list[TableRow] = []
    for width, count in report["face_sizes"].items():
        groups = [arm["strata"].get(width, {}) for arm in report["arms"]]
        cells = [Cell(group.get("figures", {}).get(name), group.get("compared", {}).get(name)) for group in groups]
        rows.append(((f"{width}: {count} people", "too small to be scored here" if width == smallest else ""), cells))
    head = [(text, "") for text in ("face's width in the real clip", *(arm["name"] for arm in report["arms"]))]
    return FigureTable(title="FaceSim by the size of the face", head=head, rows=rows)
