"""Face tracks through a clip, by position and identity similarity, and their motion."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from rewardfl.rewards.face.align import Faces, similarity_transform

# A real clip that moves less than this many face widths per frame gives no ratio: it would divide by noise.
MIN_MOTION = 1e-4
# A landmark that moves less than this many face widths has no direction: detectors tremble by as much.
MIN_STEP = 0.005
# A detection may be a lost face if its mean cosine with that face's embeddings is at least this. OpenCV's tutorial has
# it for SFace (FaceRecognizerSF); different people are below it with ArcFace, too.
SAME_PERSON = 0.363

Detection = tuple[int, int]  # its frame, and its row among that frame's faces


@dataclass
class Track:
    """One face through F frames. A frame without a detection repeats landmarks and box of another frame."""

    landmarks: Tensor  # (F, 5, 2) in frame pixels
    detected: Tensor  # (F,) bool
    boxes: Tensor  # (F, 4) left, top, right, bottom in frame pixels

    @property
    def width(self) -> Tensor:
        """Return the width of the boxes (F,), in pixels."""
        return self.boxes[:, 2] - self.boxes[:, 0]


def track_largest(faces: Sequence[Faces]) -> Track | None:
    """Track the largest face of the first frame that has one, by position alone; return None when no frame has one.

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


class Embeddings:
    """Computes the unit embeddings of a clip's detections, each once; 0 for NaN.

    embed: n detections -> (n, D) on the CPU, without a graph.
    """

    def __init__(self, embed: Callable[[Sequence[Detection]], Tensor]):
        self._embed = embed
        self._cache: dict[Detection, Tensor] = {}

    def __call__(self, detections: Sequence[Detection]) -> Tensor:
        missing = [detection for detection in dict.fromkeys(detections) if detection not in self._cache]
        if missing:
            self._cache |= dict(zip(missing, self._embed(missing).nan_to_num(), strict=True))
        return torch.stack([self._cache[detection] for detection in detections])


@dataclass
class _Trail:
    """The detections of a face so far, and the embeddings of its person until it has any."""

    detections: list[Detection] = field(default_factory=list)
    reference: Tensor | None = None  # (p, D)

    def mean(self, embeddings: Embeddings) -> Tensor:
        """Return (D,), whose product with a unit embedding is its mean cosine with the trail's embeddings."""
        vectors = embeddings(self.detections) if self.detections else self.reference
        assert vectors is not None
        return vectors.mean(0)


def follow_first(faces: Sequence[Faces], rows: Sequence[int], embed: Embeddings) -> list[Track]:
    """Track these rows of the first frame that has a face: the people of a real clip.

    - A clip without two faces in a frame is tracked by `track_largest`.
    - A face of the frame before takes its only near detection, if that is near no other face.
    - Other near detections are assigned one to one, with the largest sum of mean cosines to the faces' embeddings.
    - A lost face may take any remaining detection with a mean cosine of at least SAME_PERSON.

    The other faces of the clip are tracked too, until they are lost, so that their detections are taken.
    """
    start = first_frame(faces)
    if start is None:
        return []
    tracks = _follow(faces, start, [_Trail([(start, row)]) for row in rows], embed)
    return [track for track in tracks if track is not None]


def follow_known(faces: Sequence[Faces], references: Sequence[Tensor], embed: Embeddings) -> list[Track | None]:
    """Track people with `references`, (p, D) embeddings of each; None for a person who is not found.

    The faces of the first frame that has one are assigned one to one, with the largest sum of mean cosines, and then
    tracked as by `follow_first`. A person without a face there takes the first untaken face with a mean cosine of at
    least SAME_PERSON.
    """
    start = first_frame(faces)
    if start is None:
        return [None] * len(references)
    trails = [_Trail(reference=reference) for reference in references]
    rows = range(len(faces[start].scores))
    if len(references) == len(rows) == 1:
        trails[0].detections.append((start, 0))
    else:
        cosines = torch.stack([trail.mean(embed) for trail in trails]) @ embed([(start, row) for row in rows]).T
        for person, row in zip(*linear_sum_assignment(cosines.numpy(), maximize=True), strict=True):
            trails[person].detections.append((start, int(row)))
    return _follow(faces, start, trails, embed)


