"""The largest face of a clip, followed through its frames, and how it moves."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rewardfl.rewards.face.align import Faces, similarity_transform

# A real clip that moves less than this many face widths per frame gives no ratio: it would divide by noise.
MIN_MOTION = 1e-4
# A landmark that moves less than this many face widths has no direction: a detector trembles by as much.
MIN_STEP = 0.005


@dataclass
class Track:
    """One face through F frames; landmarks and box are carried over where it was not detected."""

    landmarks: Tensor  # (F, 5, 2) in frame pixels
    detected: Tensor  # (F,) bool
    boxes: Tensor  # (F, 4) left, top, right, bottom in frame pixels

    @property
    def width(self) -> Tensor:
        """(F,) of the boxes, in pixels."""
        return self.boxes[:, 2] - self.boxes[:, 0]


def track_largest(faces: list[Faces]) -> Track | None:
    """Follow the largest face of the first frame that has one; None when no frame has.

    In each later frame the detection that overlaps the last box most is the same face (nearest centre
    decides when none overlaps), provided its centre lies within one face width and its width within a
    factor of two; a larger stranger is never followed. Frames without such a detection keep the last
    landmarks, those before the first take the first's.
    """
    start = next((j for j, frame in enumerate(faces) if len(frame.scores)), None)
    if start is None:
        return None
    box = faces[start].boxes[0]
    rows: list[tuple[Tensor, bool, Tensor]] = [(faces[start].landmarks[0], False, box)] * start
    for j, frame in enumerate(faces[start:], start):
        match = 0 if j == start else _same_face(box, frame.boxes)
        if match is None:
            rows.append((rows[-1][0], False, rows[-1][2]))
        else:
            box = frame.boxes[match]
            rows.append((frame.landmarks[match], True, box))
    landmarks, detected, boxes = zip(*rows, strict=True)
    return Track(torch.stack(landmarks), torch.tensor(detected), torch.stack(boxes))


def _same_face(box: Tensor, boxes: Tensor) -> int | None:
    """Row of (n, 4) `boxes` that continues `box`, or None."""
    width, widths = box[2] - box[0], boxes[:, 2] - boxes[:, 0]
    distance = ((boxes[:, :2] + boxes[:, 2:]) / 2 - (box[:2] + box[2:]) / 2).norm(dim=-1)
    near = (distance <= width) & (widths <= 2 * width) & (width <= 2 * widths)
    size = torch.minimum(boxes[:, 2:], box[2:]) - torch.maximum(boxes[:, :2], box[:2])
    overlap = size.clamp(min=0).prod(-1)
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(-1)
    iou = overlap / (areas + (box[2:] - box[:2]).prod() - overlap)
    candidates = near.nonzero().flatten().tolist()
    return max(candidates, key=lambda i: (iou[i].item(), -distance[i].item()), default=None)


def landmark_motion(track: Track) -> tuple[float, float]:
    """step_motion as numbers; (0.0, 0.0) without two consecutive detections."""
    motion = step_motion(track)
    return (motion[0].item(), motion[1].item()) if motion else (0.0, 0.0)


def step_motion(track: Track) -> tuple[Tensor, Tensor] | None:
    """(speed, nonrigid) per frame step, in face widths, with gradient to the landmarks; both ().

    speed: mean distance that a landmark moves. nonrigid: mean distance left after the best similarity fit of
    one frame's landmarks onto the next one's: blinks, speech and turning, which a frozen face that merely
    drifts does not have. None without two consecutive detections.
    """
    pairs = track.detected[:-1] & track.detected[1:]
    if not pairs.any():
        return None
    before, after, width = track.landmarks[:-1][pairs], track.landmarks[1:][pairs], track.width[:-1][pairs]
    fit = similarity_transform(before, after)
    fitted = before @ fit[:, :, :2].mT + fit[:, None, :, 2]
    speed = (after - before).norm(dim=-1).mean(1) / width
    nonrigid = (after - fitted).norm(dim=-1).mean(1) / width
    return speed.mean(), nonrigid.mean()


def step_reversals(track: Track) -> Tensor | None:
    """() in [0, 1], with gradient: mean of max(0, -cosine) between a landmark's steps into a frame and out of it.

    0 for a landmark that goes on or stands still, 1 for one that goes back and forth in every frame. Steps of less
    than MIN_STEP face widths have no direction and count as 0. None without three consecutive detections.
    """
    threes = track.detected[:-2] & track.detected[1:-1] & track.detected[2:]
    if not threes.any():
        return None
    steps = track.landmarks.diff(dim=0)  # (F - 1, 5, 2)
    into, out, width = steps[:-1][threes], steps[1:][threes], track.width[1:-1][threes]
    directed = (into.norm(dim=-1) >= MIN_STEP * width[:, None]) & (out.norm(dim=-1) >= MIN_STEP * width[:, None])
    back = -F.cosine_similarity(into, out, dim=-1)
    return torch.where(directed, back, 0).clamp(min=0).mean()
