"""A reward that another process computes: the client and the wire format."""

# ruff: noqa: F401  (this file only re-exports)

from rewardfl.rewards.remote.client import RemoteReward, RewardServerError
