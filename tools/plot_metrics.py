"""Curves of metrics.jsonl, of one run or several on the same axes.

python tools/plot_metrics.py outputs/a
python tools/plot_metrics.py outputs/a outputs/b --keys eval/held_out eval/motion --out curves.png

Exit code 0: drawn; 2: a run, or a key in all of them, is not there, or --out exists.
"""

import sys
from pathlib import Path

from rewardfl import command_line


def main() -> int:
    parser = command_line.Parser(__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--keys", nargs="+", help="metrics, one picture each (default: the watched ones)")
    parser.add_argument("--out", type=Path, help="a .png, .svg or .pdf (default: curves.png in the first run's folder)")
    command_line.add_overwrite_option(parser)
    return command_line.run("rewardfl.evaluation.metric_curves", parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
