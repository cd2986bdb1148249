"""A third recogniser of the tiny world, for reward.second_model_path: people that no other one has seen, another width.

    python benchmarks/ablation/second_pack.py outputs/second_pack        # seven minutes on one core

It is trained as the others are (tools/tiny_world/faces.py); its detector is the reward's, which it shares crops with.
"""

import shutil
import sys
from pathlib import Path

import torch

from rewardfl_tools.tiny_world import faces

SEED, WIDTH, STEPS, PEOPLE_PER_STEP = 13, 8, 425, 96  # the reward's: 11, 12, 450; the judge's: 12, 10, 400


def main() -> None:
    """Train it and write the pack into the folder that the command names."""
    out = Path(sys.argv[1])
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    net = faces.Recogniser(WIDTH)
    faces.train_recogniser(net, SEED, STEPS, PEOPLE_PER_STEP, print)
    faces.export(net.eval(), out / "recogniser.onnx")
    shutil.copy(Path(__file__).parents[2] / "assets/tiny_world/faces/reward/detector.onnx", out)


if __name__ == "__main__":
    main()
