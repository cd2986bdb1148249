"""Rewards: what a generated video is worth, by the name that the configuration gives it."""

from rewardfl.rewards.base import Reward, RewardError, RewardOutput
from rewardfl.rewards.face.reward import FaceIdentityReward
from rewardfl.rewards.registry import REWARDS, build, build_terms, find_reward

__all__ = [
    "REWARDS",
    "FaceIdentityReward",
    "Reward",
    "RewardError",
    "RewardOutput",
    "build",
    "build_terms",
    "find_reward",
]
