"""Does the adapter keep the person, on people it never saw, by a judge it was not trained on? And do they still move?
Or, of an image model: are the pictures of prompts it never saw better, by every reward that the run names?

    python tools/evaluate.py --run outputs/tiny_face --data assets/tiny_world/eval/metadata.csv --seeds 2

    # several adapters, strengths and step counts, from the same noises; two GPUs share the work
    torchrun --nproc_per_node 2 -- tools/evaluate.py --run outputs/my --data held_out/metadata.csv \
        --adapter outputs/my/checkpoints/best --adapter outputs/other/checkpoints/best --strengths 0.5,1 --steps 8,20

    # videos of other tools; no model is loaded
    python tools/evaluate.py --config configs/wan22_face_80gb.yaml --data held_out/metadata.csv \
        --videos base_videos --videos their_videos --out outputs/compared

    python tools/evaluate.py --run outputs/tiny_words --data assets/tiny_words/eval.txt --seeds 4

The base model, the run's start (lora.init_from) and every adapter are sampled from the same noises and compared with
the real clips. OUT (RUN/evaluation) gets records.jsonl (a line per video), report.html (a page with the videos in it),
report.json, grid.png and videos/ARM/ROW_seedN.mp4. The same command resumes where it was stopped, and one with more
seeds, adapters or strengths samples only those. In OUT only evaluate.py's files are replaced, edited or not.
Images are judged by the run's rewards (more by reward.terms.NAME.name=...). What every figure means: docs/evaluate.md.
Exit code 0: judged; 2: refused, or the disk is full; 130: stopped by Ctrl-C.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from rewardfl import command_line, trust
from rewardfl.config import schema

Period = Annotated[int, Field(ge=2, le=1000)]  # in pixels


def numbers(number: Any) -> Callable[[str], list]:
    """Return a reader of a list such as 0.5,1. number: the numbers' type in the schema."""
    read = command_line.option_type(number)
    return lambda text: [read(part) for part in text.split(",")]


def parse_arguments() -> argparse.Namespace:
    parser = command_line.Parser(__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--run", type=Path, help="folder of a training run; its run.json says how to sample")
    source.add_argument("--config", help="a configuration instead, for --videos: its sizes, face packs and rewards")
    parser.add_argument("--data", required=True, help="metadata.csv of people, or prompts, that were not trained on")
    parser.add_argument(
        "--adapter", type=command_line.parse_adapter, action="append", metavar="PATH[:STRENGTH]",
        help="checkpoint folder; may be given several times (default: RUN/checkpoints/latest)",
    )  # fmt: skip
    parser.add_argument("--strengths", type=numbers(schema.NonNegative), metavar="0.5,1", help="of every adapter")
    steps = numbers(schema.Denoising)
    parser.add_argument("--steps", type=steps, metavar="8,20", help="sampling steps (default: the run's)")
    parser.add_argument(
        "--videos", type=Path, action="append", default=[], metavar="FOLDER",
        help="mp4s of another tool, judged in place of an adapter's; may be given several times. A file is named by "
        "the row's place in the table, from 0 (007.mp4), or by its id, whose odd characters become _; 007_seed1.mp4 is "
        "of a second noise. They are decoded and brought to the real clip's size; without --run the first folder is "
        "what the others are compared with",
    )  # fmt: skip
    parser.add_argument(
        "--others", type=Path, metavar="FOLDER",
        help="pictures of people who are not in the table: a folder of folders or of pictures, one person each, or a "
        "table; identity kept on photos and verification need ten",
    )  # fmt: skip
    count = command_line.option_type(schema.BatchSize)
    parser.add_argument("--seeds", type=count, default=2, help="noises per person or prompt (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="default: RUN/evaluation")
    command_line.add_overwrite_option(parser, "remove an earlier evaluation from OUT, and replace files in the way")
    text = "clips or images sampled at a time (default: %(default)s)"
    parser.add_argument("--batch", type=count, default=4, help=text)
    command_line.add_device_options(parser)
    trust.add_option(parser)
    parser.add_argument(
        "--judge", type=command_line.parse_judge, action="append", default=[], metavar="NAME=FOLDER",
        help="a face pack of another recogniser, next to the run's; may be given several times. The last one's word "
        "counts in the report's first sentences",
    )  # fmt: skip
    text = "pixels of the VAE's and the patch's grid, which the canaries look for (default: 8,16)"
    parser.add_argument("--periods", type=numbers(Period), default=[8, 16], metavar="8,16", help=text)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to the run's configuration")
    args = parser.parse_args()
    judges = dict(args.judge)
    if len(judges) < len(args.judge):
        parser.error("--judge: two recognisers have one name; give one another")
    args.judge = judges
    if args.config and (not args.videos or args.adapter or args.steps or args.strengths or not args.out):
        parser.error("--config takes only --videos and --out; to sample from adapters give --run")
    return args


def main() -> int:
    return command_line.run("rewardfl.evaluation.judge_videos:evaluate_run", parse_arguments())


if __name__ == "__main__":
    raise SystemExit(main())
