"""Evaluations of two or more runs next to each other, on one page that opens without a network.

    python tools/compare_runs.py outputs/a outputs/b --out comparison.html
    python tools/compare_runs.py outputs/a/evaluation outputs/compared --out comparison.html

Each is a run that tools/evaluate.py has judged, or the --out of an evaluation. A row per run and arm, gain against
motion, FaceSim along the clip, and of runs the curves of their training. Evaluations of other people, sampling or
judges are refused, unless --anyway is given: then the page says how they differ.

Exit code 0: written; 2: an evaluation is missing, they are not alike, or --out exists.
"""

import sys
from pathlib import Path

from rewardfl import command_line


def main() -> int:
    parser = command_line.Parser(__doc__)
    parser.add_argument("evaluations", nargs="+", type=Path, metavar="RUN_OR_EVALUATION", help="two or more folders")
    parser.add_argument("--out", type=Path, required=True, metavar="PAGE.html", help="the page to write")
    parser.add_argument("--anyway", action="store_true", help="compare what was not evaluated alike, and say so")
    command_line.add_overwrite_option(parser)
    args = parser.parse_args()
    if len(args.evaluations) < 2:
        parser.error("RUN_OR_EVALUATION: name two or more")
    return command_line.run("rewardfl.evaluation.comparison", args)


if __name__ == "__main__":
    sys.exit(main())
