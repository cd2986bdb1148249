"""Reward post-training for flow-matching video and image models."""
