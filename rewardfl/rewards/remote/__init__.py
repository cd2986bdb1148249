"""A reward that another process computes: the client, its server (tools/serve_reward.py) and what they say (wire)."""

# ruff: noqa: F401  (this file only re-exports)

from rewardfl.rewards.remote.client import RemoteReward, RewardServerError
