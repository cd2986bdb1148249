"""Rectified-flow sampling mathematics. Imports torch only.

Convention:   x = (1 - sigma) * x0 + sigma * noise      sigma in [0, 1], 1 is pure noise
              velocity = dx / dsigma = noise - x0       sampling walks sigma down: sigma_next < sigma
"""

import torch
from torch import Tensor


def linear_sigmas(num_steps: int, shift: float) -> Tensor:
    """(num_steps + 1,) float32 sigmas from 1 to 0: shift * s / (1 + (shift - 1) * s) over s = linspace(1, 0).

    Computed in float64. This is the schedule of Wan2.2-Lightning. diffusers'
    FlowMatchEulerDiscreteScheduler(shift=...) is not: it shifts an already shifted range. `wan.set_sigmas`
    gives these sigmas to a diffusers scheduler.
    """
    if num_steps < 1 or shift <= 0:
        raise ValueError(f"linear_sigmas needs num_steps >= 1 and shift > 0, got {num_steps} and {shift}")
    s = torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)
    return (shift * s / (1 + (shift - 1) * s)).float()


def euler_step(x: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor) -> Tensor:
    """x at sigma_next: one Euler step of dx/dsigma = velocity. x, velocity: (B, ...); sigmas: float32 scalars."""
    return x + (sigma_next - sigma) * velocity


def predict_x0(x: Tensor, velocity: Tensor, sigma: Tensor) -> Tensor:
    """The clean sample that x and its velocity point at: the Euler step to sigma = 0."""
    return x - sigma * velocity


def velocity_kl(velocity: Tensor, reference: Tensor, sigma: Tensor) -> Tensor:
    """(B,) distance of two velocities at one sigma: mean over elements of (v - v_ref)^2 / (2 sigma^2).

    The KL divergence, per dimension, of two Gaussian steps whose means differ by h * (v - v_ref) and whose
    standard deviation is h * sigma; the anchor of IPRO (arXiv 2510.14255) with the weight that Alibaba's ROLL
    gave it.
    """
    return ((velocity - reference) ** 2).flatten(1).mean(1) / (2 * sigma**2)
