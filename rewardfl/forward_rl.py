"""Forward-process reinforcement: advantage-weighted regression of the velocity on a model's own clean samples.

A rollout by the old policy, with any sampler, gives x0 and an advantage A. An update draws noise and sigma, and fits or
repels the velocity at

    x = (1 - sigma) x0 + sigma noise    towards    u = noise - x0.

All objectives are of one family. At v = v_old their gradient by v is  A g (v - u) / D,  with D elements per sample,
l = mean((v - u)^2), and g

    rvm   1                                          RVM, arXiv 2608.23664
    nft   2 sigma / mean|v_old - u|                  DiffusionNFT, arXiv 2509.16117
    awm   2 w'(l), w of `awm_log_prob`               AWM, arXiv 2509.25050
    best  2, with A of `best_advantages`: loss A l   rejection sampling: Flow-GRPO, arXiv 2505.05470, appendix C.1
    dpo   beta, with A of `pair_advantages`          Diffusion-DPO, arXiv 2311.12908; Flow-DPO, 2501.13918

Away from it, nft also pulls v towards v_old, awm's ratio grows or is clipped, dpo's factor falls (its v_old is the
reference), and rvm and best stay as they are.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

Weighting = Literal["uniform", "sigma", "sigma_squared", "huber", "generalised_huber"]

_ROUNDING = 1e-10  # added below a root by the authors of AWM


def _mean(x: Tensor) -> Tensor:
    """Return the mean over the elements of each sample, (B,), summed in float64."""
    return x.flatten(1).mean(1, dtype=torch.float64)


def distance(velocity: Tensor, other: Tensor) -> Tensor:
    """Return the mean over elements of (velocity - other)^2, (B,) float64; both (B, ...)."""
    return _mean((velocity - other).square())


def best_advantages(rewards: Tensor, valid: Tensor) -> Tensor:
    """Return 1 for the highest reward of each group, the first of equals, and 0 for all others, as `rewards`.

    rewards: (groups, group_size); valid: the same of bool. A group whose valid rewards differ by no more than rounding,
    a millionth, has no best: all are 0.
    """
    highest, best = rewards.masked_fill(~valid, -torch.inf).max(1, keepdim=True)
    lowest = rewards.masked_fill(~valid, torch.inf).amin(1, keepdim=True)
    differ = (highest > lowest) & ~highest.isclose(lowest, rtol=1e-6, atol=0)
    return torch.zeros_like(rewards).scatter(1, best, differ.to(rewards))


def pair_advantages(rewards: Tensor, valid: Tensor) -> Tensor:
    """Return `best_advantages`, with -1 for the lowest valid reward of a group that has a best, the first of equals."""
    best = best_advantages(rewards, valid)
    worst = rewards.masked_fill(~valid, torch.inf).argmin(1, keepdim=True)
    return best - torch.zeros_like(best).scatter(1, worst, best.sum(1, keepdim=True))


def pair_logits(change: Tensor, advantage: Tensor, beta: float) -> Tensor:
    """Return DPO's logit of each pair, for both of its samples:  z = -(beta / 2) (change_w - change_l), as `change`.

    change: (pairs, 2, draws), a sample's error mean((v - u)^2) minus the reference's; at one noise and sigma for both.
    advantage: (pairs, 2), 1 for the chosen sample w, -1 for the rejected l; 0 for both without a pair, whose z is 0.
    Diffusion-DPO, arXiv 2311.12908, eq. 14, as means over elements; beta is constant as in Flow-DPO, 2501.13918.
    """
    return -beta / 2 * (advantage[:, :, None] * change).sum(1, keepdim=True).expand_as(change)


def dpo_loss(velocity: Tensor, target: Tensor, advantage: Tensor, logit: Tensor, beta: float) -> Tensor:
    """Return DPO's loss (B,) float64 of each sample's pair,  -log sigmoid(logit),  and 0 without a pair.

    Its gradient is a regression's with the constant weight  advantage * beta * sigmoid(-logit). The mean over a pair's
    samples has exactly the gradient of the loss, in one forward pass or two. velocity, target: (B, ...). advantage,
    logit: (B,), as in `pair_logits`.
    """
    pull = advantage * beta * (-logit).sigmoid() * distance(velocity, target)
    return advantage.abs() * functional.softplus(-logit) + pull - pull.detach()


def rvm_loss(velocity: Tensor, target: Tensor, advantage: Tensor) -> Tensor:
    """Return RVM's loss (B,), whose gradient by the velocity (B, ...) is  advantage * (velocity - target) / D.

    target: noise - x0, (B, ...). advantage: (B,), of either sign. The value is the surrogate
    0.5 mean((v - sg[v - advantage (v - target)])^2), bounded below for a negative advantage, where the weighted
    regression is not (FastVideo's port, rvm_faithful.py).
    """
    pull = advantage.view(-1, *[1] * (velocity.ndim - 1)) * (velocity - target)
    return 0.5 * distance(velocity, (velocity - pull).detach())


def nft_weight(advantage: Tensor, largest: float) -> Tensor:
    """Return the weight (B,) in [0, 1] of NFT's positive branch: A / (2 largest) + 1/2, clamped."""
    return (advantage / (2 * largest) + 0.5).clamp(0, 1)


def nft_loss(
    velocity: Tensor,
    old: Tensor,
    x: Tensor,
    x0: Tensor,
    sigma: Tensor,
    advantage: Tensor,
    *,
    mix: float,
    largest: float,
) -> Tensor:
    """Return DiffusionNFT's loss (B,) float64, as published: eq. 5 with the code's adaptive weights.

        v+ = mix v + (1 - mix) v_old,    v- = (1 + mix) v_old - mix v,    x0+- = x - sigma v+-
        L = largest / mix [r mean((x0+ - x0)^2) / w+  +  (1 - r) mean((x0- - x0)^2) / w-],   w = sg mean|x0+- - x0|

    r is `nft_weight` of the advantage (B,). velocity, old: (B, ...), old without a graph; x (B, ...): x0 with noise at
    `sigma`. mix: the authors' beta, in (0, 1]; at 1 the branches are the policy and its mirror image.
    """
    weight, branches = nft_weight(advantage.double(), largest), []
    for branch in (mix * velocity + (1 - mix) * old, (1 + mix) * old - mix * velocity):
        error = x - sigma * branch - x0
        branches.append(_mean(error.square()) / _mean(error.detach().abs()).clamp(min=1e-5))
    return largest / mix * (weight * branches[0] + (1 - weight) * branches[1])


def awm_log_prob(
    velocity: Tensor, target: Tensor, sigma: Tensor, weighting: Weighting = "generalised_huber", power: float = 0.25
) -> Tensor:
    """Return AWM's stand-in for the log-likelihood of x0, (B,) float64: -w(l), with l = mean((velocity - target)^2).

    huber and generalised_huber have 1e-10 added to l, and are 0 at l = 0 as in the authors' scripts/train_sd3_awm.py.
    """
    loss, sigma = distance(velocity, target), sigma.double()
    weighted = {
        "uniform": loss,
        "sigma": sigma * loss,
        "sigma_squared": sigma**2 * loss,
        "huber": sigma * ((loss + _ROUNDING).sqrt() - _ROUNDING**0.5),
        "generalised_huber": sigma * ((loss + _ROUNDING) ** power - _ROUNDING**power) / power,
    }
    return -weighted[weighting]


def awm_loss(log_ratio: Tensor, advantage: Tensor, clip_range: float) -> Tensor:
    """Return PPO's clipped loss (B,): max(-A q, -A clip(q, 1 - clip_range, 1 + clip_range)),  q = exp(log_ratio).

    log_ratio: `awm_log_prob` of the policy minus the old policy's, (B,).
    """
    ratio = log_ratio.exp()
    return torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - clip_range, 1 + clip_range))


def old_decay(update: int, *, start: int, rate: float, largest: float) -> float:
    """Return the old policy's share of itself after `update` optimizer updates: rate * (update - start), 0 to largest.

    NFT's schedule 1 is start 0, rate 0.001, largest 0.5; schedule 2 is 75, 0.0075 and 0.999. At 0 the old policy is the
    policy at the start of the epoch.
    """
    return min(max(0.0, rate * (update - start)), largest)


def deviation(velocity: Tensor, old: Tensor) -> Tensor:
    """Return mean|velocity - old| / mean|old|, a scalar, of both (B, ...): how far the policy is from the old one.

    Exactly 0 after an update with an advantage says that the objective compares the policy with itself (UniRL#420).
    """
    return (velocity - old).abs().double().mean() / old.abs().double().mean()
