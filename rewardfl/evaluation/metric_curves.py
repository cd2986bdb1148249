"""Curves of metrics.jsonl, of one run or several on the same axes."""

import argparse
import io
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

# "What to watch" of README.md and of docs/flow_grpo.md, for runs of either script
WATCHED = (
    "actor/face_score", "reward/mean", "reward/held_out", "reward/motion", "reward/coverage", "reward/std_in_group",
    "actor/kl_loss", "policy/kl", "policy/clip_fraction", "grad_norm",
)  # fmt: skip

FORMATS = (".png", ".svg", ".pdf")

_COLUMNS = 4  # of pictures, at most

Lines = list[dict[str, float | None]]


def run(args: argparse.Namespace) -> int:
    """Draw the runs' curves; return the exit code."""
    from rewardfl.merging import output  # here, so that --help is fast

    out = args.out or args.runs[0] / "curves.png"
    if out.suffix not in FORMATS:
        raise ValueError(f"--out {out}: give a name that ends in {', '.join(FORMATS)}")
    inputs = tuple(run / "metrics.jsonl" for run in args.runs)
    file = output.File(option="--out", path=out, tool="rewardfl plot_metrics", inputs=inputs)
    file.check()
    curves = dict(zip(run_labels(args.runs), map(read_metrics, args.runs), strict=True))
    keys = select_keys(args.keys, {key for lines in curves.values() for line in lines for key in line})
    file.write(draw_metrics(curves, keys, out.suffix[1:]))
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


def metric_points(lines: Lines, key: str) -> list[tuple[float, float]]:
    """Return (step, value) of the lines that have a value."""
    pairs = ((line["step"], line.get(key)) for line in lines)
    return [(step, value) for step, value in pairs if step is not None and value is not None]


def draw_metrics(curves: dict[str, Lines], keys: Sequence[str], kind: str) -> bytes:
    """Draw the picture. kind: png, svg or pdf."""
    from matplotlib.figure import Figure

    columns, rows = min(len(keys), _COLUMNS), math.ceil(len(keys) / _COLUMNS)
    figure = Figure(figsize=(4.5 * columns, 3.5 * rows), layout="tight")
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat[len(keys) :]:
        axis.set_axis_off()
    for axis, key in zip(axes.flat, keys, strict=False):
        for name, lines in curves.items():
            points = metric_points(lines, key)
            steps, values = ([point[i] for point in points] for i in (0, 1))
            axis.plot(steps, values, marker="." if len(points) < 20 else "", label=name)
        axis.set_title(key)
        axis.set_xlabel("step")
    axes[0][0].legend()
    content = io.BytesIO()
    figure.savefig(content, format=kind, dpi=110)
    return content.getvalue()
