"""Wan2.2-I2V-A14B."""
