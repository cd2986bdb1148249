"""A reward that another process computes: the client, its server (tools/serve_reward.py) and what they say (wire)."""

from rewardfl.rewards.remote.client import RemoteReward, RewardServerError

__all__ = ["RemoteReward", "RewardServerError"]
