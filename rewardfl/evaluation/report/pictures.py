"""Pictures of an evaluation: FaceSim along the clip, gain against motion, and a grid of frames."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from PIL import Image, ImageDraw, ImageOps
from torch import Tensor

from rewardfl import data
from rewardfl.evaluation.records import REAL, Record
from rewardfl.evaluation.report.charts import STYLE, arm_curves, draw_curves, draw_front, make_markers, real_curve
from rewardfl.evaluation.report.meanings import judge_words, main_judge

PEOPLE, SHOWN, HEIGHT = 8, 4, 96  # rows of the grid, frames of each clip in it, and their height
GAP, HEAD, FOOT = 10, 16, 14  # pixels between clips, above all, and below each row


@STYLE
def save_curves(report: Mapping, path: Path) -> None:
    """Draw FaceSim along the clip of all arms and the real clips, by each recogniser."""
    judges = list(report["real"]["per_frame"])
    figure = Figure(figsize=(5 * len(judges), 4), layout="constrained")
    axes = figure.subplots(1, len(judges), squeeze=False)[0]
    for axis, judge in zip(axes, judges, strict=True):
        curves = [*arm_curves(report, judge), real_curve(report, judge)]
        draw_curves(axis, curves)
        axis.set_title(f"By {judge_words(judge)}")
        axis.legend(axis.lines, [curve.name for curve in curves], fontsize="small")
    figure.savefig(path, dpi=110)


@STYLE
def save_front(report: Mapping, path: Path) -> None:
    """Draw gain in FaceSim against the face's own motion, both over the base's, by the main judge."""
    figure, markers = Figure(figsize=(7, 5), layout="constrained"), make_markers(report)
    axis = figure.subplots()
    draw_front(axis, markers, judge_words(main_judge(report)))
    for marker in markers:
        point = (marker.gain["mean"], marker.motion["mean"])
        axis.annotate(marker.name, point, xytext=(4, 4), textcoords="offset points")
    axis.annotate("base", (0, 1), xytext=(4, -12), textcoords="offset points")
    figure.savefig(path, dpi=110)


def draw_grid(report: Mapping, out: Path, records: Sequence[Record], read: Callable[[Path], Tensor]) -> None:
    """Draw out/grid.png: a row per clip, a column for the real clip and each arm, the judge's score below a frame.

    records: of the clips that are shown. read: returns the frames of another tool's video.
    """
    names = [REAL, *(arm["name"] for arm in report["arms"])]
    rows = sorted({record["index"] for record in records})
    first = [record for record in records if not record["seed"] and record["arm"] in names]
    first = [record for record in first if (out / record["file"]).is_file()]
    strips = [_draw_strip(record, main_judge(report), out, read) for record in first]
    width, height = max(strip.width for strip in strips) + GAP, max(strip.height for strip in strips)
    sheet = Image.new("RGB", (len(names) * width, HEAD + len(rows) * height), "white")
    for i, name in enumerate(names):
        ImageDraw.Draw(sheet).text((i * width + 4, 2), name, fill="black")
    for record, strip in zip(first, strips, strict=True):
        sheet.paste(strip, (names.index(record["arm"]) * width, HEAD + rows.index(record["index"]) * height))
    sheet.save(out / "grid.png")


def _draw_strip(record: Record, judge: str, out: Path, read: Callable[[Path], Tensor]) -> Image.Image:
    """Draw frames of a video, evenly among those after the first, with the score below each."""
    is_foreign, path = record["decoded"] and record["arm"] != REAL, out / record["file"]
    frames = (read(path) if is_foreign else data.read_video(path)).numpy()
    shown = np.linspace(1, len(frames) - 1, min(SHOWN, len(frames) - 1)).round().astype(int)
    pictures = [ImageOps.contain(Image.fromarray(frames[i]), (4 * HEIGHT, HEIGHT)) for i in shown]
    strip = Image.new("RGB", (sum(picture.width for picture in pictures), HEIGHT + FOOT), "white")
    left = 0
    for i, picture in zip(shown, pictures, strict=True):
        strip.paste(picture, (left, 0))
        if record["arm"] != REAL:
            ImageDraw.Draw(strip).text((left + 4, HEIGHT), f"{record['curves'][judge][i - 1]:.2f}", fill="black")
        left += picture.width
    return strip


def draw_pictures(report: Mapping, out: Path, records: Sequence[Record], read: Callable[[Path], Tensor]) -> list[Path]:
    """Draw all pictures of an evaluation and return their files. records, read: as `draw_grid` takes them."""
    pictures = [out / "grid.png", out / "curves.png"]
    save_curves(report, out / "curves.png")
    draw_grid(report, out, records, read)
    if sum(arm["against"] is not None for arm in report["arms"]) > 1:
        save_front(report, out / "front.png")
        pictures.append(out / "front.png")
    return pictures
