"""Who is in a video: detect (no gradient) -> track -> align (gradient) -> embed (gradient) -> score.

Template, normalisation, decoding and suppression are insightface's, so that scores compare with those published for
its packs; tests/test_face.py holds every stage against insightface itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from rewardfl.rewards.face.align import (
    ARCFACE_TEMPLATE,
    Faces,
    align,
    align_each,
    frames_of,
    similarity_transform,
)
from rewardfl.rewards.face.detect import FaceDetector
from rewardfl.rewards.face.embed import FaceRecogniser
from rewardfl.rewards.face.pack import pack_files
from rewardfl.rewards.face.track import (
    Embeddings,
    Place,
    Track,
    first_frame,
    follow_first,
    follow_known,
    landmark_motion,
)


@dataclass
class FacePool:
    """What is kept of a real clip: who it shows, how alike she is to herself, how much she moves."""

    embeddings: Tensor  # (P, D) unit float32, of the tracked face in every frame but the first
    cap: float  # mean cosine between two different embeddings of the pool; 1.0 for a pool of one
    speed: float  # landmark_motion
    nonrigid: float
    coverage: float  # share of the frames after the first in which the face was detected
    boxes: Tensor  # (F, 4) where the face was tracked, in frame pixels


@dataclass
class FaceScore:
    """How much a generated clip shows the person of a pool."""

    per_frame: Tensor  # (F - 1,) mean cosine with the pool of frames 1 .. F - 1, in [-1, 1], with gradient
    mean: Tensor  # () of per_frame, with gradient
    detected: Tensor  # (F,) bool
    speed: float  # landmark_motion
    nonrigid: float
    coverage: float  # share of frames 1 .. F - 1 in which the face was detected
    boxes: Tensor  # (F, 4) where the face was tracked, in frame pixels


class FaceIdentity(nn.Module):
    """Detector and recogniser of one insightface-style pack, frozen; scores videos (3, F, H, W) in [-1, 1].

    `pack_dir` is what face_pack.pack_files takes; `files` are the detector's and the recogniser's that it found.
    Everything is computed in float32, also under autocast; the detector sees no gradient. Frame 0 of a clip is
    the given image: it starts the tracks and is neither pooled nor scored. Whose face is whose later on: track.py.
    """

    def __init__(self, pack_dir: str | Path, det_size: int = 640, chunk: int = 8):
        super().__init__()
        self.files = pack_files(pack_dir)
        self.detector = FaceDetector(self.files[0], det_size)
        self.recogniser = FaceRecogniser(self.files[1], chunk)

    def pool(self, video: Tensor) -> FacePool | None:
        """The pool of the largest face of a real clip's first frame with one; None when no later one shows it."""
        return next(iter(self.pools(video)), None)

    @torch.no_grad()
    def pools(self, video: Tensor, everybody: bool = False, least: float = 0.0) -> list[FacePool]:
        """The pools of the people of a real clip, largest face first; none of one whom no later frame shows.

        They are the largest face of the first frame that has one, or all of its faces (`everybody`), whose box there
        is at least `least` pixels wide.
        """
        with torch.autocast(video.device.type, enabled=False):
            frames = frames_of(video)
            faces = self.detector.detect(frames)
            start = first_frame(faces)
            if start is None:
                return []
            widths = faces[start].boxes[:, 2] - faces[start].boxes[:, 0]
            rows = (widths >= least).nonzero().flatten().tolist()
            rows = rows if everybody else [row for row in rows if row == 0]
            tracks = follow_first(faces, rows, self._embeddings(frames, faces))
            return [self._pool(frames, track) for track in tracks if track.detected[1:].any()]

    def _pool(self, frames: Tensor, track: Track) -> FacePool:
        shown = track.detected.nonzero().flatten()
        shown = shown[shown > 0]
        embeddings = self._embed(frames[shown.to(frames.device)], track.landmarks[shown])
        speed, nonrigid = landmark_motion(track)
        return FacePool(embeddings, self_similarity(embeddings), speed, nonrigid, _coverage(track), track.boxes)

    def score(self, video: Tensor, pool: Tensor) -> FaceScore | None:
        """`scores` of one person."""
        return self.scores(video, [pool])[0]

    def scores(self, video: Tensor, pools: Sequence[Tensor]) -> list[FaceScore | None]:
        """The scores of the people of a generated clip, differentiable to the video; None for one who is not found.

        pools: the embeddings of a FacePool each. Where the detector loses a face, it is looked for at its last
        landmarks: hiding it costs score.
        """
        with torch.autocast(video.device.type, enabled=False):
            frames = frames_of(video)
            faces = self.detector.detect(frames)
            known = [pool.float().cpu() for pool in pools]
            tracks = follow_known(faces, known, self._embeddings(frames, faces))
            found = [track for track in tracks if track is not None]
            if not found:
                return [None] * len(pools)
            matrices = [similarity_transform(track.landmarks[1:], ARCFACE_TEMPLATE) for track in found]
            crops = align_each(frames[1:], torch.stack(matrices))
            embeddings = iter(self.recogniser(crops).split(len(frames) - 1))
            return [
                None if track is None else _score(next(embeddings), pool, track)
                for track, pool in zip(tracks, pools, strict=True)
            ]

    def _embeddings(self, frames: Tensor, faces: Sequence[Faces]) -> Embeddings:
        """Of what was detected in the frames, by which faces are told apart: without a gradient."""

        @torch.no_grad()
        def embed(places: Sequence[Place]) -> Tensor:
            found = []
            for i in range(0, len(places), self.recogniser.chunk):  # a chunk's frames are copied
                part = places[i : i + self.recogniser.chunk]
                landmarks = torch.stack([faces[j].landmarks[row] for j, row in part])
                found.append(self._embed(frames[[j for j, _ in part]], landmarks).cpu())
            return torch.cat(found)

        return Embeddings(embed)

    def _embed(self, frames: Tensor, landmarks: Tensor) -> Tensor:
        return self.recogniser(align(frames, similarity_transform(landmarks, ARCFACE_TEMPLATE)))


def _score(embeddings: Tensor, pool: Tensor, track: Track) -> FaceScore:
    # all are unit vectors, so the mean of the cosines is the product with the mean embedding
    per_frame = embeddings @ pool.to(embeddings).mean(0)
    speed, nonrigid = landmark_motion(track)
    return FaceScore(per_frame, per_frame.mean(), track.detected, speed, nonrigid, _coverage(track), track.boxes)


def _coverage(track: Track) -> float:
    return track.detected[1:].float().mean().item()


def self_similarity(embeddings: Tensor) -> float:
    """Mean cosine between two different rows of (P, D) unit embeddings; 1.0 when P is 1."""
    count = len(embeddings)
    if count == 1:
        return 1.0
    cosines = embeddings @ embeddings.T
    return ((cosines.sum() - cosines.trace()) / (count * (count - 1))).item()
