"""Motion, steadiness and sharpness of a clip, measured from pixels without a network.

No training uses these measures. Frames are (F, H, W, 3) uint8, RGB, as generated, before a video codec smooths them.
OpenCV and numpy on the CPU.
"""

import math
from collections.abc import Sequence

import cv2
import numpy as np

from rewardfl.rewards.pixels.artifacts import mean

# cv2.calcOpticalFlowFarneback: pyramid scale, levels, window, iterations, poly_n, poly_sigma, flags
FARNEBACK = (0.5, 3, 11, 5, 5, 1.1, 0)
# For speed, flow is computed on frames shrunk to this many pixels on their long side, and given in pixels of the
# original. All measures of 81 frames of 480 x 832 take 1.7 s of one core; unshrunk, just the flow took 17 s.
LONG_SIDE = 256
DIRECTED = 0.01  # mean pixels per frame; below it a flow field is Farneback's noise and has no direction


def video_motion(frames: np.ndarray, boxes: np.ndarray | None = None) -> dict[str, float]:
    """Measure a clip (F, H, W, 3) uint8: `mean_flow`, `pixel_change`, `sharpness`, `reversals`, and two of faces.

    boxes: (F, 4) left, top, right, bottom of its face in pixels, or (K, F, 4) of K faces. face_flow is the mean of
    their `mean_flow_inside`, and so is displacement of the sum of all fields, in pixels per clip: shimmer cancels. A
    figure is NaN where there is nothing to measure.
    """
    fields = flow_fields(frames)
    faces = np.reshape([] if boxes is None else boxes * _shrink(frames), (-1, len(frames), 4))
    total = [np.sum(fields, axis=0)] if fields else []

    def mean_over_faces(fields: Sequence[np.ndarray]) -> float:
        flows = [mean_flow_inside(fields, face) for face in faces]
        return mean([flow for flow in flows if not math.isnan(flow)])

    return {
        "flow": mean_flow(fields),
        "face_flow": mean_over_faces(fields),
        "displacement": mean_over_faces(total),
        "pixel_change": pixel_change(frames),
        "sharpness": sharpness(frames),
        "reversals": reversals(fields),
    }


def flow_fields(frames: np.ndarray) -> list[np.ndarray]:
    """Return Farneback's flow from each frame to the next: F - 1 fields (h, w, 2) of (x, y) in pixels of `frames`.

    h x w is the frame's size, shrunk to LONG_SIDE if larger.
    """
    scale = _shrink(frames)
    size = (round(frames.shape[2] * scale), round(frames.shape[1] * scale))
    grey = [cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY) for frame in frames]
    if scale < 1:
        grey = [cv2.resize(frame, size, interpolation=cv2.INTER_AREA) for frame in grey]
    pairs = zip(grey[:-1], grey[1:], strict=True)
    flow = np.empty((*grey[0].shape, 2), np.float32)  # written by OpenCV for each pair
    return [cv2.calcOpticalFlowFarneback(first, second, flow, *FARNEBACK) / scale for first, second in pairs]


def mean_flow(fields: Sequence[np.ndarray]) -> float:
    """Return the mean magnitude over pixels and fields, in pixels per frame; NaN for a clip of one frame."""
    return mean([float(np.linalg.norm(field, axis=-1).mean()) for field in fields])


def mean_flow_inside(fields: Sequence[np.ndarray], boxes: np.ndarray) -> float:
    """Return `mean_flow` within the (F, 4) boxes, which are in the pixels of the fields.

    A field takes its first frame's box. Boxes outside the frame are skipped; NaN when all are.
    """
    means = []
    for field, (left, top, right, bottom) in zip(fields, boxes[: len(fields)], strict=True):
        rows = slice(max(0, math.floor(top)), max(0, math.ceil(bottom)))
        inside = field[rows, max(0, math.floor(left)) : max(0, math.ceil(right))]
        if inside.size:
            means.append(float(np.linalg.norm(inside, axis=-1).mean()))
    return mean(means)


def reversals(fields: Sequence[np.ndarray]) -> float:
    """Return minus the mean cosine of each flow field with the next one, in [-1, 1].

    Near -1 motion is steady, near 1 it changes direction in every frame, like trembling. Fields without motion are
    skipped; NaN when no two successive fields move.
    """
    cosines = []
    for first, second in zip(fields[:-1], fields[1:], strict=True):
        sizes = [float(np.linalg.norm(field)) for field in (first, second)]
        if min(mean_flow([first]), mean_flow([second])) >= DIRECTED:
            cosines.append(float(np.vdot(first, second)) / (sizes[0] * sizes[1]))
    return -mean(cosines)


def pixel_change(frames: np.ndarray) -> float:
    """Return the mean absolute change of a pixel's channels per frame, in [0, 1]; NaN for a clip of one frame."""
    pairs = zip(frames[:-1], frames[1:], strict=True)
    return mean([float(cv2.absdiff(first, second).mean()) / 255 for first, second in pairs])


def sharpness(frames: np.ndarray) -> float:
    """Return the variance of the Laplacian of the grey frames after the first, in levels of 255 squared.

    The focus measure of Pech-Pacheco et al. (ICPR 2000). It is quadratic in contrast, and grain counts as detail. NaN
    for one frame.
    """
    grey = (cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY) for frame in frames[1:])
    return mean([float(cv2.Laplacian(frame, cv2.CV_32F).var()) for frame in grey])


def _shrink(frames: np.ndarray) -> float:
    """Return the scale, at most 1, of frames for their flow."""
    return min(1.0, LONG_SIDE / max(frames.shape[1:3]))
