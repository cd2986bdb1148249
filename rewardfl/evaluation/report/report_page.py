"""The page of an evaluation, which opens from the disk without a network, its tables, and its text for a terminal."""

import base64
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2

from rewardfl.evaluation.figures import FROZEN, Interval
from rewardfl.evaluation.metric_curves import Lines, encode_figure
from rewardfl.evaluation.records import REAL
from rewardfl.evaluation.report import verdicts
from rewardfl.evaluation.report.pictures import draw_face_sim, draw_front, draw_training, face_sim_curves

PAGE = 40_000_000  # maximum bytes of a page, with its videos
NOTES = 2000  # bytes reserved for the note on this limit


@dataclass(frozen=True)
class Cell:
    """A figure and its changes against base and start. problem: why the former is not healthy; empty where it is."""

    figure: Interval | None
    change: Mapping | None = None
    problem: str = ""
    over_start: Mapping | None = None


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
        ("", f"By {verdicts.judge_words(judge)}", [n for n in names if n.startswith(f"{judge}/") and n not in moves])
        for judge in reversed(judges)
    ] + [
        ("Does it still move?", "", [*moves, *motion, "frozen_share"]),
        ("Canaries: was the reward hacked?", "", ["motion/sharpness", *canaries, "colour_shift"]),
    ]
    sections[0] = ("Is the person kept?", *sections[0][1:])
    if rest := [name for name in names if name.partition("/")[0] not in ("motion", "canary", *judges)]:
        sections.append(("The look of the face and other rewards", "", rest))
    head = [(name, "") for name in ("figure", *(arm["name"] for arm in report["arms"]), "real clips")]
    tables = [
        FigureTable(title=title, subtitle=below, head=head, rows=[_figure_row(report, name) for name in rows])
        for title, below, rows in sections
    ]
    return [*tables, _strata(report)]


def _figure_row(report: Mapping, name: str) -> TableRow:
    judges = list(report["real"]["per_frame"])
    figure = verdicts.meaning(name, judges)
    cells = [*(figure_cell(arm, name, judges) for arm in report["arms"]), Cell(report["real"]["figures"].get(name))]
    return (figure.label, figure.says + verdicts.healthy(figure)), cells


def figure_cell(arm: Mapping, name: str, judges: Sequence[str]) -> Cell:
    """Return a figure of an arm, and its change against the arm's base, marked where it is not healthy."""
    if name in ("frozen_share", "colour_shift"):  # figures of an arm and its base
        is_frozen = name == "frozen_share" and verdicts.frozen(arm)
        return Cell(arm.get(name), problem=f"healthy: {verdicts.FROZEN_MOST:g} at most" if is_frozen else "")
    change = arm.get("compared", {}).get(name)
    problem = verdicts.describe_unhealthy(change, verdicts.meaning(name, judges))
    return Cell(arm["figures"].get(name), change, problem, arm.get("over_start", {}).get(name))


def _strata(report: Mapping) -> FigureTable:
    """Return the table of FaceSim by the width of the face."""
    name, (smallest, *_) = f"{verdicts.main_judge(report)}/face_sim", report["face_sizes"]
    rows: list[TableRow] = []
    for width, count in report["face_sizes"].items():
        groups = [arm["strata"].get(width, {}) for arm in report["arms"]]
        cells = [Cell(group.get("figures", {}).get(name), group.get("compared", {}).get(name)) for group in groups]
        rows.append(((f"{width}: {count} people", "too small to be scored here" if width == smallest else ""), cells))
    head = [(text, "") for text in ("face's width in the real clip", *(arm["name"] for arm in report["arms"]))]
    return FigureTable(title="FaceSim by the size of the face", head=head, rows=rows)


ENVIRONMENT = jinja2.Environment(
    loader=jinja2.PackageLoader("rewardfl.evaluation.report", "pages"),
    autoescape=jinja2.select_autoescape(["html"]),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
ENVIRONMENT.filters["digits"] = digits


def render(template: str, values: Mapping[str, Any]) -> str:
    """Render a template with these values; jinja2 escapes whatever comes from files."""
    return ENVIRONMENT.get_template(template).render(values)


def format_report(report: Mapping) -> str:
    """Format the verdicts, and then the figures of each arm and of the real clips, for a terminal."""
    words = [verdicts.verdict(report, arm) for arm in verdicts.compared_arms(report)]
    return render("report.txt", {"report": report, "verdicts": words, "tables": make_tables(report)})


def report_page(report: Mapping, folder: Path, most: int = PAGE, metrics: Lines | None = None) -> str:
    """Return the page of an evaluation in `folder`. most: maximum bytes. metrics: of the run's training.

    Embed the videos of the worst clips while there is room, and link the files of the rest.
    """
    judges, judge = list(report["real"]["per_frame"]), verdicts.main_judge(report)
    against, training = verdicts.compared_arms(report), draw_training({"training": metrics or []})
    clips = [(clip, list_shots(report, clip, folder)) for clip in worst_first(report)]
    values = {
        "report": report,
        "title": f"Evaluation of {', '.join(arm['name'] for arm in against) or 'one arm'}",
        "verdicts": [(arm["name"], verdicts.verdict(report, arm)) for arm in against],
        "tables": make_tables(report),
        "curves": [embed("image/png", draw_face_sim({name: face_sim_curves(report, name)})) for name in judges[::-1]],
        "front": embed("image/png", encode_figure(draw_front(report))),
        "training": embed("image/png", training) if training else "",
        "worst_by": judged_arm(report),
        "judge": judge,
        "judge_words": verdicts.judge_words(judge),
        "clips": clips,
        "command": shlex.join(report["command"]),
        "frozen": FROZEN,
    }
    room, inside = most - NOTES - len(render("report.html", values | {"inside": 0}).encode()), 0
    for _, shots in clips:
        present = [shot for shot in shots if shot["source"]]
        room -= sum(4 * -(-shot["path"].stat().st_size // 3) for shot in present)  # of base64
        if room < 0:
            break
        for shot in present:
            shot["source"] = embed("video/mp4", shot["path"].read_bytes())
        inside += 1
    return render("report.html", values | {"inside": inside})


def embed(kind: str, content: bytes) -> str:
    """Return a file as a data URI. kind: its MIME type."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def worst_first(report: Mapping) -> list[Mapping]:
    """Sort the clips by the main judge's FaceSim of `judged_arm`, the lowest first; clips without its video last."""
    judge, arm = verdicts.main_judge(report), judged_arm(report)

    def face_sim(clip: Mapping) -> float:
        return clip["arms"][arm]["figures"][f"{judge}/face_sim"] if arm in clip["arms"] else float("inf")

    return sorted(report["per_clip"], key=face_sim)


def judged_arm(report: Mapping) -> str:
    """Return the arm that sorts the clips: the first verdict's, else the first."""
    return (verdicts.compared_arms(report) or report["arms"])[0]["name"]


def list_shots(report: Mapping, clip: Mapping, folder: Path) -> list[dict[str, Any]]:
    """Return name, record, path and URL of the real clip and of every arm's video of it. The URL is "" for no file."""
    names = [arm["name"] for arm in report["arms"] if arm["name"] in clip["arms"]]
    shots = []
    for name, record in [(REAL, clip["real"]), *((name, clip["arms"][name]) for name in names)]:
        path = folder / record["file"]
        link = path.as_uri() if Path(record["file"]).is_absolute() else quote(record["file"])
        shots.append({"name": name, "record": record, "path": path, "source": link if path.is_file() else ""})
    return shots
