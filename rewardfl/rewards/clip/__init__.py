"""Rewards from CLIP-like networks, which compare frames with a prompt or rate them."""
