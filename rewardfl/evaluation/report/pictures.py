"""Charts for pages and files, FaceSim along the clip and gain against motion, and a grid of frames."""

import base64
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image, ImageDraw, ImageOps
from torch import Tensor

from rewardfl import data
from rewardfl.evaluation import records
from rewardfl.evaluation.intervals import Interval
from rewardfl.evaluation.records import Record
from rewardfl.evaluation.report.verdicts import judge_words, main_judge

PEOPLE, SHOWN, HEIGHT = 8, 4, 96  # rows of the grid, frames of each clip in it, and their height
GAP, HEAD, FOOT = 10, 16, 14  # pixels between clips, above all, and below each row

_COLOURS = ("#0068b5", "#c75300", "#00805b", "#a83f83", "#8a6d00", "#1f8fbf", "#7b4fb5", "#8b4a2b")

REAL, BASE = "#7f7f7f", "#000000"

STYLE = matplotlib.rc_context(
    {
        "svg.hashsalt": "rewardfl",  # equal figures give equal bytes
        "text.parse_math": False,  # names may hold a dollar sign
        "axes.grid": True,
        "grid.alpha": 0.3,
    }
)


@dataclass(frozen=True)
class Curve:
    """A named line of (x, y), by rising x."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str


@dataclass(frozen=True, kw_only=True)
class Marker:
    """A named point: an arm's gain in FaceSim and its motion over the base's."""

    name: str
    gain: Interval
    motion: Interval
    colour: str


@dataclass(frozen=True)
class Chart:
    """A picture of a page as a data URI, and the names of its colours."""

    title: str
    image: str
    names: Sequence[tuple[str, str]]


def arm_colour(number: int) -> str:
    """Return the colour of the arm with this number."""
    return _COLOURS[number % len(_COLOURS)]


def arm_curves(report: Mapping, judge: str, before: str = "", first: int = 0) -> list[Curve]:
    """Return FaceSim along the clip of every arm. before: prefix of the names. first: number of the first colour."""
    return [
        Curve(before + arm["name"], list(enumerate(arm["per_frame"][judge], 1)), arm_colour(i))
        for i, arm in enumerate(report["arms"], first)
    ]


def real_curve(report: Mapping, judge: str) -> Curve:
    """Return FaceSim along the clip of the real clips, by their own pools."""
    return Curve("real clips", list(enumerate(report["real"]["per_frame"][judge], 1)), REAL)


def make_markers(report: Mapping, before: str = "", first: int = 0) -> list[Marker]:
    """Return gain and non-rigid motion, by the main judge, of every arm that has both."""
    judge, markers = main_judge(report), []
    for i, arm in enumerate(report["arms"], first):
        gain, motion = ((arm.get("compared") or {}).get(f"{judge}/{key}") for key in ("face_sim", "nonrigid"))
        if gain and motion:
            ends = {"gain": gain["difference"], "motion": motion["ratio"]}
            markers.append(Marker(name=before + arm["name"], colour=arm_colour(i), **ends))
    return markers


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indices of the Pareto front of (gain, motion), by rising gain.

    Clamp motion at 1: more than before may be trembling. Leave out points with a NaN.
    """
    clamped = [(gain, min(motion, 1.0)) for gain, motion in points]
    valid = [i for i, point in enumerate(clamped) if not any(map(math.isnan, point))]

    def beaten(i: int) -> bool:
        gain, motion = clamped[i]
        return any(clamped[j] != clamped[i] and clamped[j][0] >= gain and clamped[j][1] >= motion for j in valid)

    return sorted((i for i in valid if not beaten(i)), key=lambda i: clamped[i])


def curves_chart(title: str, curves: Sequence[Curve], labels: tuple[str, str] = ("frame", "FaceSim")) -> Chart:
    """Return a chart of curves for a page."""
    names = [(curve.colour, curve.name) for curve in curves]
    return Chart(title, _data_uri(lambda axis: draw_curves(axis, curves, labels)), names)


