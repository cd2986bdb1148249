"""Rewards by their name in the config."""

from .base import Reward, RewardOutput
from .face_identity import FaceIdentityReward
from .remote import RemoteReward

__all__ = ["REWARDS", "FaceIdentityReward", "Reward", "RewardOutput", "build"]

REWARDS: dict[str, type[Reward]] = {reward.name: reward for reward in (FaceIdentityReward, RemoteReward)}


def build(name: str, settings: dict[str, object]) -> Reward:
    """The reward called `name`, `settings` its constructor's arguments; ValueError for an unknown name."""
    if name not in REWARDS:
        raise ValueError(f"reward.name {name!r} is not a reward; choose from {', '.join(sorted(REWARDS))}")
    return REWARDS[name](**settings)
