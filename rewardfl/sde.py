"""Rollouts with a window of stochastic steps, and the scores of those steps then and now.

The window's steps are drawn from `flow.transition` and stored; the others are Euler steps of the ODE.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rewardfl import flow, reward_flow
from rewardfl.copies import to_device


@dataclass(frozen=True)
class Kernel:
    """The law of stochastic steps: flow.py's kind, noise_level and max_std, on `sigmas` (steps + 1,) that end at 0."""

    kind: flow.Kind
    noise_level: float
    sigmas: Tensor
    max_std: float = math.inf

    def transition(self, velocity: flow.VelocityFunction, x: Tensor, step: int) -> tuple[Tensor, float]:
        """Return (mean (B, ...), std) of x_{step + 1} given x (B, ...)."""
        law = (self.sigmas[step], self.sigmas[step + 1], self.noise_level, self.sigmas[1], self.max_std)
        return flow.transition(self.kind, x, velocity(x, step), *law)

    def dt(self, step: int) -> float:
        return float(self.sigmas[step + 1] - self.sigmas[step])


@dataclass(frozen=True, kw_only=True)
class Step:
    """One stochastic step of B samples in the rollout, for its replay. All float32 but log_prob."""

    x: Tensor  # (B, ...) before it
    x_next: Tensor  # (B, ...) as drawn
    mean: Tensor | None  # (B, ...) of the draw; None with keep_means=False
    std: float
    log_prob: Tensor  # (B,) float64

    def to(self, device: str | torch.device) -> "Step":
        mean = None if self.mean is None else to_device(self.mean, device)
        x, x_next, log_prob = (to_device(value, device) for value in (self.x, self.x_next, self.log_prob))
        return replace(self, x=x, x_next=x_next, mean=mean, log_prob=log_prob)


@torch.no_grad()
def rollout(
    velocity: flow.VelocityFunction,
    x: Tensor,
    kernel: Kernel,
    window: Sequence[int],
    noise: Callable[[int], Tensor],
    start: int = 0,
    *,
    keep_means: bool = True,
) -> tuple[Tensor, dict[int, Step]]:
    """Return (x0 (B, ...), the window's steps by index) from x (B, ...) float32 at sigmas[start].

    window: the stochastic steps. noise: step -> (B, ...) standard normal. keep_means: only for the objective `guard`.
    """
    sigmas, steps = kernel.sigmas, {}
    for i in range(start, len(sigmas) - 1):
        if i not in window:
            x = flow.euler_step(x, velocity(x, i), sigmas[i], sigmas[i + 1])
            continue
        mean, std = kernel.transition(velocity, x, i)
        x_next = flow.sample(mean, std, noise(i))
        steps[i] = Step(
            x=x, x_next=x_next, mean=mean if keep_means else None, std=std,
            log_prob=flow.log_prob(kernel.kind, x_next, mean, std),
        )  # fmt: skip
        x = x_next
    return x, steps


@torch.no_grad()
def reference_mean(reference: flow.VelocityFunction | None, kernel: Kernel, x: Tensor, step: int) -> Tensor | None:
    """Return the mean of the transition from x (B, C, T, h, w) without the adapter; None without a reference."""
    return None if reference is None else kernel.transition(reference, x, step)[0]


@torch.no_grad()
def kl_floor(reference: flow.VelocityFunction, x: Tensor, kernel: Kernel, window: Sequence[int]) -> float:
    """Return the KL of two transitions whose velocities differ only by rounding (flow.perturb).

    The mean over the window's steps of the reference's rollout, without noise, from x (B, ...) at sigma 1.
    """
    latents = reward_flow.rollout(reference, x, kernel.sigmas[: max(window) + 2], window).latents
    jittered, read = flow.perturb(reference), []
    for i, before in latents.items():
        (mean, std), (other, _) = (kernel.transition(velocity, before, i) for velocity in (reference, jittered))
        read.append(flow.transition_kl(other, mean, std).mean())
    return float(torch.stack(read).mean())


def score(velocity: flow.VelocityFunction, step: Step, index: int, kernel: Kernel) -> tuple[Tensor, Tensor]:
    """Return (mean (B, ...), log_prob (B,) float64) of a stored step under today's velocity, with its graph."""
    mean, std = kernel.transition(velocity, step.x, index)
    return mean, flow.log_prob(kernel.kind, step.x_next, mean, std)
