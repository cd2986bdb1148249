"""Rebuild the tiny images from a seed: scenes, a pipeline of Stable Diffusion 3's kind, a judge and prompts.

    python tools/make_tiny_images.py                    # assets/tiny_images, about an hour on two CPU cores
    python tools/make_tiny_images.py --quick --out DIR  # the whole path with next to no training, half a minute

Finished stages are kept in --work and not trained again; delete the folder to start over. The figures that the trained
networks reach are measured from the written files and land in OUT/figures.json, with a contact sheet (drawn pictures
above, the base's below).
"""

import argparse
from pathlib import Path

from make_tiny_world import write_figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("assets/tiny_images"))
    parser.add_argument("--work", type=Path, help="where finished stages are kept (default: build/tiny_images)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="next to no training, for tests")
    args = parser.parse_args()
    from tiny_images import build  # not before: --help is answered without torch

    plan = build.QUICK if args.quick else build.Plan()
    work = args.work or (args.out / "work" if args.quick else Path("build/tiny_images"))
    work.mkdir(parents=True, exist_ok=True)
    build.build(plan, args.out, work, args.seed)
    write_figures(build.measure(args.out, plan.measured, args.seed + 900), args.out)


if __name__ == "__main__":
    main()
