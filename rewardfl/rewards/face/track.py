"""Face tracks through a clip, by position and identity similarity, and their motion."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from rewardfl.rewards.face.align import Faces, similarity_transform

MIN_MOTION = 1e-4  # face widths per frame; a real clip that moves less gives no ratio, which would divide by noise
MIN_STEP = 0.005  # face widths; a landmark that moves less has no direction, since detectors tremble by as much
# Least mean cosine of a detection with a lost face's embeddings: OpenCV's threshold for SFace, which suits ArcFace too.
SAME_PERSON = 0.363

Embeddings = Sequence[Tensor]  # for the n detections of each frame, (n, D), unit, on the CPU, without a graph


@dataclass(frozen=True)
class Track:
    """One face through F frames. A frame without a detection repeats landmarks and box of another frame."""

    landmarks: Tensor  # (F, 5, 2) in frame pixels
    detected: Tensor  # (F,) bool
    boxes: Tensor  # (F, 4) left, top, right, bottom in frame pixels

    @property
    def width(self) -> Tensor:
        """Return the width of the boxes (F,), in pixels."""
        return self.boxes[:, 2] - self.boxes[:, 0]

    @property
    def coverage(self) -> float:
        """Return the share of the frames after the first in which the face was detected."""
        return self.detected[1:].float().mean().item()

    @property
    def speed(self) -> float:
        """Return `step_motion`'s speed; 0.0 without two consecutive detections."""
        return step_motion(self)[0].nan_to_num().item()

    @property
    def nonrigid(self) -> float:
        """Return `step_motion`'s non-rigid motion; 0.0 without two consecutive detections."""
        return step_motion(self)[1].nan_to_num().item()


def track_largest(faces: Sequence[Faces]) -> Track | None:
    """Track the largest face of the first frame that has one, only by position; return None when no frame has one.

    In each later frame, the detection that overlaps the last box most is the same face; the nearest centre decides
    when none overlaps. Its centre must be within one face width and its width within a factor of two. Frames without
    such a detection repeat the last landmarks, those before the first detection take its landmarks.
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
    """Return the index of the first frame that has a face."""
    return next((j for j, frame in enumerate(faces) if len(frame.scores)), None)


def _track(faces: Sequence[Faces], rows: Sequence[int | None]) -> Track | None:
    """Return the track of these rows of the frames' detections, None in a frame without one; None without any."""
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
    """Return the row of (n, 4) `boxes` that continues `box`, or None."""
    near, distance = _near(box, boxes)
    size = torch.minimum(boxes[:, 2:], box[2:]) - torch.maximum(boxes[:, :2], box[:2])
    overlap = size.clamp(min=0).prod(-1)
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(-1)
    iou = overlap / (areas + (box[2:] - box[:2]).prod() - overlap)
    candidates = near.nonzero().flatten().tolist()
    return max(candidates, key=lambda i: (iou[i].item(), -distance[i].item()), default=None)


def _near(box: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor]:
    """Return (n,) bool, whether (n, 4) `boxes` may be the face of `box` a frame later, and their distances."""
    width, widths = box[2] - box[0], boxes[:, 2] - boxes[:, 0]
    distance = ((boxes[:, :2] + boxes[:, 2:]) / 2 - (box[:2] + box[2:]) / 2).norm(dim=-1)
    return (distance <= width) & (widths <= 2 * width) & (width <= 2 * widths), distance


@dataclass
class _Trail:
    """The detections of a face so far, row by frame, and its person's embeddings (p, D), used while `rows` is empty."""

    rows: dict[int, int] = field(default_factory=dict)
    reference: Tensor = field(default_factory=lambda: torch.zeros(1, 1))

    @property
    def last(self) -> int:
        """Return the frame of the last detection, -1 without any."""
        return max(self.rows, default=-1)

    def mean(self, vectors: Embeddings) -> Tensor:
        """Return (D,), whose product with a unit embedding is its mean cosine with the trail's embeddings."""
        seen = [vectors[j][row] for j, row in self.rows.items()]
        return torch.stack(seen).mean(0) if seen else self.reference.mean(0)


def follow_first(faces: Sequence[Faces], rows: Sequence[int], embed: Callable[[], Embeddings]) -> list[Track]:
    """Track these rows of the first frame that has a face: the people of a real clip.

    - A clip without two faces in a frame is tracked by `track_largest`.
    - A face of the frame before takes its only near detection, if that is near no other face.
    - Other near detections are assigned one to one, with the largest sum of mean cosines to the faces' embeddings.
    - A lost face may take any remaining detection with a mean cosine of at least SAME_PERSON.

    The other faces of the clip are tracked too, until they are lost, so that their detections are taken.
    """
    start = first_frame(faces)
    if start is None or not rows:
        return []
    if len(rows) == 1 and _one_at_a_time(faces):
        tracks = [track_largest(faces)]
    else:
        tracks = _follow(faces, start, [_Trail({start: row}) for row in rows], embed())
    return [track for track in tracks if track is not None]


