"""The procedural people of the tiny world and the training of its networks; driven by make_tiny_world.py."""
