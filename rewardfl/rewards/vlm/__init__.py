"""Rewards from vision language models, which answer a question about a video."""
