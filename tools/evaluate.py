"""Before and after: does the adapter keep the person, on people it never saw, by a judge it was not trained on?
Or, of an image model: are the pictures of prompts it never saw better, by every reward that the run names?

    python tools/evaluate.py --run outputs/tiny_face --data assets/tiny_world/eval/metadata.csv --seeds 2

    python tools/evaluate.py --run outputs/tiny_image --data assets/tiny_images/eval.txt --seeds 4

The same prompts, images and noises are sampled twice, with the adapter off and on. Videos are compared with the real
clips: OUT (RUN/evaluation) gets report.json, curves.png, grid.png and videos/*.mp4 (real | before | after). Images are
judged by the run's rewards, those of weight 0 in reward.others, which are not trained on, among them (more by
reward.others.NAME.name=... as overrides): report.json with the win rate, grid.png and images/*.png (before | after).
Both print a table.
"""

import argparse
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--run", type=Path, required=True, help="folder of a training run; its run.json says how to sample"
    )
    parser.add_argument("--adapter", type=Path, help="checkpoint folder (default: RUN/checkpoints/latest)")
    parser.add_argument("--data", required=True, help="metadata.csv of people, or prompts, that were not trained on")
    parser.add_argument("--seeds", type=int, default=2, help="noises per person or prompt (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="default: RUN/evaluation")
    parser.add_argument("--batch", type=int, default=4, help="clips or images sampled at a time (default: %(default)s)")
    parser.add_argument("--device", help="default: cuda where there is one, else cpu")
    parser.add_argument(
        "--experts", choices=("gpu", "cpu_swap"), default="gpu", help="cpu_swap: blocks come from host memory in turn"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to the run's configuration")
    args = parser.parse_args()
    if args.seeds < 1 or args.batch < 1:
        parser.error("--seeds and --batch must be at least 1")
    from rewardfl_tools import _evaluate  # not before: --help and mistakes are answered without torch

    return _evaluate.run(args)


if __name__ == "__main__":
    sys.exit(main())
