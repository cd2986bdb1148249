"""Rebuild the tiny images from a seed: scenes, a pipeline of Stable Diffusion 3's kind, a judge and prompts.

    python assets/build/make_tiny_images.py                    # assets/tiny_images, about an hour on two CPU cores
    python assets/build/make_tiny_images.py --quick --out DIR  # the whole path with next to no training, half a minute

Finished stages stay in --work and are not trained again; delete the folder to start over. OUT/figures.json has figures
of the written networks, next to a contact sheet (drawn pictures above, the base's below).
"""

import argparse
from pathlib import Path

from make_tiny_world import write_figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("assets/tiny_images"))
    parser.add_argument("--work", type=Path, help="folder of finished stages (default: build/tiny_images)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="next to no training, for tests")
    args = parser.parse_args()
    from tiny_images import build  # here, so that --help works without torch

    plan = build.QUICK if args.quick else build.Plan()
    work = args.work or (args.out / "work" if args.quick else Path("build/tiny_images"))
    work.mkdir(parents=True, exist_ok=True)
    build.build(plan, args.out, work, args.seed)
    write_figures(build.measure(args.out, plan.measured, args.seed + 900), args.out)


if __name__ == "__main__":
    main()
