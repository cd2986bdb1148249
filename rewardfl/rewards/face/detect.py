"""Face detection by SCRFD or YuNet, with gradient from the landmarks to the frames.

Frames are (N, 3, H, W), RGB in [-1, 1]. Pixel coordinates are OpenCV's: (x, y) from the top left, pixel centres at
integers. Decoding and suppression are insightface's for SCRFD and OpenCV's for YuNet (FaceDetectorYN).
"""

from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rewardfl.rewards.face.align import Faces
from rewardfl.rewards.face.onnx_module import OnnxModule

STRIDES = (8, 16, 32)


class Scrfd:
    """SCRFD, insightface/model_zoo/retinaface.py: boxes as distances of sides from the cell."""

    anchors = 2  # per cell
    threshold = 0.5  # for the score
    nms_iou = 0.4
    last_pixel = 1  # added to the difference of a box's corners for the length of its sides

    def preprocess(self, levels: Tensor) -> Tensor:
        """Return the network's input for RGB levels (B, 3, H, W) in 0..255."""
        return (levels - 127.5) / 128

    def read(self, outputs: list[Tensor], cells: Tensor, stride: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return scores (B, n, 1), box corners (B, n, 4) and landmarks (B, n, 10) in pixels of the input.

        outputs: of this stride, (B, n, ...) each. cells: (n, 2), the top left corner of each anchor's cell.
        """
        scores, distances, offsets = outputs
        distances = distances * stride
        boxes = torch.cat([cells - distances[..., :2], cells + distances[..., 2:]], -1)
        return scores, boxes, cells.repeat(1, 5) + offsets * stride


class YuNet:
    """OpenCV's FaceDetectorYN, modules/objdetect/src/face_detect.cpp, as Scrfd: BGR, boxes by centre."""

    anchors, threshold, nms_iou, last_pixel = 1, 0.9, 0.3, 0

    def preprocess(self, levels: Tensor) -> Tensor:
        return levels.float().flip(-3)

    def read(self, outputs: list[Tensor], cells: Tensor, stride: int) -> tuple[Tensor, Tensor, Tensor]:
        classes, objects, distances, offsets = outputs
        scores = (classes.clamp(0, 1) * objects.clamp(0, 1)).sqrt()
        centres, half = cells + distances[..., :2] * stride, distances[..., 2:].exp() * (stride / 2)
        return scores, torch.cat([centres - half, centres + half], -1), cells.repeat(1, 5) + offsets * stride


YUNET_OUTPUTS = [f"{name}_{stride}" for name in ("cls", "obj", "bbox", "kps") for stride in STRIDES]


@dataclass(frozen=True)
class View:
    """A small zoom and shift: it moves a frame's pixel q to zoom * (q - centre) + centre + shift."""

    zoom: float
    shift: tuple[float, float]  # x, y in frame pixels

    def of(self, frames: Tensor) -> Tensor:
        """Return (N, 3, H, W) frames through this view, with gradient: bilinear, the outer pixels repeated outside."""
        grids = []
        for size, shift in zip((frames.shape[-1], frames.shape[-2]), self.shift, strict=True):
            centre = (size - 1) / 2
            pixel = torch.arange(size, device=frames.device, dtype=frames.dtype)
            # align_corners=True puts -1 and 1 on the centres of the outer pixels, which are size - 1 apart
            grids.append((pixel - centre - shift) / self.zoom / max(centre, 0.5))
        y, x = torch.meshgrid(grids[1], grids[0], indexing="ij")
        grid = torch.stack([x, y], -1).expand(len(frames), -1, -1, -1)
        return F.grid_sample(frames, grid, mode="bilinear", padding_mode="border", align_corners=True)

    def undo(self, faces: Faces, frames: Tensor) -> Faces:
        """Return faces detected in `of(frames)` in the pixels of `frames` (N, 3, H, W)."""
        centre = torch.tensor([(frames.shape[-1] - 1) / 2, (frames.shape[-2] - 1) / 2])
        boxes, landmarks = (
            (points - centre - torch.tensor(self.shift)) / self.zoom + centre
            for points in (faces.boxes.view(-1, 2, 2), faces.landmarks)
        )
        return replace(faces, boxes=boxes.view(-1, 4), landmarks=landmarks)


class FaceDetector(nn.Module):
    """SCRFD or YuNet with landmarks: scores, boxes and landmarks at strides 8, 16, 32.

    A frame is scaled to fit `det_size` x `det_size`, top left, and padded with black. Detections below the published
    threshold are dropped, and those that overlap a better one by more than the published share.
    """

    CHUNK = 8  # frames at a time

    def __init__(self, path: str | Path, det_size: int = 640):
        super().__init__()
        self.net = OnnxModule(path)
        names = self.net.output_names
        is_yunet = sorted(names) == sorted(YUNET_OUTPUTS)
        if not is_yunet and len(names) != 9:
            raise ValueError(
                f"{path} has {len(names)} outputs; SCRFD with landmarks (bnkps) has 9, YuNet of 2023 has "
                f"{len(YUNET_OUTPUTS)}, {', '.join(YUNET_OUTPUTS)}"
            )
        self.family: Scrfd | YuNet = YuNet() if is_yunet else Scrfd()
        self._order = [names.index(name) for name in (YUNET_OUTPUTS if is_yunet else names)]
        fixed = [size for size in self.net.input_shape[2:] if size is not None]
        if any(size != det_size for size in fixed):
            raise ValueError(f"{path} only takes {fixed} pixels, det_size is {det_size}; set det_size={fixed[0]}")
        self.net.check_size(1, 3, det_size, det_size)
        self.det_size = det_size
        self.threshold = self.family.threshold

    @torch.no_grad()
    def detect(self, frames: Tensor) -> list[Faces]:
        """Return the N `Faces`, in frame pixels, of (N, 3, H, W) frames."""
        return self.trace(frames, self.CHUNK)

    def trace(self, frames: Tensor, chunk: int, view: View | None = None) -> list[Faces]:
        """Return `detect`'s faces with gradient from the landmarks, not from boxes and scores, to the frames.

        `chunk` frames are detected at a time, and again in the backward pass. view: applied to the frames before
        detection; the faces are in the pixels of `frames`. The CPU waits for a GPU twice.
        """
        recomputed = partial(checkpoint, self.rows, use_reentrant=False, preserve_rng_state=False)
        chunks, (scale, *_) = zip(*(recomputed(part, view) for part in frames.split(chunk)), strict=True)
        rows = torch.cat(chunks)
        frame, row = (rows[..., 0] >= self.threshold).nonzero(as_tuple=True)
        numbered = torch.cat([frame[:, None].to(rows), rows[frame, row]], 1).cpu()
        counts = numbered[:, 0].long().bincount(minlength=len(frames))
        faces = [self._faces(frame_rows, scale) for frame_rows in numbered[:, 1:].split(counts.tolist())]
        return faces if view is None else [view.undo(frame_faces, frames) for frame_faces in faces]

    def rows(self, frames: Tensor, view: View | None = None) -> tuple[Tensor, float]:
        """Return (N, n, 15) rows of score, box and landmarks (with gradient) in detector pixels, and `fit`'s scale."""
        x, scale = self.fit(frames if view is None else view.of(frames))
        # the published graphs take one frame; with vmap the operators get all frames as one batch
        outputs = [output.flatten(1, -2) for output in torch.vmap(self.net)(x[:, None])]
        outputs = [outputs[i] for i in self._order]
        outputs = [output.detach() for output in outputs[:-3]] + outputs[-3:]
        rows = []
        for i, stride in enumerate(STRIDES):
            cells = torch.arange(self.det_size // stride, device=x.device) * stride
            grid = torch.meshgrid(cells, cells, indexing="xy")
            corners = torch.stack(grid, -1).reshape(-1, 2).repeat_interleave(self.family.anchors, 0)  # (n, 2)
            rows.append(torch.cat(self.family.read(outputs[i::3], corners, stride), -1))
        return torch.cat(rows, 1), scale

    def fit(self, frames: Tensor) -> tuple[Tensor, float]:
        """Return the detector's input (N, 3, det_size, det_size), and its pixels per frame pixel.

        The values are rounded to 8 bits, twice. The gradient is the bilinear resize's without rounding.
        """
        height, width = frames.shape[-2:]
        ratio = height / width
        # insightface rounds the fitted size down and takes the scale from the height
        side = self.det_size
        fitted = (side, int(side / ratio)) if ratio > 1 else (int(side * ratio), side)
        scale = fitted[0] / height
        levels = (frames.float().clamp(-1, 1) + 1) * 127.5
        resized = _rounded_resize(levels.detach(), *fitted)
        if levels.requires_grad:
            smooth = F.interpolate(levels, fitted, mode="bilinear", align_corners=False)
            resized = resized + (smooth - smooth.detach())  # the difference is exactly 0: no value changes
        return self.family.preprocess(F.pad(resized, (0, side - fitted[1], 0, side - fitted[0]))), scale

    def _faces(self, rows: Tensor, scale: float) -> Faces:
        """Return the faces of one frame's (n, 15) detections after non-maximum suppression, in frame pixels."""
        rows = rows[rows[:, 0].argsort(descending=True, stable=True)]
        scores, boxes = rows[:, 0].detach(), rows[:, 1:5].detach() / scale
        landmarks = rows[:, 5:].view(-1, 5, 2) / scale
        best = torch.tensor(_suppress(boxes, self.family.nms_iou, self.family.last_pixel), dtype=torch.long)
        area = (boxes[best, 2:] - boxes[best, :2]).prod(-1)
        order = best[area.argsort(descending=True, stable=True)]
        return Faces(boxes[order], scores[order], landmarks[order])


def _rounded_resize(levels: Tensor, height: int, width: int) -> Tensor:
    """Return float (..., H, W) levels in 0..255 as (..., height, width) int32, to the bit cv2.resize's of bytes."""
    levels = levels.round().int()
    low, high, near, far = _resize_taps(levels.shape[-1], width, levels.device)
    rows = levels[..., low] * near + levels[..., high] * far
    low, high, near, far = _resize_taps(levels.shape[-2], height, levels.device)
    upper, lower = rows[..., low, :] >> 4, rows[..., high, :] >> 4
    return ((near[:, None] * upper >> 16) + (far[:, None] * lower >> 16) + 2) >> 2


@cache
def _resize_taps(size: int, out: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the two neighbours of each of `out` samples on an axis of `size`, and their weights, with sum 2048."""
    position = ((torch.arange(out, dtype=torch.float64) + 0.5) * (size / out) - 0.5).float()
    low = position.floor()
    weight = position - low
    near, far = ((part * 2048).round().int().to(device) for part in (1 - weight, weight))
    low, high = (index.long().clamp(0, size - 1).to(device) for index in (low, low + 1))
    return low, high, near, far


def _suppress(boxes: Tensor, iou: float, last_pixel: int) -> list[int]:
    """Return the rows of (n, 4) boxes, best first, that overlap no better remaining box by more than `iou`."""
    areas = (boxes[:, 2:] - boxes[:, :2] + last_pixel).prod(-1)
    rows: list[int] = []
    left = torch.arange(len(boxes))
    while len(left):
        best, left = int(left[0]), left[1:]
        rows.append(best)
        near, far = torch.maximum(boxes[left, :2], boxes[best, :2]), torch.minimum(boxes[left, 2:], boxes[best, 2:])
        overlap = (far - near + last_pixel).clamp(min=0).prod(-1)
        left = left[overlap / (areas[left] + areas[best] - overlap) <= iou]
    return rows
