"""A training script from its command line to its exit code.

with open_command(args, RewardFlConfig) as command:
    command.exit_code = train(command.start())
return command.exit_code
"""

import contextlib
import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from rewardfl import config as configuration
from rewardfl import data, grpo
from rewardfl.config import AnyConfig
from rewardfl.data.cache import CacheError
from rewardfl.estimate import report
from rewardfl.files import escape_control
from rewardfl.memory import attention
from rewardfl.rewards.face import parity as face_parity
from rewardfl.rewards.remote import RewardServerError
from rewardfl.rewards.scoring import RewardError
from rewardfl.training import checkpoint, invariants
from rewardfl.training.launch import LaunchError
from rewardfl.training.run import Run, RunEnded, read_headers, start
from rewardfl.training.run_folder import RunFolder
from rewardfl.training.signals import Interruption
from rewardfl.weights.shards import InputError

# errors of the input: one line for the user instead of a traceback
REFUSALS = (
    configuration.ConfigError,
    data.DataError,
    checkpoint.CheckpointError,
    InputError,
    RewardError,
    RewardServerError,
    face_parity.FaceParityError,
    LaunchError,
    CacheError,
    grpo.RatioError,
    attention.BackendError,
)


@dataclass
class Command:
    """The command line of a script, its signals and its run folder."""

    args: Namespace
    config_class: type[AnyConfig]
    interruption: Interruption
    run_folder: RunFolder
    exit_code: int = 0

    def start(self) -> Run[Any, Any]:
        """Return the run that the command line asks for. Raise RunEnded after a dry run, or if nothing is left."""
        dry_run = self.args.dry_run
        cfg = configuration.load(self.args.config, self.args.overrides, self.config_class)
        headers = read_headers(cfg, None if dry_run else self.run_folder)
        if dry_run:
            raise RunEnded(report.dry_run(headers.work, headers.job))
        return start(headers, self.run_folder, self.interruption)


@contextlib.contextmanager
def open_command(args: Namespace, config_class: type[AnyConfig]) -> Iterator[Command]:
    """Map the refusals of the block to one line on stderr and an exit code: 2, or a broken invariant's."""
    with Interruption() as interruption, RunFolder() as run_folder:
        command = Command(args, config_class, interruption, run_folder)
        try:
            yield command
        except RunEnded as end:
            command.exit_code = end.exit_code
        except (*REFUSALS, invariants.InvariantError) as error:
            close_bars()
            print(escape_control(f"error: {error}"), file=sys.stderr)
            command.exit_code = error.exit_code if isinstance(error, invariants.InvariantError) else 2
        finally:
            close_bars()


def close_bars() -> None:
    """End the lines of all progress bars, so that the next message begins its own."""
    for bar in tuple(getattr(tqdm, "_instances", ())):
        bar.close()
