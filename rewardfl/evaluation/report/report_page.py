"""The page of an evaluation, which opens from the disk without a network, its tables, and its text for a terminal."""

import base64
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import jinja2

from rewardfl.evaluation.figures import FROZEN, Interval, format_interval
from rewardfl.evaluation.records import REAL
from rewardfl.evaluation.report import verdicts
from rewardfl.evaluation.report.pictures import draw_face_sim

PAGE = 40_000_000  # maximum bytes of a page, with its videos


class Cell(NamedTuple):
    """A figure and its changes against base and start. problem: why the former is not healthy; empty where it is."""

    figure: Interval | None
    change: Mapping | None = None
    problem: str = ""
    over_start: Mapping | None = None


def make_tables(report: Mapping) -> list[dict[str, Any]]:
    """Return a table for each question; a row per figure, a column per arm, and the real clips last."""
    judges, arms, real = list(report["real"]["per_frame"]), report["arms"], report["real"]["figures"]
    names = list(dict.fromkeys(name for arm in arms for name in arm["figures"]))
    moves = [f"{judges[-1]}/{key}" for key in ("speed", "nonrigid")]
    blocks = {block: [n for n in names if n.startswith(f"{block}/")] for block in (*judges, "motion", "canary")}
    sections = {
        f"Is the person kept? By {verdicts.judge_words(judge)}": [n for n in blocks[judge] if n not in moves]
        for judge in reversed(judges)
    }
    motion = [name for name in blocks["motion"] if name != "motion/sharpness"]
    sections["Does it still move?"] = [*moves, *motion, "frozen_share"]
    sections["Canaries: was the reward hacked?"] = ["motion/sharpness", *blocks["canary"], "colour_shift"]
    sections["The look of the face and other rewards"] = [n for n in names if n not in sum(blocks.values(), [])]
    head = [(arm["name"], "decoded from mp4" if arm["decoded"] else "") for arm in arms]
    head += [("real clips", "")] if real else []
    tables: list[dict[str, Any]] = []
    for title, listed in sections.items():
        rows = []
        for name in listed:
            cells = [figure_cell(arm, name, judges) for arm in arms] + ([Cell(real.get(name))] if real else [])
            rows.append((verdicts.explain(name, judges), cells))
        tables.append({"title": title, "head": [("figure", ""), *head], "rows": rows})
    return [table for table in tables if table["rows"]]


def figure_cell(arm: Mapping, name: str, judges: Sequence[str]) -> Cell:
    """Return a figure of an arm, and its change against the arm's base, marked where it is not healthy."""
    if name in ("frozen_share", "colour_shift"):  # figures of an arm and its base
        share = arm.get(name)
        return Cell(share, problem=verdicts.describe_unhealthy(name, {"difference": share}, judges))
    change = arm.get("compared", {}).get(name)
    problem = verdicts.describe_unhealthy(name, change, judges)
    return Cell(arm["figures"].get(name), change, problem, arm.get("over_start", {}).get(name))


ENVIRONMENT = jinja2.Environment(
    loader=jinja2.PackageLoader("rewardfl.evaluation.report", "pages"), undefined=jinja2.StrictUndefined,
    autoescape=jinja2.select_autoescape(["html"]), trim_blocks=True, lstrip_blocks=True,
)  # fmt: skip
ENVIRONMENT.filters |= {"interval": format_interval, "remarks": verdicts.remarks}


def render(template: str, values: Mapping[str, Any]) -> str:
    """Render a template with these values; jinja2 escapes whatever comes from files."""
    return ENVIRONMENT.get_template(template).render(values)


def format_report(report: Mapping) -> str:
    """Format the verdicts, and then the figures of each arm and of the real clips, for a terminal."""
    words = [verdicts.verdict(report, arm) for arm in verdicts.compared_arms(report)]
    return render("report.txt", {"report": report, "verdicts": words, "tables": make_tables(report)})


def report_page(report: Mapping, folder: Path, most: int = PAGE) -> str:
    """Return the page of an evaluation in `folder`, of at most `most` bytes, with the videos of the worst clips."""
    judges, against = list(report["real"]["per_frame"]), verdicts.compared_arms(report)
    clips = [(clip, list_shots(clip, folder)) for clip in worst_first(report)]
    values = {
        "report": report, "tables": make_tables(report), "clips": clips, "frozen": FROZEN,
        "title": f"Evaluation of {', '.join(arm['name'] for arm in against) or 'one arm'}",
        "verdicts": [(arm["name"], verdicts.verdict(report, arm)) for arm in against],
        "curves": [embed("image/png", draw_face_sim(report, name)) for name in judges[::-1]],
        "worst_by": (against or report["arms"])[0]["name"], "command": shlex.join(report["command"]),
        "judge": judges[-1], "judge_words": verdicts.judge_words(judges[-1]),
    }  # fmt: skip
    # 2000 bytes for the note on this limit
    room, inside = most - 2000 - len(render("report.html", values | {"inside": 0}).encode()), 0
    for _, shots in clips:
        present = [shot for shot in shots if shot["source"]]
        room -= sum(4 * -(-shot["path"].stat().st_size // 3) for shot in present)  # length in base64
        if room < 0:
            break
        for shot in present:
            shot["source"] = embed("video/mp4", shot["path"].read_bytes())
        inside += 1
    return render("report.html", values | {"inside": inside})


def embed(mime_type: str, content: bytes) -> str:
    """Return a file as a data URI."""
    return f"data:{mime_type};base64,{base64.b64encode(content).decode()}"


def worst_first(report: Mapping) -> list[Mapping]:
    """Sort the clips by FaceSim of the first verdict's arm, else the first arm; clips without its video last."""
    face_sim, arm = f"{verdicts.main_judge(report)}/face_sim", (verdicts.compared_arms(report) or report["arms"])[0]
    last = {"figures": {face_sim: float("inf")}}
    return sorted(report["per_clip"], key=lambda clip: clip["arms"].get(arm["name"], last)["figures"][face_sim])


def list_shots(clip: Mapping, folder: Path) -> list[dict[str, Any]]:
    """Return name, record, path and URL of the real clip and of every arm's video of it. The URL is "" for no file."""
    shots, real = [], {REAL: clip["real"]} if "real" in clip else {}
    for name, record in (real | clip["arms"]).items():
        path = folder / record["file"]
        link = path.as_uri() if Path(record["file"]).is_absolute() else quote(record["file"])
        shots.append({"name": name, "record": record, "path": path, "source": link if path.is_file() else ""})
    return shots
