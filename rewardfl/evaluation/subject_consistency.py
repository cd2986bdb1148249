"""VBench's subject consistency, by a DINO ViT from a local folder."""

import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import ViTModel

SIDE = 224  # pixels of the shorter side of a resized frame

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

CHUNK = 8  # frames per forward pass


def load_dino(folder: str, device: str) -> ViTModel:
    """Load the network of a transformers folder. Raise ValueError where it is missing or no ViT."""
    path = Path(folder) / "config.json"
    kind = json.loads(path.read_text()).get("model_type") if path.is_file() else None
    if kind != "vit":
        problem = f"is of a model {kind!r}" if path.is_file() else "is missing"
        raise ValueError(f"--dino: {path} {problem}; name a local folder of facebook/dino-vitb16")
    model = ViTModel.from_pretrained(folder, local_files_only=True, add_pooling_layer=False)
    return model.eval().requires_grad_(False).to(device)


def subject_consistency(model: ViTModel, frames: np.ndarray) -> float:
    """Return the subject consistency of a clip (F, H, W, 3) uint8, in [0, 1]: vbench/subject_consistency.py.

    Each frame after the first scores half of max(0, cosine with the frame before) + max(0, cosine with frame 0).
    Frames that are not square get positions interpolated by transformers' rule.
    """
    tokens = torch.cat([class_tokens(model, frames[i : i + CHUNK]) for i in range(0, len(frames), CHUNK)])
    before, first = (tokens[1:] * tokens[:-1]).sum(1), tokens[1:] @ tokens[0]
    return float((before.clamp(min=0) + first.clamp(min=0)).mean() / 2)


@torch.no_grad()
def class_tokens(model: ViTModel, frames: np.ndarray) -> Tensor:
    """Return unit class tokens (N, D) of frames (N, H, W, 3) uint8."""
    height, width = frames.shape[1:3]
    short = min(height, width)
    size = (int(SIDE * height / short), int(SIDE * width / short))
    levels = torch.tensor(frames, device=model.device).permute(0, 3, 1, 2).float()
    levels = F.interpolate(levels, size, mode="bilinear", align_corners=False).round()  # as torchvision resizes bytes
    mean, std = (torch.tensor(values, device=model.device)[:, None, None] for values in (MEAN, STD))
    pixels = (levels / 255 - mean) / std
    return F.normalize(model(pixels, interpolate_pos_encoding=True).last_hidden_state[:, 0].float())
