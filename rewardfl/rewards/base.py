"""The base class of rewards, modules from videos to one score per sample, and the check of their contract."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Reference = Mapping[str, Tensor] | None  # output of `Reward.reference`

NONFINITE = "nonfinite"  # the part that counts scores that were not finite


class RewardError(ValueError):
    """A reward cannot be built or breaks its contract. The message names its configuration key or its class."""


class ContractError(RewardError):
    """The output of a reward breaks the contract of RewardOutput."""


class PhotoError(ValueError):
    """Photos that a reward cannot compare with. problems: why, by their place in the list."""

    def __init__(self, problems: Mapping[int, str]):
        super().__init__("; ".join(f"photo {i}: {why}" for i, why in problems.items()))
        self.problems = problems


class Unavailable(RuntimeError):
    """The reward is down for every sample: do not retry the samples of a batch one by one."""


@dataclass
class RewardOutput:
    """Scores of B samples. Where `valid` is False the score is 0 with a zero gradient, and has no meaning."""

    score: Tensor  # (B,) float32, always finite; with gradient to the video if the reward is differentiable
    valid: Tensor  # (B,) bool
    parts: dict[str, Tensor]  # name -> (B,) for the log, without gradient; NaN where not measured


class Reward(nn.Module):
    """Base class. Subclasses set `name` and the attributes that differ for them, and implement forward.

    Their settings are the named arguments of their constructor; `rewards.build` checks a config against them.
    """

    name: str = ""  # in configs, tables and cache keys
    differentiable: bool = False  # does the score have a gradient to the video?
    uses_prompt: bool = False  # does `reference` depend on the prompt?
    fewest_frames: int = 1  # frames of a clip that it can score; 2 for rewards that compare frames with each other
    concurrent: bool = False  # may calls run in threads, several at a time? For rewards that wait, e.g. for a server
    parallel: int = 4  # calls at a time of a concurrent reward
    call_timeout: float = 600.0  # seconds after which such a call has failed
    place: str = "settings"  # the key of its settings, for messages: build_terms sets the configuration's
    has_cap: bool = False  # does the score end at a target, so that a verdict needs no other cap?
    weights: str = ""  # the files that it needs; empty for none
    licence: str = ""  # licence of the weights, or of the code without weights
    range: str = ""  # range of the score
    evaluation_settings: Mapping[str, object] = {}  # for tools/evaluate.py if the configuration lacks them
    second_opinion: tuple[str, str] | tuple[()] = ()  # two parts that should agree: evaluations show where they do not
    nothing_found: str = "nothing to compare with was found in"  # the message for a clip without a reference

    @property
    def compares_with(self) -> str:
        """Return the input of `reference`: "clip", "motion", "picture" (passed as two equal frames) or "nothing".

        A row without that input raises an error where the reward has a weight. For "motion", the base model's own video
        stands for a missing clip. A class that does not override `reference` needs nothing.
        """
        return self.comparison(vars(self))  # its attributes have the settings' names

    @classmethod
    def comparison(cls, settings: Mapping[str, Any]) -> str:
        """Return `compares_with` under these settings, before the reward is built; "" if it is known only then."""
        if isinstance(cls.compares_with, str):
            return cls.compares_with
        if cls.compares_with is not Reward.compares_with:
            return ""
        return "nothing" if cls.reference is Reward.reference else "clip"

    @property
    def measures_motion(self) -> bool:
        """Return whether `with_motion` takes something from a clip, or from the base model's video of the row."""
        return self.compares_with == "motion"

    @staticmethod
    def prompt_problem(prompt: str) -> str:
        """Return why the reward cannot use a prompt, "" for a usable one. Rows are checked before anything loads."""
        return ""

    @classmethod
    def prompt_limits(cls, settings: Mapping[str, Any]) -> Mapping[Path, int]:
        """Return {folder of a tokenizer: tokens of a prompt that the reward reads}; none where it reads all."""
        return {}

    @staticmethod
    def prompt_target(prompt: str) -> str:
        """Return the words that the reward looks for, of a usable prompt, "" for none. A start prints the first."""
        return ""

    def reference(self, video: Tensor, prompt: str = "") -> dict[str, Tensor] | None:
        """Return what `forward` needs of a sample's real clip (3, F, H, W) in [-1, 1] and its prompt, {} for nothing.

        Return None for an unusable clip. F is 0 where the reward `compares_with` no clip.
        Called once per sample; the result is cached under `fingerprint` (and the prompt where `uses_prompt`).
        """
        return {}

    def reference_from_photos(self, photos: Sequence[Tensor], prompt: str = "") -> dict[str, Tensor] | None:
        """Return `reference` of photos of one person, (3, H, W) in [-1, 1] each at its size, at least one.

        By default the first photo counts. Raise PhotoError for photos that cannot be used.
        """
        return self.reference(photos[0][:, None].repeat(1, 2, 1, 1), prompt)

    def with_motion(self, reference: Reference, video: Tensor, prompt: str = "") -> Reference:
        """Return the reference with the motion of the row's clip (3, F, H, W), or of the base model's video of it."""
        return self.reference(video, prompt) if self.compares_with == "motion" else reference

    def complete(self, references: Sequence[Reference]) -> list[Reference]:
        """Return the references of all rows, with what a row takes from the others. Raise RewardError without it."""
        return list(references)

    def fingerprint(self) -> dict[str, object]:
        """Return the weights and settings that `reference` depends on, as plain JSON values."""
        return {"name": self.name}

    def held(self, video: Tensor, batch: Sequence[Reference]) -> tuple[Tensor, Sequence[Reference]]:
        """Convert inputs of `forward` to what a queued call keeps: small, and in CPU memory, since several wait."""
        return video.cpu(), batch

    def forward(self, video: Tensor, batch: Sequence[Reference]) -> RewardOutput:
        """Score videos (B, 3, F, H, W) in [-1, 1] against one reference each; None makes a sample invalid."""
        raise NotImplementedError


