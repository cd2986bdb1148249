"""Several people in a clip: who is followed, who is who after they have crossed, and what is scored of them."""

import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from runs import WORLD

from rewardfl import data, rewards
from rewardfl.rewards.face import ARCFACE_TEMPLATE, FaceIdentity, Faces, align, similarity_transform, track_largest
from rewardfl.rewards.face.track import Track, follow_first, follow_known

PACK = WORLD / "faces" / "reward"


def scene(*frames):
    """[{name: (centre x, width)} of each frame] -> its Faces, largest first, and the embeddings, by which they differ.

    Every name has a direction of its own; every detection is a little away from it.
    """
    names = sorted({name for frame in frames for name in frame})
    noise = torch.Generator().manual_seed(0)
    directions = torch.linalg.qr(torch.randn(16, 16, generator=noise))[0]
    faces, vectors, asked = [], [], []
    for frame in frames:
        ordered = sorted(frame.items(), key=lambda item: -item[1][1])
        x, width = torch.tensor([place for _, place in ordered]).view(-1, 2).unbind(1)
        boxes = torch.stack([x - width / 2, 50 - width / 2, x + width / 2, 50 + width / 2], 1)
        centre = torch.stack([x, torch.full_like(x, 50)], 1)
        faces.append(Faces(boxes, torch.ones(len(x)), centre[:, None].repeat(1, 5, 1)))
        rows = [names.index(name) for name, _ in ordered]
        vectors.append(F.normalize(directions[rows] + 0.15 * torch.randn(len(rows), 16, generator=noise), dim=1))

    def embed():
        asked.append(True)
        return vectors

    return faces, embed, asked, {name: directions[[names.index(name)]] for name in names}


def centres(track):
    return track.landmarks[:, 0, 0].tolist()


def test_one_face_at_a_time_is_followed_by_place_alone():
    """As track_largest follows it, without a network: also where the face is lost, jumps away, or begins late."""
    drawn = torch.Generator().manual_seed(0)
    jumps = 0
    for _ in range(100):
        frames, x, width = [], 100.0, 40.0
        for _ in range(12):
            x += 25 * float(torch.randn((), generator=drawn))
            width *= float(1 + 0.3 * torch.rand((), generator=drawn) - 0.15)
            frames.append({"a": (x, width)} if torch.rand((), generator=drawn) < 0.8 else {})
        faces, embed, asked, _ = scene(*frames)
        expected = track_largest(faces)
        tracks = [(follow_known(faces, [torch.zeros(1, 16)], embed) or [None])[0]]
        tracks += follow_first(faces, [0], embed) or [None]
        for track in tracks:
            assert (track is None) == (expected is None)
            if expected is not None:
                assert all(map(torch.equal, vars(track).values(), vars(expected).values()))
                jumps += sum(len(frame) for frame in frames) > int(track.detected.sum())
        assert asked == []
    assert jumps > 20


def crossing(hidden):
    frames = [{"a": (20.0 + 10 * j, 42), "b": (120.0 - 10 * j, 40)} for j in range(11)]
    return [{name: place for name, place in f.items() if name == "a" or j not in hidden} for j, f in enumerate(frames)]


@pytest.mark.parametrize("hidden", [(), (5,), (4, 5, 6)])
def test_people_who_cross_stay_who_they_are(hidden):
    faces, embed, _, known = scene(*crossing(hidden))
    b_seen = [120.0 - 10 * j for j in range(11)]
    for j in hidden:
        b_seen[j] = b_seen[min(hidden) - 1]  # where she last was
    for tracks in (follow_first(faces, [0, 1], embed), follow_known(faces, [known["a"], known["b"]], embed)):
        assert centres(tracks[0]) == [20.0 + 10 * j for j in range(11)] and tracks[0].detected.all()
        assert centres(tracks[1]) == b_seen
        assert tracks[1].detected.tolist() == [j not in hidden for j in range(11)]
    # whoever is asked for, in whatever order
    (alone,) = follow_first(faces, [1], embed)
    assert centres(alone) == b_seen
    swapped = follow_known(faces, [known["b"], known["a"]], embed)
    assert centres(swapped[0]) == b_seen