def _follow(faces: Sequence[Faces], start: int, people: list[_Trail], embed: Embeddings) -> list[Track | None]:
    """Return the tracks of these trails, which begin in frame `start` or have not begun."""
    if len(people) == 1 and all(len(frame.scores) <= 1 for frame in faces):
        return [track_largest(faces)]
    strangers = _strangers(start, faces[start], people)
    for j, frame in enumerate(faces[start + 1 :], start + 1):
        trails = people + strangers
        matches = _match(trails, len(people), faces, j, embed)
        for trail, row in zip(trails, matches, strict=True):
            if row is not None:
                trail.detections.append((j, row))
        strangers = [trail for trail in strangers if trail.detections[-1][0] == j]
        # while a person is missing, a new face may be that person, half hidden
        if all(trail.detections and trail.detections[-1][0] == j for trail in people):
            strangers += _strangers(j, frame, trails)
    rows = [dict(trail.detections) for trail in people]
    return [_track(faces, [row_by_frame.get(j) for j in range(len(faces))]) for row_by_frame in rows]


def _strangers(j: int, frame: Faces, trails: Sequence[_Trail]) -> list[_Trail]:
    """Start trails at the faces of frame j that no trail has."""
    taken = {trail.detections[-1] for trail in trails if trail.detections}
    return [_Trail([(j, row)]) for row in range(len(frame.scores)) if (j, row) not in taken]


def _match(
    trails: Sequence[_Trail], people: int, faces: Sequence[Faces], j: int, embed: Embeddings
) -> list[int | None]:
    """Return the row of each trail in frame j; see follow_first. people: number of trails, the first, of people."""
    boxes = faces[j].boxes
    matches: list[int | None] = [None] * len(trails)
    if len(boxes) == 0:
        return matches
    near = torch.zeros(len(trails), len(boxes), dtype=torch.bool)
    lost = torch.zeros(len(trails), dtype=torch.bool)
    for t, trail in enumerate(trails):
        lost[t] = not trail.detections or trail.detections[-1][0] < j - 1
        if trail.detections:
            frame, row = trail.detections[-1]
            near[t] = _near(faces[frame].boxes[row], boxes)[0]
    plain = (near.sum(1) == 1) & ~lost
    clear = near & plain[:, None] & (near.sum(0) == 1)
    for t, row in clear.nonzero().tolist():
        matches[t] = row
    anywhere = lost & (torch.arange(len(trails)) < people)
    allowed = (near | anywhere[:, None]) & ~clear.any(1)[:, None] & ~clear.any(0)
    open_trails, open_rows = allowed.any(1).nonzero().flatten(), allowed.any(0).nonzero().flatten()
    if len(open_trails) == 0:
        return matches
    means = torch.stack([trails[t].mean(embed) for t in open_trails.tolist()])
    cosines = means @ embed([(j, row) for row in open_rows.tolist()]).T
    allowed = allowed[open_trails][:, open_rows] & ((cosines >= SAME_PERSON) | ~lost[open_trails][:, None])
    # a face of the frame before takes a detection with a negative cosine rather than none
    gain = torch.where(allowed, cosines.clamp(min=0) + 1e-3, 0)
    for t, row in zip(*linear_sum_assignment(gain.numpy(), maximize=True), strict=True):
        if allowed[t, row]:
            matches[int(open_trails[t])] = int(open_rows[row])
    return matches


def landmark_motion(track: Track) -> tuple[float, float]:
    """Return `step_motion` as numbers; (0.0, 0.0) without two consecutive detections."""
    motion = step_motion(track)
    return (motion[0].item(), motion[1].item()) if motion else (0.0, 0.0)


def step_motion(track: Track) -> tuple[Tensor, Tensor] | None:
    """Return (speed, nonrigid) per frame step, in face widths, with gradient to the landmarks; both ().

    speed: mean distance that a landmark moves. nonrigid: mean distance left after the best similarity fit of one
    frame's landmarks onto the next one's: blinks, speech and turning, but not the drift of a frozen face. None without
    two consecutive detections.
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
    """Return the mean of max(0, -cosine) between a landmark's steps into and out of a frame, (), with gradient.

    0 for steady motion or none, 1 for a change of direction in every frame. Steps of less than MIN_STEP face widths
    have no direction and count as 0. None without three consecutive detections.
    """
    triples = track.detected[:-2] & track.detected[1:-1] & track.detected[2:]
    if not triples.any():
        return None
    steps = track.landmarks.diff(dim=0)  # (F - 1, 5, 2)
    into, out, width = steps[:-1][triples], steps[1:][triples], track.width[1:-1][triples]
    directed = (into.norm(dim=-1) >= MIN_STEP * width[:, None]) & (out.norm(dim=-1) >= MIN_STEP * width[:, None])
    back = -F.cosine_similarity(into, out, dim=-1)
    return torch.where(directed, back, 0).clamp(min=0).mean()
