"""Artifacts on pictures with known values."""

import cv2
import numpy as np
import pytest

from rewardfl.rewards.pixels import artifacts as measures

HEIGHT, WIDTH = 96, 128
X = np.arange(WIDTH)


def clip(grey, frames=3):
    """A clip that shows a picture (H, W) of grey levels after a first frame of another."""
    frame = np.clip(np.rint(grey), 0, 255).astype(np.uint8)
    return np.stack([np.zeros_like(frame), *[frame] * (frames - 1)])[..., None].repeat(3, -1)


def noise(deviation=8.0, seed=0):
    return 128 + deviation * np.random.default_rng(seed).normal(size=(HEIGHT, WIDTH))


def sine(period, amplitude=1.0):
    return amplitude * np.cos(2 * np.pi * X / period)


def photo(seed=0):
    """1 / f, as photographs are, and no straight line in it."""
    f = np.hypot(np.fft.fftfreq(HEIGHT)[:, None], np.fft.fftfreq(WIDTH)[None])
    f[0, 0] = 1
    picture = np.fft.ifft2(np.fft.fft2(noise(seed=seed) - 128) / f).real
    return 128 + 30 * picture / picture.std()


def test_a_sine_of_the_period_adds_its_closed_form():
    """By M N a^2 / (6 s^2) to one of eight ratios (four harmonics, two axes), s^2 with what grain is allowed for."""
    steps = (2 * np.sin(np.pi / 8)) ** 2  # the energy that differences have of what a picture has at 1 / 8
    for amplitude in (1.0, 2.0):
        expected = 8 * WIDTH * amplitude**2 / 6 * steps / (8**2 * steps + measures.GRAIN)
        gains = [
            measures.grid(clip(noise(seed=i) + sine(8, amplitude)), [8]) - measures.grid(clip(noise(seed=i)), [8])
            for i in range(8)
        ]
        assert np.mean(gains) == pytest.approx(expected / 8, rel=0.15)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("period", [4, 8, 16])
def test_a_faint_grid_is_seen_along_either_axis(period, axis):
    size = (HEIGHT, WIDTH)[axis]
    lines = np.where(np.arange(size) % period == 0, 3.0 if axis else -3.0, 0.0)
    lines = lines[None] if axis else lines[:, None]
    for picture in (noise(3.0), 0.2 * photo() + 100):
        assert measures.grid(clip(picture + lines), [period]) > 1.4 * measures.grid(clip(picture), [period])
        assert measures.grid(clip(picture + lines), [8, 16]) > 1.2 * measures.grid(clip(picture), [8, 16])


def test_a_pattern_of_another_period_is_not_a_grid():
    for period in (7, 9, 5.5):
        assert measures.grid(clip(noise(3.0) + sine(period, 3.0)), [8]) < 1.1


def test_the_ratio_is_one_without_a_grid():
    slope = 40 + 0.9 * X[None] + 0.4 * np.arange(HEIGHT)[:, None]
    blurred = [cv2.GaussianBlur(photo(), (0, 0), sigma) for sigma in (1, 2, 4)]
    edge = np.where(X[None] > 61, 200.0, 30.0) + np.zeros((HEIGHT, 1))
    for picture in (noise(), photo(), slope, slope + noise(1.0) - 128, *blurred, edge, np.full((HEIGHT, WIDTH), 90.0)):
        for periods in ([8], [4, 8]):
            assert 0.7 < measures.grid(clip(picture), periods) < 1.15, periods
    assert measures.grid(clip(np.full((HEIGHT, WIDTH), 90.0)), [4, 8]) == 1
    many = [measures.grid(clip(photo(seed)), [8]) for seed in range(16)]
    assert np.mean(many) == pytest.approx(1, abs=0.05)


def test_the_given_image_is_left_out():
    frames = clip(noise())
    frames[0] = clip(noise() + sine(8, 20.0))[1]
    assert measures.measure_artifacts(frames, [8]) == measures.measure_artifacts(clip(noise()), [8])


def test_axes_that_are_too_small_are_left_out():
    lines = noise(3.0) + sine(8, 4.0)
    both_axes, one_axis = measures.grid(clip(lines), [8]), measures.grid(clip(lines[:31]), [8])
    assert one_axis > 1.5 * both_axes  # the mean over both axes is diluted by the one without lines
    assert one_axis == measures.grid(clip(lines[:24]), [8])  # only complete bands
    assert np.isnan(measures.grid(clip(lines[:31, :31]), [8])) and not np.isnan(measures.grid(clip(lines[:32]), [8]))
    assert np.isnan(measures.grid(clip(lines[:7]), [8]))  # no band


def test_saturation_and_colour_by_hand():
    frames = np.zeros((2, 4, 4, 3), np.uint8)
    frames[0] = 255  # the given image
    frames[1, :2] = [255, 0, 0]
    frames[1, 2:, :2] = [102, 102, 102]
    frames[1, 2:, 2:] = [0, 51, 102]
    values = measures.measure_artifacts(frames, [8])
    assert values["saturation"] == pytest.approx(0.5 * 1 + 0.25 * 0 + 0.25 * 0.4)
    assert (values["red"], values["green"], values["blue"]) == pytest.approx(
        (0.5 + 0.25 * 0.4, 0.25 * 0.4 + 0.25 * 0.2, 0.25 * 0.4 + 0.25 * 0.4)
    )


def test_one_frame_has_nothing_to_measure():
    values = measures.measure_artifacts(clip(noise())[:1], [8])
    assert all(np.isnan(list(values.values())))