def invalid_score(video: Tensor) -> Tensor:
    """Return the score of an invalid sample: () float32 0 with a zero gradient to all of `video`."""
    return video[:0].sum().float()  # a sum over no pixels, since NaN * 0 is NaN


def score_clips(
    video: Tensor,
    batch: Sequence[Reference],
    score_clip: Callable[[Tensor, Mapping[str, Tensor]], tuple[Tensor | None, dict[str, float]]],
    names: Sequence[str],
) -> RewardOutput:
    """Score one clip (3, F, H, W) of the batch at a time.

    score_clip: clip, reference -> (score, parts). The score is None for an invalid sample.
    Parts called `names` that it leaves out are NaN.
    """
    pairs = zip(video, batch, strict=True)
    results = [(None, {}) if reference is None else score_clip(clip, reference) for clip, reference in pairs]
    scores = [invalid_score(clip) if score is None else score for clip, (score, _) in zip(video, results, strict=True)]
    rows = torch.tensor([[parts.get(name, math.nan) for name in names] for _, parts in results])  # numbers for the log
    valid = torch.stack([torch.full((), score is not None, device=video.device) for score, _ in results])
    return RewardOutput(torch.stack(scores), valid, dict(zip(names, rows.unbind(1), strict=True)))


def attach_checks(reward: Reward) -> Reward:
    """Return `reward` with hooks that raise ContractError for an output that is not as RewardOutput says.

    A score that is not finite makes its sample invalid and counts 1 in the part `nonfinite` (added to the reward's own
    part of that name). Invalid samples get score 0 and a gradient of zero, even where the reward's gradient is NaN.
    """
    reward.register_forward_pre_hook(_watch)
    reward.register_forward_hook(_check)
    return reward


def _watch(reward: Reward, args: tuple) -> tuple:
    video, batch = args
    # a view: a hook on it changes this reward's gradient only, not the gradient of other rewards of the same video
    return video.view_as(video), batch


def _check(reward: Reward, args: tuple, output: RewardOutput) -> RewardOutput:
    """Check the output and clear invalid samples."""
    video, who, count = args[0], f"reward {type(reward).__qualname__}", len(args[0])
    if not isinstance(output, RewardOutput):
        raise ContractError(f"{who} must return a RewardOutput, it returned a {type(output).__name__}")
    parts = {f"parts[{name!r}]": part for name, part in output.parts.items()}
    for label, value in {"score": output.score, "valid": output.valid, **parts}.items():
        if not isinstance(value, Tensor) or value.shape != (count,):
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise ContractError(f"{who}: {label} must be a tensor of one value per video, ({count},), got {got}")
    if output.valid.dtype != torch.bool or not output.score.is_floating_point():
        raise ContractError(f"{who}: score must be floating point, valid bool")
    for name in output.parts:
        if not re.fullmatch(r"[\w.-]+", str(name)):  # it becomes a piece of a metric key
            raise ContractError(f"{who}: parts[{name!r}] is not a name for a metric; use letters, digits, _ - and .")
    wants_gradient = reward.differentiable and torch.is_grad_enabled() and video.requires_grad
    if wants_gradient and not output.score.requires_grad and output.valid.any():
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
