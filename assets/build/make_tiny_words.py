"""Rebuild the tiny words from a seed: words, drawings, and a pipeline of Stable Diffusion 3's kind that misspells.

    python assets/build/make_tiny_words.py                    # assets/tiny_words, a quarter of an hour on one CPU core
    python assets/build/make_tiny_words.py --quick --out DIR  # the whole path with next to no training, half a minute

Finished stages stay in --work and are not trained again; delete the folder to start over. OUT/figures.json has figures
of the written networks by both readers of the reward `ocr` (pip install 'rewardfl[ocr]', apt-get install
tesseract-ocr), next to a contact sheet (drawn pictures above, the base's below). The fonts are matplotlib's DejaVu,
whose licence (Bitstream Vera's) allows pictures and copies.
"""

import argparse
from pathlib import Path

from make_tiny_world import write_figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("assets/tiny_words"))
    parser.add_argument("--work", type=Path, help="folder of finished stages (default: build/tiny_words)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="next to no training, for tests")
    args = parser.parse_args()
    from tiny_words import build  # here, so that --help works without torch

    plan = build.QUICK if args.quick else build.Plan()
    work = args.work or (args.out / "work" if args.quick else Path("build/tiny_words"))
    work.mkdir(parents=True, exist_ok=True)
    build.build(plan, args.out, work, args.seed)
    write_figures(build.measure(args.out, args.seed + 900, plan.measured), args.out)


if __name__ == "__main__":
    main()
