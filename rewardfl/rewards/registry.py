"""Rewards by their name in the configuration."""

import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from rewardfl import trust
from rewardfl.config import RewardSpec, did_you_mean
from rewardfl.rewards.base import Reward, RewardError, attach_checks
from rewardfl.rewards.scoring import Term
from rewardfl.rewards.settings import check_settings, setting_types

ResolvedReward = tuple[RewardSpec, type[Reward]]

# name -> module and class in this package, imported on use: some import transformers, which is slow
REWARDS: dict[str, str] = {
    "aesthetic": "clip.scorers:AestheticReward",
    "clip_score": "clip.scorers:ClipScoreReward",
    "face_identity": "face.reward:FaceIdentityReward",
    "face_judge": "face_judge:FaceJudge",
    "face_motion": "face.motion:FaceMotionReward",
    "hpsv2": "clip.scorers:Hpsv2Reward",
    "hpsv3": "vlm.hpsv3:Hpsv3Reward",
    "motion": "pixels.motion:MotionReward",
    "ocr": "ocr:Ocr",
    "optical_flow": "pixels.optical_flow:OpticalFlowReward",
    "pickscore": "clip.scorers:PickScoreReward",
    "remote": "remote:RemoteReward",
    "video_align": "vlm.video_align:VideoAlignReward",
}


def build(name: str, settings: Mapping[str, object], place: str = "settings") -> Reward:
    """Build the reward `name` (see find_reward) with `settings`; each call is checked (see attach_checks).

    place: the key of the settings, for messages. Raise ValueError for a name or settings that cannot be used.
    """
    cls = find_reward(name)
    return attach_checks(cls(**check_settings(cls, settings, place)))


def resolve_rewards(specs: Sequence[RewardSpec], fps: float = 1.0, *, here: bool = True) -> list[ResolvedReward]:
    """Return the specs with checked settings, and their classes, without building a reward.

    Raise RewardError for an unknown name, code that may not be loaded, and wrong settings. fps: the videos' frame rate,
    for classes that require it and settings without it. here: whether the files that settings name must exist.
    """
    chosen = []
    for spec in specs:
        try:
            cls = find_reward(spec.name)
        except RewardError as error:
            raise RewardError(f"{_key(spec, 'name')}: {error}") from error
        _, default = setting_types(cls).get("fps", (None, None))
        settings = {"fps": fps, **spec.settings} if default is ... else spec.settings
        settings = check_settings(cls, settings, _key(spec, "settings"), here=here)
        chosen.append((replace(spec, settings=settings), cls))
    return chosen


def check_trainable(chosen: Sequence[ResolvedReward]) -> None:
    """Raise RewardError when a reward with a weight is not differentiable, or no reward has a weight."""
    for spec, cls in chosen:
        if spec.weight > 0 and not cls.differentiable:
            raise RewardError(
                f"{spec.key}: {spec.name} has no gradient, as its class says (differentiable = False); measure it "
                "(weight 0), or train on it without one (train_forward_rl.py, train_flow_grpo.py)"
            )
    if not any(spec.weight > 0 for spec, _ in chosen):
        raise RewardError(
            "reward.terms: no weight is above 0, so nothing is trained; for supervised fine-tuning set "
            "anchor.weight: 1 and reward.kl_weight: 0"
        )


def build_terms(chosen: Sequence[ResolvedReward], device: torch.device) -> list[Term]:
    """Build the rewards on the device. Raise RewardError for settings or weights that a reward does not accept."""
    terms = []
    for spec, cls in chosen:
        key = _key(spec, "settings")
        try:
            reward = attach_checks(cls(**spec.settings)).to(device)
        except (OSError, ValueError) as error:
            raise RewardError(f"{key}: {error}") from error
        reward.place = key
        terms.append(
            Term(
                key=spec.key, label=spec.label, reward=reward, weight=spec.weight, mean=spec.mean, std=spec.std,
                guards=spec.guards,
            )
        )  # fmt: skip
    return terms


def _key(spec: RewardSpec, name: str) -> str:
    """Return the configuration key of the reward's name or settings; a reward of `reward` itself has one for both."""
    return f"{spec.key}.{name}" if spec.key.startswith("reward.terms.") else spec.key


def find_reward(name: str) -> type[Reward]:
    """Return the class of a reward in REWARDS, or the user's "module:Class" or "path/to/file.py:Class"."""
    source, colon, attribute = name.rpartition(":")
    if name in REWARDS:
        source, _, attribute = f"rewardfl.rewards.{REWARDS[name]}".partition(":")
    elif not colon:
        choices = ", ".join(sorted(REWARDS))
        raise RewardError(
            f"{name!r} is not a reward{did_you_mean(name, REWARDS)}; choose from {choices}, or name a class of your "
            "own as module:Class or path/to/file.py:Class"
        )
    elif refusal := trust.refusal_message(name, source):
        raise RewardError(refusal)
    try:
        module = _import_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    except (ImportError, FileNotFoundError) as error:
        raise RewardError(
            f"reward {name!r} cannot be imported ({error}); install the missing package (OpenCV needs libGL: "
            "apt-get install libgl1), or add the folder of your module to PYTHONPATH"
        ) from error
    cls = vars(module).get(attribute)
    if not isinstance(cls, type) or not issubclass(cls, Reward) or not cls.name:
        raise RewardError(
            f"{name} is not a subclass of rewardfl.rewards.Reward with a class attribute `name`"
            f"{did_you_mean(attribute, vars(module).keys() - {attribute})}"
        )
    return cls


def _import_file(path: Path):
    name = f"rewardfl_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # as for every .py file
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module
