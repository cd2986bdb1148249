"""report.html: an evaluation in one page that opens from the disk without a network, made from report.json."""

import base64
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2

from rewardfl.evaluation.figures import FROZEN
from rewardfl.evaluation.records import REAL
from rewardfl.evaluation.report.pictures import arm_curves, curves_chart, front_chart, make_markers, real_curve
from rewardfl.evaluation.report.tables import digits, make_tables
from rewardfl.evaluation.report.verdicts import judge_words, main_judge, verdict

PAGE = 40_000_000  # maximum bytes of a page, with its videos
NOTES = 2000  # bytes reserved for the note on this limit

ENVIRONMENT = jinja2.Environment(
    loader=jinja2.PackageLoader("rewardfl.evaluation.report", "pages"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
ENVIRONMENT.filters["digits"] = digits


def render(template: str, values: Mapping[str, Any]) -> str:
    """Render a template with these values; jinja2 escapes whatever comes from files."""
    return ENVIRONMENT.get_template(template).render(values)


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
        "tables": make_tables(report),
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
        """Return the bytes of its base64 text."""
        return 4 * -(-self.path.stat().st_size // 3) if self.exists else 0

    @property
    def data_uri(self) -> str:
        return "data:video/mp4;base64," + base64.b64encode(self.path.read_bytes()).decode()

    @property
    def link(self) -> str:
        """Return the URL, relative to the page, absolute for a file elsewhere."""
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
