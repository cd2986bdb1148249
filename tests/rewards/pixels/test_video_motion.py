"""Motion and sharpness of clips with known values."""

import cv2
import numpy as np
import pytest
import torch

from rewardfl.rewards.pixels import video_motion as measures
from rewardfl.rewards.pixels.motion import mean_change

ROOM = 24  # pixels of texture around a frame, for it to be shifted over


def texture(height=96, width=112, seed=0):
    """A smooth random picture (H, W, 3) uint8 with ROOM to be looked at from the side."""
    noise = np.random.default_rng(seed).normal(size=(height + 2 * ROOM, width + 2 * ROOM, 3))
    smooth = cv2.GaussianBlur(noise, (0, 0), 3)
    return np.clip(128 + 60 * smooth / smooth.std(), 0, 255).astype(np.uint8)


def shifted(shifts, height=96, width=112):
    """A clip that looks at the texture through a window at `shifts`, (x, y) in integer pixels."""
    picture = texture(height, width)
    places = [(ROOM + y, ROOM + x) for x, y in shifts]
    return np.stack([picture[y : y + height, x : x + width] for y, x in places])


STEADY = shifted([(2 * i, i) for i in range(6)])
TREMBLING = shifted([(2 * (i % 2), i % 2) for i in range(6)])


def test_flow_of_a_shift_is_the_shift():
    values = measures.video_motion(STEADY)
    assert values["flow"] == pytest.approx(5**0.5, rel=0.03)
    assert np.isnan(values["face_flow"])
    middle = [field[20:-20, 20:-20].mean((0, 1)) for field in measures.flow_fields(STEADY)]
    np.testing.assert_allclose(middle, [[-2, -1]] * 5, atol=0.05)  # the window goes right: what it shows goes left


def test_flow_is_cv2s_with_the_documented_settings():
    grey = [cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY) for frame in STEADY[:2]]
    expected = cv2.calcOpticalFlowFarneback(grey[0], grey[1], None, 0.5, 3, 11, 5, 5, 1.1, 0)
    np.testing.assert_array_equal(measures.flow_fields(STEADY[:2])[0], expected)


def test_flow_inside_a_moving_box():
    still, moving = np.repeat(STEADY[:1], 6, 0), shifted([(2 * i, 0) for i in range(6)])
    clip = still.copy()
    clip[:, 24:72, 30:80] = moving[:, 24:72, 30:80]
    box = np.array([[36.0, 30.0, 74.0, 66.0]] * 6)
    values = measures.video_motion(clip, box)
    assert values["face_flow"] == pytest.approx(2, rel=0.05) and values["flow"] < 0.7 * values["face_flow"]
    assert values["displacement"] == pytest.approx(10, rel=0.05)
    there_and_back = measures.video_motion(TREMBLING[:5], box[:5])
    assert there_and_back["face_flow"] == pytest.approx(5**0.5, rel=0.05) and there_and_back["displacement"] < 0.1
    away = box.copy()
    away[1:] = [0.0, 80.0, 20.0, 96.0]  # the first pair looks at its first frame's box, the others elsewhere
    fields = measures.flow_fields(clip)
    assert measures.mean_flow_inside(fields[:1], away) == pytest.approx(2, rel=0.05)
    assert measures.mean_flow_inside(fields[1:], away[1:]) < 0.1


def test_reversals_tell_trembling_from_motion():
    assert measures.video_motion(STEADY)["reversals"] == pytest.approx(-1, abs=0.03)
    assert measures.video_motion(TREMBLING)["reversals"] == pytest.approx(1, abs=0.03)
    right, up = np.zeros((8, 8, 2)), np.zeros((8, 8, 2))
    right[..., 0], up[..., 1] = 2, 3
    assert measures.reversals([right, right, -right]) == pytest.approx(0)  # -1 and 1
    assert measures.reversals([right, right + up]) == pytest.approx(-2 / 13**0.5)


def test_a_still_clip_has_no_direction():
    values = measures.video_motion(np.repeat(STEADY[:1], 4, 0))
    assert values["flow"] < measures.DIRECTED and values["pixel_change"] == 0 and np.isnan(values["reversals"])


def test_one_frame_and_a_box_outside_have_no_values():
    values = measures.video_motion(STEADY[:1], np.zeros((1, 4)))
    assert all(np.isnan(value) for value in values.values())
    for box in ([200.0, 200.0, 240.0, 240.0], [-50.0, -50.0, -10.0, -10.0]):
        assert np.isnan(measures.video_motion(STEADY, np.array([box] * 6))["face_flow"])


def test_pixel_change_equals_the_motion_rewards():
    expected = np.abs(STEADY[1:].astype(float) - STEADY[:-1]).mean() / 255
    assert measures.pixel_change(STEADY) == pytest.approx(expected, rel=1e-9)
    video = torch.from_numpy(STEADY).permute(3, 0, 1, 2).float() / 127.5 - 1
    assert measures.pixel_change(STEADY) == pytest.approx(float(mean_change(video)), rel=1e-5)


def test_sharpness_is_the_variance_of_the_laplacian():
    grey = np.random.default_rng(0).integers(0, 256, (3, 40, 48)).astype(np.uint8)
    frames = np.repeat(grey[..., None], 3, -1)
    padded = np.pad(grey.astype(float), ((0, 0), (1, 1), (1, 1)), mode="reflect")
    around = padded[:, :-2, 1:-1] + padded[:, 2:, 1:-1] + padded[:, 1:-1, :-2] + padded[:, 1:-1, 2:]
    expected = (around - 4.0 * grey).var((1, 2))
    assert measures.sharpness(frames) == pytest.approx(expected[1:].mean(), rel=1e-5)  # without the given image


def test_large_frames_are_shrunk_and_measured_in_their_own_pixels():
    picture = cv2.resize(texture(160, 200), None, fx=4, fy=4, interpolation=cv2.INTER_CUBIC)
    clip = np.stack([picture[100:700, 100 + 10 * i : 900 + 10 * i] for i in range(3)])
    assert measures.flow_fields(clip)[0].shape == (192, measures.LONG_SIDE, 2)
    values = measures.video_motion(clip, np.array([[200.0, 100.0, 600.0, 500.0]] * 3))
    assert values["flow"] == pytest.approx(10, rel=0.12) and values["face_flow"] == pytest.approx(10, rel=0.05)
