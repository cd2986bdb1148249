"""AdamW with its moments in host memory, learning-rate schedules, and a model with its averaged weights."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from diffusers.training_utils import EMAModel
from torch import nn

from rewardfl.offload import InHost, to_host

AT_ONCE = 32  # parameters whose moments are on the device


class HostAdamW(torch.optim.AdamW):
    """AdamW whose two moments wait in host memory, and are on the device of their parameters for these' turn.

    The same numbers to the last bit. 8 of the 16 bytes that a float32 parameter takes are in the host.
    """

    @torch.no_grad()
    def step(self, closure=None):
        groups = self.param_groups
        try:
            for group in groups:
                for begin in range(0, len(group["params"]), AT_ONCE):
                    part = group["params"][begin : begin + AT_ONCE]
                    self._move(part, lambda moment, parameter: InHost(moment).back(parameter.device))
                    self.param_groups = [group | {"params": part}]
                    super().step()
                    self._move(part, lambda moment, parameter: to_host(moment))
        finally:
            self.param_groups = groups

    def _move(
        self, parameters: Sequence[nn.Parameter], to: Callable[[torch.Tensor, nn.Parameter], torch.Tensor]
    ) -> None:
        for parameter in parameters:
            if state := self.state.get(parameter):  # none before a parameter's first update
                state |= {name: to(state[name], parameter) for name in ("exp_avg", "exp_avg_sq")}


def learning_rate_factor(kind: str, warmup_steps: int, steps: int) -> Callable[[int], float]:
    """step (from 0) -> factor on the learning rate: linear warmup, then constant, or a cosine down to 0 at `steps`."""

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        done = (step - warmup_steps) / max(1, steps - warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, done))) if kind == "cosine" else 1.0

    return factor


class Average(EMAModel):
    """diffusers' average of parameters with Flow-GRPO's warm-up: it starts at 0.1, where diffusers starts at 0."""

    def get_decay(self, optimization_step: int) -> float:
        """Return the weight of the old average at update `optimization_step`, counted from 1."""
        return min(self.decay, optimization_step / (9 + optimization_step))


@contextlib.contextmanager
def averaged(average: EMAModel | None, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Within, the parameters have the average's values, if there is one; afterwards their own again, bit for bit."""
    if average is None:
        yield
        return
    average.store(parameters)
    average.copy_to(parameters)
    try:
        yield
    finally:
        average.restore(parameters)
