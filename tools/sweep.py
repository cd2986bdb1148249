"""A grid of settings: train each, judge each on held-out people, draw what likeness costs in motion.

    python tools/sweep.py --config configs/tiny_face.yaml --data assets/tiny_world/eval/metadata.csv \\
        --out outputs/front --grid reward.kl_weight=1,2,4 --grid train.learning_rate=5e-4,1e-3 --seeds 42,1,2

Every value of every --grid with every other is a point; --points FILE lists others, a YAML list of {name: text,
overrides: [section.key=value, ...]}. With both, each of the list stands for a grid of its own. A point is trained once
per seed in OUT/NAME/seedN and judged by tools/evaluate.py. Writes OUT/front.csv, OUT/front.md and OUT/front.png:
FaceSim's gain by the held-out judge against motion (--motion), means over the seeds and the worst of them.

The same command goes on where it was stopped: what is judged is not trained again, what was cut off is resumed.
Exit code 0: all is judged; 1: a run or its evaluation has failed, see its log, and the others are drawn; 2: bad input,
before anything was trained.
"""

import argparse
import sys
from pathlib import Path

MOTIONS = ("flow", "face_flow", "pixel_change", "speed", "nonrigid")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="of either script; what the points have in common")
    parser.add_argument("--data", required=True, help="metadata.csv of people who are not trained on")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs and of the front")
    parser.add_argument(
        "--grid", action="append", default=[], metavar="KEY=VALUE,VALUE", help="may be given several times"
    )
    parser.add_argument("--points", type=Path, metavar="FILE", help="YAML list of {name, overrides}")
    parser.add_argument("--seeds", help="run.seed of each point's runs, such as 42,1,2 (default: the configuration's)")
    parser.add_argument("--noises", type=int, default=2, help="per person, when judging (default: %(default)s)")
    parser.add_argument("--motion", choices=MOTIONS, default="flow", help="what is drawn upwards (default: flow)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default: %(default)s)")
    parser.add_argument("--launch", default="", help='of accelerate, such as --launch="--num_processes 8"')
    parser.add_argument("--dry-run", action="store_true", help="check and list the runs, train nothing")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="for all points")
    args = parser.parse_intermixed_args()
    if args.jobs < 1 or args.noises < 1:
        parser.error("--jobs and --noises must be at least 1")
    from rewardfl_tools import _sweep  # not before: --help and mistakes are answered without torch

    return _sweep.run(args)


if __name__ == "__main__":
    sys.exit(main())