def test_a_face_that_comes_back_is_taken_by_likeness():
    """Far from where it was, if it is alike; and a stranger at the very place is not, while the face is away."""
    gone = {"b": (150.0, 30)}
    frames = [{"a": (30.0, 40), **gone}, gone, {"s": (34.0, 40), **gone}, {"s": (34.0, 40), "a": (100.0, 40), **gone}]
    faces, embed, _, known = scene(*frames)
    for (track,) in (follow_first(faces, [0], embed), follow_known(faces, [known["a"]], embed)):
        assert track.detected.tolist() == [True, False, False, True]
        assert centres(track) == [30, 30, 30, 100]


def test_a_face_is_not_given_away_so_that_everybody_has_one():
    """b goes as a stranger comes: a stays a, although the stranger is near a, and a near b."""
    faces, embed, _, _ = scene({"a": (50.0, 40), "b": (75.0, 38)}, {"a": (55.0, 40), "s": (30.0, 38)})
    a, b = follow_first(faces, [0, 1], embed)
    assert centres(a) == [50, 55] and b.detected.tolist() == [True, False]


def test_people_who_are_not_in_the_first_frame_are_taken_when_they_come():
    others = [{}, {"s": (90.0, 40)}, {"b": (90.0, 40)}]  # a face that is hers only when it is seen well
    faces, embed, _, known = scene(*({"a": (30.0 + j, 41)} | others[j] for j in range(3)))
    a, b = follow_known(faces, [known["a"], known["b"]], embed)
    assert centres(a) == [30, 31, 32] and a.detected.all()
    assert centres(b) == [90, 90, 90] and b.detected.tolist() == [False, False, True]
    nobody = follow_known(faces, [known["a"], -known["a"]], embed)
    assert nobody[1] is None and centres(nobody[0]) == [30, 31, 32]
    assert follow_known(faces[:0], [known["a"]], embed) == [None] and follow_first(faces[:0], [0], embed) == []


def test_the_first_frames_faces_go_to_whom_they_are_most_alike():
    """One to one over all: a face that is the most alike to two people is given to one of them."""
    names = ["a", "b", "c"]
    for order in itertools.permutations(names):
        widths = {name: 40.0 - i for i, name in enumerate(order)}
        faces, embed, _, known = scene({name: (40.0 + 60 * names.index(name), widths[name]) for name in names})
        tracks = follow_known(faces, [known[name] for name in names], embed)
        assert [centres(track) for track in tracks] == [[40], [100], [160]]
    # both like a, the second one more so than b is like b
    both = [known["a"], F.normalize(known["a"] + 0.2 * known["b"])]
    assert [centres(track)[0] for track in follow_known(faces, both, embed)] == [40, 100]


def test_embeddings_that_are_no_numbers_match_nobody():
    pack = FaceIdentity(PACK, det_size=64)
    pack._recognise = lambda crops: torch.full((len(crops), 16), torch.nan)
    faces, _, _, known = scene(*crossing(()))
    embed = partial(pack._embeddings, torch.zeros(len(faces), 3, 64, 64), faces)
    tracks = follow_known(faces, [known["a"], known["b"]], embed)
    assert all(track.landmarks.isfinite().all() for track in tracks)


PATCH = 40  # pixels that a person is wide


@pytest.fixture(scope="module")
def pack():
    """The reward's: the judge's recogniser, which sees the inner face alone, does not know half of a face."""
    return FaceIdentity(PACK, det_size=256)


def whole(index):
    """(3, 9, 64, 64): one of the people that nothing was trained on, with room around her."""
    rows = data.load_metadata(WORLD / "eval" / "metadata.csv")
    frames = data.to_float(data.read_video(rows[index].video)).transpose(0, 1)
    small = F.interpolate(frames, size=(48, 48), mode="bilinear", antialias=True)
    return F.pad(small, (8, 8, 16, 0), mode="replicate").transpose(0, 1)


