"""Rebuild the tiny words from a seed: words, drawings, and a pipeline of Stable Diffusion 3's kind that misspells.

    python assets/build/make_tiny_words.py                    # assets/tiny_words, a quarter of an hour on one CPU core
    python assets/build/make_tiny_words.py --quick --out DIR  # the whole path with next to no training, half a minute

Finished stages stay in --work and are not trained again; delete the folder to start over. OUT/figures.json has figures
of the written networks by both readers of the reward `ocr` (pip install 'rewardfl[ocr]', apt-get install
tesseract-ocr), next to a contact sheet (drawn pictures above, the base's below). The fonts are matplotlib's DejaVu,
whose licence (Bitstream Vera's) allows pictures and copies.
"""

from make_tiny_world import make_parser, make_work_folder, write_figures


def main() -> None:
    args = make_parser(__doc__, "tiny_words").parse_args()
    from tiny_words import build  # here, so that --help works without torch

    plan = build.QUICK if args.quick else build.Plan()
    build.build(plan, args.out, make_work_folder(args, "tiny_words"), args.seed)
    write_figures(build.measure(args.out, args.seed + 900, plan.measured), args.out)


if __name__ == "__main__":
    main()