def follow_known(
    faces: Sequence[Faces], references: Sequence[Tensor], embed: Callable[[], Embeddings]
) -> list[Track | None]:
    """Track people with `references`, (p, D) embeddings of each; None for a person who is not found.

    The faces of the first frame that has one are assigned one to one, with the largest sum of mean cosines, and then
    tracked as by `follow_first`. A person without a face there takes the first untaken face with a mean cosine of at
    least SAME_PERSON.
    """
    start = first_frame(faces)
    if start is None:
        return [None] * len(references)
    if len(references) == 1 and _one_at_a_time(faces):
        return [track_largest(faces)]
    vectors = embed()
    trails = [_Trail(reference=reference) for reference in references]
    cosines = torch.stack([trail.mean(vectors) for trail in trails]) @ vectors[start].T
    for person, row in zip(*linear_sum_assignment(cosines.numpy(), maximize=True), strict=True):
        trails[person].rows[start] = int(row)
    return _follow(faces, start, trails, vectors)


def _one_at_a_time(faces: Sequence[Faces]) -> bool:
    return all(len(frame.scores) <= 1 for frame in faces)


def _follow(faces: Sequence[Faces], start: int, people: list[_Trail], vectors: Embeddings) -> list[Track | None]:
    """Return the tracks of these trails, which begin in frame `start` or have not begun."""
    strangers = _strangers(start, faces[start], people)
    for j, frame in enumerate(faces[start + 1 :], start + 1):
        trails = people + strangers
        for trail, row in _match(trails, len(people), faces, j, vectors).items():
            trails[trail].rows[j] = row
        strangers = [trail for trail in strangers if trail.last == j]
        # while a person is missing, a new face may be that person, half hidden
        if all(trail.last == j for trail in people):
            strangers += _strangers(j, frame, trails)
    return [_track(faces, [trail.rows.get(j) for j in range(len(faces))]) for trail in people]


def _strangers(j: int, frame: Faces, trails: Sequence[_Trail]) -> list[_Trail]:
    """Start trails at the faces of frame j that no trail has."""
    taken = {trail.rows.get(j) for trail in trails}
    return [_Trail({j: row}) for row in range(len(frame.scores)) if row not in taken]


def _match(
    trails: Sequence[_Trail], people: int, faces: Sequence[Faces], j: int, vectors: Embeddings
) -> dict[int, int]:
    """Return the row of each trail in frame j; see follow_first. people: number of trails, the first, of people."""
    boxes = faces[j].boxes
    if len(boxes) == 0:
        return {}
    near = torch.zeros(len(trails), len(boxes), dtype=torch.bool)
    for t, trail in enumerate(trails):
        if trail.rows:
            near[t] = _near(faces[trail.last].boxes[trail.rows[trail.last]], boxes)[0]
    lost = torch.tensor([trail.last < j - 1 for trail in trails])
    plain = (near.sum(1) == 1) & ~lost
    clear = near & plain[:, None] & (near.sum(0) == 1)
    matches = dict(clear.nonzero().tolist())
    anywhere = lost & (torch.arange(len(trails)) < people)
    cosines = torch.stack([trail.mean(vectors) for trail in trails]) @ vectors[j].T
    allowed = (near | anywhere[:, None]) & ~clear.any(1)[:, None] & ~clear.any(0)
    allowed &= (cosines >= SAME_PERSON) | ~lost[:, None]
    # a face of the frame before takes a detection with a negative cosine rather than none
    gain = torch.where(allowed, cosines.clamp(min=0) + 1e-3, 0)
    pairs = zip(*linear_sum_assignment(gain.numpy(), maximize=True), strict=True)
    return matches | {int(t): int(row) for t, row in pairs if allowed[t, row]}


def step_motion(track: Track) -> tuple[Tensor, Tensor]:
    """Return (speed, nonrigid) per frame step, in face widths, with gradient to the landmarks; both ().

    speed: mean distance that a landmark moves. nonrigid: mean distance left after the best similarity fit of one
    frame's landmarks onto the next one's: blinks, speech and turning, but not the drift of a frozen face. Both are NaN
    without two consecutive detections.
    """
    pairs = track.detected[:-1] & track.detected[1:]
    before, after, width = track.landmarks[:-1][pairs], track.landmarks[1:][pairs], track.width[:-1][pairs]
    fit = similarity_transform(before, after)
    fitted = before @ fit[:, :, :2].mT + fit[:, None, :, 2]
    speed = (after - before).norm(dim=-1).mean(1) / width
    nonrigid = (after - fitted).norm(dim=-1).mean(1) / width
    return speed.mean(), nonrigid.mean()


def step_reversals(track: Track) -> Tensor:
    """Return the mean of max(0, -cosine) between a landmark's steps into and out of a frame, (), with gradient.

    0 for steady motion or none, 1 for a change of direction in every frame. Steps of less than MIN_STEP face widths
    have no direction and count as 0. NaN without three consecutive detections.
    """
    triples = track.detected[:-2] & track.detected[1:-1] & track.detected[2:]
    steps = track.landmarks.diff(dim=0)  # (F - 1, 5, 2)
    into, out, width = steps[:-1][triples], steps[1:][triples], track.width[1:-1][triples]
    directed = (into.norm(dim=-1) >= MIN_STEP * width[:, None]) & (out.norm(dim=-1) >= MIN_STEP * width[:, None])
    back = -F.cosine_similarity(into, out, dim=-1)
    return torch.where(directed, back, 0).clamp(min=0).mean()
