"""The models that can be trained."""
