"""Rewards by their name in the config."""

import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from rewardfl import trust
from rewardfl.config import WantedReward, did_you_mean
from rewardfl.rewards.base import Reward, RewardError
from rewardfl.rewards.contract import checked
from rewardfl.rewards.scoring import Term
from rewardfl.rewards.settings import check_settings

Chosen = tuple[WantedReward, type[Reward]]
# name -> module and class within this package, imported when asked for: some take transformers, which loads slowly
REWARDS: dict[str, str] = {
    "aesthetic": "clip.aesthetic:AestheticReward",
    "clip_score": "clip.clip_score:ClipScoreReward",
    "colour": "pixels.colour:ColourReward",
    "face_identity": "face.reward:FaceIdentityReward",
    "face_judge": "face_judge:FaceJudge",
    "face_motion": "face.motion:FaceMotionReward",
    "hpsv2": "clip.hpsv2:Hpsv2Reward",
    "hpsv3": "vlm.hpsv3:Hpsv3Reward",
    "jpeg_size": "pixels.jpeg_size:JpegSizeReward",
    "motion": "pixels.motion:MotionReward",
    "optical_flow": "pixels.optical_flow:OpticalFlowReward",
    "pickscore": "clip.pickscore:PickScoreReward",
    "remote": "remote:RemoteReward",
    "video_align": "vlm.video_align:VideoAlignReward",
}


def build(name: str, settings: Mapping[str, object], place: str = "settings") -> Reward:
    """The reward called `name`, `settings` its constructor's arguments, every call of it checked (see checked).

    name: as for find_reward. place: where the settings stand, for messages. Raises ValueError for an unknown name, a
    class that is no reward or may not be loaded, and settings that are unknown, missing or of another type.
    """
    cls = find_reward(name)
    return checked(cls(**check_settings(cls, settings, place)))


def find_terms(wanted: Sequence[WantedReward], here: bool = True) -> list[Chosen]:
    """The rewards with their classes and checked settings, of which none is made yet.

    RewardError for an unknown one, for code that may not be loaded, and for settings that are wrong. here: whether
    the files that settings name must exist, as for a run on this machine.
    """
    found = []
    for one in wanted:
        try:
            cls = find_reward(one.name)
        except ValueError as error:
            place = f"{one.key}.name" if one.key.startswith("reward.others.") else one.key
            raise RewardError(f"{place}: {error}") from error
        try:
            settings = check_settings(cls, one.settings, _place_of_settings(one.key), here)
        except ValueError as error:
            raise RewardError(str(error)) from error
        found.append((replace(one, settings=settings), cls))
    return found


def check_trainable(found: Sequence[Chosen]) -> None:
    """RewardError when a reward that is to be trained on by its gradient has none, or no reward has a weight."""
    for one, cls in found:
        if one.weight > 0 and not cls.differentiable:
            raise RewardError(
                f"{one.key}: {one.name} has no gradient, as its class says (differentiable = False); measure it "
                "(weight 0), train on it by policy gradient (train_flow_grpo.py), or, if its score does have one, set "
                "differentiable = True in the class"
            )
    if not any(one.weight > 0 for one, _ in found):
        raise RewardError(
            "reward.reward_weight is 0, and so are the weights of reward.others: nothing is trained; for supervised "
            "fine-tuning set anchor.weight: 1 and reward.kl_weight: 0"
        )


def build_terms(found: Sequence[Chosen], device: torch.device) -> list[Term]:
    """The rewards, on the device. RewardError for settings or weights that do not fit one."""
    terms = []
    for one, cls in found:
        place = _place_of_settings(one.key)
        try:
            reward = checked(cls(**one.settings)).to(device)
        except (OSError, ValueError) as error:
            raise RewardError(f"{place}: {error}") from error
        reward.place = place
        terms.append(Term(one.key, one.label, reward, one.weight, one.mean, one.std))
    return terms


def _place_of_settings(key: str) -> str:
    """Where the configuration has the settings of the reward that it names at `key`."""
    if key.startswith("reward.others."):
        return f"{key}.settings"
    return "reward.settings" if key == "reward.name" else key


def find_reward(name: str) -> type[Reward]:
    """The class of a reward in REWARDS, or a user's own: "module:Class", "path/to/file.py:Class".

    Code outside this package is loaded only where the command line allows it (trust).
    """
    if name in REWARDS:
        module, _, attribute = REWARDS[name].partition(":")
        try:
            return vars(importlib.import_module(f"rewardfl.rewards.{module}"))[attribute]
        except ImportError as error:
            raise ValueError(
                f"reward {name!r} cannot be imported ({error}); install what is missing (OpenCV needs the system's "
                "libGL: apt-get install libgl1)"
            ) from error
    place, colon, attribute = name.rpartition(":")
    if not colon:
        choices = ", ".join(sorted(REWARDS))
        raise ValueError(
            f"{name!r} is not a reward{did_you_mean(name, REWARDS)}; choose from {choices}, or name a class of your "
            f"own as module:Class or {name if name.endswith('.py') else 'path/to/file.py'}:Class"
        )
    if refusal := trust.refusal_message(name, place):
        raise ValueError(refusal)
    module = _module_of_file(Path(place)) if place.endswith(".py") else _module(place)
    cls = vars(module).get(attribute)
    if cls is None:
        raise ValueError(f"{place} defines no {attribute!r}{did_you_mean(attribute, vars(module))}")
    if not isinstance(cls, type) or not issubclass(cls, Reward):
        raise ValueError(f"{name} must be a subclass of rewardfl.rewards.Reward, and it is none")
    if not cls.name:
        raise ValueError(f"{name} must have a class attribute `name`, under which its references are cached")
    return cls


def _module(name: str):
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there, and one that it imports is not
        raise ValueError(f"there is no module {name!r} to take a reward from; is its folder in PYTHONPATH?") from error


def _module_of_file(path: Path):
    if not path.is_file():
        raise ValueError(f"there is no file {path} to take a reward from; a relative path is seen from {Path.cwd()}")
    name = f"rewardfl_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
