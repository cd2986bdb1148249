"""Reward post-training for flow-matching video and image models."""

__version__ = "0.1.0"
