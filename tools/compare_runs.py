"""Evaluations of two or more runs next to each other, on one page that opens without a network.

    python tools/compare_runs.py outputs/a outputs/b --out comparison.html

Each is a run that tools/evaluate.py has judged, or the --out of an evaluation; other people, sampling or judges are
refused. Or two groups of arms of one evaluation, usually one training with several seeds each, as a Markdown table:

    python tools/compare_runs.py outputs/compared --first demo_s42,demo_s1,demo_s2 --second sft_s42,sft_s1,sft_s2

People are paired by name, over the clips that all arms and the base have; each person's mean over a group's arms
counts. Identity kept is on its scale, motion over the base's. Brackets are 95 % bootstrap intervals over people.
Exit code 0: written or printed; 2: an evaluation or arm is missing, they are not alike, or --out exists.
"""

from pathlib import Path

from rewardfl import command_line


def main() -> int:
    parser = command_line.Parser(__doc__)
    parser.add_argument("evaluations", nargs="+", type=Path, metavar="RUN_OR_EVALUATION", help="folders")
    parser.add_argument("--out", type=Path, metavar="PAGE.html", help="the page to write")
    for name in ("--first", "--second"):
        parser.add_argument(name, metavar="ARM,ARM", help="arms of one evaluation, compared with the other group")
    command_line.add_overwrite_option(parser)
    args = parser.parse_args()
    if args.first or args.second:
        if not (args.first and args.second) or len(args.evaluations) > 1 or args.out:
            parser.error("--first, --second: give both, one evaluation, and no --out")
    elif len(args.evaluations) < 2 or not args.out:
        parser.error("RUN_OR_EVALUATION: name two or more, and a page by --out")
    return command_line.run("rewardfl.evaluation.comparison:compare_runs", args)


if __name__ == "__main__":
    raise SystemExit(main())