def person(index):
    """(3, 9, 64, PATCH): the middle of `whole`, to be moved."""
    margin = (64 - PATCH) // 2
    return whole(index)[..., margin:-margin]


def painted(*people, width=128):
    """(3, 9, 64, width): [(clip, left edge in each frame)], later ones in front."""
    canvas = torch.full((3, 9, 64, width), -0.2)
    for clip, left in people:
        for j, x in enumerate(left):
            canvas[:, j, :, x : x + PATCH] = clip[:, j]
    return canvas


LEFT, RIGHT = [4] * 9, [84] * 9
TO_THE_RIGHT = [2, 12, 22, 34, 44, 54, 65, 76, 86]
TO_THE_LEFT = TO_THE_RIGHT[::-1]


def likeness(one, other):
    return (one @ other.mean(0)).mean().item()


@pytest.mark.parametrize("front,back", [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)])
@pytest.mark.slow(5)
def test_people_of_the_tiny_world_who_cross_are_kept_apart(pack, front, back):
    a, b = person(front), person(back)
    alone = [pack.pool(painted((clip, LEFT))).embeddings for clip in (a, b)]
    video = painted((b, TO_THE_LEFT), (a, TO_THE_RIGHT))
    pools = pack.pools(video, everybody=True)
    assert len(pools) == 2 and min(pool.coverage for pool in pools) < 1
    ends = [(pool.boxes[:, 0] + pool.boxes[:, 2])[[0, -1]] / 2 for pool in pools]
    for pool, (first, last) in zip(pools, ends, strict=True):
        mine, other = alone if first < 64 else alone[::-1]
        assert (last > 64) == (first < 64)
        assert likeness(pool.embeddings, mine) > likeness(pool.embeddings, other) + 0.15
    scores = pack.scores(video, [pool.embeddings for pool in pools[::-1]])
    for score, end in zip(scores, ends[::-1], strict=True):
        assert torch.allclose((score.boxes[:, 0] + score.boxes[:, 2])[[0, -1]] / 2, end)


def reward_of(**settings):
    return rewards.build("face_identity", {"pack_dir": PACK, "det_size": 256, "people": "all"} | settings)


@pytest.fixture(scope="module")
def everybody():
    return reward_of()


@pytest.fixture(scope="module")
def two():
    return side_by_side(2, 3)


def side_by_side(left, right):
    return torch.cat([whole(left), whole(right)], -1)


def score(reward, video, real):
    output = reward(video[None], [reward.reference(real)])
    return output, {name: float(part[0]) for name, part in output.parts.items()}


def changed(video, noise=0.15):
    """The clip as a generated one might be, from frame 1 on."""
    other = video + noise * torch.randn(video.shape, generator=torch.Generator().manual_seed(1))
    return torch.cat([video[:, :1], other[:, 1:]], 1).clamp(-1, 1)


def seen_on(side, networks, video):
    """(embeddings (F, D), track) of the one face whose centre is in this half of each frame."""
    embeddings, landmarks, boxes = [], [], []
    for frame, found in zip(video.transpose(0, 1), networks.detector.detect(video.transpose(0, 1)), strict=True):
        (row,) = [i for i, box in enumerate(found.boxes) if ((box[0] + box[2]) / 2 > 64) == side]
        crop = align(frame[None], similarity_transform(found.landmarks[[row]], ARCFACE_TEMPLATE))
        embeddings.append(networks.recogniser(crop)[0].numpy())
        landmarks.append(found.landmarks[row])
        boxes.append(found.boxes[row])
    return np.stack(embeddings), Track(torch.stack(landmarks), torch.ones(len(boxes)).bool(), torch.stack(boxes))


