"""Measures of clips with known values."""

import cv2
import numpy as np
import pytest
import torch

from rewardfl.rewards.pixels import measures
from rewardfl.rewards.pixels.motion import mean_change

HEIGHT, WIDTH = 96, 128
X = np.arange(WIDTH)


def clip(grey, frames=3):
    """Return a clip that shows a picture (H, W) of grey levels after a black first frame."""
    frame = np.clip(np.rint(grey), 0, 255).astype(np.uint8)
    return np.stack([np.zeros_like(frame), *[frame] * (frames - 1)])[..., None].repeat(3, -1)


def noise(deviation=8.0, seed=0):
    return 128 + deviation * np.random.default_rng(seed).normal(size=(HEIGHT, WIDTH))


def sine(period, amplitude=1.0):
    return amplitude * np.cos(2 * np.pi * X / period)


def photo(seed=0):
    """Return a picture with a spectrum of 1 / f, as photographs have, without straight lines."""
    f = np.hypot(np.fft.fftfreq(HEIGHT)[:, None], np.fft.fftfreq(WIDTH)[None])
    f[0, 0] = 1
    picture = np.fft.ifft2(np.fft.fft2(noise(seed=seed) - 128) / f).real
    return 128 + 30 * picture / picture.std()


def test_a_sine_of_the_period_adds_its_closed_form():
    """It adds M N a^2 / (6 s^2) to one of eight ratios (four harmonics, two axes), s^2 with the grain's variance."""
    steps = (2 * np.sin(np.pi / 8)) ** 2  # energy of the differences over the picture's, at a frequency of 1 / 8
    for amplitude in (1.0, 2.0):
        expected = 8 * WIDTH * amplitude**2 / 6 * steps / (8**2 * steps + measures.GRAIN)
        gains = [
            measures.grid(clip(noise(seed=i) + sine(8, amplitude)), [8]) - measures.grid(clip(noise(seed=i)), [8])
            for i in range(8)
        ]
        assert np.mean(gains) == pytest.approx(expected / 8, rel=0.15)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("period", [4, 16])
def test_a_faint_grid_is_seen_along_either_axis(period, axis):
    size = (HEIGHT, WIDTH)[axis]
    lines = np.where(np.arange(size) % period == 0, 3.0 if axis else -3.0, 0.0)
    lines = lines[None] if axis else lines[:, None]
    for picture in (noise(3.0), 0.2 * photo() + 100):
        assert measures.grid(clip(picture + lines), [period]) > 1.4 * measures.grid(clip(picture), [period])
        assert measures.grid(clip(picture + lines), [8, 16]) > 1.2 * measures.grid(clip(picture), [8, 16])


def test_the_ratio_is_one_without_a_grid():
    flat, slope = np.full((HEIGHT, WIDTH), 90.0), 40 + 0.9 * X[None] + 0.4 * np.arange(HEIGHT)[:, None]
    edge = np.where(X[None] > 61, 200.0, 30.0) + np.zeros((HEIGHT, 1))
    for picture in (noise(), photo(), slope, cv2.GaussianBlur(photo(), (0, 0), 2), edge, flat):
        for periods in ([8], [4, 8]):
            assert 0.7 < measures.grid(clip(picture), periods) < 1.15, periods
    assert measures.grid(clip(flat), [4, 8]) == 1
    assert np.mean([measures.grid(clip(photo(seed)), [8]) for seed in range(16)]) == pytest.approx(1, abs=0.05)
    for period in (7, 9, 5.5):  # a pattern of another period
        assert measures.grid(clip(noise(3.0) + sine(period, 3.0)), [8]) < 1.1


def test_the_given_image_is_left_out():
    frames = clip(noise())
    frames[0] = clip(noise() + sine(8, 20.0))[1]
    assert measures.measure_artifacts(frames, [8]) == measures.measure_artifacts(clip(noise()), [8])


def test_axes_that_are_too_small_are_left_out():
    lines = noise(3.0) + sine(8, 4.0)
    both_axes, one_axis = measures.grid(clip(lines), [8]), measures.grid(clip(lines[:31]), [8])
    assert one_axis > 1.5 * both_axes  # the mean over both axes is diluted by the axis without lines
    assert one_axis == measures.grid(clip(lines[:24]), [8])  # only complete bands
    assert np.isnan(measures.grid(clip(lines[:31, :31]), [8])) and np.isnan(measures.grid(clip(lines[:7]), [8]))


def test_saturation_and_colour_by_hand():
    frames = np.zeros((2, 4, 4, 3), np.uint8)
    frames[0] = 255  # the given image
    frames[1, :2] = [255, 0, 0]
    frames[1, 2:, :2] = [102, 102, 102]
    frames[1, 2:, 2:] = [0, 51, 102]
    values = measures.measure_artifacts(frames, [8])
    assert values["saturation"] == pytest.approx(0.5 * 1 + 0.25 * 0 + 0.25 * 0.4)
    assert (values["red"], values["green"], values["blue"]) == pytest.approx((0.6, 0.15, 0.2))


ROOM = 24  # pixels of texture around a frame, for shifts


