"""Rectified-flow sampling mathematics. Imports torch only.

Convention:   x = (1 - sigma) * x0 + sigma * noise      sigma in [0, 1], 1 is pure noise
              velocity = dx / dsigma = noise - x0       sampling walks sigma down: sigma_next < sigma

A step that draws its noise is a Gaussian N(mean, std^2) whose mean is linear in x and velocity (`coefficients`). With
ever smaller steps flow and dance sample the marginals of the ODE; cps has their noise scale at any size of step, but
its samples vary too little (on Gaussian data std ends 3 % low at a = 0.3, 15 % at 0.7). The kinds:

    ode     x + dt v, std 0
    flow    Euler-Maruyama of  dx = [v - g^2 score / 2] dt + g dw,  g = a sqrt(sigma / (1 - sigma))   Flow-GRPO,
            arXiv 2505.05470, eq. 8 and 9; score = -(x + (1 - sigma) v) / sigma
    dance   the same with g = a                                              DanceGRPO, arXiv 2505.07818
    cps     the marginal's own coefficients, part of its noise drawn anew    Flow-CPS, arXiv 2509.05952

a is the noise_level. `std` is everywhere that of the whole transition, sqrt(-dt) included.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

KINDS = ("ode", "flow", "dance", "cps")


def linear_sigmas(num_steps: int, shift: float) -> Tensor:
    """(num_steps + 1,) float32 sigmas from 1 to 0: shift * s / (1 + (shift - 1) * s) over s = linspace(1, 0).

    Computed in float64. This is the schedule of Wan2.2-Lightning. diffusers'
    FlowMatchEulerDiscreteScheduler(shift=...) is not: it shifts an already shifted range.
    `scheduler.FlowMatchSDEScheduler` gives it to a stock pipeline.
    """
    if num_steps < 1 or shift <= 0:
        raise ValueError(f"linear_sigmas needs num_steps >= 1 and shift > 0, got {num_steps} and {shift}")
    s = torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)
    return (shift * s / (1 + (shift - 1) * s)).float()


def euler_step(x: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor) -> Tensor:
    """x at sigma_next: one Euler step of dx/dsigma = velocity. x, velocity: (B, ...); sigmas: float32 scalars."""
    return x + (sigma_next - sigma) * velocity


def add_noise(x0: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """Return x at sigma: clean latents x0 (B, ...) with noise (B, ...). sigma: a float32 scalar in [0, 1]."""
    return (1 - sigma) * x0 + sigma * noise


def velocity_kl(velocity: Tensor, reference: Tensor, sigma: Tensor) -> Tensor:
    """(B,) distance of two velocities at one sigma: mean over elements of (v - v_ref)^2 / (2 sigma^2).

    The KL divergence, per dimension, of two Gaussian steps whose means differ by h * (v - v_ref) and whose
    standard deviation is h * sigma; the anchor of IPRO (arXiv 2510.14255) with the weight that Alibaba's ROLL
    gave it.
    """
    return ((velocity - reference) ** 2).flatten(1).mean(1) / (2 * sigma**2)


JITTER = 2.0**-16  # far below bfloat16's resolution of 2^-8: what it changes in a velocity is rounding


def jittered(velocity: Callable[[Tensor, int], Tensor]) -> Callable[[Tensor, int], Tensor]:
    """The same velocity of latents that differ by a relative JITTER of fixed noise.

    A network in bfloat16 rounds differently then in all of its layers, as it does after an update that is as small.
    What a divergence reads between this and the velocity itself is its floor on this model: nothing below it has been
    measured. True differences of this size are about 1e-10; in float32 the divergence says so.
    """

    def at(x: Tensor, step: int) -> Tensor:
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(step), dtype=x.dtype)
        return velocity(x * (1 + JITTER * noise.to(x.device)), step)

    return at


@dataclass(frozen=True)
class Coefficients:
    """One transition: mean = x * x_t + velocity * v_t; std of the whole step; dt = sigma_next - sigma < 0."""

    x: float
    velocity: float
    std: float
    dt: float


def coefficients(
    kind: str, sigma: Tensor | float, sigma_next: Tensor | float, noise_level: float, sigma_cap: Tensor | float
) -> Coefficients:
    """The transition from sigma to sigma_next, in float64. sigmas: scalars, best on the CPU (they are read).

    noise_level: a, 0 makes every kind the ODE. sigma_cap: the largest sigma that flow's g sees, below 1 and normally
    the schedule's second sigma (as Flow-GRPO's code has it for sigma 1 alone): g is infinite at 1. The drift takes
    the true sigma. ValueError for sigmas that do not walk down within [0, 1]: never an epsilon, which would turn a
    wrong index into a step of noise.
    """
    dt = float(sigma_next - sigma)  # before they become float64: the float32 difference, as euler_step and diffusers
    sigma, sigma_next, sigma_cap = float(sigma), float(sigma_next), float(sigma_cap)
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if not 0 <= sigma_next < sigma <= 1:
        raise ValueError(f"a step walks sigma down within [0, 1], got {sigma:g} to {sigma_next:g}")
    if noise_level < 0 or (kind == "cps" and noise_level > 1):
        raise ValueError(f"noise_level must be >= 0, and <= 1 for cps, got {noise_level:g} for {kind}")
    if kind == "ode" or noise_level == 0:
        return Coefficients(1.0, dt, 0.0, dt)
    if kind == "cps":  # (1 - sigma_next) x0^ + kept x1^,  x0^ = x - sigma v,  x1^ = x + (1 - sigma) v
        kept, std = (sigma_next * trig(noise_level * math.pi / 2) for trig in (math.cos, math.sin))
        return Coefficients(1 - sigma_next + kept, (1 - sigma) * kept - sigma * (1 - sigma_next), std, dt)
    g2 = noise_level**2
    if kind == "flow":
        capped = min(sigma, sigma_cap)
        if capped == 1:
            raise ValueError("flow at sigma 1 needs a sigma_cap below 1, such as the schedule's second sigma")
        g2 *= sigma / (1 - capped)
    pull = g2 / (2 * sigma)  # of the score: g^2 / 2 * -score = pull * x1^
    return Coefficients(1 + pull * dt, (1 + pull * (1 - sigma)) * dt, math.sqrt(-g2 * dt), dt)


def transition(
    kind: str,
    x: Tensor,
    velocity: Tensor,
    sigma: Tensor | float,
    sigma_next: Tensor | float,
    noise_level: float,
    sigma_cap: Tensor | float,
) -> tuple[Tensor, float]:
    """(mean (B, ...), std) of x at sigma_next given x, velocity (B, ...) at sigma; std 0 is a deterministic step.

    The other arguments and the errors: `coefficients`. Rollout and replay both call this, so that equal velocities
    give equal bits; ode, and every kind at noise_level 0, gives those of `euler_step`.
    """
    c = coefficients(kind, sigma, sigma_next, noise_level, sigma_cap)
    return c.x * x + c.velocity * velocity, c.std


def gradient_weight(
    kind: str, sigma: Tensor | float, sigma_next: Tensor | float, noise_level: float, sigma_cap: Tensor | float
) -> float:
    """How strongly a step's `log_prob` pulls on its velocity: rms over its noise of d(D * log_prob) / dv per element.

    |dmean/dv| / std, and for cps 2 |dmean/dv| std. Steps with a large one dominate an unweighted objective.
    """
    c = coefficients(kind, sigma, sigma_next, noise_level, sigma_cap)
    _refuse_deterministic(c.std)
    return 2 * abs(c.velocity) * c.std if kind == "cps" else abs(c.velocity) / c.std


def noise_scale_error(
    kind: str, sigma: Tensor | float, sigma_next: Tensor | float, noise_level: float, sigma_cap: Tensor | float
) -> float:
    """Standard deviation of the noise after one step from the exact marginal, over sigma_next: 1 is exact.

    With x0 known, x = (1 - sigma) x0 + sigma n and v = n - x0, so that the step, mean = cx x + cv v, ends at

        (1 - sigma_next) x0 + (cx sigma + cv) n + std z,      n, z ~ N(0, 1):

    x0's part is exact in every kind; the noise's is sqrt((cx sigma + cv)^2 + std^2) / sigma_next. 1.2 means that the
    next network call finds 20 % more noise than its timestep says. ode and cps: always 1, up to rounding. ValueError
    for sigma_next 0, where there is nothing to compare with, and as in `coefficients`.
    """
    c = coefficients(kind, sigma, sigma_next, noise_level, sigma_cap)
    if float(sigma_next) == 0:
        raise ValueError("a step to sigma 0 has no noise scale to compare with: leave it out")
    return math.hypot(c.x * float(sigma) + c.velocity, c.std) / float(sigma_next)


def sample(mean: Tensor, std: float, noise: Tensor) -> Tensor:
    """x_next (B, ...): the transition's draw by standard normal noise (B, ...)."""
    return mean + std * noise


