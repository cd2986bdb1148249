"""Curves of several runs on the same axes, such as metrics.jsonl holds."""

import io
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib.figure import Figure

_COLUMNS = 4  # pictures in a row, at most

Lines = list[dict[str, float | None]]


class Curve(NamedTuple):
    """A named line of (x, y), by rising x. colour: None takes the next one."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str | None = None
    style: str = "-"


def run_labels(runs: Sequence[Path]) -> list[str]:
    """Return a name for each run: its folder's, or its path where two folders share a name."""
    count = Counter(run.resolve().name for run in runs)
    return [run.resolve().name if count[run.resolve().name] == 1 else str(run) for run in runs]


def read_metrics(run: Path) -> Lines:
    """Read the run's metrics; none for a folder without metrics.jsonl. Raise CheckpointError for a damaged line."""
    from rewardfl.training.metrics_file import MetricsFile

    return MetricsFile(run / "metrics.jsonl").read()


def metric_curve(name: str, lines: Lines, key: str) -> Curve:
    """Return the curve of a metric by step, without the lines that lack it."""
    pairs = ((line["step"], line.get(key)) for line in lines)
    return Curve(name, [(step, value) for step, value in pairs if step is not None and value is not None])


@matplotlib.rc_context({"text.parse_math": False, "axes.grid": True, "grid.alpha": 0.3})  # a name may hold a $
def draw_curves(panels: Mapping[str, Sequence[Curve]], label: str, limits: tuple[float, float] | None = None) -> bytes:
    """Draw a panel of curves for each title, as a PNG. The first one's legend is for all.

    label: of the horizontal axes. limits: the least range of the vertical axes.
    """
    columns, rows = min(len(panels), _COLUMNS), math.ceil(len(panels) / _COLUMNS)
    figure = Figure(figsize=(5 * columns, 4 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    for axis, (title, curves) in zip(axes.flat, panels.items(), strict=False):
        for curve in curves:
            x, y = ([point[i] for point in curve.points] for i in (0, 1))
            marker = "." if len(x) < 20 else ""
            axis.plot(x, y, color=curve.colour, linestyle=curve.style, marker=marker, label=curve.name)
        axis.set_title(title)
        axis.set_xlabel(label)
        if limits:
            low, high = axis.get_ylim()
            axis.set_ylim(min(low, limits[0]), max(high, limits[1]))
    first = axes[0][0]  # names may begin with _, which a legend by labels leaves out
    first.legend(first.lines, [str(line.get_label()) for line in first.lines], fontsize="small")
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110)
    return content.getvalue()
