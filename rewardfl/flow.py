"""Rectified-flow sampling mathematics.

Convention:   x = (1 - sigma) * x0 + sigma * noise      sigma in [0, 1], 1 is pure noise
              velocity = dx / dsigma = noise - x0       sampling walks sigma down: sigma_next < sigma

A stochastic step is a Gaussian N(mean, std^2) whose mean is linear in x and velocity (`coefficients`); std includes
sqrt(-dt). a is the noise_level. In the limit of small steps flow and dance sample the marginals of the ODE. cps has
their noise scale at any step size, but too little variance. On Gaussian data its std ends 3 % low at a = 0.3, 15 % at
0.7.

    ode     x + dt v, std 0
    flow    Euler-Maruyama of  dx = [v - g^2 score / 2] dt + g dw,  g = a sqrt(sigma / (1 - sigma))   Flow-GRPO,
            arXiv 2505.05470, eq. 8 and 9; score = -(x + (1 - sigma) v) / sigma
    dance   the same with g = a                                              DanceGRPO, arXiv 2505.07818
    cps     the marginal's own coefficients, part of its noise redrawn       Flow-CPS, arXiv 2509.05952
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

Kind = Literal["ode", "flow", "dance", "cps"]
VelocityFunction = Callable[[Tensor, int], Tensor]  # (x (B, ...), denoising step) -> velocity (B, ...)

Scalar = Tensor | float


def linear_sigmas(num_steps: int, shift: float) -> Tensor:
    """Return (num_steps + 1,) float32 sigmas from 1 to 0: shift * s / (1 + (shift - 1) * s) over s = linspace(1, 0).

    Computed in float64. This is the schedule of Wan2.2-Lightning; diffusers' own FlowMatchEulerDiscreteScheduler
    shifts an already shifted range.
    """
    s = torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)
    return (shift * s / (1 + (shift - 1) * s)).float()


def euler_step(x: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor) -> Tensor:
    """Return x at sigma_next by one Euler step of dx/dsigma = velocity. x, velocity: (B, ...); sigmas: float32."""
    return x + (sigma_next - sigma) * velocity


def add_noise(x0: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """Return x at sigma: clean latents x0 (B, ...) with noise (B, ...). sigma: a float32 scalar in [0, 1]."""
    return (1 - sigma) * x0 + sigma * noise


def velocity_kl(velocity: Tensor, reference: Tensor, sigma: Tensor) -> Tensor:
    """Return the distance (B,) of two velocities at one sigma: mean over elements of (v - v_ref)^2 / (2 sigma^2).

    It is the KL divergence per dimension of two Gaussian steps, of means h * (v - v_ref) apart and std h * sigma: the
    anchor of IPRO (arXiv 2510.14255) with the weight of Alibaba's ROLL.
    """
    return ((velocity - reference) ** 2).flatten(1).mean(1) / (2 * sigma**2)


PERTURBATION = 2.0**-16  # far below bfloat16's resolution of 2^-8: it changes a velocity only by rounding


def perturb(velocity: VelocityFunction) -> VelocityFunction:
    """Return the same velocity at latents with a relative PERTURBATION by fixed noise.

    A bfloat16 network then rounds differently in all layers, as after an equally small update. Divergences below that
    of the two velocities are rounding.
    """

    def at(x: Tensor, step: int) -> Tensor:
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(step), dtype=x.dtype)
        return velocity(x * (1 + PERTURBATION * noise.to(x.device)), step)

    return at


@dataclass(frozen=True, kw_only=True)
class Coefficients:
    """One transition: mean = x * x_t + velocity * v_t; std of the full step; dt = sigma_next - sigma < 0."""

    x: float
    velocity: float
    std: float
    dt: float


def coefficients(
    kind: Kind, sigma: Scalar, sigma_next: Scalar, noise_level: float, sigma_cap: Scalar, max_std: float = math.inf
) -> Coefficients:
    """Return the transition from sigma to sigma_next, in float64. sigmas: scalars, best on the CPU (they are read).

    noise_level: a; 0 makes every step the ODE's. sigma_cap: the largest sigma in flow's g, which is infinite at 1;
    normally the schedule's second sigma, as in Flow-GRPO's code. The drift takes the true sigma. max_std: flow's and
    dance's g is at most max_std / sqrt(-dt) (LongCat, ModelTC/GenRL 82a867e). Raise ValueError unless sigma falls
    within [0, 1]; an epsilon would turn a wrong index into a step of noise.
    """
    dt = float(sigma_next - sigma)  # the float32 difference, as in euler_step and diffusers
    sigma, sigma_next, sigma_cap = float(sigma), float(sigma_next), float(sigma_cap)
    if kind not in get_args(Kind):
        raise ValueError(f"kind must be one of {', '.join(get_args(Kind))}, got {kind!r}")
    if not 0 <= sigma_next < sigma <= 1:
        raise ValueError(f"a step walks sigma down within [0, 1], got {sigma:g} to {sigma_next:g}")
    if kind == "ode" or noise_level == 0:
        return Coefficients(x=1.0, velocity=dt, std=0.0, dt=dt)
    if kind == "cps":  # (1 - sigma_next) x0^ + old x1^,  x0^ = x - sigma v,  x1^ = x + (1 - sigma) v
        old, std = (sigma_next * trig(noise_level * math.pi / 2) for trig in (math.cos, math.sin))
        return Coefficients(
            x=1 - sigma_next + old, velocity=(1 - sigma) * old - sigma * (1 - sigma_next), std=std, dt=dt
        )
    g2 = noise_level**2
    if kind == "flow":
        capped = min(sigma, sigma_cap)
        g2 *= sigma / (1 - capped)
    g2 = min(g2, max_std**2 / -dt)
    pull = g2 / (2 * sigma)  # the score's pull: g^2 / 2 * -score = pull * x1^
    return Coefficients(x=1 + pull * dt, velocity=(1 + pull * (1 - sigma)) * dt, std=math.sqrt(-g2 * dt), dt=dt)


def transition(
    kind: Kind,
    x: Tensor,
    velocity: Tensor,
    sigma: Scalar,
    sigma_next: Scalar,
    noise_level: float,
    sigma_cap: Scalar,
    max_std: float = math.inf,
) -> tuple[Tensor, float]:
    """Return (mean (B, ...), std) of x at sigma_next given x, velocity (B, ...) at sigma; std 0 is deterministic.

    The other arguments and the errors: `coefficients`. Equal velocities give equal bits in rollout and replay. ode, and
    noise_level 0, equals `euler_step` to the bit.
    """
    c = coefficients(kind, sigma, sigma_next, noise_level, sigma_cap, max_std)
    return c.x * x + c.velocity * velocity, c.std


def gradient_weight(kind: Kind, c: Coefficients) -> float:
    """Return the rms over a step's noise of d(D * log_prob) / dv per element: the pull of its `log_prob`.

    It is |dmean/dv| / std, and for cps 2 |dmean/dv| std. Steps of large weight dominate an unweighted objective.
    """
    return 2 * abs(c.velocity) * c.std if kind == "cps" else abs(c.velocity) / c.std


def noise_scale_error(c: Coefficients, sigma: Scalar, sigma_next: Scalar) -> float:
    """Return the std of the noise after one step from the exact marginal, over sigma_next > 0: 1 is exact.

    For a single x0, x = (1 - sigma) x0 + sigma n and v = n - x0. The step, mean = cx x + cv v, ends at

        (1 - sigma_next) x0 + (cx sigma + cv) n + std z,      n, z ~ N(0, 1).

    At 1.2 the next network call gets 20 % more noise than its timestep says. ode and cps: 1, up to rounding.
    """
    return math.hypot(c.x * float(sigma) + c.velocity, c.std) / float(sigma_next)


def sample(mean: Tensor, std: float, noise: Tensor) -> Tensor:
    """Return x_next (B, ...): the transition's draw by standard normal noise (B, ...)."""
    return mean + std * noise


