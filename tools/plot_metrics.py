"""Curves of metrics.jsonl, of one run or several on the same axes.

python tools/plot_metrics.py outputs/a outputs/b --keys eval/held_out eval/motion --out curves.png
"""

import argparse
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--keys", nargs="+", required=True, help="metrics, one picture each")
    parser.add_argument("--out", type=Path, required=True, help="a .png, .svg or .pdf")
    args = parser.parse_args()
    curves = {run.name: read(run) for run in args.runs}
    known = {key for lines in curves.values() for line in lines for key in line}
    missing = [key for key in args.keys if key not in known]
    if missing:
        print(f"error: --keys: no run has {', '.join(missing)}; there are {', '.join(sorted(known))}", file=sys.stderr)
        return 2
    draw(curves, args.keys, args.out)
    print(args.out)
    return 0


def read(run: Path) -> list[dict[str, float | None]]:
    from rewardfl.run.checkpoint import MetricsFile  # not before --help is answered: it imports torch

    return MetricsFile(run / "metrics.jsonl").read()


def points(lines: list[dict[str, float | None]], key: str) -> tuple[list[float], list[float]]:
    """(steps, values) of the lines that have a value."""
    found = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
    return [step for step, _ in found], [value for _, value in found]


def draw(curves: dict[str, list[dict[str, float | None]]], keys: list[str], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(keys), figsize=(4.5 * len(keys), 3.5), squeeze=False)
    for axis, key in zip(axes[0], keys, strict=True):
        for name, lines in curves.items():
            axis.plot(*points(lines, key), marker="." if len(points(lines, key)[0]) < 20 else "", label=name)
        axis.set_title(key)
        axis.set_xlabel("step")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(out, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
