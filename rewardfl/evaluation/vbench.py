"""VBench's measures (arXiv 2311.17982): of motion by Farneback's flow in place of its networks, and of the subject.

Frames are (F, H, W, 3) uint8, RGB, before a video codec smooths them.
"""

import json
from pathlib import Path

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import ViTModel

from rewardfl.rewards.pixels.artifacts import mean
from rewardfl.rewards.pixels.video_motion import flow_fields

SIDE = 224  # pixels of the shorter side of a frame that DINO sees

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

CHUNK = 8  # frames per forward pass


def dynamic_degree(frames: np.ndarray, fps: float) -> bool:
    """Return VBench's dynamic degree of one clip (vbench/dynamic_degree.py), by Farneback's flow in place of RAFT's.

    Every round(fps / 8)-th frame counts, n in all. A pair moves where the mean flow of its fastest 5 % of pixels
    exceeds 6 min(H, W) / 256 pixels (8 / fps times that below 8 frames per second). The clip is dynamic where
    round(n / 4) of its pairs move, and at least one. A benchmark reports the share of dynamic clips. The whole frame
    counts: a still face before a moving camera is dynamic.
    """
    chosen = frames[:: max(1, round(fps / 8))]
    threshold = max(1.0, 8 / fps) * 6 * min(frames.shape[1:3]) / 256
    needed = max(1, round(4 * len(chosen) / 16))
    return sum(fastest_flow(field) > threshold for field in flow_fields(chosen)) >= needed


def motion_smoothness(frames: np.ndarray) -> float:
    """Return VBench's motion smoothness of one clip (vbench/motion_smoothness.py), by Farneback's flow, not AMT's.

    Each of two frames is moved half of the way to the other along the flow; their mean predicts the frame between.
    Return 1 minus the mean absolute error as a share of 255: 1 where nothing moves, less where the speed changes.
    Return NaN for fewer than 3 frames.
    """
    errors = [
        float(cv2.absdiff(_halfway(before, after), frame).mean()) / 255
        for before, frame, after in zip(frames[:-2:2], frames[1:-1:2], frames[2::2], strict=True)
    ]
    return 1 - mean(errors)


def _halfway(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Interpolate the frame (H, W, 3) uint8 between two."""
    height, width = before.shape[:2]
    y, x = np.mgrid[:height, :width].astype(np.float32)
    moved = []
    for start, end in ((before, after), (after, before)):
        (field,) = flow_fields(np.stack([start, end]))
        half = cv2.resize(field, (width, height)) / 2
        x_map, y_map = x - half[..., 0], y - half[..., 1]
        moved.append(cv2.remap(start, x_map, y_map, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REFLECT))
    return cv2.addWeighted(moved[0], 0.5, moved[1], 0.5, 0)


def fastest_flow(field: np.ndarray, share: float = 0.05) -> float:
    """Return the mean magnitude of a flow field (h, w, 2) over this share of its fastest pixels."""
    speeds = np.sort(np.linalg.norm(field, axis=-1), axis=None)
    return float(speeds[-max(1, int(share * speeds.size)) :].mean())


def load_dino(folder: str, device: str) -> ViTModel:
    """Load the network of a transformers folder. Raise ValueError where it is missing or no ViT."""
    path = Path(folder) / "config.json"
    kind = json.loads(path.read_text()).get("model_type") if path.is_file() else None
    if kind != "vit":
        problem = f"is of a model {kind!r}" if path.is_file() else "is missing"
        raise ValueError(f"--dino: {path} {problem}; name a local folder of facebook/dino-vitb16")
    model = ViTModel.from_pretrained(folder, local_files_only=True, add_pooling_layer=False)
    return model.eval().requires_grad_(requires_grad=False).to(device)


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