@pytest.mark.slow(2)
def test_the_score_is_the_mean_over_people_each_with_a_cap_of_her_own(everybody, two):
    output, parts = score(everybody, changed(two), two)
    assert set(parts) == {*rewards.face.reward.PARTS, "people", "worst_person", "nonfinite"} and output.valid.all()
    means, caps, speeds, motions = [], [], [], []
    for side in (0, 1):  # frame by frame the face on this side, and cosine by cosine
        real, made = (seen_on(side, everybody.identity, video) for video in (two, changed(two)))
        means.append(np.mean([a @ b for a, b in itertools.product(made[0][1:], real[0][1:])]))
        caps.append(np.mean([a @ b for a, b in itertools.permutations(real[0][1:], 2)]))
        speed, nonrigid = made[1].speed / real[1].speed, made[1].nonrigid / real[1].nonrigid
        speeds.append(speed)
        motions.append(min(speed, nonrigid))
    assert parts["people"] == 2 and abs(means[0] - means[1]) > 0.01
    assert parts["face_score"] == pytest.approx(sum(means) / 2, abs=1e-4)
    assert parts["worst_person"] == pytest.approx(min(means), abs=1e-4)
    assert parts["cap"] == pytest.approx(sum(caps) / 2, abs=1e-4)
    assert output.score.item() == pytest.approx(sum(map(min, means, caps)) / 2, abs=1e-4)
    assert parts["motion_speed"] == pytest.approx(sum(speeds) / 2, rel=1e-3)
    assert parts["motion"] == pytest.approx(sum(motions) / 2, rel=1e-3)
    # one person's cap is no other's: a clip is more alike to its own pools than they are among themselves
    own, parts = score(everybody, two, two)
    assert own.score.item() == pytest.approx(sum(caps) / 2, abs=1e-4) and abs(caps[0] - caps[1]) > 0.01
    assert parts["face_score"] > own.score.item() + 2e-3
    capped = score(reward_of(cap=sum(means) / 2), changed(two), two)[0]
    assert capped.score.item() == pytest.approx((min(means) + sum(means) / 2) / 2, abs=1e-4)


def test_a_clip_of_one_person_is_scored_alike_by_both(everybody):
    alone, largest = painted((person(2), LEFT)), reward_of(people="largest")
    (mine, parts), (theirs, others) = (score(one, changed(alone), alone) for one in (everybody, largest))
    assert torch.equal(mine.score, theirs.score) and parts["people"] == 1
    assert others == {name: parts[name] for name in others} and parts["worst_person"] == parts["face_score"]
    prints = [one.fingerprint() for one in (everybody, largest, reward_of(people="largest", min_face_size=9))]
    assert all(one != other for one, other in itertools.combinations(prints, 2))  # references are cached apart


def test_people_who_exchange_their_faces_are_not_paid(everybody, two):
    exchanged = torch.cat([two[:, :1], side_by_side(3, 2)[:, 1:]], 1)
    assert score(everybody, two, two)[1]["worst_person"] > 0.9
    assert score(everybody, exchanged, two)[1]["face_score"] < 0.4


def test_somebody_who_is_not_there_costs_her_whole_score(everybody, two):
    alone = two.clone()
    alone[..., 64:] = -0.2
    output, parts = score(everybody, alone, two)
    assert output.valid.all() and parts["people"] == 2 and parts["worst_person"] == 0
    # but for the cap
    assert parts["face_score"] == pytest.approx(output.score.item(), abs=0.01) and 0.3 < parts["face_score"] <= 0.5
    assert parts["coverage"] == 0.5 and 0 <= parts["motion"] < 0.8
    # both hide after the first frame: they are looked for where they were
    hidden = torch.cat([two[:, :1], torch.full_like(two[:, 1:], -1.0)], 1).requires_grad_()
    output = everybody(hidden[None], [everybody.reference(two)])
    assert output.valid.all() and output.score.item() < 0.4 and output.parts["coverage"].item() == 0
    (gradient,) = torch.autograd.grad(output.score.sum(), hidden)
    assert gradient[:, 1:].isfinite().all() and gradient[..., :64].any() and gradient[..., 64:].any()


