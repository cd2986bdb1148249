"""report.html: an evaluation in one page that opens from the disk, without a network. From report.json's content."""

import base64
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from rewardfl.evaluation.figures import FROZEN
from rewardfl.evaluation.records import REAL
from rewardfl.evaluation.report.charts import arm_curves, curves_chart, front_chart, make_markers, real_curve
from rewardfl.evaluation.report.meanings import FROZEN_MOST, healthy, judge_words, main_judge, meaning, outside
from rewardfl.evaluation.report.table import STILL
from rewardfl.evaluation.report.templates import Cell, TableRow, render
from rewardfl.evaluation.report.verdicts import frozen, verdict

PAGE = 40_000_000  # bytes of a page at most, the videos in it included

NOTES = 2000  # of these for what the page then says of its limit


def report_page(report: Mapping, folder: Path, most: int = PAGE) -> str:
    """Return the page of an evaluation whose videos lie in `folder`, of at most so many bytes.

    The worst clips' videos are in it as long as there is room. The others are links to the files next to it.
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
    for _, found in clips:
        room -= sum(shot.size for shot in found)
        if room < 0:
            break
        inside += 1
    return render("report.html", values | {"inside": inside})


Table = tuple[str, str, Sequence[tuple[str, str]], Sequence[TableRow]]  # its two headings, its head and its rows


def tables(report: Mapping, judges: Sequence[str]) -> list[Table]:
    """Return a table for each question; a row per figure, a column per arm, and the real clips last."""
    names = list(dict.fromkeys(name for arm in report["arms"] for name in arm["figures"]))
    moves = [f"{judges[-1]}/{key}" for key in ("speed", "nonrigid")]
    motion = [name for name in names if name.startswith("motion/") and name != "motion/sharpness"]
    canaries = [name for name in names if name.startswith("canary/")]
    others = [name for name in names if name.partition("/")[0] not in ("motion", "still", "canary", *judges)]
    found = [
        ("", f"By {judge_words(judge)}", [n for n in names if n.startswith(f"{judge}/") and n not in moves])
        for judge in reversed(judges)
    ]
    found[0] = ("Is the person kept?", *found[0][1:])
    found += [
        ("Does it still move?", "", [*moves, *motion, "frozen_share"]),
        (f"T{STILL[1:]}", "", [name for name in names if name.startswith("still/")]),
        ("Canaries: was the reward hacked?", "", ["motion/sharpness", *canaries, "colour_shift"]),
    ]
    if others:
        found.append(("Published protocols and other rewards", "", others))
    head = [(name, "") for name in ("figure", *(arm["name"] for arm in report["arms"]), "real clips")]
    return [
        *((title, below, head, [_row(report, name) for name in rows]) for title, below, rows in found),
        strata(report),
    ]


def _row(report: Mapping, name: str) -> TableRow:
    judges = list(report["real"]["per_frame"])
    known = meaning(name, judges)
    cells = [figure_cell(arm, name, judges) for arm in report["arms"]]
    return TableRow((known.label, known.says + healthy(known)), [*cells, Cell(report["real"]["figures"].get(name))])


def figure_cell(arm: Mapping, name: str, judges: Sequence[str]) -> Cell:
    """Return a figure of an arm, and its change against the arm's base, marked where it is not healthy."""
    if name in ("frozen_share", "colour_shift"):  # of an arm and its base together
        problem = f"healthy: {FROZEN_MOST:g} at most" if name == "frozen_share" and frozen(arm) else ""
        return Cell(arm[name] if arm["against"] else None, problem=problem)
    found = (arm.get("compared") or {}).get(name)
    return Cell(arm["figures"].get(name), found or None, outside(found, meaning(name, judges)))


def strata(report: Mapping) -> Table:
    """Return FaceSim by the width of the face."""
    name = f"{main_judge(report)}/face_sim"
    (least, small), *larger = report["face_sizes"].items()
    rows = [TableRow((least, ""), [str(small), *("too small to be scored here" for _ in report["arms"])])]
    for width, count in larger:
        found = [arm["strata"][width] for arm in report["arms"]]
        cells = [Cell(one["figures"][name], (one.get("compared") or {}).get(name)) for one in found]
        rows.append(TableRow((width, ""), [str(count), *cells]))
    arms = [f"FaceSim of {arm['name']}" for arm in report["arms"]]
    head = [(text, "") for text in ("face's width in the real clip", "people", *arms)]
    return "By the size of the face", "", head, rows


@dataclass(frozen=True)
class Shot:
    """One video of a clip: its arm, its record, the judge whose scores are shown, and where the file is."""

    name: str
    record: Mapping
    judge: str
    path: Path

    @property
    def exists(self) -> bool:
        return self.path.is_file()

    @property
    def size(self) -> int:
        """Bytes of it in a page, as text."""
        return 4 * -(-self.path.stat().st_size // 3) if self.exists else 0

    @property
    def data_uri(self) -> str:
        return "data:video/mp4;base64," + base64.b64encode(self.path.read_bytes()).decode()

    @property
    def link(self) -> str:
        """The address from the page's folder, or the whole one of a file elsewhere."""
        file = self.record["file"]
        return self.path.as_uri() if Path(file).is_absolute() else quote(file)


def worst_first(report: Mapping) -> list[Mapping]:
    """Return the clips by the main judge's FaceSim of the arm that is compared first, the lowest first.

    A clip that this arm has no video of comes last. Without a comparison the only arm counts.
    """
    judge, arm = main_judge(report), judged_arm(report)

    def face_sim(clip: Mapping) -> float:
        return clip["arms"][arm]["figures"][f"{judge}/face_sim"] if arm in clip["arms"] else float("inf")

    return sorted(report["per_clip"], key=face_sim)


def judged_arm(report: Mapping) -> str:
    """Return the arm by which clips are called worse: the first that is compared with another, else the first."""
    return next((arm["name"] for arm in report["arms"] if arm["against"]), report["arms"][0]["name"])


def shots(report: Mapping, clip: Mapping, folder: Path) -> list[Shot]:
    """Return the real clip and every arm's video of it."""
    names = [arm["name"] for arm in report["arms"] if arm["name"] in clip["arms"]]
    found = {REAL: clip["real"], **{name: clip["arms"][name] for name in names}}
    return [Shot(name, known, main_judge(report), folder / known["file"]) for name, known in found.items()]
