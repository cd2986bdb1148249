"""The faces of a clip, followed through its frames by place and by likeness, and how one moves."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from rewardfl.rewards.face.align import Faces, similarity_transform

# A real clip that moves less than this many face widths per frame gives no ratio: it would divide by noise.
MIN_MOTION = 1e-4
# A landmark that moves less than this many face widths has no direction: a detector trembles by as much.
MIN_STEP = 0.005
# Mean cosine with a lost face's own embeddings from which a detection may be that face again. It is the threshold that
# OpenCV states for SFace (FaceRecognizerSF's tutorial); ArcFace's two people lie below it, too.
SAME_PERSON = 0.363

Place = tuple[int, int]  # a detection: its frame, and its row among that frame's faces


@dataclass
class Track:
    """One face through F frames; landmarks and box are carried over where it was not detected."""

    landmarks: Tensor  # (F, 5, 2) in frame pixels
    detected: Tensor  # (F,) bool
    boxes: Tensor  # (F, 4) left, top, right, bottom in frame pixels

    @property
    def width(self) -> Tensor:
        """(F,) of the boxes, in pixels."""
        return self.boxes[:, 2] - self.boxes[:, 0]


def track_largest(faces: Sequence[Faces]) -> Track | None:
    """Follow the largest face of the first frame that has one, by place alone; None when no frame has one.

    In each later frame the detection that overlaps the last box most is the same face (nearest centre
    decides when none overlaps), provided its centre lies within one face width and its width within a
    factor of two; a larger stranger is never followed. Frames without such a detection keep the last
    landmarks, those before the first take the first's.
    """
    start = first_frame(faces)
    if start is None:
        return None
    rows: list[int | None] = [None] * start + [0]
    box = faces[start].boxes[0]
    for frame in faces[start + 1 :]:
        match = _same_face(box, frame.boxes)
        rows.append(match)
        if match is not None:
            box = frame.boxes[match]
    return _track(faces, rows)


def first_frame(faces: Sequence[Faces]) -> int | None:
    """The first frame that has a face."""
    return next((j for j, frame in enumerate(faces) if len(frame.scores)), None)


def _track(faces: Sequence[Faces], rows: Sequence[int | None]) -> Track | None:
    """The face that is this row of each frame's detections, None where it is none; None when it is none anywhere."""
    shown = [j for j, row in enumerate(rows) if row is not None]
    if not shown:
        return None
    last, landmarks, boxes = shown[0], [], []
    for j, row in enumerate(rows):
        last = j if row is not None else last
        landmarks.append(faces[last].landmarks[rows[last]])
        boxes.append(faces[last].boxes[rows[last]])
    return Track(torch.stack(landmarks), torch.tensor([row is not None for row in rows]), torch.stack(boxes))


def _same_face(box: Tensor, boxes: Tensor) -> int | None:
    """Row of (n, 4) `boxes` that continues `box`, or None."""
    near, distance = _near(box, boxes)
    size = torch.minimum(boxes[:, 2:], box[2:]) - torch.maximum(boxes[:, :2], box[:2])
    overlap = size.clamp(min=0).prod(-1)
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(-1)
    iou = overlap / (areas + (box[2:] - box[:2]).prod() - overlap)
    candidates = near.nonzero().flatten().tolist()
    return max(candidates, key=lambda i: (iou[i].item(), -distance[i].item()), default=None)


def _near(box: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor]:
    """Which of (n, 4) `boxes` may by their place be the face of `box` a frame later, (n,) bool; their distances."""
    width, widths = box[2] - box[0], boxes[:, 2] - boxes[:, 0]
    distance = ((boxes[:, :2] + boxes[:, 2:]) / 2 - (box[:2] + box[2:]) / 2).norm(dim=-1)
    return (distance <= width) & (widths <= 2 * width) & (width <= 2 * widths), distance


# ---- several faces ----


