"""The command line of the training scripts. It imports no torch, so that --help prints at once."""

import argparse

from rewardfl import trust
from rewardfl.files import protect_console


def parse_arguments(description: str | None) -> argparse.Namespace:
    """Return config, dry_run and overrides of the command line, with a script's docstring as its help."""
    protect_console()
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop before weights load")
    trust.add_option(parser)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    return parser.parse_intermixed_args()  # settings may stand on both sides of an option
