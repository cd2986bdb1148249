"""Rebuild the tiny world from a seed: people, clips, a Wan2.2-I2V-shaped pipeline, a detector and two recognisers.

    python tools/make_tiny_world.py                    # assets/tiny_world, about three hours on two CPU cores
    python tools/make_tiny_world.py --quick --out DIR  # the whole path with next to no training, a minute
    python tools/make_tiny_world.py --second           # instead: the pipeline of TI2V-5B's kind alone, out of the first
    python tools/make_tiny_world.py --strangers DIR    # instead: people drawn by another program, to judge by

Finished stages are kept in --work and not trained again; delete the folder to start over. The figures that
the trained networks reach are measured from the written files and land in OUT/figures.json, with a contact
sheet. Strangers (metadata.csv, videos, contact_sheet.png, and in figures.json how well OUT's face packs know them) are
for tools/evaluate.py --data DIR/metadata.csv.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("assets/tiny_world"))
    parser.add_argument("--work", type=Path, help="where finished stages are kept (default: build/tiny_world)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="next to no training, for tests")
    parser.add_argument("--second", action="store_true", help="rebuild the second pipeline alone, out of OUT/pipeline")
    parser.add_argument("--strangers", type=Path, metavar="DIR", help="draw strangers, and rebuild nothing")
    parser.add_argument("--count", type=int, default=24, help="of --strangers (default: %(default)s)")
    args = parser.parse_args()
    if args.count < 1:
        parser.error("--count must be at least 1")
    from rewardfl_tools.tiny_world import build, measure, strangers  # not before: --help is answered without torch

    if args.strangers:
        strangers.write_strangers(args.strangers, args.count, args.seed)
        write_figures(strangers.measure_strangers(args.strangers, args.out), args.strangers)
        return
    plan = build.QUICK if args.quick else build.Plan()
    work = args.work or (args.out / "work" if args.quick else Path("build/tiny_world"))
    work.mkdir(parents=True, exist_ok=True)
    if args.second:
        build.build_second(plan, args.out, work, args.seed)
        known = json.loads((args.out / "figures.json").read_text())
        write_figures(known | measure.measure_second(args.out), args.out)
        return
    build.build(plan, args.out, work, args.seed)
    figures = measure.measure(args.out, seed=args.seed + 900, count=plan.measured_people)
    write_figures(figures, args.out)


def write_figures(figures: Mapping[str, object], folder: Path) -> None:
    text = json.dumps(figures, indent=2)
    (folder / "figures.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
