"""Reward post-training for flow-matching video and image models."""

import os

from rewardfl import machine

__version__ = "0.1.0"

machine.set_thread_defaults(os.environ)
