"""Exit codes of the training scripts."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tqdm import tqdm

from rewardfl import config as configuration
from rewardfl import data, grpo
from rewardfl.data.cache import CacheError
from rewardfl.files import escape_control
from rewardfl.memory import attention
from rewardfl.rewards.face import parity as face_parity
from rewardfl.rewards.remote import RewardServerError
from rewardfl.rewards.scoring import RewardError
from rewardfl.training import checkpoint, invariants
from rewardfl.training.launch import LaunchError
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


class RunEnded(Exception):
    """The end of a run that has nothing left to train."""


@dataclass
class Result:
    """The exit code of a script."""

    exit_code: int = 0


@contextmanager
def exit_codes() -> Iterator[Result]:
    """Map the refusals of the block to one line on stderr and an exit code: 2, or a broken invariant's."""
    result = Result()
    try:
        yield result
    except RunEnded:
        pass
    except (*REFUSALS, invariants.InvariantError) as error:
        close_bars()
        print(escape_control(f"error: {error}"), file=sys.stderr)
        result.exit_code = error.exit_code if isinstance(error, invariants.InvariantError) else 2
    finally:
        close_bars()


def close_bars() -> None:
    """End the lines of all progress bars, so that the next message begins its own."""
    for bar in tuple(getattr(tqdm, "_instances", ())):
        bar.close()
