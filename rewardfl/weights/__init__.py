"""Weights in files: safetensors tables, the dialects of LoRA files, the names of Wan's layers, merging."""
