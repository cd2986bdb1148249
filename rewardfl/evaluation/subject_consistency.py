"""VBench's subject consistency, by a DINO ViT from a local folder."""

import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import ViTModel

SIDE = 224  # that the shorter side of a frame is brought to

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

CHUNK = 8  # frames at a time


def load_dino(folder: str, device: str) -> ViTModel:
    """The network of a transformers folder. ValueError where there is none, or one of another kind."""
    path = Path(folder) / "config.json"
    kind = json.loads(path.read_text()).get("model_type") if path.is_file() else None
    if kind != "vit":
        found = f"is of a model {kind!r}" if path.is_file() else "is missing"
        raise ValueError(f"--dino: {path} {found}; name a local folder of facebook/dino-vitb16")
    model = ViTModel.from_pretrained(folder, local_files_only=True, add_pooling_layer=False)
    return model.eval().requires_grad_(False).to(device)


def subject_consistency(model: ViTModel, frames: np.ndarray) -> float:
    """Subject consistency of a clip (F, H, W, 3) uint8, in [0, 1]: vbench/subject_consistency.py.

    Mean over the frames after the first of half of max(0, cosine with the frame before) and max(0, cosine with the
    first). Positions are interpolated by transformers' rule for frames that are not square.
    """
    seen = torch.cat([features(model, frames[i : i + CHUNK]) for i in range(0, len(frames), CHUNK)])
    before, first = (seen[1:] * seen[:-1]).sum(1), seen[1:] @ seen[0]
    return float((before.clamp(min=0) + first.clamp(min=0)).mean() / 2)


@torch.no_grad()
def features(model: ViTModel, frames: np.ndarray) -> Tensor:
    """(N, D) unit class tokens of frames (N, H, W, 3) uint8."""
    height, width = frames.shape[1:3]
    short = min(height, width)
    size = (int(SIDE * height / short), int(SIDE * width / short))
    levels = torch.tensor(frames, device=model.device).permute(0, 3, 1, 2).float()
    levels = F.interpolate(levels, size, mode="bilinear", align_corners=False).round()  # torchvision's, of bytes
    mean, std = (torch.tensor(values, device=model.device)[:, None, None] for values in (MEAN, STD))
    pixels = (levels / 255 - mean) / std
    return F.normalize(model(pixels, interpolate_pos_encoding=True).last_hidden_state[:, 0].float())
