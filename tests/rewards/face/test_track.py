"""Tracks of faces by position and by identity, and the motion of their landmarks."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from face_nets import placed
from skimage.transform import SimilarityTransform

from rewardfl.rewards.face import Faces, track_largest
from rewardfl.rewards.face.track import Track, follow_first, follow_known, step_reversals


def faces_at(*places):
    """Return faces at (centre x, centre y, width), in this order; landmarks are the centre."""
    rows = torch.tensor(places, dtype=torch.float32).view(-1, 3)
    centre, half = rows[:, :2], rows[:, 2:] / 2
    return Faces(torch.cat([centre - half, centre + half], 1), torch.ones(len(rows)), centre[:, None].repeat(1, 5, 1))


def centres(track):
    return track.landmarks[:, 0].tolist()


def columns(track):
    return track.landmarks[:, 0, 0].tolist()


def test_the_track_does_not_jump_to_a_larger_face():
    frames = [
        faces_at((50, 50, 40), (150, 50, 20)),
        faces_at((150, 50, 80), (55, 50, 40)),
        faces_at((150, 50, 90)),  # the face is hidden, the stranger is there
        faces_at((150, 50, 90), (58, 52, 38)),
    ]
    track = track_largest(frames)
    assert track.detected.tolist() == [True, True, False, True]
    assert centres(track) == [[50, 50], [55, 50], [55, 50], [58, 52]]
    assert track.width.tolist() == [40, 40, 40, 38]


def test_the_track_starts_at_the_first_frames_largest_face():
    track = track_largest([faces_at(), faces_at(), faces_at((80, 20, 30), (20, 20, 10)), faces_at()])
    assert track.detected.tolist() == [False, False, True, False]
    assert centres(track) == [[80, 20]] * 4 and track.width.tolist() == [30] * 4
    assert track_largest([faces_at(), faces_at()]) is None


@pytest.mark.parametrize(
    "candidates,chosen",
    [
        ([(50, 50, 21), (56, 50, 40)], (56, 50)),  # more overlap beats a nearer centre
        ([(50, 88, 30), (86, 50, 30)], (86, 50)),  # no overlap: nearer centre
        ([(89, 50, 40)], (89, 50)),  # within a face width
        ([(91, 50, 40)], None),  # beyond
        ([(50, 50, 19)], None),  # less than half as wide
        ([(50, 50, 81)], None),  # more than twice as wide
    ],
)
def test_the_same_face_is_near_and_of_similar_width(candidates, chosen):
    track = track_largest([faces_at((50, 50, 40)), faces_at(*candidates)])
    assert track.detected[1].item() is (chosen is not None)
    assert centres(track)[1] == list(chosen or (50, 50))


def track_of(*landmarks, detected=None, width=50.0):
    detected = torch.tensor([True] * len(landmarks) if detected is None else detected)
    boxes = torch.tensor([0.0, 0.0, width, width]).expand(len(landmarks), 4)
    return Track(torch.stack(landmarks), detected, boxes)


def landmark_motion(*landmarks, detected=None):
    track = track_of(*landmarks, detected=detected)
    return track.speed, track.nonrigid


FACE = placed(0.5, 0.0, 50, 50)


def test_a_drifting_face_has_only_rigid_motion():
    assert landmark_motion(FACE, FACE, FACE) == (0.0, 0.0)
    speed, nonrigid = landmark_motion(FACE, FACE + torch.tensor([3.0, 4.0]), FACE)
    assert speed == pytest.approx(5 / 50) and nonrigid == pytest.approx(0, abs=1e-6)
    # turning in the plane and coming nearer are rigid too
    speed, nonrigid = landmark_motion(FACE, placed(0.6, 0.3, 52, 50))
    assert speed > 0.02 and nonrigid == pytest.approx(0, abs=1e-6)


def test_an_opening_mouth_is_nonrigid():
    mouth = FACE + torch.tensor([[0.0, 0], [0, 0], [0, 0], [-2, 0], [2, 0]])
    speed, nonrigid = landmark_motion(FACE, mouth)
    fit = SimilarityTransform.from_estimate(FACE.numpy(), mouth.numpy())
    residual = np.linalg.norm(fit(FACE.numpy()) - mouth.numpy(), axis=1).mean() / 50
    assert (speed, nonrigid) == pytest.approx((4 / 5 / 50, residual), rel=1e-4) and residual > 0.01


@pytest.mark.parametrize("detected,speed", [((1, 1, 0), 0), ((1, 0, 1), 0), ((0, 1, 1), 40 / 50)])
def test_motion_counts_consecutive_detections_only(detected, speed):
    assert landmark_motion(FACE, FACE, FACE + torch.tensor([40.0, 0.0]), detected=[bool(d) for d in detected]) == (
        pytest.approx(speed), pytest.approx(0, abs=1e-6)
    )  # fmt: skip


def test_reversals_are_the_cosine_of_a_turn():
    right, up, corner = torch.tensor([2.0, 0.0]), torch.tensor([0.0, -2.0]), torch.zeros(5, 2)
    corner[3] = right[0]
    for second, third, expected in (
        (right, 2 * right, 0),
        (right, 0 * right, 1),
        (right, up, math.cos(math.pi / 4)),
        (corner, 0 * right, 1 / 5),  # a landmark of five
        (0.1 * right, 0 * right, 0),  # less than MIN_STEP of 50 pixels
    ):
        assert step_reversals(track_of(FACE, FACE + second, FACE + third)) == pytest.approx(expected, abs=1e-6)


def test_reversals_need_three_consecutive_detections():
    step = torch.tensor([2.0, 0.0])
    assert step_reversals(track_of(FACE, FACE + step, FACE, FACE, detected=[True, True, False, True])).isnan()
    track = track_of(FACE - step, FACE, FACE + step, FACE, detected=[False, True, True, True])
    assert step_reversals(track) == pytest.approx(1)


def scene(*frames):
    """Return each frame's faces, a function that embeds them and the people's directions: {name: (1, 16)}.

    frames: {name: (centre x, width)} each. Every name has its own direction, and each embedding is near its person's.
    """
    names = sorted({name for frame in frames for name in frame})
    noise = torch.Generator().manual_seed(0)
    directions = torch.linalg.qr(torch.randn(16, 16, generator=noise))[0]
    faces, vectors = [], []
    for frame in frames:
        ordered = sorted(frame.items(), key=lambda item: -item[1][1])
        faces.append(faces_at(*((x, 50, width) for _, (x, width) in ordered)))
        rows = [names.index(name) for name, _ in ordered]
        vectors.append(F.normalize(directions[rows] + 0.15 * torch.randn(len(rows), 16, generator=noise), dim=1))
    return faces, lambda: vectors, {name: directions[[names.index(name)]] for name in names}


@pytest.mark.parametrize("seed", range(6))
def test_a_single_face_is_tracked_by_place(seed):
    """The tracks are track_largest's, without a network, also where the face is lost, jumps away or begins late."""
    steps = torch.randn(12, generator=torch.Generator().manual_seed(seed))
    places = [(x, 40.0) for x in (100 + 25 * steps.cumsum(0)).tolist()]
    faces, _, _ = scene(*({"a": place} if step > -0.8 else {} for place, step in zip(places, steps, strict=True)))
    expected = vars(track_largest(faces)).values()
    for track in follow_known(faces, [torch.zeros(1, 16)], None) + follow_first(faces, [0], None):
        assert all(map(torch.equal, vars(track).values(), expected))