class Embeddings:
    """The unit embeddings of a clip's detections, each computed once, when it is first asked for; 0 for NaN."""

    def __init__(self, embed: Callable[[Sequence[Place]], Tensor]):
        """embed: n places -> (n, D) on the CPU, without a graph."""
        self._embed = embed
        self._found: dict[Place, Tensor] = {}

    def __call__(self, places: Sequence[Place]) -> Tensor:
        missing = [place for place in dict.fromkeys(places) if place not in self._found]
        if missing:
            self._found |= dict(zip(missing, self._embed(missing).nan_to_num(), strict=True))
        return torch.stack([self._found[place] for place in places])


@dataclass
class _Trail:
    """A face on its way through the frames: its detections so far, and who it is said to be before it has any."""

    places: list[Place] = field(default_factory=list)
    known: Tensor | None = None  # (p, D)

    def mean(self, embeddings: Embeddings) -> Tensor:
        """(D,) whose product with a unit embedding is the mean cosine with the face's own."""
        own = embeddings(self.places) if self.places else self.known
        assert own is not None
        return own.mean(0)


def follow_first(faces: Sequence[Faces], rows: Sequence[int], embed: Embeddings) -> list[Track]:
    """The tracks of these rows of the first frame that has a face: the people of a real clip.

    A face is followed as by `track_largest` where only one detection is near its last place, that is near no other
    face's, and the face was there in the frame before. Elsewhere likeness decides: the mean cosine of a detection with
    the face's own embeddings so far. What is near several faces or near one that has several near it is given out one
    to one, so that the sum of cosines is largest; a face that was lost takes any detection of the frame that nobody
    has, near or far, if their likeness is at least SAME_PERSON. All faces are followed for that, also those that
    nobody asked for, until they are lost. A clip that never shows two faces at a time is `track_largest`'s.
    """
    start = first_frame(faces)
    if start is None:
        return []
    tracks = _follow(faces, start, [_Trail([(start, row)]) for row in rows], embed)
    return [track for track in tracks if track is not None]


def follow_known(faces: Sequence[Faces], known: Sequence[Tensor], embed: Embeddings) -> list[Track | None]:
    """The tracks of known people, of whom each has (p, D) embeddings; None for one who is not found.

    The faces of the first frame that has one are given to the people so that the sum of their mean cosines is largest,
    one each; they are then followed as by `follow_first`. One who is left without a face gets the first one later on
    that nobody has, and whose likeness is at least SAME_PERSON.
    """
    start = first_frame(faces)
    if start is None:
        return [None] * len(known)
    trails = [_Trail(known=one) for one in known]
    rows = range(len(faces[start].scores))
    if len(known) == len(rows) == 1:
        trails[0].places.append((start, 0))
    else:
        cosines = torch.stack([trail.mean(embed) for trail in trails]) @ embed([(start, row) for row in rows]).T
        for person, row in zip(*linear_sum_assignment(cosines.numpy(), maximize=True), strict=True):
            trails[person].places.append((start, int(row)))
    return _follow(faces, start, trails, embed)


def _follow(faces: Sequence[Faces], start: int, people: list[_Trail], embed: Embeddings) -> list[Track | None]:
    """The tracks of these trails, which begin in frame `start` or have not begun."""
    if len(people) == 1 and all(len(frame.scores) <= 1 for frame in faces):
        return [track_largest(faces)]
    strangers = _strangers(start, faces[start], people)
    for j, frame in enumerate(faces[start + 1 :], start + 1):
        trails = people + strangers
        matches = _match(trails, len(people), faces, j, embed)
        for trail, row in zip(trails, matches, strict=True):
            if row is not None:
                trail.places.append((j, row))
        strangers = [trail for trail in strangers if trail.places[-1][0] == j]
        if all(trail.places and trail.places[-1][0] == j for trail in people):
            strangers += _strangers(
                j, frame, trails
            )  # not while one is looked for: a new face may be hers, half hidden
    rows = [dict(trail.places) for trail in people]
    return [_track(faces, [one.get(j) for j in range(len(faces))]) for one in rows]


def _strangers(j: int, frame: Faces, trails: Sequence[_Trail]) -> list[_Trail]:
    """New trails of the faces of frame j that are nobody's."""
    taken = {trail.places[-1] for trail in trails if trail.places}
    return [_Trail([(j, row)]) for row in range(len(frame.scores)) if (j, row) not in taken]


