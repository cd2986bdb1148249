"""The first hour with published weights: does this machine do what training expects of it? One page to paste.

    python tools/doctor.py --config my.yaml [--out PAGE.md] [--only step] [section.key=value ...]

    environment  versions, card, driver, disk and memory
    step         one update of the training script at the configured size: seconds, TFLOP/s, peak, and the estimate

The step needs the checkout, as training does: the wheel has no scripts and no configs/. The page holds no host, user
or prompt. Exit code 0: no check differs; 1: one does; 2: the configuration is refused.
"""

import sys
import time
from pathlib import Path

from rewardfl import command_line, trust
from rewardfl.config import schema


def main() -> int:
    parser = command_line.Parser(__doc__)
    parser.add_argument("--config", required=True, help="a run's YAML file, of any training script")
    page = Path(time.strftime("outputs/doctor_%Y%m%d_%H%M%S.md"))
    parser.add_argument("--out", type=Path, default=page, help="the page (default: outputs/doctor_TIME.md)")
    parser.add_argument("--only", choices=("environment", "step"), help="this check")
    count = command_line.option_type(schema.Count)
    parser.add_argument("--clips", type=count, default=4, help="how many of the data's first rows (default: 4)")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is one, else cpu")
    command_line.add_overwrite_option(parser)
    trust.add_option(parser)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    return command_line.run("rewardfl.doctor.checks", parser.parse_intermixed_args())


if __name__ == "__main__":
    sys.exit(main())
