"""Learning-rate schedules, and a model with its averaged weights."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence

from diffusers.training_utils import EMAModel
from torch import nn


def learning_rate_factor(schedule: str, warmup_steps: int, steps: int) -> Callable[[int], float]:
    """Return step (from 0) -> learning-rate factor: linear warmup, then constant, or a cosine down to 0 at `steps`."""
    decays = {"constant": False, "constant_with_warmup": False, "cosine": True}[schedule]

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        done = (step - warmup_steps) / max(1, steps - warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, done))) if decays else 1.0

    return factor


class Average(EMAModel):
    """diffusers' average of parameters with Flow-GRPO's warm-up: it starts at 0.1, where diffusers starts at 0.

    Pass the parameters always as the same list. Call `step` once per optimizer update, not per micro-batch.
    """

    def get_decay(self, optimization_step: int) -> float:
        """Return the weight of the old average at update `optimization_step`, counted from 1."""
        return min(self.decay, optimization_step / (9 + optimization_step))


class OldPolicy(EMAModel):
    """The policy that makes forward-process RL's videos. decay: update -> share of itself (forward_rl.old_decay)."""

    def __init__(self, parameters: Sequence[nn.Parameter], decay: Callable[[int], float]):
        super().__init__(parameters)
        self._parameters, self._decay = parameters, decay

    def get_decay(self, optimization_step: int) -> float:
        return self._decay(optimization_step)

    def follow(self, update: int) -> None:
        """Move towards the trained policy after `update` updates; with a share of 0, become equal to it to the bit."""
        if self._decay(update) == 0:
            for shadow, parameter in zip(self.shadow_params, self._parameters, strict=True):
                shadow.copy_(parameter.detach())
            return
        self.optimization_step = update - 1
        self.step(self._parameters)


@contextlib.contextmanager
def averaged(average: EMAModel | None, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Swap the average's values, if there is one, into the parameters within the context, and restore theirs after."""
    if average is None:
        yield
        return
    average.store(parameters)
    average.copy_to(parameters)
    try:
        yield
    finally:
        average.restore(parameters)
