"""The first hour with published weights: is everything here what training expects it to be? One page to paste.

    python tools/doctor.py --config my.yaml [--out outputs/doctor] [--only files,faces] [section.key=value ...]

One check after the other, each with a line (ok, differs, or could not be done and why) and a section of OUT/doctor.md
and OUT/doctor.json:

    environment  versions, card, driver, disk and memory
    files        size, sha256, and by the headers the tensors of every file of the model, face packs and rewards
    stock        a few small steps of the stock diffusers pipeline and of ours, from the same noise (Wan models)
    faces        the face packs beside insightface's, and the faces of the first clips
    base         the first clips as the untrained model makes them: likeness, motion and sharpness
    step         one update of the training script at the configuration's size: seconds, peak, and the estimate's

The page names no folder but the last one of a file, no host and no user, and holds no prompt and no picture. It is
written after every check.

Exit code 0: all that could be checked is as expected; 1: something differs; 2: the configuration is refused.
"""

import argparse
import sys
from pathlib import Path

from rewardfl import trust

CHECKS = ("environment", "files", "stock", "faces", "base", "step")


def names(text: str) -> list[str]:
    """Checks by name, comma separated."""
    found = text.split(",")
    if unknown := [name for name in found if name not in CHECKS]:
        raise argparse.ArgumentTypeError(f"there is no check {unknown[0][:80]!r}; there are {', '.join(CHECKS)}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="a run's YAML file, of either training script")
    parser.add_argument("--out", type=Path, default=Path("outputs/doctor"), help="default: %(default)s")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--only", type=names, metavar="CHECK,...", help="these checks alone")
    chosen.add_argument("--skip", type=names, metavar="CHECK,...", default=[], help="all checks but these")
    parser.add_argument("--clips", type=int, default=4, help="how many of the data's first rows (default: %(default)s)")
    parser.add_argument(
        "--no-digests", action="store_true", help="no sha256 of whole files, which reads all of them: minutes"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is one, else cpu")
    trust.add_option(parser)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_intermixed_args()
    if args.clips < 1:
        parser.error("--clips must be at least 1")
    args.checks = [name for name in CHECKS if name in (args.only or CHECKS) and name not in args.skip]
    from rewardfl_tools import _doctor  # not before: --help and mistakes are answered without torch

    return _doctor.run(args)


if __name__ == "__main__":
    sys.exit(main())
