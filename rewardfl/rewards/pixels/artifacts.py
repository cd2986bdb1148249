"""By what users recognise a picture that was made to please a reward: a grid, lurid colours, a tint.

Optimising pixels against a network brings these in long before the network's score says so; none of them needs a
network to be measured. Frames are (F, H, W, 3) uint8, RGB; they are to be the generated ones, before a video codec
smooths them. The first frame of a clip is the given image and is left out. OpenCV and numpy on the CPU.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np

# Grain of one level, which nobody sees, has this variance in the difference of two pixels. It stands on both sides of a
# ratio: a flat picture has 1, and the steps of a smooth slope that was rounded to 8 bits are no grid.
GRAIN = 2.0

# A Hann window spreads a periodic pattern over its own frequency and the one on either side.
NEAREST = 2

# Patterns are told apart from their neighbours where this many frequencies lie between one harmonic and the next.
FEWEST = 2 * NEAREST


@dataclass(frozen=True)
class Artifacts:
    """What `canaries` finds in a clip; NaN where there is nothing to measure."""

    grid: float  # energy at the periods asked for, over that of the frequencies beside them: 1 without a grid
    saturation: float  # mean chroma, in [0, 1]
    colour: tuple[float, float, float]  # mean red, green and blue, in [0, 1]


def measure_artifacts(frames: np.ndarray, periods: Sequence[int]) -> Artifacts:
    """The figures of a clip (F, H, W, 3) uint8; periods: in pixels, those of the VAE and of the transformer's patch."""
    return Artifacts(grid=grid(frames, periods), saturation=saturation(frames), colour=colour(frames))


def grid(frames: np.ndarray, periods: Sequence[int]) -> float:
    """How much more energy the frames have at `periods` and their harmonics than at the frequencies beside those.

    Mean over both axes and all harmonics of such ratios. About 1 for a picture without a pattern of one of these
    periods, somewhat below it for a blurred one. Lines are averaged in bands as wide as the periods' least common
    multiple, M: a grid looks alike in all of them, what else a picture shows does not. In white noise of standard
    deviation s a sine of amplitude a along an axis of N pixels raises its one ratio by M N a^2 / (6 s^2).

    Of periods that are multiples of each other the longest says all: its harmonics are the others', too. None: NaN.

    An axis with fewer than 4 M pixels cannot tell the periods from others, one that lies across fewer than M has no
    band, and neither is measured; NaN when both axes are out, and for a clip of one frame.
    """
    if len(frames) < 2 or not periods:
        return math.nan
    common = math.lcm(*periods)
    grey = [cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY) for frame in frames[1:]]
    ratios: list[float] = []
    for frames_of_lines in (grey, [frame.T for frame in grey]):
        if frames_of_lines[0].shape[1] < FEWEST * common or frames_of_lines[0].shape[0] < common:
            continue
        energy = np.mean([_energy(lines, common) for lines in frames_of_lines], axis=0)
        length = frames_of_lines[0].shape[1] // common * common
        places = {k * length // period for period in periods for k in range(1, period // 2 + 1)}
        ratios += [float(energy[place] / _beside(energy, place, length // common)) for place in sorted(places)]
    return mean(ratios)


def saturation(frames: np.ndarray) -> float:
    """Mean chroma, max(R, G, B) - min(R, G, B) of a pixel over 255: 0 for grey, 1 for pure colours.

    Chroma as in the hexagon of Joblove and Greenberg (SIGGRAPH 1978), not the S of HSV, which divides it by
    brightness and is noise where a picture is dark. NaN for a clip of one frame.
    """
    channels = (cv2.split(frame) for frame in frames[1:])
    return mean([float((cv2.max(cv2.max(r, g), b) - cv2.min(cv2.min(r, g), b)).mean()) / 255 for r, g, b in channels])


def colour(frames: np.ndarray) -> tuple[float, float, float]:
    """Mean red, green and blue, in [0, 1]; NaN for a clip of one frame."""
    red, green, blue = (mean([float(frame[..., i].mean()) / 255 for frame in frames[1:]]) for i in range(3))
    return red, green, blue


def _energy(lines: np.ndarray, band: int) -> np.ndarray:
    """Spectrum (N / 2 + 1,) of lines (M, N) uint8, mean over bands of them: of each pixel's step from the one before.

    M and N are cut to multiples of `band`. Photographs have about 1 / f^2 of energy at a frequency f (Field 1987):
    that of steps is about flat, and so a fair measure beside any frequency. White steps of variance s^2 have
    (s^2 + GRAIN) / band everywhere.
    """
    height, width = (size // band * band for size in lines.shape)
    means = lines[:height, :width].reshape(-1, band, width).mean(1)
    steps = np.diff(means, axis=-1, prepend=means[:, :1])  # the first is 0, and so is its weight
    window = np.hanning(width + 1)[:-1]
    return (np.abs(np.fft.rfft(steps * window)) ** 2).mean(0) / (window**2).sum() + GRAIN / band


def _beside(energy: np.ndarray, place: int, spacing: int) -> float:
    """Mean energy at both sides of a frequency, a third of the way to the next harmonic, `spacing` further, at most."""
    ways = np.arange(NEAREST, max(NEAREST, spacing // 3) + 1)
    nyquist = len(energy) - 1
    return float(energy[nyquist - np.abs(nyquist - np.concatenate([place - ways, place + ways]))].mean())


def mean(values: Sequence[float]) -> float:
    """NaN where there are none."""
    return sum(values) / len(values) if values else math.nan
