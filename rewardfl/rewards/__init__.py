"""Rewards: what a generated video is worth, by the name that the configuration gives it."""

# ruff: noqa: F401  (this file only re-exports)

from rewardfl.rewards.base import Reward, RewardError, RewardOutput
from rewardfl.rewards.face.reward import FaceIdentityReward
from rewardfl.rewards.registry import REWARDS, build, build_terms, find_reward, find_terms
