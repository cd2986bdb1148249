"""Can these clips be trained on? Lists every problem of every row.

    python tools/check_dataset.py --config configs/wan22_face.yaml --faces models/antelopev2 \\
        data.file_name=data/metadata.csv data.max_pixels=399360 data.fps=16

Problems keep a row from being trained on, warnings do not. --faces reports clips without a face, and warns of frames
without it, of a cut to another person, and of a crop through the face. Stills and repeated frames have a warning, too.
Exit code 0: every row can be used; 2: some cannot, or there is nothing to check.
"""

from pathlib import Path

from rewardfl import command_line


def main() -> int:
    parser = command_line.Parser(__doc__, config="a run's YAML file")
    parser.add_argument("--faces", type=Path, metavar="PACK", help="look for faces, with this folder of .onnx files")
    parser.add_argument("--device", help="for --faces (default: cuda where there is one, else cpu)")
    return command_line.run("rewardfl.doctor.dataset:check_dataset", parser.parse_intermixed_args())


if __name__ == "__main__":
    raise SystemExit(main())