@pytest.mark.parametrize("hidden", [(), (5,), (4, 5, 6)])
def test_people_who_cross_keep_their_tracks(hidden):
    left, right = [20.0 + 10 * j for j in range(11)], [120.0 - 10 * j for j in range(11)]
    faces, embed, people = scene(
        *({"a": (left[j], 42)} | ({} if j in hidden else {"b": (right[j], 40)}) for j in range(11))
    )
    for j in hidden:
        right[j] = right[min(hidden) - 1]  # the last place
    for tracks in (follow_first(faces, [0, 1], embed), follow_known(faces, [people["a"], people["b"]], embed)):
        assert columns(tracks[0]) == left and tracks[0].detected.all()
        assert columns(tracks[1]) == right
        assert tracks[1].detected.tolist() == [j not in hidden for j in range(11)]
    assert columns(follow_first(faces, [1], embed)[0]) == right


def test_a_lost_face_is_found_again_by_identity():
    """It may be far from where it was. A stranger in its place is not taken for it."""
    bystander = {"b": (150.0, 30)}
    frames = [{"a": (30.0, 40)}, {}, {"s": (34.0, 40)}, {"s": (34.0, 40), "a": (100.0, 40)}]
    faces, embed, people = scene(*(frame | bystander for frame in frames))
    for (track,) in (follow_first(faces, [0], embed), follow_known(faces, [people["a"]], embed)):
        assert track.detected.tolist() == [True, False, False, True]
        assert columns(track) == [30, 30, 30, 100]


def test_a_clear_match_is_not_given_to_another_face():
    """b goes as a stranger comes: a stays a, although the stranger is near a, and a near b."""
    faces, embed, _ = scene({"a": (50.0, 40), "b": (75.0, 38)}, {"a": (55.0, 40), "s": (30.0, 38)})
    a, b = follow_first(faces, [0, 1], embed)
    assert columns(a) == [50, 55] and b.detected.tolist() == [True, False]


def test_people_missing_from_the_first_frame_are_taken_later():
    others = [{}, {"s": (90.0, 40)}, {"b": (90.0, 40)}]
    faces, embed, people = scene(*({"a": (30.0 + j, 41)} | others[j] for j in range(3)))
    a, b = follow_known(faces, [people["a"], people["b"]], embed)
    assert columns(a) == [30, 31, 32] and a.detected.all()
    assert columns(b) == [90, 90, 90] and b.detected.tolist() == [False, False, True]
    a, missing = follow_known(faces, [people["a"], -people["a"]], embed)
    assert missing is None and columns(a) == [30, 31, 32]
    assert follow_known([], [people["a"]], embed) == [None] and follow_first([], [0], embed) == []


def test_the_first_frames_faces_are_assigned_one_to_one():
    faces, embed, people = scene({"a": (40.0, 39), "b": (100.0, 40), "c": (160.0, 38)})
    tracks = follow_known(faces, [people[name] for name in "cab"], embed)
    assert [columns(track) for track in tracks] == [[160], [40], [100]]
    # both are most similar to a, the second one more than to b
    both = [people["a"], F.normalize(people["a"] + 0.5 * people["b"])]
    assert [columns(track)[0] for track in follow_known(faces, both, embed)] == [40, 100]
