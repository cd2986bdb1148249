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

COLUMNS = 4  # of pictures, at most

Lines = list[dict[str, float | None]]


def run(args: argparse.Namespace) -> int:
    """Draw the runs' curves: the exit code."""
    from rewardfl.merging import output  # not before --help is answered

    out = args.out or args.runs[0] / "curves.png"
    if out.suffix not in FORMATS:
        raise ValueError(f"--out {out}: give a name that ends in {', '.join(FORMATS)}")
    inputs = tuple(run / "metrics.jsonl" for run in args.runs)
    file = output.File(option="--out", path=out, tool="rewardfl plot_metrics", inputs=inputs)
    file.check()
    curves = dict(zip(labels(args.runs), map(read_metrics, args.runs), strict=True))
    keys = chosen(args.keys, {key for lines in curves.values() for line in lines for key in line})
    file.write(draw_metrics(curves, keys, out.suffix[1:]))
    print(out)
    return 0


def labels(runs: Sequence[Path]) -> list[str]:
    """A name for each run: its folder's, or its path where two folders have one name."""
    count = Counter(run.resolve().name for run in runs)
    return [run.resolve().name if count[run.resolve().name] == 1 else str(run) for run in runs]


def read_metrics(run: Path) -> Lines:
    """The run's metrics; FileNotFoundError for a folder that is none of a run."""
    from rewardfl.training.metrics_file import MetricsFile

    path = run / "metrics.jsonl"
    if not path.is_file():
        raise FileNotFoundError(f"{run}: holds no metrics.jsonl; name the run.output_dir of a run that has begun")
    return MetricsFile(path).read()


def chosen(asked: Sequence[str] | None, known: set[str]) -> list[str]:
    """The keys to draw: those that are asked for, or those to watch that are known; ValueError where none is."""
    missing = [key for key in asked or [] if key not in known]
    keys = [key for key in WATCHED if key in known] if asked is None else list(asked)
    if missing or not keys:
        wanted = ", ".join(missing or WATCHED)
        raise ValueError(f"--keys: no run has {wanted}; there are {', '.join(sorted(known)) or 'none yet'}")
    return keys


def points(lines: Lines, key: str) -> tuple[list[float], list[float]]:
    """(steps, values) of the lines that have a value."""
    found = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
    return [step for step, _ in found], [value for _, value in found]


def draw_metrics(curves: dict[str, Lines], keys: Sequence[str], kind: str) -> bytes:
    """Return the picture: kind is png, svg or pdf."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    columns, rows = min(len(keys), COLUMNS), math.ceil(len(keys) / COLUMNS)
    figure, axes = plt.subplots(rows, columns, figsize=(4.5 * columns, 3.5 * rows), squeeze=False)
    for axis in axes.flat[len(keys) :]:
        axis.set_axis_off()
    for axis, key in zip(axes.flat, keys, strict=False):
        for name, lines in curves.items():
            axis.plot(*points(lines, key), marker="." if len(points(lines, key)[0]) < 20 else "", label=name)
        axis.set_title(key)
        axis.set_xlabel("step")
    axes[0][0].legend()
    figure.tight_layout()
    content = io.BytesIO()
    figure.savefig(content, format=kind, dpi=110)
    plt.close(figure)
    return content.getvalue()
