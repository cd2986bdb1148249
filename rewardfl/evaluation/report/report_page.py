"""report.html: an evaluation in one page that opens from the disk without a network, made from report.json."""

import base64
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from rewardfl.evaluation.figures import FROZEN
from rewardfl.evaluation.records import REAL
from rewardfl.evaluation.report.charts import arm_curves, curves_chart, front_chart, make_markers, real_curve
from rewardfl.evaluation.report.meanings import (
    FROZEN_MOST,
    describe_unhealthy,
    healthy,
    judge_words,
    main_judge,
    meaning,
)
from rewardfl.evaluation.report.table import STILL
from rewardfl.evaluation.report.templates import Cell, TableRow, render
from rewardfl.evaluation.report.verdicts import frozen, verdict

PAGE = 40_000_000  # maximum bytes of a page, with its videos
NOTES = 2000  # bytes reserved for the note on this limit


def report_page(report: Mapping, folder: Path, most: int = PAGE) -> str:
    """Return the page of an evaluation in `folder`. most: maximum bytes.

    Embed the videos of the worst clips while there is room, and link the files of the rest.
    """
    judges, judge = list(report["real"]["per_frame"]), main_judge(report)
    against = [arm for arm in report["arms"] if arm["against"]]
    clips = [(clip, shots(report, clip, folder)) for clip in worst_first(report)]
    values = {
        "report": report,
        "title": f"Evaluation of {', '.join(arm['name'] for arm in against) or 'one arm'}",
        "verdicts": [(arm["name"], verdict(report, arm)) for arm in against],
        "tables": tables(report, judges),
        "curves": [
            curves_chart(f"By {judge_words(name)}", [*arm_curves(report, name), real_curve(report, name)])
            for name in reversed(judges)
        ],
        "front": front_chart(make_markers(report), judge),
        "worst_by": judged_arm(report),
        "judge": judge_words(judge),
        "clips": clips,
        "command": shlex.join(report["command"]),
        "frozen": FROZEN,
    }
    room = most - NOTES - len(render("report.html", values | {"inside": 0}).encode())
    inside = 0
    for _, clip_shots in clips:
        room -= sum(shot.size for shot in clip_shots)
        if room < 0:
            break
        inside += 1
    return render("report.html", values | {"inside": inside})


Table = tuple[str, str, Sequence[tuple[str, str]], Sequence[TableRow]]  # two headings, head, rows


def tables(report: Mapping, judges: Sequence[str]) -> list[Table]:
    """Return a table for each question; a row per figure, a column per arm, and the real clips last."""
    names = list(dict.fromkeys(name for arm in report["arms"] for name in arm["figures"]))
    moves = [f"{judges[-1]}/{key}" for key in ("speed", "nonrigid")]
    motion = [name for name in names if name.startswith("motion/") and name != "motion/sharpness"]
    canaries = [name for name in names if name.startswith("canary/")]
    rest = [name for name in names if name.partition("/")[0] not in ("motion", "still", "canary", *judges)]
    sections = [
        ("", f"By {judge_words(judge)}", [n for n in names if n.startswith(f"{judge}/") and n not in moves])
        for judge in reversed(judges)
    ]
    sections[0] = ("Is the person kept?", *sections[0][1:])
    sections += [
        ("Does it still move?", "", [*moves, *motion, "frozen_share"]),
        (f"T{STILL[1:]}", "", [name for name in names if name.startswith("still/")]),
        ("Canaries: was the reward hacked?", "", ["motion/sharpness", *canaries, "colour_shift"]),
    ]
    if rest:
        sections.append(("Published protocols and other rewards", "", rest))
    head = [(name, "") for name in ("figure", *(arm["name"] for arm in report["arms"]), "real clips")]
    return [
        *((title, below, head, [_row(report, name) for name in rows]) for title, below, rows in sections),
        strata(report),
    ]


def _row(report: Mapping, name: str) -> TableRow:
    judges = list(report["real"]["per_frame"])
    figure = meaning(name, judges)
    cells = [*(figure_cell(arm, name, judges) for arm in report["arms"]), Cell(report["real"]["figures"].get(name))]
    return TableRow((figure.label, figure.says + healthy(figure)), cells)


def figure_cell(arm: Mapping, name: str, judges: Sequence[str]) -> Cell:
    """Return a figure of an arm, and its change against the arm's base, marked where it is not healthy."""
    if name in ("frozen_share", "colour_shift"):  # figures of an arm and its base
        problem = f"healthy: {FROZEN_MOST:g} at most" if name == "frozen_share" and frozen(arm) else ""
        return Cell(arm[name] if arm["against"] else None, problem=problem)
    change = (arm.get("compared") or {}).get(name)
    return Cell(arm["figures"].get(name), change or None, describe_unhealthy(change, meaning(name, judges)))


def strata(report: Mapping) -> Table:
    """Return the table of FaceSim by the width of the face."""
    name = f"{main_judge(report)}/face_sim"
    (smallest, small), *larger = report["face_sizes"].items()
    rows = [TableRow((smallest, ""), [str(small), *("too small to be scored here" for _ in report["arms"])])]
    for width, count in larger:
        groups = [arm["strata"][width] for arm in report["arms"]]
        cells = [Cell(group["figures"][name], (group.get("compared") or {}).get(name)) for group in groups]
        rows.append(TableRow((width, ""), [str(count), *cells]))
    arms = [f"FaceSim of {arm['name']}" for arm in report["arms"]]
    head = [(text, "") for text in ("face's width in the real clip", "people", *arms)]
    return "By the size of the face", "", head, rows


@dataclass(frozen=True, kw_only=True)
class Shot:
    """One video of a clip. name: its arm. judge: whose scores are shown. path: the file."""

    name: str
    record: Mapping
    judge: str
    path: Path

    @property
    def exists(self) -> bool:
        return self.path.is_file()

    @property
    def size(self) -> int:
        """Bytes of its base64 text."""
        return 4 * -(-self.path.stat().st_size // 3) if self.exists else 0

    @property
    def data_uri(self) -> str:
        return "data:video/mp4;base64," + base64.b64encode(self.path.read_bytes()).decode()

    @property
    def link(self) -> str:
        """URL relative to the page, absolute for a file elsewhere."""
        file = self.record["file"]
        return self.path.as_uri() if Path(file).is_absolute() else quote(file)


def worst_first(report: Mapping) -> list[Mapping]:
    """Sort the clips by the main judge's FaceSim of `judged_arm`, the lowest first; clips without its video last."""
    judge, arm = main_judge(report), judged_arm(report)

    def face_sim(clip: Mapping) -> float:
        return clip["arms"][arm]["figures"][f"{judge}/face_sim"] if arm in clip["arms"] else float("inf")

    return sorted(report["per_clip"], key=face_sim)


def judged_arm(report: Mapping) -> str:
    """Return the arm that sorts the clips: the first with a base, else the first."""
    return next((arm["name"] for arm in report["arms"] if arm["against"]), report["arms"][0]["name"])


def shots(report: Mapping, clip: Mapping, folder: Path) -> list[Shot]:
    """Return the real clip and every arm's video of it."""
    names = [arm["name"] for arm in report["arms"] if arm["name"] in clip["arms"]]
    records = {REAL: clip["real"], **{name: clip["arms"][name] for name in names}}
    judge = main_judge(report)
    return [Shot(name=name, record=r, judge=judge, path=folder / r["file"]) for name, r in records.items()]
