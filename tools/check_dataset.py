"""Can these clips be trained on? Lists every problem of every row, and draws what the model will be shown.

    python tools/check_dataset.py --config configs/wan22_face.yaml --sheet outputs/sheet.png
    python tools/check_dataset.py --data data/metadata.csv --max-pixels 399360 --num-frames 81 --fps 16 \\
        --faces models/antelopev2

--config takes what a run's configuration says of its data; the other flags say otherwise. Problems keep a row from
being trained on, warnings do not. --faces looks for a face in the first, middle and last frame of the clip that the
face is taken from, and in all of them when it finds none there; a row without any has a problem. --sheet draws
these three frames of every clip as they are trained on, and the row's image, with the boxes of the faces.

Exit code 0: every row can be used; 2: some cannot, or there is nothing to check.
"""

import argparse
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", help="a run's YAML file")
    parser.add_argument("--data", help="metadata.csv, without a configuration")
    parser.add_argument("--height", type=int, help="the size that clips are cropped to (default: 480 x 832)")
    parser.add_argument("--width", type=int)
    parser.add_argument("--max-pixels", type=int, help="clips keep their shape; height and width are not used")
    parser.add_argument("--num-frames", type=int, help="default: 81")
    parser.add_argument("--fps", type=float, help="frames taken per second (default: frames as they are stored)")
    parser.add_argument("--sheet", type=Path, metavar="PNG", help="draw a contact sheet")
    parser.add_argument("--faces", type=Path, metavar="PACK", help="look for faces, with this folder of .onnx files")
    parser.add_argument("--det-size", type=int, help="as reward.det_size (default: 640)")
    parser.add_argument("--device", help="for --faces (default: cuda where there is one, else cpu)")
    args = parser.parse_args()
    from rewardfl_tools import _check_dataset  # not before: --help and mistakes are answered without torch

    return _check_dataset.run(args)


if __name__ == "__main__":
    sys.exit(main())
