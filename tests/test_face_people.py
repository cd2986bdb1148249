"""Several people in a clip: who is followed, who is who after they have crossed, and what is scored of them."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from runs import WORLD

from rewardfl import data
from rewardfl.rewards.face import FaceIdentity, Faces, track_largest
from rewardfl.rewards.face.track import Embeddings, follow_first, follow_known

# ---- tracks, of faces that are drawn up ----


def scene(*frames):
    """[{name: (centre x, width)} of each frame] -> its Faces, largest first, and the embeddings, by which they differ.

    Every name has a direction of its own; every detection is a little away from it.
    """
    names = sorted({name for frame in frames for name in frame})
    noise = torch.Generator().manual_seed(0)
    directions = torch.linalg.qr(torch.randn(16, 16, generator=noise))[0]
    faces, vectors, asked = [], {}, []
    for j, frame in enumerate(frames):
        ordered = sorted(frame.items(), key=lambda item: -item[1][1])
        x, width = torch.tensor([place for _, place in ordered]).view(-1, 2).unbind(1)
        boxes = torch.stack([x - width / 2, 50 - width / 2, x + width / 2, 50 + width / 2], 1)
        centre = torch.stack([x, torch.full_like(x, 50)], 1)
        faces.append(Faces(boxes, torch.ones(len(x)), centre[:, None].repeat(1, 5, 1)))
        for row, (name, _) in enumerate(ordered):
            shaken = directions[names.index(name)] + 0.15 * torch.randn(16, generator=noise)
            vectors[j, row] = F.normalize(shaken, dim=0)

    def embed(places):
        asked.extend(places)
        return torch.stack([vectors[place] for place in places])

    return faces, Embeddings(embed), asked, {name: directions[[names.index(name)]] for name in names}


def centres(track):
    return track.landmarks[:, 0, 0].tolist()


def by_definition(frames):
    """The largest face by place alone, written down once more: (landmarks, detected, boxes), frame by frame."""
    kept = []
    for faces in frames:
        rows = range(len(faces.scores))
        if not kept:
            best = 0 if len(rows) else None
        else:
            box = kept[-1][2]
            width = box[2] - box[0]
            distance = [((faces.boxes[i, :2] + faces.boxes[i, 2:] - box[:2] - box[2:]) / 2).norm() for i in rows]
            widths = [faces.boxes[i, 2] - faces.boxes[i, 0] for i in rows]
            near = [i for i in rows if distance[i] <= width and width / 2 <= widths[i] <= 2 * width]
            best = near[0] if near else None
        if best is not None:
            kept.append((faces.landmarks[best], True, faces.boxes[best]))
        elif kept:
            kept.append((kept[-1][0], False, kept[-1][2]))
    first = len(frames) - len(kept)
    return [(kept[0][0], False, kept[0][2])] * first + kept if kept else None


def test_one_face_at_a_time_is_followed_by_place_alone():
    """Bit for bit as ever, and without a network: also where the face is lost, jumps away, or begins late."""
    drawn = torch.Generator().manual_seed(0)
    jumps = 0
    for _ in range(100):
        frames, x, width = [], 100.0, 40.0
        for _ in range(12):
            x += 25 * float(torch.randn((), generator=drawn))
            width *= float(1 + 0.3 * torch.rand((), generator=drawn) - 0.15)
            frames.append({"a": (x, width)} if torch.rand((), generator=drawn) < 0.8 else {})
        faces, embed, asked, _ = scene(*frames)
        expected = by_definition(faces)
        found = [track_largest(faces)] + [(follow_known(faces, [torch.zeros(1, 16)], embed) or [None])[0]]
        found += follow_first(faces, [0], embed) or [None]
        for track in found:
            assert (track is None) == (expected is None)
            if expected is not None:
                for mine, theirs in zip(vars(track).values(), zip(*expected, strict=True), strict=True):
                    assert torch.equal(mine, torch.stack([torch.as_tensor(one) for one in theirs]))
                jumps += sum(len(frame) for frame in frames) > int(track.detected.sum())
        assert asked == []
    assert jumps > 20


def crossing(hidden):
    """a from left to right in front of b, who goes the other way and is not seen in the frames `hidden`."""
    frames = [{"a": (20.0 + 10 * j, 42), "b": (120.0 - 10 * j, 40)} for j in range(11)]
    return [{name: place for name, place in f.items() if name == "a" or j not in hidden} for j, f in enumerate(frames)]


@pytest.mark.parametrize("hidden", [(), (5,), (4, 5, 6)])
def test_people_who_cross_stay_who_they_are(hidden):
    faces, embed, asked, known = scene(*crossing(hidden))
    b_seen = [120.0 - 10 * j for j in range(11)]
    for j in hidden:
        b_seen[j] = b_seen[min(hidden) - 1]  # where she last was
    for tracks in (follow_first(faces, [0, 1], embed), follow_known(faces, [known["a"], known["b"]], embed)):
        assert centres(tracks[0]) == [20.0 + 10 * j for j in range(11)] and tracks[0].detected.all()
        assert centres(tracks[1]) == b_seen
        assert tracks[1].detected.tolist() == [j not in hidden for j in range(11)]
    assert len(set(asked)) == len(asked)  # no detection is embedded twice
    # whoever is asked for, in whatever order
    (alone,) = follow_first(faces, [1], embed)
    assert centres(alone) == b_seen
    swapped = follow_known(faces, [known["b"], known["a"]], embed)
    assert centres(swapped[0]) == b_seen
    # by place alone the one who is hidden goes on as the other
    swaps = [{"a": (20.0 + 10 * j, 40), "b": (120.0 - 10 * j, 42)} for j in range(11)]
    swaps = [{n: p for n, p in f.items() if n == "a" or j not in (5, 6)} for j, f in enumerate(swaps)]
    faces, embed, _, known = scene(*swaps)
    assert centres(track_largest(faces))[-1] == 120
    assert centres(follow_first(faces, [0], embed)[0])[-1] == 20
    assert centres(follow_known(faces, [known["b"]], embed)[0])[-1] == 20


def test_only_faces_in_doubt_are_embedded():
    apart = [{"a": (20.0 + j, 40), "b": (150.0 - j, 38)} for j in range(6)]
    faces, embed, asked, _ = scene(*apart)
    follow_first(faces, [0, 1], embed)
    assert asked == []
    faces, embed, asked, _ = scene(*apart, {"a": (70.0, 40), "b": (90.0, 38)}, {"a": (70.0, 40), "b": (90.0, 38)})
    follow_first(faces, [0, 1], embed)
    assert {j for j, _ in asked} >= {7} and asked


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
    faces, _, _, known = scene(*crossing(()))
    embed = Embeddings(lambda places: torch.full((len(places), 16), torch.nan))
    tracks = follow_known(faces, [known["a"], known["b"]], embed)
    assert all(track.landmarks.isfinite().all() for track in tracks)


# ---- whole clips: two people of the tiny world ----

PATCH = 40  # pixels that a person is wide


@pytest.fixture(scope="module")
def judge():
    return FaceIdentity(WORLD / "faces" / "judge", det_size=256)


def person(index):
    """(3, 9, 64, PATCH): one of the people that nothing was trained on."""
    rows = data.load_metadata(WORLD / "eval" / "metadata.csv")
    margin = (64 - PATCH) // 2
    return data.to_float(data.read_video(rows[index].video))[..., margin:-margin]


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
def test_people_of_the_tiny_world_who_cross_are_kept_apart(judge, front, back):
    """One walks in front of the other, who is hidden for some frames; by place alone the track changes the person."""
    a, b = person(front), person(back)
    alone = [judge.pool(painted((clip, LEFT))).embeddings for clip in (a, b)]
    video = painted((b, TO_THE_LEFT), (a, TO_THE_RIGHT))
    pools = judge.pools(video, everybody=True)
    assert len(pools) == 2 and min(pool.coverage for pool in pools) < 1
    ends = [(pool.boxes[:, 0] + pool.boxes[:, 2])[[0, -1]] / 2 for pool in pools]
    for pool, (first, last) in zip(pools, ends, strict=True):
        mine, other = alone if first < 64 else alone[::-1]
        assert (last > 64) == (first < 64)
        assert likeness(pool.embeddings, mine) > likeness(pool.embeddings, other) + 0.15
    scores = judge.scores(video, [pool.embeddings for pool in pools[::-1]])
    for score, end in zip(scores, ends[::-1], strict=True):
        assert torch.allclose((score.boxes[:, 0] + score.boxes[:, 2])[[0, -1]] / 2, end)
