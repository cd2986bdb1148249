"""The differentiable reward-flow sampler: roll out without a graph, then replay the active steps one graph at a time.

    x_{i+1} = x_i + h_i v_i,   v_i = velocity(x_i, i),   h_i = sigma_{i+1} - sigma_i < 0

With g the cotangent of x_{i+1}, one replayed step adds  h_i (dv_i/dtheta)^T g  to the parameters' gradients
and hands g + coupling * h_i (dv_i/dx_i)^T g  to the step before. coupling 1 is the exact chain rule (DRaFT-K,
arXiv 2309.17400). 0 stops the gradient at the network's input (DRTune, arXiv 2405.00760). 0.1 to 0.3 is the
bridge between them (FlowBP, arXiv 2606.11075). Memory is one step's graph.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from rewardfl import flow
from rewardfl.flow import VelocityFunction, euler_step, velocity_kl

KlGradient = Literal["exact", "fixed_trajectory", "reference_constant"]  # see `replay`
# whether the KL's gradient by x_i passes through the reference's velocity, and whether it leaves out the policy's
_KL_PATHS: dict[KlGradient, tuple[bool, bool]] = {
    "exact": (True, False),
    "fixed_trajectory": (False, True),
    "reference_constant": (False, False),
}

# below this first-order rise of the reward over an ascent of `replay_endpoint`, the ascent's direction is rounding
SMALLEST_GAIN = 1e-4


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """x0: (B, ...) the end of a rollout; latents: x_i (B, ...) by step index i, for the requested steps.

    graphs: velocity(x_i, i) with its graph from x_i, of some of these steps. velocities: the same without a graph, of
    all these steps.
    """

    x0: Tensor
    latents: dict[int, Tensor]
    graphs: dict[int, Tensor] = field(default_factory=dict)
    velocities: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Replayed:
    """kl: (B,) of each sample; cotangents: (B, K) norms of each active step's cotangent. Both without a graph.

    The cotangent of step i is the objective's gradient by x_{i+1}, as the steps after i leave it.
    """

    kl: Tensor
    cotangents: Tensor


@dataclass(frozen=True)
class KeptGraphs:
    """The steps whose velocity a rollout computes with a graph, each in its context."""

    steps: Sequence[int] = ()
    context: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext


@torch.no_grad()
def rollout(
    velocity: VelocityFunction,
    x: Tensor,
    sigmas: Tensor,
    keep: Sequence[int],
    start: int = 0,
    with_graphs: KeptGraphs = KeptGraphs(),
) -> Trajectory:
    """Sample x (B, ...) float32 at sigmas[start] by Euler steps through the rest of `sigmas`.

    keep: the steps whose x_i and velocity the trajectory holds. The last sigma is 0 for x0; a shorter head of a
    schedule gives the latents of its next step. with_graphs: of steps in `keep`, for `replay`.
    """
    latents, graphs, velocities = {}, {}, {}
    for i in range(start, len(sigmas) - 1):
        if i in keep and i in with_graphs.steps:
            latents[i] = x.detach().requires_grad_(i != min(keep))  # no active step precedes the first one
            with torch.enable_grad(), with_graphs.context():
                graphs[i] = velocity(latents[i], i)
            v = graphs[i].detach()
        else:
            v = velocity(x, i)
        if i in keep:
            latents.setdefault(i, x)
            velocities[i] = v
        x = euler_step(x, v, sigmas[i], sigmas[i + 1])
    return Trajectory(x0=x, latents=latents, graphs=graphs, velocities=velocities)


@torch.no_grad()
def kl_floor(reference: VelocityFunction, x: Tensor, sigmas: Tensor, active: Sequence[int], start: int = 0) -> float:
    """Return the KL of `replay` for two velocities that differ only by rounding: see flow.perturb.

    It is the mean over the active steps of the reference's rollout from x (B, ...) at sigmas[start].
    """
    latents = rollout(reference, x, sigmas, active, start).latents
    jittered = flow.perturb(reference)
    read = [velocity_kl(jittered(latents[i], i), reference(latents[i], i), sigmas[i]).mean() for i in active]
    return float(torch.stack(read).mean())


def replay(
    velocity: VelocityFunction,
    trajectory: Trajectory,
    sigmas: Tensor,
    active: Sequence[int],
    grad_x0: Tensor,
    coupling: float,
    *,
    reference: VelocityFunction | None = None,
    kl_weight: float = 0.0,
    kl_gradient: KlGradient = "reference_constant",
    kl_steps: Sequence[int] | None = None,
    backward: Callable[[Tensor], None] = torch.Tensor.backward,
    micro_batch: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
) -> Replayed:
    """Accumulate the parameters' gradients of  <grad_x0, x0> + kl_weight * sum_b KL_b ; return KL_b and norms.

    grad_x0: (B, ...) gradient of the loss by the rollout's x0. It includes every averaging over the batch and the
    accumulation; `kl_weight` likewise multiplies a sum over samples. active: step indices whose velocity is
    differentiated; the steps between them pass the cotangent on unchanged. KL_b is `flow.velocity_kl` against
    `reference`, averaged over `kl_steps`, which are active steps; None: over all of them.

    kl_gradient: how the KL reaches the parameters of earlier active steps, through x_i (equal for coupling 0):

        exact               the gradient of the KL, with the same coupling; `reference` must have a graph from x_i (one
                            more backward per coupled step)
        fixed_trajectory    x_i is a constant for the KL (one more backward per coupled step)
        reference_constant  the reference's velocity is a constant, as in ROLL: close to the base model this is not the
                            KL's gradient

    Graphs of the trajectory are walked back and released one by one; without them each velocity is computed again.
    backward: accumulates a scalar's gradients, unscaled (`accelerator.backward` divides by its accumulation count).
    micro_batch: the context of one forward and backward, called once per active step.
    """
    through_reference, without_policy = _KL_PATHS[kl_gradient]
    with_kl = {*(active if kl_steps is None else kl_steps)} if kl_weight != 0 else set()
    g = grad_x0
    kl = grad_x0.new_zeros(len(grad_x0))
    cotangents: list[Tensor] = []
    order = sorted(active, reverse=True)
    for i in order:
        couples = coupling != 0 and i != order[-1]  # no active step precedes the first one
        v, x = trajectory.graphs.pop(i, None), trajectory.latents[i]
        x = x.detach().requires_grad_(couples) if v is None else x
        h = sigmas[i + 1] - sigmas[i]
        cotangents.append(g.detach().flatten(1).norm(dim=1))
        pull = None
        with micro_batch():
            if i in with_kl:  # before the policy's forward: no graph takes memory yet
                assert reference is not None, "a KL needs its reference"
                weight = kl_weight / len(with_kl) if couples and through_reference else 0.0
                v_reference, pull = _reference_velocity(reference, trajectory, i, sigmas[i], weight)
            v = velocity(x, i) if v is None else v
            loss = (v * (h * g).detach()).sum()
            chain: Tensor | None = None
            if i in with_kl:
                step_kl = velocity_kl(v, v_reference, sigmas[i]) / len(with_kl)
                kl += step_kl.detach()
                if couples and without_policy:
                    (chain,) = torch.autograd.grad(loss, x, retain_graph=True)
                loss = loss + kl_weight * step_kl.sum()
            backward(loss)
        if couples:
            chain = x.grad if chain is None else chain
            assert chain is not None, "backward must reach x_i"
            g = g + coupling * (chain if pull is None else chain + pull)
    return Replayed(kl, torch.stack(cotangents[::-1], 1) if cotangents else kl.new_zeros(len(kl), 0))


def ascend(x0: Tensor, grad_x0: Tensor, length: float, share: float) -> tuple[Tensor, Tensor]:
    """Return the move -length |x0| grad_x0 / |grad_x0| of each sample (B, ...), and which samples have one, (B,) bool.

    grad_x0: (B, ...) `share` times each sample's gradient of -reward. length: a share of |x0|. A sample whose reward
    would rise by less than SMALLEST_GAIN has no move: 0.
    """
    slope = torch.linalg.vector_norm(grad_x0.flatten(1), dim=1)
    reach = length * torch.linalg.vector_norm(x0.flatten(1), dim=1)
    rises = ~(slope * reach <= share * SMALLEST_GAIN)  # true for NaN: such an update is skipped
    return -grad_x0 * torch.where(rises, reach / slope, 0).view(-1, *[1] * (grad_x0.ndim - 1)), rises


def endpoint_change(velocity: VelocityFunction, trajectory: Trajectory, sigmas: Tensor) -> Tensor:
    """Return by how much a velocity changes x0 (B, ...) from the rollout's, in the trajectory's single step."""
    ((step, x),) = trajectory.latents.items()
    return (sigmas[step + 1] - sigmas[step]) * (velocity(x, step) - trajectory.velocities[step])


def replay_endpoint(
    velocity: VelocityFunction,
    trajectory: Trajectory,
    sigmas: Tensor,
    grad_x0: Tensor,
    length: float,
    share: float,
    backward: Callable[[Tensor], None] = torch.Tensor.backward,
    micro_batch: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
) -> Replayed:
    """Accumulate the parameters' gradients of  share * sum_b loss_b  for the trajectory's single step. The KL is 0.

        loss = 5 mean((x0(v) - x0 - ascent)^2) / mean|x0(v) - x0 - ascent|,   ascent = -length |x0| grad_x0 / |grad_x0|

    The denominator is a constant, so every sample pulls equally hard. x0 is the rollout's, by an older policy. This is
    DiffusionOPSD (arXiv 2608.24646) with one ascent step, where its two branches are one loss, whatever the sample's
    advantage. A sample whose reward would rise by less than SMALLEST_GAIN gets no gradient.

    grad_x0: (B, ...) `share` times each sample's gradient of -reward. length: a share of x0's norm. backward,
    micro_batch: as in `replay`.
    """
    rows = (-1, *[1] * (grad_x0.ndim - 1))
    ascent, teaches = ascend(trajectory.x0, grad_x0, length, share)
    with micro_batch():
        left = endpoint_change(velocity, trajectory, sigmas) - ascent
        size = left.detach().abs().flatten(1).mean(1).view(rows)
        pull = torch.where(teaches.view(rows), 10 * left.detach() / size / left[0].numel(), 0)
        backward((share * pull * left).sum())
    norms = share * torch.linalg.vector_norm(pull.flatten(1), dim=1, keepdim=True)
    return Replayed(torch.zeros_like(norms[:, 0]), norms)


def _reference_velocity(
    reference: VelocityFunction, trajectory: Trajectory, step: int, sigma: Tensor, weight: float
) -> tuple[Tensor, Tensor | None]:
    """Return the reference's velocity at x_i, without a graph, and d/dx_i of weight * sum_b KL_b(v, v_ref(x_i)).

    v is the rollout's velocity. The second is None for weight 0.
    """
    x = trajectory.latents[step].detach().requires_grad_(weight != 0)
    with torch.set_grad_enabled(weight != 0):
        v = reference(x, step)
        if weight == 0:
            return v, None
        kl = velocity_kl(trajectory.velocities[step], v, sigma).sum()
        (pull,) = torch.autograd.grad(weight * kl, x)
    return v.detach(), pull
