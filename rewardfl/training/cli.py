"""Entry point of the training scripts: arguments, configuration, exit codes."""

import argparse
import sys
from collections.abc import Callable
from typing import Any

from rewardfl import config as configuration
from rewardfl import data, grpo, trust
from rewardfl.config import AnyConfig
from rewardfl.data.cache import CacheError
from rewardfl.files import escape_unencodable_output, printable
from rewardfl.memory import attention
from rewardfl.rewards.face import parity as face_parity
from rewardfl.rewards.remote import RewardServerError
from rewardfl.rewards.scoring import RewardError
from rewardfl.training import checkpoint, invariants
from rewardfl.training.launch import LaunchError
from rewardfl.training.run_folder import RunFolder
from rewardfl.training.signals import Interruption
from rewardfl.weights.shards import Refused

# problems of the input: the user gets one line instead of a traceback
REFUSALS = (
    configuration.ConfigError,
    data.DataError,
    checkpoint.CheckpointError,
    Refused,
    RewardError,
    RewardServerError,
    face_parity.FaceParityError,
    LaunchError,
    CacheError,
    grpo.RatioError,
    attention.BackendError,
)


def main(description: str, kind: type[AnyConfig], train: Callable[[Any, bool, Interruption, RunFolder], int]) -> int:
    """Parse the command line, run `train`, and map its result or error to an exit code."""
    escape_unencodable_output()
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved plan and stop before loading weights"
    )
    trust.add_option(parser)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_intermixed_args()  # settings may stand on both sides of an option
    try:
        with Interruption() as interruption, RunFolder() as run_folder:
            cfg = configuration.load(args.config, args.overrides, kind)
            return train(cfg, args.dry_run, interruption, run_folder)
    except REFUSALS as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return 2
    except invariants.InvariantError as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return error.exit_code
