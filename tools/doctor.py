"""The first hour with published weights: is everything here what training expects it to be? One page to paste.

    python tools/doctor.py --config my.yaml [--out PAGE.md] [--only faces] [section.key=value ...]

    environment  versions, card, driver, disk and memory
    weights      each expert's velocity, with our loading and with diffusers' (Wan models); with a graph and without
    faces        the face packs next to insightface's, and the faces of the first clips
    step         one update of the training script at the configuration's size: seconds, peak, and the estimate's

The step needs the checkout, as training does: the wheel has no scripts and no configs/. The page names no host and no
user, and holds no prompt. Exit code 0: all that could be checked is as expected; 1:
something differs; 2: the configuration is refused.
"""

import sys
import time
from pathlib import Path

from rewardfl import command_line, trust
from rewardfl.config import schema

CHECKS = ("environment", "weights", "faces", "step")


def main() -> int:
    parser = command_line.Parser(__doc__)
    parser.add_argument("--config", required=True, help="a run's YAML file, of either training script")
    page = Path(time.strftime("outputs/doctor_%Y%m%d_%H%M%S.md"))
    parser.add_argument("--out", type=Path, default=page, help="the page (default: outputs/doctor_TIME.md)")
    parser.add_argument("--only", choices=CHECKS, action="append", help="this check; may be given several times")
    count = command_line.option_type(schema.Count)
    parser.add_argument("--clips", type=count, default=4, help="how many of the data's first rows (default: 4)")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is one, else cpu")
    command_line.add_overwrite_option(parser)
    trust.add_option(parser)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_intermixed_args()
    from rewardfl.doctor import checks  # here, so that --help and mistakes need no torch

    return checks.run(args)


if __name__ == "__main__":
    sys.exit(main())
