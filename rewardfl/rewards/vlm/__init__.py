"""Rewards from vision language models with a question about a video."""
