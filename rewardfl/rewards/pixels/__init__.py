"""Rewards and measures computed only from pixels."""
