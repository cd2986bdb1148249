"""Pictures of an evaluation: FaceSim along the clip, gain against motion, and a grid of frames."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from PIL import Image, ImageDraw, ImageOps
from torch import Tensor

from rewardfl import data
from rewardfl.evaluation import records
from rewardfl.evaluation.metric_curves import STYLE, Curve, Lines, draw_curves, encode_figure, metric_curve
from rewardfl.evaluation.records import Record
from rewardfl.evaluation.report.verdicts import judge_words, main_judge
from rewardfl.files import atomic_write

PEOPLE, SHOWN, HEIGHT = 8, 4, 96  # rows of the grid, frames of each clip in it, and their height
GAP, HEAD, FOOT = 10, 16, 14  # pixels between clips, above all, and below each row

GREY = "#7f7f7f"  # of the real clips

# what is trained, then what judges it
TRAINING = (
    "actor/loss", "reward/mean", "reward/face_motion", "reward/flow", "actor/data_loss", "actor/kl_loss",
    "reward/held_out", "reward/held_out/flow", "grad_norm",
)  # fmt: skip


def face_sim_curves(report: Mapping, judge: str) -> list[Curve]:
    """Return FaceSim along the clip of every arm, and of the real clips by their own pools."""
    curves = [(arm["name"], arm["per_frame"][judge], f"C{i}", "-") for i, arm in enumerate(report["arms"])]
    curves.append(("real clips", report["real"]["per_frame"][judge], GREY, "--"))
    return [Curve(name, list(enumerate(points, 1)), colour, style) for name, points, colour, style in curves]


def draw_face_sim(curves: Mapping[str, Sequence[Curve]]) -> bytes:
    """Draw FaceSim along the clip, a panel for each recogniser, as a PNG."""
    panels = {f"FaceSim by {judge_words(judge)}": judge_curves for judge, judge_curves in curves.items()}
    return draw_curves(panels, "frame", limits=(0, 1))


def draw_training(runs: Mapping[str, Lines]) -> bytes:
    """Draw the metrics TRAINING of runs by name, a panel each, as a PNG; empty without any. Leave out zeros."""
    panels = {key: [metric_curve(name, lines, key) for name, lines in runs.items()] for key in TRAINING}
    panels = {key: curves for key, curves in panels.items() if any(y for curve in curves for _, y in curve.points)}
    return draw_curves(panels, "step") if panels else b""


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


@STYLE
def draw_front(report: Mapping) -> Figure:
    """Draw gain in FaceSim against the face's own motion, both over the base's, by the main judge, with intervals.

    A dashed line joins the front, a cross is the base. Leave out arms that lack one of the two.
    """
    figure, judge = Figure(figsize=(6, 4), layout="constrained"), main_judge(report)
    axis, means = figure.subplots(), []
    for i, arm in enumerate(report["arms"]):
        gain, motion = ((arm.get("compared") or {}).get(f"{judge}/{key}") for key in ("face_sim", "nonrigid"))
        if gain and motion:
            x, y, colour = gain["difference"], motion["ratio"], f"C{i}"
            means.append((x["mean"], y["mean"]))
            axis.plot(*means[-1], "o", color=colour, label=arm["name"])
            axis.hlines(y["mean"], x["low"], x["high"], color=colour)
            axis.vlines(x["mean"], y["low"], y["high"], color=colour)
    axis.plot(0, 1, "+", color="black", markersize=10, label="base")
    axis.legend(axis.lines, [str(line.get_label()) for line in axis.lines], fontsize="small")
    axis.plot(*zip(*(means[i] for i in pareto_front(means)), strict=True), color=GREY, linestyle="--")
    axis.set(xlabel=f"gain in FaceSim by {judge_words(judge)}", ylabel="non-rigid motion / base's")
    return figure


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
    draw_grid(report, out, videos, read)
    curves = {judge: face_sim_curves(report, judge) for judge in report["real"]["per_frame"]}
    atomic_write(out / "curves.png", draw_face_sim(curves))
    if sum(arm["against"] is not None for arm in report["arms"]) > 1:
        pictures.append(out / "front.png")
        atomic_write(out / "front.png", encode_figure(draw_front(report)))
    return pictures
