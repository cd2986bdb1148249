"""Measures of a clip by its pixels, which no training uses: artifacts, motion, steadiness and sharpness.

Frames are (F, H, W, 3) uint8, RGB, as generated, before a video codec smooths them. Optimising pixels against a reward
first leaves a grid, saturated colours and a tint; the first frame of a clip, the given image, is left out there.
"""

import math
from collections.abc import Sequence

import cv2
import numpy as np

# The variance that invisible grain of one level gives the difference of two pixels. Both sides of a ratio have it, so
# that a flat picture has ratio 1.
GRAIN = 2.0
NEAREST = 2  # a Hann window spreads a periodic pattern over its frequency and one on either side
# cv2.calcOpticalFlowFarneback: pyramid scale, levels, window, iterations, poly_n, poly_sigma, flags
FARNEBACK = (0.5, 3, 11, 5, 5, 1.1, 0)
LONG_SIDE = 256  # pixels; for speed, flow is computed on frames shrunk to this long side
DIRECTED = 0.01  # mean pixels per frame; below it a flow field is Farneback's noise and has no direction


def measure_artifacts(frames: np.ndarray, periods: Sequence[int]) -> dict[str, float]:
    """Measure a clip (F, H, W, 3) uint8: `grid`, `saturation`, and the means of red, green and blue in [0, 1].

    periods: in pixels, the VAE's and the transformer patch's. NaN where there is nothing to measure.
    """
    colours = {
        colour: mean([float(frame[..., i].mean()) / 255 for frame in frames[1:]])
        for i, colour in enumerate(("red", "green", "blue"))
    }
    return {"grid": grid(frames, periods), "saturation": saturation(frames)} | colours


def grid(frames: np.ndarray, periods: Sequence[int]) -> float:
    """Return the energy at `periods` and their harmonics over the energy of neighbouring frequencies.

    The ratio is averaged over both axes and all harmonics. It is about 1 without a pattern of these periods. Lines are
    averaged in bands as wide as the periods' least common multiple, M, because a grid is equal in all bands. In white
    noise of standard deviation s, a sine of amplitude a along an axis of N pixels adds M N a^2 / (6 s^2).

    An axis of fewer than 4 M pixels cannot separate the periods, and lines of fewer than M have no band: neither is
    measured. NaN without an axis or a period, and for a clip of one frame.
    """
    if len(frames) < 2 or not periods:
        return math.nan
    common = math.lcm(*periods)
    grey = [cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY) for frame in frames[1:]]
    ratios: list[float] = []
    for frames_of_lines in (grey, [frame.T for frame in grey]):
        if frames_of_lines[0].shape[1] < 2 * NEAREST * common or frames_of_lines[0].shape[0] < common:
            continue
        energy = np.mean([_energy(lines, common) for lines in frames_of_lines], axis=0)
        length = frames_of_lines[0].shape[1] // common * common
        harmonics = {k * length // period for period in periods for k in range(1, period // 2 + 1)}
        ratios += [float(energy[i] / _neighbour_energy(energy, i, length // common)) for i in sorted(harmonics)]
    return mean(ratios)


def saturation(frames: np.ndarray) -> float:
    """Return the mean chroma, (max(R, G, B) - min(R, G, B)) / 255 of a pixel: 0 for grey, 1 for pure colours.

    Chroma as in the hexagon of Joblove and Greenberg (SIGGRAPH 1978). NaN for a clip of one frame.
    """
    channels = (cv2.split(frame) for frame in frames[1:])
    return mean([float((cv2.max(cv2.max(r, g), b) - cv2.min(cv2.min(r, g), b)).mean()) / 255 for r, g, b in channels])


def _energy(lines: np.ndarray, band: int) -> np.ndarray:
    """Return the spectrum (N / 2 + 1,) of steps from pixel to pixel in lines (M, N) uint8, mean over bands of lines.

    M and N are cut to multiples of `band`. Photographs have energy of about 1 / f^2 at a frequency f (Field 1987), and
    their steps a nearly flat spectrum, so that neighbouring frequencies compare.
    """
    height, width = (size // band * band for size in lines.shape)
    means = lines[:height, :width].reshape(-1, band, width).mean(1)
    steps = np.diff(means, axis=-1, prepend=means[:, :1])  # the first is 0, and so is its weight
    window = np.hanning(width + 1)[:-1]
    return (np.abs(np.fft.rfft(steps * window)) ** 2).mean(0) / (window**2).sum() + GRAIN / band


def _neighbour_energy(energy: np.ndarray, frequency: int, spacing: int) -> float:
    """Return the mean energy on both sides of a frequency, up to a third of the harmonics' `spacing`."""
    distances = np.arange(NEAREST, max(NEAREST, spacing // 3) + 1)
    neighbours = np.concatenate([frequency - distances, frequency + distances])
    nyquist = len(energy) - 1
    return float(energy[nyquist - np.abs(nyquist - neighbours)].mean())


def mean(values: Sequence[float]) -> float:
    """Return the mean; NaN without values."""
    return sum(values) / len(values) if values else math.nan


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

    Near -1 motion is steady, near 1 it trembles. Fields without motion are skipped; NaN if no two successive ones move.
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

    The focus measure of Pech-Pacheco et al. (ICPR 2000). Grain counts as detail. NaN for a clip of one frame.
    """
    grey = (cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY) for frame in frames[1:])
    return mean([float(cv2.Laplacian(frame, cv2.CV_32F).var()) for frame in grey])


def _shrink(frames: np.ndarray) -> float:
    """Return the scale, at most 1, of frames for their flow."""
    return min(1.0, LONG_SIDE / max(frames.shape[1:3]))
