"""Rewards of motion with gradient: the detector's landmarks, reversals, and pixels inside and outside of the face."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from face_nets import SIZE, clip, magenta_pack
from runs import WORLD
from torch.autograd import gradcheck

from rewardfl import data, rewards
from rewardfl.rewards.face import FaceDetector, detect, motion, track_largest
from rewardfl.rewards.face.align import ARCFACE_TEMPLATE, Faces
from rewardfl.rewards.face.detect import View
from rewardfl.rewards.face.look import PATCHES
from rewardfl.rewards.face.motion import COARSE, STILL_CHANGE, FaceMotionReward, expression_changes
from rewardfl.rewards.face.track import Track, step_reversals

PACK, OTHER_PACK = WORLD / "faces" / "reward", WORLD / "faces" / "judge"
STILL = {"reversals": 0.0, "jitter": False}


@pytest.fixture(scope="module")
def real():
    """Return a clip of the tiny world (3, 9, 64, 64) whose face moves."""
    row = data.load_metadata(WORLD / "eval" / "metadata.csv")[1]
    return data.load_example(row, 64, 64, 9).reference


@pytest.fixture(scope="module")
def slow(real):
    """Return the clip with each frame mixed with the middle one: less motion, and the face in every frame."""
    return 0.4 * real + 0.6 * real[:, 4:5]


@pytest.fixture(scope="module")
def detector():
    return FaceDetector(PACK / "detector.onnx", 128)


def reward(**settings):
    return rewards.build("face_motion", {"pack_dir": PACK, "det_size": 128, **STILL, **settings})


def score_and_gradient(reward, video, reference):
    """Return score () and gradient (3, F, H, W) of one clip."""
    video = video.detach().clone().requires_grad_()
    output = reward(video[None], [reference])
    (gradient,) = torch.autograd.grad(output.score.sum(), video)
    return output.score[0].detach(), gradient


@pytest.fixture
def in_double(monkeypatch):
    """Compute in float64, without rounding to 8 bits and with still boxes, for finite differences."""

    def track_in_a_box(faces):
        track = track_largest(faces)
        return replace(track, boxes=torch.tensor([18.3, 12.2, 45.7, 50.4]).expand_as(track.boxes))

    monkeypatch.setattr(motion, "track_largest", track_in_a_box)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(detect, "_rounded_resize", lambda levels, *size: F.interpolate(levels, size, mode="bilinear"))


def test_traced_faces_equal_detected_ones_to_the_bit(detector, real):
    frames = real.transpose(0, 1)
    detected = detector.detect(frames)
    traced = detector.trace(frames.clone().requires_grad_(), 4)
    for faces, expected in zip(traced, detected, strict=True):
        assert all(torch.equal(getattr(faces, name), getattr(expected, name)) for name in vars(faces))
        assert len(faces.scores) > 0 and not faces.boxes.requires_grad and not faces.scores.requires_grad
    assert traced[0].landmarks.requires_grad
    viewed = detector.trace(frames, detector.CHUNK, View(1.0, (3.0, -2.0)))  # in the pixels of `frames`
    for faces, expected in zip(viewed, detected, strict=True):
        assert 0 < (faces.landmarks[0] - expected.landmarks[0]).abs().max() < 1


def test_the_rounded_input_has_the_gradient_of_the_resize(detector):
    frames, weights = (torch.rand(1, 3, 60, 64) * 1.8 - 0.9).requires_grad_(), torch.randn(1, 3, 128, 128)
    (ours,) = torch.autograd.grad((detector.fit(frames)[0] * weights).sum(), frames)
    resized = F.interpolate(frames, scale_factor=2, mode="bilinear", align_corners=False) * 127.5 / 128
    (smooth,) = torch.autograd.grad((resized * weights[:, :, :120]).sum(), frames)
    torch.testing.assert_close(ours, smooth, atol=1e-5, rtol=1e-4)


def test_a_view_moves_pixels_and_points():
    frames = torch.rand(2, 3, 9, 11)
    torch.testing.assert_close(View(1.0, (2.0, -1.0)).of(frames)[:, :, :-1, 2:], frames[:, :, 1:, :-2])
    torch.testing.assert_close(View(1.0, (2.0, 0.0)).of(frames)[..., 0], frames[..., 0])  # the edge is repeated
    twice = View(2.0, (0.0, 0.0)).of(frames)  # about the centre, pixel (4, 5)
    torch.testing.assert_close(twice[:, :, 4, 5], frames[:, :, 4, 5])
    torch.testing.assert_close(twice[:, :, 6, 9], frames[:, :, 5, 7])
    points = torch.tensor([[10.0, 5.0]])
    (back,) = View(2.0, (1.0, -1.0)).undo(Faces(torch.zeros(0, 4), torch.zeros(0), points), frames).landmarks
    assert back.tolist() == [7.0, 5.0]


@pytest.mark.slow(4)
def test_the_gradient_of_all_terms_equals_finite_differences(in_double, real, slow):
    weights = {"landmarks": 0.5, "face_change": 0.3, "background_change": 2.0, "reversals": 0.7}
    ours = reward(**weights, jitter=True).double()
    real, video = 0.9 * real.double(), 0.9 * slow.double()  # off the edges of [-1, 1], where the levels are clamped
    video = torch.stack([video[:, j] for j in (0, 8, 1, 7, 2, 8, 0, 6, 1)], 1)  # back and forth: reversals
    reference = ours.reference(real)
    video = video[None].requires_grad_()
    assert gradcheck(lambda x: ours(x, [reference]).score, video, eps=1e-7, atol=0, rtol=1e-4, fast_mode=True)


def test_above_the_cap_there_is_no_gradient(real, slow):
    ours = reward()
    score, gradient = score_and_gradient(ours, real, ours.reference(slow))
    assert score == 1 and not gradient.any()


def test_the_score_equals_plain_loops(real, slow):
    ours = reward(landmarks=2.0, face_change=1.0, background_change=0.5, reversals=0.3)
    output = ours(slow[None], [ours.reference(real)])
    tracks = [track_largest(ours.detectors[0].detect(video.transpose(0, 1))) for video in (slow, real)]
    ratios = {name: getattr(tracks[0], name) / getattr(tracks[1], name) for name in ("speed", "nonrigid")}
    changes = {"face_change": [], "background_change": []}
    for video, track in zip((slow, real), tracks, strict=True):
        inside = torch.zeros(8, 64, 64, dtype=torch.bool)
        for j in range(8):
            for left, top, right, bottom in track.boxes[j : j + 2].clamp(min=0).tolist():
                inside[j, math.ceil(top) : math.floor(bottom) + 1, math.ceil(left) : math.floor(right) + 1] = True
        change = video.diff(dim=1).abs()
        changes["face_change"].append(change[:, inside].mean().item())
        changes["background_change"].append(change[:, ~inside].mean().item())
    ratios |= {name: generated / expected for name, (generated, expected) in changes.items()}
    excess = step_reversals(tracks[0]).item() - step_reversals(tracks[1]).item()
    for name, ratio in (ratios | {"reversals": excess, "lost": 0.0}).items():
        assert output.parts[name].item() == pytest.approx(ratio, rel=1e-4, abs=1e-6)
    landmarks = (min(ratios["speed"], 1) + min(ratios["nonrigid"], 1)) / 2 - 0.3 * max(excess, 0)
    face, background = (min(ratios[name], 1 / ratios[name]) for name in changes)
    assert output.score.item() == pytest.approx((2 * landmarks + face + 0.5 * background) / 3.5, rel=1e-4)


def test_expression_changes_equal_numpys_line_fit():
    torch.manual_seed(0)
    pattern, size = 0.2 * torch.randn(112, 112), [0.0, 1.0, -1.0, 0.5, 0.0, 2.0]
    frames = torch.stack([s * pattern for s in size])[:, None].expand(-1, 3, -1, -1)
    changes = expression_changes(frames, ARCFACE_TEMPLATE.expand(6, 5, 2))
    residual = np.array(size) - np.polyval(np.polyfit(range(6), size, 1), range(6))
    for name, (rows, columns) in PATCHES.items():
        squares = pattern[rows, columns].unfold(0, COARSE, COARSE // 2).unfold(1, COARSE, COARSE // 2).mean((-2, -1))
        expected = residual.std() * squares.std(correction=0).item()
        assert changes[name].item() == pytest.approx(expected, rel=1e-3)


@pytest.fixture(scope="module")
def talk(real, detector):
    """Return two clips (3, 9, 64, 64) of a moving face, talking and silent, and its track."""
    face = detector.detect(real[:, :1].transpose(0, 1))[0]
    x, y = face.landmarks[0, 3:].mean(0)
    mouth = torch.sigmoid(6 - 6 * ((torch.arange(64) - x) / 5) ** 2 - 6 * ((torch.arange(64)[:, None] - y) / 3) ** 2)
    views = [View(1 + 0.01 * j, (0.7 * j, 0.4 * math.sin(j))) for j in range(-4, 5)]
    points = [view.zoom * (face.landmarks[0] - 63 / 2) + 63 / 2 + torch.tensor(view.shift) for view in views]
    track = Track(torch.stack(points), torch.ones(9, dtype=torch.bool), face.boxes[:1].expand(9, 4))
    faces = [real[:, 0] * (1 - o * mouth) - o * mouth for o in (0.0, 1.0, 0.5, 0.0, 1.0, 0.0, 0.7, 0.0, 0.2)]
    clips = [[view.of(f[None])[0] for view, f in zip(views, c, strict=True)] for c in (faces, 9 * faces[:1])]
    return torch.stack(clips[0], 1), torch.stack(clips[1], 1), track


@pytest.mark.parametrize("talks", [0, 1])
def test_a_mouth_moves_as_far_as_the_real_one(talk, monkeypatch, talks):
    ours, real, other = reward(landmarks=0.0, expression=1.0), talk[1 - talks], talk[talks].clone().requires_grad_()
    monkeypatch.setattr(motion, "track_largest", lambda faces: talk[2])  # landmarks do not see a mouth open
    reference = ours.reference(real)
    assert ours(real[None], [reference]).score.item() == pytest.approx(1, abs=1e-6)
    output = ours(other[None], [reference])
    parts = {name: part.item() for name, part in output.parts.items()}
    change, compared = (ours._measure(v, 0, None)["mouth"].item() + STILL_CHANGE for v in (other, real))
    assert parts["speed"] == pytest.approx(1) and parts["mouth"] == pytest.approx(change / compared)
    score = min(parts["mouth"], 1 / parts["mouth"])
    assert score < 0.3 and output.score.item() == pytest.approx(score) and output.score.requires_grad


def test_the_gradient_of_the_expression(in_double, talk):
    frames, landmarks = (0.9 * talk[0].transpose(0, 1).double()).requires_grad_(), talk[2].landmarks

    def change(frames):
        return sum(expression_changes(frames, landmarks[: len(frames)]).values())

    assert gradcheck(change, frames, eps=1e-7, atol=0, rtol=1e-4, fast_mode=True)
    assert torch.autograd.grad(change(frames[:1]), frames)[0].isfinite().all()


MOVING = [(2, 2), (3, 2), (3, 3), (4, 3)]
TALK = [0.0, 0.2, 0.1, 0.3]


@pytest.fixture(scope="module")
def magenta(tmp_path_factory):
    folder = magenta_pack(tmp_path_factory.mktemp("pack"))
    settings = {"pack_dir": folder, "det_size": SIZE, "face_change": 0.2, "background_change": 0.2, **STILL}
    return rewards.build("face_motion", settings)


def test_a_clip_that_loses_the_face_is_invalid_and_finite(magenta):
    reference, empty = magenta.reference(clip(MOVING, mouth=TALK)), clip([None] * 4)
    shown, twice = clip(MOVING, seed=1, mouth=[0.0, 0.1, 0.0, 0.1]), clip([(2, 2), None, (3, 2), None])
    video = torch.stack([empty, torch.full_like(empty, math.nan), shown, twice]).requires_grad_()
    output = magenta(video, [reference] * 4)
    output.score.sum().backward()
    assert output.valid.tolist() == [False, False, True, True] and not output.score[:2].any()
    assert not video.grad[:2].any() and video.grad[2].any() and video.grad.isfinite().all()
    assert output.parts["lost"].tolist() == pytest.approx([1, 1, 0, 2 / 3])
    assert output.parts["speed"][3].isnan() and output.parts["face_change"][3].isfinite()  # scored by its pixels


def test_a_real_clip_that_hardly_moves_gives_no_ratio(magenta):
    assert magenta.reference(clip([None] * 4)) is None and magenta.reference(clip([(2, 2)] * 4)) is None
    drifting = magenta.reference(clip(MOVING))  # the landmarks move together
    parts = magenta(clip(MOVING, seed=1)[None], [drifting]).parts
    assert parts["nonrigid"].isnan().all() and parts["background_change"].isnan().all()
    assert parts["speed"].item() == pytest.approx(1)
    little = {name: torch.full((1, 2), least / 2) for name, least in motion.MIN_REAL_MOTION.items()}
    output = magenta(clip(MOVING, seed=1)[None], [drifting | little])
    assert not output.valid.any() and output.parts["speed"].isnan().all()


def test_draws_are_a_function_of_the_clip(slow):
    ours = reward(jitter=True, second_pack_dir=OTHER_PACK)
    video, state = slow.clone().requires_grad_(), torch.get_rng_state()
    assert ours._draw(video) == ours._draw(video + 1e-7) != ours._draw(video * 0.99)
    assert ours._draw(slow) == (0, None)  # without a gradient
    drawn = [ours._draw((slow * (1 - i / 200)).requires_grad_()) for i in range(200)]
    assert torch.equal(torch.get_rng_state(), state)
    assert 70 < sum(index for index, _ in drawn) < 130
    places = torch.tensor([[(view.zoom - 1) / 0.03, *(side / 2 for side in view.shift)] for _, view in drawn])
    assert places.abs().max() <= 1 and places.abs().amax(0).min() > 0.9  # 4 detector pixels are 2 of the frame's
    assert places.mean(0).abs().max() < 0.15


def test_the_score_takes_the_view_and_detector_drawn(real, slow, monkeypatch):
    ours = reward(second_pack_dir=OTHER_PACK)
    reference = ours.reference(real)
    second = reward(pack_dir=OTHER_PACK)
    expected, scores = score_and_gradient(second, slow, second.reference(real))[0].item(), []
    for drawn in ((0, None), (1, None), (0, View(1.02, (0.5, 1.0)))):
        monkeypatch.setattr(FaceMotionReward, "_draw", lambda *_, drawn=drawn: drawn)
        scores.append(score_and_gradient(ours, slow, reference)[0].item())
    assert scores[1] == expected != scores[0]
    assert scores[2] not in scores[:2]


def test_trembling_lowers_the_score(real, slow):
    still = slow[:, :1].repeat(1, 9, 1, 1)
    trembling = torch.stack([still[:, j].roll(2 * (j % 2), dims=-1) for j in range(9)], 1)
    plain, strict = reward(), reward(reversals=1.0)
    reference = plain.reference(real)
    scores = [scorer(trembling[None], [reference]).score.item() for scorer in (plain, strict)]
    parts = strict(trembling[None], [reference]).parts
    assert parts["reversals"].item() > 0.5 and scores[1] == pytest.approx(scores[0] - parts["reversals"].item())


def test_the_reference_of_a_real_clip(real):
    ours = reward()
    reference = ours.reference(real)
    assert set(reference) == {"speed", "nonrigid", "reversals", "face_change", "background_change", "mouth", "eyes"}
    assert all(value.shape == (1, 2) and not value.requires_grad for value in reference.values())
    frames = real.transpose(0, 1)
    assert reference["speed"][0, 0].item() == track_largest(ours.detectors[0].detect(frames)).speed
    views = [ours.view(real, *fractions) for fractions in motion.FIXED_VIEWS]
    viewed = [track_largest(ours.detectors[0].trace(frames, 8, view)) for view in views]
    assert reference["nonrigid"][0, 1].item() == pytest.approx(sum(track.nonrigid for track in viewed) / 4)
    fingerprint = ours.fingerprint()
    assert fingerprint == reward(reversals=1.0, face_change=2.0, expression=1.0, jitter=True).fingerprint()
    assert fingerprint != reward(det_size=96).fingerprint() != reward(pack_dir=OTHER_PACK, det_size=96).fingerprint()


def test_settings_that_score_nothing_are_refused():
    with pytest.raises(ValueError, match="landmarks, face_change.* are all 0: nothing is scored"):
        reward(landmarks=0.0)
