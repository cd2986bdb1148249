"""Clips of two people out of the tiny world's: each is two of its clips beside each other, 64 x 128 pixels.

    python benchmarks/ablation/two_people.py assets/tiny_world/train outputs/two_people/train

The second person of clip i is the first of clip i + 1, so that everybody is once on either side.
"""

import csv
import sys
from pathlib import Path

import torch

from rewardfl.data import read_video, write_video
from rewardfl_tools.tiny_world.people import FPS


def pair(source: Path, out: Path) -> None:
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
            write_video(out / left["video"], torch.cat([one[:frames], other[:frames]], 2), FPS)
            written.writerow([left["video"], f"{left['prompt']}; beside {right['prompt']}"])


if __name__ == "__main__":
    pair(Path(sys.argv[1]), Path(sys.argv[2]))