def test_real_clips_at_the_edge_of_what_can_be_judged(everybody, two):
    assert everybody.reference(torch.full_like(two, -0.2)) is None
    assert everybody.reference(torch.full_like(two, -1.0)) is None
    border = two.roll(-14, -1)  # the left one is half outside
    assert score(everybody, changed(border), border)[0].score.isfinite().all()
    picture = everybody.reference(two[:, :1].repeat(1, 2, 1, 1))
    assert picture["owner"].tolist() == [0, 1] and picture["cap"].tolist() == [1, 1]
    output = everybody(changed(two)[None], [picture])
    assert output.valid.all() and output.score.isfinite().all() and output.parts["motion"].isnan().all()


def test_small_faces_of_the_real_clip_are_nobodys(two):
    plain = reward_of().reference(two)
    wide, narrow = sorted(float(boxes[0, 2] - boxes[0, 0]) for boxes in plain["boxes"])[::-1]
    one, none = reward_of(min_face_size=(wide + narrow) / 2), reward_of(min_face_size=wide + 0.1)
    assert torch.equal(one.reference(two)["boxes"], plain["boxes"][:1])
    assert none.reference(two) is None and "min_face_size" in none.nothing_found
    smaller = F.interpolate(two.transpose(0, 1), scale_factor=0.75, mode="bilinear").transpose(0, 1)
    output = one(smaller[None], [one.reference(two)])
    assert output.valid.all() and output.parts["coverage"].item() == 1


def directional(reward, video, reference, h):
    """(derivative of the score along a direction by autograd, the central difference)."""
    video = video.clone().requires_grad_()
    direction = F.interpolate(torch.randn(9, 3, 8, 16, generator=torch.Generator().manual_seed(3)), (64, 128))
    direction = direction.transpose(0, 1)
    (gradient,) = torch.autograd.grad(reward(video[None], [reference]).score.sum(), video)
    sides = []
    for sign in (1, -1):
        moved = (video.detach() + sign * h * direction).requires_grad_()
        sides.append(reward(moved[None], [reference]).score.item())
    return (gradient * direction).sum().item(), (sides[0] - sides[1]) / (2 * h)


@pytest.mark.parametrize("settings", [{}, {"second_pack_dir": WORLD / "faces" / "judge"}])
@pytest.mark.slow(5)
def test_gradients_are_those_of_finite_differences(monkeypatch, two, settings):
    """Of two people, with detection held still, which has no gradient."""
    reward = reward_of(cap="none", **settings)
    reference, video = reward.reference(two), changed(two, 0.1)
    found = reward.identity.detector.detect(video.transpose(0, 1))
    monkeypatch.setattr(reward.identity.detector, "detect", lambda frames: found)
    mine, difference = directional(reward, video, reference, 1e-3)
    assert abs(mine) > 1e-3 and mine == pytest.approx(difference, rel=0.03)


@pytest.mark.slow(5)
def test_two_recognisers_give_the_mean_of_their_cosines(two):
    first, second = FaceIdentity(PACK, 256), FaceIdentity(WORLD / "faces" / "judge", 256)
    second.detector = first.detector  # detector and landmarks are the first pack's
    both = FaceIdentity(PACK, 256, second_pack_dir=WORLD / "faces" / "judge")
    generated, pools = changed(two), both.pools(two, everybody=True)
    apart = [one.pools(two, everybody=True) for one in (first, second)]
    for k, score in enumerate(both.scores(generated, [pool.embeddings for pool in pools])):
        assert pools[k].embeddings.norm(dim=1).sub(1).abs().max() < 1e-5
        assert pools[k].cap == pytest.approx(sum(one[k].cap for one in apart) / 2, abs=1e-5)
        of_each = [
            one.scores(generated, [pool.embeddings for pool in own])[k].per_frame
            for one, own in zip((first, second), apart, strict=True)
        ]
        torch.testing.assert_close(score.per_frame, (of_each[0] + of_each[1]) / 2, rtol=0, atol=1e-5)
        assert (of_each[0] - of_each[1]).abs().max() > 0.01


def test_settings_that_mean_nothing_are_refused():
    for key, value in (("people", "both"), ("cap", 1.5), ("min_face_size", math.nan)):
        with pytest.raises(ValueError, match=f"^settings.{key} must be .* got"):
            reward_of(**{key: value})
