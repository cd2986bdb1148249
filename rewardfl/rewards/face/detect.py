"""Faces in frames, by a SCRFD or YuNet detector with landmarks; the landmarks also with gradient.

Frames are (N, 3, H, W), RGB in [-1, 1]. Pixel coordinates are OpenCV's: (x, y) from the top left, pixel centres at
integers. Decoding and suppression are insightface's of SCRFD and OpenCV's of YuNet (FaceDetectorYN);
tests/rewards/face/test_detect.py and tests/rewards/face/test_yunet.py hold them against these themselves.
"""

import functools
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rewardfl.rewards.face.align import Faces
from rewardfl.rewards.face.onnx_module import OnnxModule
from rewardfl.rewards.face.pack import describe_network
from rewardfl.rewards.face.view import View

STRIDES = (8, 16, 32)


class Family(Protocol):
    """What the published code of a kind of detector does with its network. All tensors may have leading dimensions."""

    anchors: int  # answers a cell
    threshold: float  # of the score
    nms_iou: float
    last_pixel: int  # what a box's sides are longer by than the difference of its corners

    def given(self, levels: Tensor) -> Tensor:
        """The network's input of RGB levels (B, 3, H, W) of 0..255."""
        ...

    def read(self, outputs: list[Tensor], cells: Tensor, stride: int) -> tuple[Tensor, Tensor, Tensor]:
        """Scores (B, n, 1), corners of boxes (B, n, 4) and landmarks (B, n, 10) in pixels of the input.

        outputs: of this stride, (B, n, ...) each; cells: (n, 2), where each answer's cell begins.
        """
        ...


class Scrfd:
    """insightface's, model_zoo/retinaface.py: two anchors a cell, boxes as distances of their sides from the cell."""

    anchors, threshold, nms_iou, last_pixel = 2, 0.5, 0.4, 1

    def given(self, levels: Tensor) -> Tensor:
        return (levels - 127.5) / 128

    def read(self, outputs: list[Tensor], cells: Tensor, stride: int) -> tuple[Tensor, Tensor, Tensor]:
        scores, distances, offsets = outputs
        distances = distances * stride
        boxes = torch.cat([cells - distances[..., :2], cells + distances[..., 2:]], -1)
        return scores, boxes, cells.repeat(1, 5) + offsets * stride


class YuNet:
    """OpenCV's FaceDetectorYN, modules/objdetect/src/face_detect.cpp: BGR bytes, one answer a cell, boxes by centre."""

    anchors, threshold, nms_iou, last_pixel = 1, 0.9, 0.3, 0

    def given(self, levels: Tensor) -> Tensor:
        return levels.float().flip(-3)

    def read(self, outputs: list[Tensor], cells: Tensor, stride: int) -> tuple[Tensor, Tensor, Tensor]:
        kinds, objects, places, offsets = outputs
        scores = (kinds.clamp(0, 1) * objects.clamp(0, 1)).sqrt()
        centres, half = cells + places[..., :2] * stride, places[..., 2:].exp() * (stride / 2)
        return scores, torch.cat([centres - half, centres + half], -1), cells.repeat(1, 5) + offsets * stride


YUNET_OUTPUTS = [f"{kind}_{stride}" for kind in ("cls", "obj", "bbox", "kps") for stride in STRIDES]


def family_of(names: list[str], path: str | Path) -> tuple[Family, list[int]]:
    """How a detector whose outputs have these names is read, and in which order; ValueError for another detector."""
    if sorted(names) == sorted(YUNET_OUTPUTS):
        return YuNet(), [names.index(name) for name in YUNET_OUTPUTS]
    if len(names) == 9:
        return Scrfd(), list(range(9))
    raise ValueError(
        f"{path} has {len(names)} outputs; SCRFD with landmarks (bnkps) has 9, YuNet of 2023 has {len(YUNET_OUTPUTS)}, "
        f"{', '.join(YUNET_OUTPUTS)}; this file {describe_network(Path(path))}"
    )


