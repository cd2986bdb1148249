"""Can these clips be trained on? Lists every problem of every row.

    python tools/check_dataset.py --config configs/wan22_face.yaml --faces models/antelopev2 \\
        data.file_name=data/metadata.csv data.max_pixels=399360 data.fps=16

Problems keep a row from being trained on, warnings do not. --faces looks for a face in the clip that the face is taken
from; a row without any has a problem. It warns of frames without the face and of a cut to another person. Stills and
repeated frames have a warning, too.

Exit code 0: every row can be used; 2: some cannot, or there is nothing to check.
"""

import sys
from pathlib import Path

from rewardfl import command_line


def main() -> int:
    parser = command_line.Parser(__doc__)
    parser.add_argument("--config", required=True, help="a run's YAML file")
    parser.add_argument("--faces", type=Path, metavar="PACK", help="look for faces, with this folder of .onnx files")
    parser.add_argument("--device", help="for --faces (default: cuda where there is one, else cpu)")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    return command_line.run("rewardfl.doctor.dataset", parser.parse_intermixed_args())


if __name__ == "__main__":
    sys.exit(main())
