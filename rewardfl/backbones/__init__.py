"""The models that can be trained, by model.model_name."""