class FaceDetector(nn.Module):
    """SCRFD or YuNet with landmarks: scores, boxes and landmarks at strides 8, 16, 32.

    A frame is scaled to fit `det_size` x `det_size`, top left, and padded with black. Detections below
    `threshold` are dropped, None being what the detector's own code takes (SCRFD 0.5, YuNet 0.9), and so are those that
    overlap a better one by more than its own code allows (0.4, 0.3).
    """

    CHUNK = 8  # frames at a time

    def __init__(self, path: str | Path, det_size: int = 640, threshold: float | None = None):
        super().__init__()
        if det_size <= 0 or det_size % 32:
            raise ValueError(f"det_size must be a multiple of 32, the coarsest stride, got {det_size}; try 640")
        self.net = OnnxModule(path)
        self.family, self._order = family_of(self.net.output_names, path)
        fixed = [size for size in self.net.input_shape[2:] if size is not None]
        if any(size != det_size for size in fixed):
            raise ValueError(f"{path} only takes {fixed} pixels, det_size is {det_size}; set det_size={fixed[0]}")
        self.net.check_size(torch.Size([1, 3, det_size, det_size]))
        self.det_size = det_size
        self.threshold = self.family.threshold if threshold is None else threshold

    @torch.no_grad()
    def detect(self, frames: Tensor) -> list[Faces]:
        """The faces of each of the (N, 3, H, W) frames: N `Faces`, in frame pixels."""
        found = (self.rows(chunk) for chunk in frames.split(self.CHUNK))
        return [self._faces(frame, scale) for rows, scale in found for frame in rows]

    def trace(self, frames: Tensor, chunk: int, view: View | None = None) -> list[Faces]:
        """`detect` with a gradient from the landmarks to the frames; boxes, scores and the choice of rows have none.

        `chunk` frames at a time; only they are kept for the backward, in which each chunk is run again, so that a clip
        holds one chunk's graph. view: what the detector is shown instead of the frames as they are; all that comes
        back is in the frames' own pixels.
        """
        run = functools.partial(checkpoint, self.rows, use_reentrant=False, preserve_rng_state=False)
        found = []
        for part in frames.split(chunk):
            rows, scale = run(part, view)
            found += [self._faces(frame, scale) for frame in rows]
        return found if view is None else [view.undo(faces, frames) for faces in found]

    def rows(self, frames: Tensor, view: View | None = None) -> tuple[Tensor, float]:
        """(N, n, 15) rows as _decode makes them, with gradient in the landmarks alone, and fit's scale."""
        x, scale = self.fit(frames if view is None else view.of(frames))
        # The published graphs were exported for one frame and end in rows that do not say which frame they are of:
        # under vmap each frame is a batch of one to the graph, and yet all frames are one batch to the operators.
        outputs = [output.flatten(1, -2) for output in torch.vmap(self.net)(x[:, None])]
        outputs = [outputs[i] for i in self._order]
        return torch.cat([self._decode(outputs[i::3], stride) for i, stride in enumerate(STRIDES)], 1), scale

    def fit(self, frames: Tensor) -> tuple[Tensor, float]:
        """The detector's input (N, 3, det_size, det_size), and its pixels per frame pixel.

        Its values are rounded to 8 bits, twice; its gradient is that of the bilinear resize without rounding.
        """
        height, width = frames.shape[-2:]
        ratio = height / width
        # insightface rounds the fitted size down and takes the scale from the height
        limit = self.det_size
        fitted = (limit, int(limit / ratio)) if ratio > 1 else (int(limit * ratio), limit)
        scale = fitted[0] / height
        levels = (frames.float().clamp(-1, 1) + 1) * 127.5
        seen = _rounded_resize(levels.detach(), *fitted)
        if levels.requires_grad:
            smooth = F.interpolate(levels, fitted, mode="bilinear", align_corners=False)
            seen = seen + (smooth - smooth.detach())  # the difference is exactly 0: no value changes
        return self.family.given(F.pad(seen, (0, limit - fitted[1], 0, limit - fitted[0]))), scale

    def _decode(self, outputs: list[Tensor], stride: int) -> Tensor:
        """The network's answers of a stride, (B, n, ...) each -> (B, n, 15) rows of score, box, landmarks in detector
        pixels.
        """
        *others, offsets = outputs
        others = [output.detach() for output in others]  # no backward through heads that need none
        cells = torch.arange(self.det_size // stride, device=offsets.device) * stride
        y, x = torch.meshgrid(cells, cells, indexing="ij")
        corners = torch.stack([x, y], -1).reshape(-1, 2).repeat_interleave(self.family.anchors, 0)  # (n, 2)
        return torch.cat(self.family.read([*others, offsets], corners, stride), -1)

    def _faces(self, rows: Tensor, scale: float) -> Faces:
        """One frame's (n, 15) rows -> its faces: what non-maximum suppression leaves, in frame pixels."""
        rows = rows[rows[:, 0] >= self.threshold].cpu()
        rows = rows[rows[:, 0].argsort(descending=True, stable=True)]
        scores, boxes, landmarks = (
            rows[:, 0].detach(),
            rows[:, 1:5].detach() / scale,
            rows[:, 5:].view(-1, 5, 2) / scale,
        )
        kept = torch.tensor(_suppress(boxes, self.family.nms_iou, self.family.last_pixel), dtype=torch.long)
        area = (boxes[kept, 2:] - boxes[kept, :2]).prod(-1)
        order = kept[area.argsort(descending=True, stable=True)]
        return Faces(boxes[order], scores[order], landmarks[order])


def _rounded_resize(levels: Tensor, height: int, width: int) -> Tensor:
    """(..., H, W) levels in 0..255 of any float -> (..., height, width) int32 levels, as bytes would be resized."""
    return _resize_levels(levels.round().int(), height, width)


def _resize_levels(levels: Tensor, height: int, width: int) -> Tensor:
    """(..., H, W) int32 levels of 0..255 -> (..., height, width), to the bit as cv2.resize does it for bytes.

    Bilinear in fixed point, not quite rounded to nearest: a detector's score and landmarks hang on such noise more
    than one likes, and this way they are insightface's. No gradient passes, nor need it.
    """
    low, high, near, far = _resize_taps(levels.shape[-1], width, levels.device)
    rows = levels[..., low] * near + levels[..., high] * far
    low, high, near, far = _resize_taps(levels.shape[-2], height, levels.device)
    upper, lower = rows[..., low, :] >> 4, rows[..., high, :] >> 4
    return ((near[:, None] * upper >> 16) + (far[:, None] * lower >> 16) + 2) >> 2


def _resize_taps(size: int, out: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The two neighbours of each of `out` samples on an axis of `size`, and their weights, of 2048 together."""
    position = ((torch.arange(out, dtype=torch.float64) + 0.5) * (size / out) - 0.5).float()
    low = position.floor()
    weight = position - low
    near, far = ((share * 2048).round().int().to(device) for share in (1 - weight, weight))
    low, high = (index.long().clamp(0, size - 1).to(device) for index in (low, low + 1))
    return low, high, near, far


def _suppress(boxes: Tensor, iou: float, last_pixel: int) -> list[int]:
    """Rows of (n, 4) boxes, best first, that overlap no kept better one by more than `iou`.

    Sizes are longer by `last_pixel` than the differences of corners: insightface counts both end pixels.
    """
    areas = (boxes[:, 2:] - boxes[:, :2] + last_pixel).prod(-1)
    kept: list[int] = []
    left = torch.arange(len(boxes))
    while len(left):
        best, left = int(left[0]), left[1:]
        kept.append(best)
        near, far = torch.maximum(boxes[left, :2], boxes[best, :2]), torch.minimum(boxes[left, 2:], boxes[best, 2:])
        overlap = (far - near + last_pixel).clamp(min=0).prod(-1)
        left = left[overlap / (areas[left] + areas[best] - overlap) <= iou]
    return kept
