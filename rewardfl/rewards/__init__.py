"""Rewards: scores of generated videos, by their name in the configuration."""

# ruff: noqa: F401  (this file only re-exports)

from rewardfl.rewards.base import Reward, RewardError, RewardOutput
from rewardfl.rewards.face.reward import FaceIdentityReward
from rewardfl.rewards.registry import REWARDS, build, build_terms, find_reward, resolve_rewards