def log_prob(kind: str, x_next: Tensor, mean: Tensor, std: float) -> Tensor:
    """(B,) float64: mean over elements of the log density of N(mean, std^2) at x_next (B, ...) as it was stored.

    cps: the mean of -(x_next - mean)^2, its authors' score; leaving out 1 / (2 std^2) weights the steps on purpose
    (`gradient_weight`). The mean, not the sum, as all of the field has it. float64, because ratios are clipped at
    1e-6 to 1e-4 and float32 resolves only 1e-7 of a log-probability near 1. ValueError for a deterministic step, and
    for other shapes, which broadcasting would score across samples.
    """
    _refuse_deterministic(std)
    error = _mean_square(x_next, mean)
    if kind == "cps":
        return -error
    return -error / (2 * std**2) - math.log(std) - 0.5 * math.log(2 * math.pi)


def transition_kl(mean: Tensor, mean_ref: Tensor, std: float) -> Tensor:
    """(B,) float64: KL divergence of two transitions of one std, per dimension: mean (mean - mean_ref)^2 / (2 std^2).

    Flow-GRPO's eq. 13, whose variance has dt in it (its code for SD3 has not). ValueError as in `log_prob`.
    """
    _refuse_deterministic(std)
    return _mean_square(mean, mean_ref) / (2 * std**2)


def _mean_square(x: Tensor, mean: Tensor) -> Tensor:
    """(B,) float64 mean over elements of (x - mean)^2; summed in float64, it does not depend on how it is split."""
    if x.shape != mean.shape:
        raise ValueError(
            f"sample and means must be of one shape (B, ...), got {tuple(x.shape)} and {tuple(mean.shape)}"
        )
    return (x - mean).square().flatten(1).mean(1, dtype=torch.float64)


def _refuse_deterministic(std: float) -> None:
    if not std > 0:
        raise ValueError("a deterministic step (ode, noise_level 0, cps to sigma 0) has no density: leave it out")
