"""Rewards and measures computed from pixels alone."""
