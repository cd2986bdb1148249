"""The parts of make_tiny_words.py."""