def log_prob(kind: Kind, x_next: Tensor, mean: Tensor, std: float) -> Tensor:
    """Return (B,) float64: mean over elements of the log density of N(mean, std^2) at x_next (B, ...), as stored.

    cps: the mean of -(x_next - mean)^2, its authors' score, which weights the steps on purpose (`gradient_weight`).
    The mean, not the sum, as in all published code. float64, because ratios are clipped at 1e-6 to 1e-4 and float32
    resolves only 1e-7 of a log-probability near 1. Raise ValueError for a deterministic step.
    """
    _refuse_deterministic(std)
    error = _mean_square(x_next, mean)
    if kind == "cps":
        return -error
    return -error / (2 * std**2) - math.log(std) - 0.5 * math.log(2 * math.pi)


def transition_kl(mean: Tensor, mean_ref: Tensor, std: float) -> Tensor:
    """Return (B,) float64 KL divergence per dimension of two transitions of one std: mean square / (2 std^2).

    Flow-GRPO's eq. 13, whose variance includes dt (its code for SD3 omits it). Raise ValueError as in `log_prob`.
    """
    _refuse_deterministic(std)
    return _mean_square(mean, mean_ref) / (2 * std**2)


def _mean_square(x: Tensor, mean: Tensor) -> Tensor:
    """Return (B,) float64 mean over elements of (x - mean)^2. Summed in float64, it is independent of the split."""
    return (x - mean).square().flatten(1).mean(1, dtype=torch.float64)


def _refuse_deterministic(std: float) -> None:
    if not std > 0:
        raise ValueError("a deterministic step (ode, noise_level 0, cps to sigma 0) has no density: leave it out")
