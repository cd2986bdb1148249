"""report.html: an evaluation in one page that opens from the disk without a network; and its text for a terminal."""

import base64
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2

from rewardfl.evaluation.figures import FROZEN
from rewardfl.evaluation.metric_curves import encode_figure
from rewardfl.evaluation.records import REAL
from rewardfl.evaluation.report.pictures import draw_face_sim, draw_front, face_sim_curves
from rewardfl.evaluation.report.tables import digits, make_tables
from rewardfl.evaluation.report.verdicts import judge_words, main_judge, verdict

PAGE = 40_000_000  # maximum bytes of a page, with its videos
NOTES = 2000  # bytes reserved for the note on this limit

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
    verdicts = [verdict(report, arm) for arm in report["arms"] if arm["against"]]
    return render("report.txt", {"report": report, "verdicts": verdicts, "tables": make_tables(report)})


def report_page(report: Mapping, folder: Path, most: int = PAGE) -> str:
    """Return the page of an evaluation in `folder`. most: maximum bytes.

    Embed the videos of the worst clips while there is room, and link the files of the rest.
    """
    judges, judge = list(report["real"]["per_frame"]), main_judge(report)
    against = [arm for arm in report["arms"] if arm["against"]]
    clips = [(clip, list_shots(report, clip, folder)) for clip in worst_first(report)]
    values = {
        "report": report,
        "title": f"Evaluation of {', '.join(arm['name'] for arm in against) or 'one arm'}",
        "verdicts": [(arm["name"], verdict(report, arm)) for arm in against],
        "tables": make_tables(report),
        "curves": [embed("image/png", draw_face_sim({name: face_sim_curves(report, name)})) for name in judges[::-1]],
        "front": embed("image/png", encode_figure(draw_front(report))),
        "worst_by": judged_arm(report),
        "judge": judge,
        "judge_words": judge_words(judge),
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
    judge, arm = main_judge(report), judged_arm(report)

    def face_sim(clip: Mapping) -> float:
        return clip["arms"][arm]["figures"][f"{judge}/face_sim"] if arm in clip["arms"] else float("inf")

    return sorted(report["per_clip"], key=face_sim)


def judged_arm(report: Mapping) -> str:
    """Return the arm that sorts the clips: the first with a base, else the first."""
    return next((arm["name"] for arm in report["arms"] if arm["against"]), report["arms"][0]["name"])


def list_shots(report: Mapping, clip: Mapping, folder: Path) -> list[dict[str, Any]]:
    """Return name, record, path and URL of the real clip and of every arm's video of it. The URL is "" for no file."""
    names = [arm["name"] for arm in report["arms"] if arm["name"] in clip["arms"]]
    shots = []
    for name, record in [(REAL, clip["real"]), *((name, clip["arms"][name]) for name in names)]:
        path = folder / record["file"]
        link = path.as_uri() if Path(record["file"]).is_absolute() else quote(record["file"])
        shots.append({"name": name, "record": record, "path": path, "source": link if path.is_file() else ""})
    return shots
