"""Clips of two people out of the tiny world's: each is two of its clips beside each other, 64 x 128 pixels.

    python benchmarks/ablation/two_people.py assets/tiny_world/train outputs/two_people/train [--size 0.7]

The second person of clip i is the first of clip i + 1, so that everybody is once on either side; with --size she stands
in the background, of that share of the first one's size.
"""

import argparse
import csv
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from rewardfl.data import read_video, write_video
from rewardfl_tools.tiny_world.people import FPS


def further_away(frames: Tensor, size: float) -> Tensor:
    """(T, H, W, 3) frames, uint8, smaller by `size`, at the bottom of what goes on as the frames' upper rows do."""
    height, width = frames.shape[1:3]
    small = interpolate(frames.permute(0, 3, 1, 2).float(), scale_factor=size, mode="bilinear", antialias=True)
    found = small[:, :, :2].mean((2, 3), keepdim=True).repeat(1, 1, height, width)
    left = (width - small.shape[3]) // 2
    found[:, :, height - small.shape[2] :, left : left + small.shape[3]] = small
    return found.round().to(torch.uint8).permute(0, 2, 3, 1)


def pair(source: Path, out: Path, size: float) -> None:
    """out/metadata.csv (video, prompt) and out/videos/*.mp4, as many as `source` has rows."""
    with (source / "metadata.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    (out / "videos").mkdir(parents=True)
    with (out / "metadata.csv").open("w", newline="") as file:
        written = csv.writer(file, lineterminator="\n")
        written.writerow(["video", "prompt"])
        for i, left in enumerate(rows):
            right = rows[(i + 1) % len(rows)]
            one, other = (read_video(source / row["video"]) for row in (left, right))
            frames = min(len(one), len(other))
            second = other[:frames] if size == 1 else further_away(other[:frames], size)
            write_video(out / left["video"], torch.cat([one[:frames], second], 2), FPS)
            written.writerow([left["video"], f"{left['prompt']}; beside {right['prompt']}"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", type=float, default=1.0)
    arguments = parser.parse_args()
    pair(arguments.source, arguments.out, arguments.size)
