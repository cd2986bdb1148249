"""The data anchor: the flow-matching loss on real clips' latents, next to a reward or without one.

    y = (1 - sigma) x0 + sigma noise,   loss = mean((velocity(y) - (noise - x0))^2)

The anchor keeps a model with its data, without a reference model (DDRL, arXiv 2512.04332; the pretraining loss of ReFL,
arXiv 2304.05977). With no reward it is supervised fine-tuning. Moments of a schedule are denoising steps: 4 is the
sigma of step 4, and 4.5 is half-way to the sigma of step 5.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rewardfl.flow import add_noise
from rewardfl.noise import noise_seed


@dataclass(frozen=True, kw_only=True)
class Draw:
    """One draw of the loss for B clips: velocity(y) (B, ...) at sigma, the noise (B, ...) in y.

    reference: the velocity to fit in place of noise - x0, such as a distilled model's without its adapter.
    """

    velocity: Callable[[Tensor], Tensor]
    sigma: Tensor
    noise: Tensor
    reference: Callable[[Tensor], Tensor] | None = None


def draw_moments(count: int, steps: Sequence[int], seed: int, update: int, *, whole_range: bool) -> list[float]:
    """Return the `count` moments of an update, the same on every process and for every sample.

    steps: denoising steps, increasing; each is drawn once in turn, in a random order. whole_range: any moment from the
    first step to the end of the last, one of each of `count` equal parts.
    """
    generator = torch.Generator().manual_seed(noise_seed(seed, update, "anchor"))
    if whole_range:
        first, length = steps[0], steps[-1] + 1 - steps[0]
        fractions = (torch.arange(count) + torch.rand(count, generator=generator)) / count
        return [first + length * min(part, 1 - 2**-20) for part in fractions.tolist()]  # float32 may round up to 1
    orders = [torch.randperm(len(steps), generator=generator) for _ in range(-(-count // len(steps)))]
    return [float(steps[i]) for i in torch.cat(orders)[:count].tolist()]


def accumulate(
    draws: Sequence[Draw],
    x0: Tensor,
    weights: Tensor,
    *,
    backward: Callable[[Tensor], None] = torch.Tensor.backward,
    micro_batch: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
) -> Tensor:
    """Accumulate the parameters' gradients of  sum_b weights_b * loss_b ; return the losses (B,), without a graph.

    loss_b is the mean over the draws. x0: latents (B, ...) of real clips. weights: (B,), 0 for a sample without a clip.
    backward, micro_batch: as in `reward_flow.replay`; each is called once per draw.
    """
    losses = torch.zeros_like(weights)
    for draw in draws:
        with micro_batch():
            loss = velocity_misfit(draw, x0) / len(draws)
            backward((weights * loss).sum())
        losses += loss.detach() * (weights != 0)
    return losses


def velocity_misfit(draw: Draw, x0: Tensor) -> Tensor:
    """Return the loss (B,) of one draw for latents x0 (B, ...), with the graph of the draw's velocity."""
    noisy = add_noise(x0, draw.noise, draw.sigma)
    target = draw.noise - x0
    if draw.reference is not None:  # before the velocity's forward pass: no graph is alive yet
        with torch.no_grad():
            target = draw.reference(noisy)
    return (draw.velocity(noisy) - target).square().flatten(1).mean(1)