def texture(height=96, width=112):
    """Return a smooth random picture (H, W, 3) uint8, ROOM larger on each side."""
    random = np.random.default_rng(0).normal(size=(height + 2 * ROOM, width + 2 * ROOM, 3))
    smooth = cv2.GaussianBlur(random, (0, 0), 3)
    return np.clip(128 + 60 * smooth / smooth.std(), 0, 255).astype(np.uint8)


def shifted(shifts, height=96, width=112):
    """Return a clip of the texture through a window at `shifts`, (x, y) in integer pixels."""
    picture = texture(height, width)
    places = [(ROOM + y, ROOM + x) for x, y in shifts]
    return np.stack([picture[y : y + height, x : x + width] for y, x in places])


STEADY = shifted([(2 * i, i) for i in range(6)])
TREMBLING = shifted([(2 * (i % 2), i % 2) for i in range(6)])


def test_flow_of_a_shift_is_the_shift():
    values = measures.video_motion(STEADY)
    assert values["flow"] == pytest.approx(5**0.5, rel=0.03) and np.isnan(values["face_flow"])
    middle = [field[20:-20, 20:-20].mean((0, 1)) for field in measures.flow_fields(STEADY)]
    np.testing.assert_allclose(middle, [[-2, -1]] * 5, atol=0.05)  # the window goes right: its content goes left


def test_flow_inside_a_moving_box():
    still, moving = np.repeat(STEADY[:1], 6, 0), shifted([(2 * i, 0) for i in range(6)])
    video = still.copy()
    video[:, 24:72, 30:80] = moving[:, 24:72, 30:80]
    box = np.array([[36.0, 30.0, 74.0, 66.0]] * 6)
    values = measures.video_motion(video, box)
    assert values["face_flow"] == pytest.approx(2, rel=0.05) and values["flow"] < 0.7 * values["face_flow"]
    assert values["displacement"] == pytest.approx(10, rel=0.05)
    there_and_back = measures.video_motion(TREMBLING[:5], box[:5])
    assert there_and_back["face_flow"] == pytest.approx(5**0.5, rel=0.05) and there_and_back["displacement"] < 0.1
    away = box.copy()
    away[1:] = [0.0, 80.0, 20.0, 96.0]  # only the first frame's box has the motion
    fields = measures.flow_fields(video)
    assert measures.mean_flow_inside(fields[:1], away) == pytest.approx(2, rel=0.05)
    assert measures.mean_flow_inside(fields[1:], away[1:]) < 0.1


def test_reversals_tell_trembling_from_motion():
    assert measures.video_motion(STEADY)["reversals"] == pytest.approx(-1, abs=0.03)
    assert measures.video_motion(TREMBLING)["reversals"] == pytest.approx(1, abs=0.03)
    right, up = np.zeros((8, 8, 2)), np.zeros((8, 8, 2))
    right[..., 0], up[..., 1] = 2, 3
    assert measures.reversals([right, right, -right]) == pytest.approx(0)  # -1 and 1
    assert measures.reversals([right, right + up]) == pytest.approx(-2 / 13**0.5)


def test_still_clips_single_frames_and_boxes_outside_have_no_values():
    values = measures.video_motion(np.repeat(STEADY[:1], 4, 0))
    assert values["flow"] < measures.DIRECTED and values["pixel_change"] == 0 and np.isnan(values["reversals"])
    values = measures.video_motion(STEADY[:1], np.zeros((1, 4))) | measures.measure_artifacts(clip(noise())[:1], [8])
    assert all(np.isnan(value) for value in values.values())
    for box in ([200.0, 200.0, 240.0, 240.0], [-50.0, -50.0, -10.0, -10.0]):
        assert np.isnan(measures.video_motion(STEADY, np.array([box] * 6))["face_flow"])


def test_pixel_change_equals_the_motion_rewards():
    video = torch.from_numpy(STEADY).permute(3, 0, 1, 2).float() / 127.5 - 1
    assert measures.pixel_change(STEADY) == pytest.approx(float(mean_change(video)), rel=1e-5)


def test_sharpness_is_the_variance_of_the_laplacian():
    grey = np.random.default_rng(0).integers(0, 256, (3, 40, 48)).astype(np.uint8)
    padded = np.pad(grey.astype(float), ((0, 0), (1, 1), (1, 1)), mode="reflect")
    around = padded[:, :-2, 1:-1] + padded[:, 2:, 1:-1] + padded[:, 1:-1, :-2] + padded[:, 1:-1, 2:]
    expected = (around - 4.0 * grey).var((1, 2))[1:].mean()  # without the given image
    assert measures.sharpness(np.repeat(grey[..., None], 3, -1)) == pytest.approx(expected, rel=1e-5)


def test_large_frames_are_shrunk_and_measured_in_their_own_pixels():
    picture = cv2.resize(texture(160, 200), None, fx=4, fy=4, interpolation=cv2.INTER_CUBIC)
    video = np.stack([picture[100:700, 100 + 10 * i : 900 + 10 * i] for i in range(3)])
    assert measures.flow_fields(video)[0].shape == (192, measures.LONG_SIDE, 2)
    values = measures.video_motion(video, np.array([[200.0, 100.0, 600.0, 500.0]] * 3))
    assert values["flow"] == pytest.approx(10, rel=0.12) and values["face_flow"] == pytest.approx(10, rel=0.05)
