"""Can these clips be trained on? Lists every problem of every row, and draws what the model will be shown.

    python tools/check_dataset.py --config configs/wan22_face.yaml --sheet outputs/sheet.png
    python tools/check_dataset.py --data data/metadata.csv --max-pixels 399360 --num-frames 81 --fps 16 \\
        --faces models/antelopev2

--config takes what a run's configuration says of its data; the other flags say otherwise. Problems keep a row from
being trained on, warnings do not. --faces looks for a face in the first, middle and last frame of the clip that the
face is taken from, and in all of them when it finds none there; a row without any has a problem. It warns of a cut to
another person. Stills and repeated frames have a warning, too. --sheet draws these three frames of every clip as they
are trained on, and the row's image, with the boxes of the faces.

Exit code 0: every row can be used; 2: some cannot, or there is nothing to check.
"""

import sys
from pathlib import Path

from rewardfl import command_line


def main() -> int:
    parser = command_line.Parser(__doc__)
    parser.add_argument("--config", help="a run's YAML file")
    parser.add_argument("--data", help="metadata.csv, without a configuration")
    # the configuration checks the values of these
    parser.add_argument("--height", help="the size that clips are cropped to (default: 480 x 832)")
    parser.add_argument("--width")
    parser.add_argument("--max-pixels", help="clips keep their shape; height and width are not used")
    parser.add_argument("--num-frames", help="default: 81")
    parser.add_argument("--fps", help="frames taken per second (default: frames as they are stored)")
    parser.add_argument("--sheet", type=Path, metavar="PNG", help="draw a contact sheet")
    command_line.add_overwrite_option(parser, "replace --sheet if it exists")
    parser.add_argument("--faces", type=Path, metavar="PACK", help="look for faces, with this folder of .onnx files")
    parser.add_argument("--det-size", help="as reward.det_size (default: 640)")
    parser.add_argument("--device", help="for --faces (default: cuda where there is one, else cpu)")
    return command_line.run("rewardfl.doctor.dataset", parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
