"""Rebuild the tiny world from a seed: people, clips, a Wan2.2-I2V-shaped pipeline, a detector and two recognisers.

    python assets/build/make_tiny_world.py                    # assets/tiny_world, under six hours on two CPU cores
    python assets/build/make_tiny_world.py --quick --out DIR  # the whole path with next to no training, a minute
    python assets/build/make_tiny_world.py --distil           # OUT/lightning alone, from OUT/pipeline and OUT/train
    python assets/build/make_tiny_world.py --photos           # photos of the people and OUT/train_drift, no training

Finished stages stay in --work and are not trained again; delete the folder to start over. The cured model, trained on
the same clips without drift, stays in --work, too. OUT/figures.json has figures of the written networks, next to a
contact sheet. They are by the world's judges and by those of --judge (`make realface` fetches two).
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

from rewardfl.command_line import parse_judge


def main() -> None:
    parser = make_parser(__doc__, "tiny_world")
    parser.add_argument("--distil", action="store_true", help="write the four-step LoRAs of OUT/pipeline, nothing else")
    parser.add_argument("--photos", action="store_true", help="write photos and clips that drift, nothing else")
    parser.add_argument(
        "--judge",
        type=parse_judge,
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="a further face pack that judges",
    )
    args = parser.parse_args()
    from tiny_world import build, distil, measure  # here, so that --help works without torch

    plan = build.QUICK if args.quick else build.Plan()
    if args.distil:
        if missing := [name for name in ("pipeline", "train/metadata.csv") if not (args.out / name).exists()]:
            parser.error(f"--distil: {args.out / missing[0]} is missing; give the folder of a built world as --out")
        build.run_pass((distil.distil, args.out, plan.distil_updates, args.seed, print))
        return
    if args.photos:
        build.write_photos_and_drift(plan, args.out, args.seed)
        return
    work = make_work_folder(args, "tiny_world")
    build.build(plan, args.out, work, args.seed)
    write_figures(
        measure.measure(args.out, work / "cured", args.seed, plan.measured_people, dict(args.judge)), args.out
    )


def make_parser(text: str | None, world: str) -> argparse.ArgumentParser:
    """Return the parser of a builder, described by `text`. world: the name of its folder below assets and build."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("assets") / world)
    parser.add_argument("--work", type=Path, help=f"folder of finished stages (default: build/{world})")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="next to no training, for tests")
    return parser


def make_work_folder(args: argparse.Namespace, world: str) -> Path:
    """Make and return the folder of finished stages."""
    work = args.work or (args.out / "work" if args.quick else Path("build") / world)
    work.mkdir(parents=True, exist_ok=True)
    return work


def write_figures(figures: Mapping[str, object], folder: Path) -> None:
    """Write folder/figures.json and print it."""
    text = json.dumps(figures, indent=2)
    (folder / "figures.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
