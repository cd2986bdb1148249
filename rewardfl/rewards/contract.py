"""The check, at every call, that a reward keeps the contract of RewardOutput."""

import re

import torch
from torch import Tensor

from rewardfl.rewards.base import Reward, RewardError, RewardOutput

NONFINITE = "nonfinite"  # the part that counts scores that were not finite

PART_NAME = re.compile(r"[\w.-]+")  # part names become pieces of metric keys


class ContractError(RewardError):
    """The output of a reward breaks the contract of RewardOutput."""


def attach_checks(reward: Reward) -> Reward:
    """Return `reward` with hooks that check every call (video, batch) against the contract of RewardOutput.

    A call raises ContractError unless score is (B,) floating point, valid (B,) bool and each part (B,). So does a
    differentiable reward's score without gradient.

    A score that is not finite makes its sample invalid and counts 1 in the part `nonfinite` (added to the reward's own
    part of that name). Invalid samples get score 0 and a gradient of zero, even where the reward's gradient is NaN.
    """
    reward.register_forward_pre_hook(_watch)
    reward.register_forward_hook(_check)
    return reward


def _watch(reward: Reward, args: tuple) -> tuple:
    video, batch = args
    if len(batch) != len(video):
        raise RewardError(f"{len(video)} videos need as many references, got {len(batch)}")
    # a view: a hook on it changes this reward's gradient only, not that of other rewards of the same video
    return video.view_as(video), batch


def _check(reward: Reward, args: tuple, output: RewardOutput) -> RewardOutput:
    """Check the output and clear invalid samples."""
    video, who, count = args[0], f"reward {type(reward).__qualname__}", len(args[0])
    if not isinstance(output, RewardOutput):
        raise ContractError(f"{who} must return a RewardOutput, it returned a {type(output).__name__}")
    _check_shape(f"{who}: score", output.score, count)
    _check_shape(f"{who}: valid", output.valid, count)
    if not output.score.is_floating_point():
        raise ContractError(f"{who}: score must be floating point, it is {output.score.dtype}")
    if output.valid.dtype != torch.bool:
        raise ContractError(f"{who}: valid must be bool, it is {output.valid.dtype}")
    for name, part in output.parts.items():
        _check_shape(f"{who}: parts[{name!r}]", part, count)
        if not isinstance(name, str) or not PART_NAME.fullmatch(name):
            raise ContractError(f"{who}: parts[{name!r}] is no name for a metric: letters, digits, _ - and . are")
    wants_gradient = reward.differentiable and torch.is_grad_enabled() and video.requires_grad
    if wants_gradient and output.valid.any() and not output.score.requires_grad:
        raise ContractError(f"{who} says that it is differentiable, but its score has no gradient to the video")

    finite = output.score.isfinite()
    valid = output.valid & finite
    if video.requires_grad and not valid.all():
        rows = ~valid.to(video.device).view(-1, *[1] * (video.ndim - 1))
        video.register_hook(lambda gradient: gradient.masked_fill(rows, 0))
    counted = (output.valid & ~finite).float()
    if NONFINITE in output.parts:
        counted = counted + output.parts[NONFINITE].to(counted).nan_to_num()
    return RewardOutput(output.score.masked_fill(~valid, 0), valid, {**output.parts, NONFINITE: counted})


def _check_shape(label: str, value: object, count: int) -> None:
    if not isinstance(value, Tensor):
        raise ContractError(f"{label} must be a tensor, it is a {type(value).__name__}")
    if value.shape != (count,):
        shape = tuple(value.shape)
        raise ContractError(f"{label} must hold one value per video, shape ({count},), it has shape {shape}")
