"""Checks before the first run: the machine, published weights, face packs, a data set."""