def _match(
    trails: Sequence[_Trail], people: int, faces: Sequence[Faces], j: int, embed: Embeddings
) -> list[int | None]:
    """The row in frame j of each trail, of which the first `people` are asked for; see follow_first."""
    boxes = faces[j].boxes
    matches: list[int | None] = [None] * len(trails)
    if len(boxes) == 0:
        return matches
    near = torch.zeros(len(trails), len(boxes), dtype=torch.bool)
    lost = torch.zeros(len(trails), dtype=torch.bool)
    for t, trail in enumerate(trails):
        lost[t] = not trail.places or trail.places[-1][0] < j - 1
        if trail.places:
            frame, row = trail.places[-1]
            near[t] = _near(faces[frame].boxes[row], boxes)[0]
    plain = (near.sum(1) == 1) & ~lost
    clear = near & plain[:, None] & (near.sum(0) == 1)
    for t, row in clear.nonzero().tolist():
        matches[t] = row
    anywhere = lost & (torch.arange(len(trails)) < people)
    allowed = (near | anywhere[:, None]) & ~clear.any(1)[:, None] & ~clear.any(0)
    who, which = allowed.any(1).nonzero().flatten(), allowed.any(0).nonzero().flatten()
    if len(who) == 0:
        return matches
    means = torch.stack([trails[t].mean(embed) for t in who.tolist()])
    cosines = means @ embed([(j, row) for row in which.tolist()]).T
    allowed = allowed[who][:, which] & ((cosines >= SAME_PERSON) | ~lost[who][:, None])
    # a likeness below 0 is none, and still better than nothing for a face that was there a frame before
    worth = torch.where(allowed, cosines.clamp(min=0) + 1e-3, 0)
    for t, row in zip(*linear_sum_assignment(worth.numpy(), maximize=True), strict=True):
        if allowed[t, row]:
            matches[int(who[t])] = int(which[row])
    return matches


# ---- motion ----


def landmark_motion(track: Track) -> tuple[float, float]:
    """step_motion as numbers; (0.0, 0.0) without two consecutive detections."""
    motion = step_motion(track)
    return (motion[0].item(), motion[1].item()) if motion else (0.0, 0.0)


def step_motion(track: Track) -> tuple[Tensor, Tensor] | None:
    """(speed, nonrigid) per frame step, in face widths, with gradient to the landmarks; both ().

    speed: mean distance that a landmark moves. nonrigid: mean distance left after the best similarity fit of
    one frame's landmarks onto the next one's: blinks, speech and turning, which a frozen face that merely
    drifts does not have. None without two consecutive detections.
    """
    pairs = track.detected[:-1] & track.detected[1:]
    if not pairs.any():
        return None
    before, after, width = track.landmarks[:-1][pairs], track.landmarks[1:][pairs], track.width[:-1][pairs]
    fit = similarity_transform(before, after)
    fitted = before @ fit[:, :, :2].mT + fit[:, None, :, 2]
    speed = (after - before).norm(dim=-1).mean(1) / width
    nonrigid = (after - fitted).norm(dim=-1).mean(1) / width
    return speed.mean(), nonrigid.mean()


def step_reversals(track: Track) -> Tensor | None:
    """() in [0, 1], with gradient: mean of max(0, -cosine) between a landmark's steps into a frame and out of it.

    0 for a landmark that goes on or stands still, 1 for one that goes back and forth in every frame. Steps of less
    than MIN_STEP face widths have no direction and count as 0. None without three consecutive detections.
    """
    threes = track.detected[:-2] & track.detected[1:-1] & track.detected[2:]
    if not threes.any():
        return None
    steps = track.landmarks.diff(dim=0)  # (F - 1, 5, 2)
    into, out, width = steps[:-1][threes], steps[1:][threes], track.width[1:-1][threes]
    directed = (into.norm(dim=-1) >= MIN_STEP * width[:, None]) & (out.norm(dim=-1) >= MIN_STEP * width[:, None])
    back = -F.cosine_similarity(into, out, dim=-1)
    return torch.where(directed, back, 0).clamp(min=0).mean()
