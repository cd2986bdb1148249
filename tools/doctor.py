"""The first minute with published weights: does this machine do what training expects of it?

    python tools/doctor.py --config configs/wan22_face_80gb.yaml [section.key=value ...]

environment  versions, GPU, driver, memory and disk
attention    output and gradients of model.attention_backend, against plain matrix products
faces        the face packs, against insightface's or OpenCV's code, on the first row of the data

A line each, with the way out. The model's weights are not loaded.
Exit code 0: all as expected; 1: something differs; 2: the configuration is refused.
"""

from rewardfl import command_line


def main() -> int:
    parser = command_line.Parser(__doc__, config="a run's YAML file, of any training script")
    parser.add_argument("--device", help="default: cuda where there is one, else cpu")
    return command_line.run("rewardfl.doctor.checks:run_checks", parser.parse_intermixed_args())


if __name__ == "__main__":
    raise SystemExit(main())
