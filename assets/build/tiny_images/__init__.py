"""The parts of make_tiny_images.py."""
