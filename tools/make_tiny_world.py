"""Rebuild the tiny world from a seed: people, clips, a Wan2.2-I2V-shaped pipeline, a detector and two recognisers.

    python tools/make_tiny_world.py                    # assets/tiny_world, about three hours on two CPU cores
    python tools/make_tiny_world.py --quick --out DIR  # the whole path with next to no training, a minute

Finished stages are kept in --work and not trained again; delete the folder to start over. The figures that
the trained networks reach are measured from the written files and land in OUT/figures.json, with a contact
sheet.
"""

import argparse
import json
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("assets/tiny_world"))
    parser.add_argument("--work", type=Path, help="where finished stages are kept (default: build/tiny_world)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="next to no training, for tests")
    args = parser.parse_args()
    from rewardfl_tools.tiny_world import build, measure  # not before: --help is answered without torch

    plan = build.QUICK if args.quick else build.Plan()
    work = args.work or (args.out / "work" if args.quick else Path("build/tiny_world"))
    work.mkdir(parents=True, exist_ok=True)
    build.build(plan, args.out, work, args.seed)
    figures = measure.measure(args.out, seed=args.seed + 900, count=plan.measured_people)
    (args.out / "figures.json").write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
