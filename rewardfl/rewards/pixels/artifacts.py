"""Visible artifacts of optimising pixels against a reward: a grid, saturated colours, a tint.

They appear long before the reward's score shows them, and need no network to be measured. Frames are (F, H, W, 3)
uint8, RGB, as generated, before a video codec smooths them. The first frame of a clip, the given image, is left out.
OpenCV and numpy on the CPU.
"""

import math
from collections.abc import Sequence

import cv2
import numpy as np

# The variance that invisible grain of one level gives the difference of two pixels. Both sides of a ratio have it: a
# flat picture has ratio 1, and the steps of a smooth slope rounded to 8 bits are no grid.
GRAIN = 2.0
NEAREST = 2  # a Hann window spreads a periodic pattern over its frequency and one on either side


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

    The ratio is averaged over both axes and all harmonics. It is about 1 without a pattern of these periods, and
    somewhat less for a blurred picture. Lines are averaged in bands as wide as the periods' least common multiple, M,
    because a grid is equal in all bands. In white noise of standard deviation s, a sine of amplitude a along an axis of
    N pixels raises its ratio by M N a^2 / (6 s^2).

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

    Chroma as in the hexagon of Joblove and Greenberg (SIGGRAPH 1978). The S of HSV divides it by brightness, which is
    noise in dark pictures. NaN for a clip of one frame.
    """
    channels = (cv2.split(frame) for frame in frames[1:])
    return mean([float((cv2.max(cv2.max(r, g), b) - cv2.min(cv2.min(r, g), b)).mean()) / 255 for r, g, b in channels])


def _energy(lines: np.ndarray, band: int) -> np.ndarray:
    """Return the spectrum (N / 2 + 1,) of steps from pixel to pixel in lines (M, N) uint8, mean over bands of lines.

    M and N are cut to multiples of `band`. Photographs have energy of about 1 / f^2 at a frequency f (Field 1987), and
    their steps a nearly flat spectrum: neighbouring frequencies compare. White steps of variance s^2 have
    (s^2 + GRAIN) / band everywhere.
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