def front_chart(markers: Sequence[Marker], judge: str) -> Chart:
    """Return a chart of gain against motion for a page."""
    names = [*((marker.colour, marker.name) for marker in markers), (BASE, "base")]
    return Chart("", _data_uri(lambda axis: draw_front(axis, markers, judge_words(judge))), names)


@STYLE
def _data_uri(draw: Callable[[Axes], None]) -> str:
    figure, file = Figure(figsize=(5.6, 3.5), layout="constrained"), io.BytesIO()
    draw(figure.subplots())
    figure.savefig(file, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(file.getvalue()).decode()


def draw_curves(axis: Axes, curves: Sequence[Curve], labels: tuple[str, str] = ("frame", "FaceSim")) -> None:
    """Draw curves on one axis. Real clips are dashed, and the axis of FaceSim covers 0 to 1."""
    for curve in curves:
        style = "--" if curve.colour == REAL else "-"
        marker = "o" if len(curve.points) < 20 else ""
        axis.plot(*zip(*curve.points, strict=True), color=curve.colour, linestyle=style, marker=marker, markersize=3)
    axis.set(xlabel=labels[0], ylabel=labels[1])
    if labels[1] == "FaceSim":
        low, high = axis.get_ylim()
        axis.set_ylim(min(low, 0), max(high, 1))


def draw_front(axis: Axes, markers: Sequence[Marker], judge: str) -> None:
    """Draw markers with their intervals, a dashed line along the front, and a cross for the base."""
    means = [(marker.gain["mean"], marker.motion["mean"]) for marker in markers]
    best = [means[i] for i in pareto_front(means)]
    axis.plot([gain for gain, _ in best], [motion for _, motion in best], color=REAL, linestyle="--")
    for marker, (gain, motion) in zip(markers, means, strict=True):
        axis.plot(gain, motion, "o", color=marker.colour)
        axis.hlines(motion, marker.gain["low"], marker.gain["high"], color=marker.colour)
        axis.vlines(gain, marker.motion["low"], marker.motion["high"], color=marker.colour)
    axis.plot(0, 1, "+", color=BASE, markersize=10)
    axis.set(xlabel=f"gain in FaceSim by {judge}", ylabel="non-rigid motion / base's")


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


def draw_grid(report: Mapping, out: Path, videos: Sequence[Record], read: Callable[[Path], Tensor]) -> None:
    """Draw out/grid.png: a row per clip, a column for the real clip and each arm, the judge's score below a frame.

    videos: records of the clips that are shown. read: returns the frames of another tool's video.
    """
    names = [records.REAL, *(arm["name"] for arm in report["arms"])]
    rows = sorted({record["index"] for record in videos})
    first = [record for record in videos if not record["seed"] and record["arm"] in names]
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
    is_foreign, path = record["decoded"] and record["arm"] != records.REAL, out / record["file"]
    frames = (read(path) if is_foreign else data.read_video(path)).numpy()
    shown = np.linspace(1, len(frames) - 1, min(SHOWN, len(frames) - 1)).round().astype(int)
    pictures = [ImageOps.contain(Image.fromarray(frames[i]), (4 * HEIGHT, HEIGHT)) for i in shown]
    strip = Image.new("RGB", (sum(picture.width for picture in pictures), HEIGHT + FOOT), "white")
    left = 0
    for i, picture in zip(shown, pictures, strict=True):
        strip.paste(picture, (left, 0))
        if record["arm"] != records.REAL:
            ImageDraw.Draw(strip).text((left + 4, HEIGHT), f"{record['curves'][judge][i - 1]:.2f}", fill="black")
        left += picture.width
    return strip


def draw_pictures(report: Mapping, out: Path, videos: Sequence[Record], read: Callable[[Path], Tensor]) -> list[Path]:
    """Draw all pictures of an evaluation and return their files. videos, read: as `draw_grid` takes them."""
    pictures = [out / "grid.png", out / "curves.png"]
    save_curves(report, out / "curves.png")
    draw_grid(report, out, videos, read)
    if sum(arm["against"] is not None for arm in report["arms"]) > 1:
        save_front(report, out / "front.png")
        pictures.append(out / "front.png")
    return pictures
