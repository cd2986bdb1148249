"""Reward post-training for flow-matching video and image models."""

import os

from rewardfl import cpu

__version__ = "0.1.0"

cpu.set_defaults(os.environ)
