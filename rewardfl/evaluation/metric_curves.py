"""Curves of metrics.jsonl, of one run or several on the same axes."""

import argparse
import io
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib.figure import Figure

from rewardfl import outputs

# "What to watch" of README.md and of docs/flow_grpo.md, for runs of either script
WATCHED = (
    "actor/face_score", "reward/mean", "reward/held_out", "reward/motion", "reward/coverage", "reward/std_in_group",
    "actor/kl_loss", "policy/kl", "policy/clip_fraction", "grad_norm",
)  # fmt: skip

FORMATS = (".png", ".svg", ".pdf")

_COLUMNS = 4  # of pictures, at most

STYLE = matplotlib.rc_context({"text.parse_math": False, "axes.grid": True, "grid.alpha": 0.3})  # a name may hold a $

Lines = list[dict[str, float | None]]


class Curve(NamedTuple):
    """A named line of (x, y), by rising x. colour: None takes the next one."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str | None = None
    style: str = "-"


def run(args: argparse.Namespace) -> int:
    """Draw the runs' curves; return the exit code."""
    out = args.out or args.runs[0] / "curves.png"
    if out.suffix not in FORMATS:
        raise ValueError(f"--out {out}: give a name that ends in {', '.join(FORMATS)}")
    inputs = tuple(run / "metrics.jsonl" for run in args.runs)
    file = outputs.Target(option="--out", path=out, overwrite=args.overwrite, inputs=inputs)
    file.check()
    curves = dict(zip(run_labels(args.runs), map(read_metrics, args.runs), strict=True))
    keys = select_keys(args.keys, {key for lines in curves.values() for line in lines for key in line})
    panels = {key: [metric_curve(name, lines, key) for name, lines in curves.items()] for key in keys}
    file.write(draw_curves(panels, "step", out.suffix[1:]))
    print(out)
    return 0


def run_labels(runs: Sequence[Path]) -> list[str]:
    """Return a name for each run: its folder's, or its path where two folders share a name."""
    count = Counter(run.resolve().name for run in runs)
    return [run.resolve().name if count[run.resolve().name] == 1 else str(run) for run in runs]


def read_metrics(run: Path) -> Lines:
    """Read the run's metrics. Raise FileNotFoundError for a folder without metrics.jsonl."""
    from rewardfl.training.metrics_file import MetricsFile

    path = run / "metrics.jsonl"
    if not path.is_file():
        raise FileNotFoundError(f"{run}: holds no metrics.jsonl; name the run.output_dir of a run that has begun")
    return MetricsFile(path).read()


def select_keys(keys: Sequence[str] | None, available: set[str]) -> list[str]:
    """Return the keys to draw: these, or the available ones of WATCHED. Raise ValueError for a missing key."""
    missing = [key for key in keys or [] if key not in available]
    drawn = [key for key in WATCHED if key in available] if keys is None else list(keys)
    if missing or not drawn:
        lacking, names = ", ".join(missing or WATCHED), ", ".join(sorted(available))
        raise ValueError(f"--keys: no run has {lacking}; there are {names or 'none yet'}")
    return drawn


def metric_curve(name: str, lines: Lines, key: str) -> Curve:
    """Return the curve of a metric by step, without the lines that lack it."""
    pairs = ((line["step"], line.get(key)) for line in lines)
    return Curve(name, [(step, value) for step, value in pairs if step is not None and value is not None])


@STYLE
def draw_curves(
    panels: Mapping[str, Sequence[Curve]], label: str, kind: str = "png", limits: tuple[float, float] | None = None
) -> bytes:
    """Draw a panel of curves for each title. The first one's legend is for all.

    label: of the horizontal axes. kind: png, svg or pdf. limits: the least range of the vertical axes.
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
    return encode_figure(figure, kind)


def encode_figure(figure: Figure, kind: str = "png") -> bytes:
    content = io.BytesIO()
    figure.savefig(content, format=kind, dpi=110)
    return content.getvalue()
