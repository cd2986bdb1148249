"""Holds a reward to its contract at every call: what a user's class returns decides what is trained."""

import torch
from torch import Tensor

from .base import Reward, RewardOutput

NONFINITE = "nonfinite"  # the part that counts scores that were not finite


def checked(reward: Reward) -> Reward:
    """`reward` itself, whose calls (video, batch) from now on either keep what RewardOutput promises or raise.

    ValueError, naming the class, for a score that is not (B,) floating point, a valid that is not (B,) bool, parts
    that are not (B,), and a score without gradient from a reward that says it is differentiable. A score that is
    not finite becomes an invalid sample; the part `nonfinite` is 1 for it and 0 for all others. Invalid samples get
    score 0 and a gradient of zero, also where the reward's own would be NaN.
    """
    reward.register_forward_pre_hook(_watch)
    reward.register_forward_hook(_check)
    return reward


def _watch(reward: Reward, args: tuple) -> tuple:
    video, batch = args
    if len(batch) != len(video):
        raise ValueError(f"{len(video)} videos need as many references, got {len(batch)}")
    # an alias: its gradient is what this reward sends back, and may be mended without touching what others send
    return video.view_as(video), batch


def _check(reward: Reward, args: tuple, output: RewardOutput) -> RewardOutput:
    video, who, count = args[0], f"reward {type(reward).__qualname__}", len(args[0])
    if not isinstance(output, RewardOutput):
        raise ValueError(f"{who} must return a RewardOutput, it returned a {type(output).__name__}")
    _check_shape(f"{who}: score", output.score, count)
    _check_shape(f"{who}: valid", output.valid, count)
    if not output.score.is_floating_point():
        raise ValueError(f"{who}: score must be floating point, it is {output.score.dtype}")
    if output.valid.dtype != torch.bool:
        raise ValueError(f"{who}: valid must be bool, it is {output.valid.dtype}")
    for name, part in output.parts.items():
        _check_shape(f"{who}: parts[{name!r}]", part, count)
    wants_gradient = reward.differentiable and torch.is_grad_enabled() and video.requires_grad
    if wants_gradient and output.valid.any() and not output.score.requires_grad:
        raise ValueError(f"{who} says that it is differentiable, but its score has no gradient to the video")

    finite = output.score.isfinite()
    valid = output.valid & finite
    if video.requires_grad and not valid.all():
        rows = ~valid.to(video.device).view(-1, *[1] * (video.ndim - 1))
        video.register_hook(lambda gradient: gradient.masked_fill(rows, 0))
    counted = (output.valid & ~finite).float()
    score = output.score.masked_fill(~valid, 0)
    return RewardOutput(score, valid, {**output.parts, NONFINITE: counted})


def _check_shape(what: str, value: object, count: int) -> None:
    if not isinstance(value, Tensor):
        raise ValueError(f"{what} must be a tensor, it is a {type(value).__name__}")
    if value.shape != (count,):
        raise ValueError(f"{what} must hold one value per video, shape ({count},), it has shape {tuple(value.shape)}")
