"""Holds a reward to its contract at every call: what a user's class returns decides what is trained."""

import re
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from rewardfl.rewards.base import Reward, RewardError, RewardOutput

NONFINITE = "nonfinite"  # the part that counts scores that were not finite

PART_NAME = re.compile(r"[\w.-]+")  # it becomes a piece of a metric's key


class ContractError(RewardError):
    """A reward gives something else than RewardOutput promises."""


def checked(reward: Reward) -> Reward:
    """`reward` itself, whose calls (video, batch) from now on either keep what RewardOutput promises or raise.

    ContractError, naming the class, for a score that is not (B,) floating point, a valid that is not (B,) bool, parts
    that are not (B,) or change their names, and a score without gradient from a reward that says it is
    differentiable. The names are those of the first call with a valid sample; a call without one may leave all parts
    out, and they are then NaN.

    A score that is not finite becomes an invalid sample; the part `nonfinite` is 1 for it and 0 for all others (a
    class that has such a part itself, as one that asks a server has, counts those too). Invalid samples get score 0
    and a gradient of zero, also where the reward's own would be NaN.
    """
    reward.register_forward_pre_hook(_watch)
    reward.register_forward_hook(partial(_check, {}))
    return reward


def _watch(reward: Reward, args: tuple) -> tuple:
    video, batch = args
    if len(batch) != len(video):
        raise RewardError(f"{len(video)} videos need as many references, got {len(batch)}")
    # an alias: its gradient is what this reward sends back, and may be mended without touching what others send
    return video.view_as(video), batch


def _check(frozen: dict[str, tuple[str, ...]], reward: Reward, args: tuple, output: RewardOutput) -> RewardOutput:
    """frozen: this reward's part names, once they are known, under "names"."""
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
    parts = _under_frozen_names(who, output, frozen)
    wants_gradient = reward.differentiable and torch.is_grad_enabled() and video.requires_grad
    if wants_gradient and output.valid.any() and not output.score.requires_grad:
        raise ContractError(f"{who} says that it is differentiable, but its score has no gradient to the video")

    finite = output.score.isfinite()
    valid = output.valid & finite
    if video.requires_grad and not valid.all():
        rows = ~valid.to(video.device).view(-1, *[1] * (video.ndim - 1))
        video.register_hook(lambda gradient: gradient.masked_fill(rows, 0))
    counted = (output.valid & ~finite).float()
    if NONFINITE in parts:
        counted = counted + parts[NONFINITE].to(counted).nan_to_num()
    score = output.score.masked_fill(~valid, 0)
    return RewardOutput(score, valid, {**parts, NONFINITE: counted})


def _under_frozen_names(who: str, output: RewardOutput, frozen: dict[str, tuple[str, ...]]) -> Mapping[str, Tensor]:
    """The output's parts under the names of the first call, which this one may be."""
    if not output.parts and not output.valid.any():
        return {name: output.score.detach().new_full(output.score.shape, torch.nan) for name in frozen.get("names", ())}
    # setdefault: of a concurrent reward's first calls, which may be several at a time, one counts
    names = frozen.setdefault("names", tuple(output.parts))
    if set(names) != set(output.parts):
        now, first = ", ".join(output.parts) or "none", ", ".join(names) or "none"
        raise ContractError(f"{who} must name its parts alike at every call: they were {first}, and now are {now}")
    return output.parts


def _check_shape(what: str, value: object, count: int) -> None:
    if not isinstance(value, Tensor):
        raise ContractError(f"{what} must be a tensor, it is a {type(value).__name__}")
    if value.shape != (count,):
        way_out = "; view(-1) makes that of it" if value.numel() == count else ""
        shape = tuple(value.shape)
        raise ContractError(f"{what} must hold one value per video, shape ({count},), it has shape {shape}{way_out}")
