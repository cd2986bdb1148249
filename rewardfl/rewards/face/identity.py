"""Who is in a video: detect (no gradient) -> track -> align (gradient) -> embed (gradient) -> score.

Template, normalisation, decoding and suppression are insightface's, so that scores compare with those published for
its packs; tests/rewards/face/test_detect.py holds every stage against insightface itself.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from rewardfl.rewards.face.align import ARCFACE_TEMPLATE, Faces, align, align_each, frames_of, similarity_transform
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
from rewardfl.rewards.face.vary import vary_crops
from rewardfl.rewards.face.view import seed_of


@dataclass
class FacePool:
    """What is kept of a real clip: who it shows, how alike she is to herself, how much she moves."""

    embeddings: Tensor  # (P, D) unit float32, of the tracked face in every frame but the first
    cap: float  # mean cosine between two different embeddings of the pool; 1.0 for a pool of one
    speed: float  # landmark_motion
    nonrigid: float
    coverage: float  # share of the frames after the first in which the face was detected
    boxes: Tensor  # (F, 4) where the face was tracked, in frame pixels
    landmarks: Tensor  # (F, 5, 2) of the tracked face, in frame pixels


@dataclass
class FaceScore:
    """How much a generated clip shows the person of a pool."""

    per_frame: Tensor  # (F - 1,) mean cosine with the pool of frames 1 .. F - 1, in [-1, 1], with gradient
    mean: Tensor  # () of per_frame, with gradient
    paid: Tensor  # () the mean over that and the varied views, with gradient
    embedding: Tensor  # (D,) mean of the unit embeddings of frames 1 .. F - 1, with gradient
    detected: Tensor  # (F,) bool
    speed: float  # landmark_motion
    nonrigid: float
    coverage: float  # share of frames 1 .. F - 1 in which the face was detected
    boxes: Tensor  # (F, 4) where the face was tracked, in frame pixels
    landmarks: Tensor  # (F, 5, 2) of the tracked face, in frame pixels


class FaceIdentity(nn.Module):
    """Detector and recogniser of one insightface-style pack, frozen; scores videos (3, F, H, W) in [-1, 1].

    `pack_dir` is what face_pack.pack_files takes; `files` are the detector's and the recogniser's that it found. With
    `second_pack_dir` each cosine is the mean of two, by the recognisers of both packs on the same crops.
    Everything is computed in float32, also under autocast; the detector sees no gradient. Frame 0 of a clip is
    the given image: it starts the tracks and is neither pooled nor scored. Whose face is whose later on: track.py.
    """

    def __init__(
        self, pack_dir: str | Path, det_size: int = 640, chunk: int = 8, second_pack_dir: str | Path | None = None
    ):
        super().__init__()
        self.files = pack_files(pack_dir)
        self.detector = FaceDetector(self.files[0], det_size)
        self.recogniser = FaceRecogniser(self.files[1], chunk)
        self.second_file = None if second_pack_dir is None else pack_files(second_pack_dir)[1]
        self.second = None if self.second_file is None else FaceRecogniser(self.second_file, chunk)

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
        cap, coverage = self_similarity(embeddings), _coverage(track)
        return FacePool(embeddings, cap, speed, nonrigid, coverage, track.boxes, track.landmarks)

    def score(self, video: Tensor, pool: Tensor) -> FaceScore | None:
        """`scores` of one person."""
        return self.scores(video, [pool])[0]

    def scores(
        self, video: Tensor, pools: Sequence[Tensor], jitter: float = 0.0, views: int = 0
    ) -> list[FaceScore | None]:
        """The scores of the people of a generated clip, differentiable to the video; None for one who is not found.

        pools: the embeddings of a FacePool each. Where the detector loses a face, it is looked for at its last
        landmarks: hiding it costs score. jitter: landmarks by which faces are cut out are moved by normal noise of this
        deviation, in widths of their boxes, drawn from the clip itself. views: how many varied crops are recognised
        next to each crop (vary.py).
        """
        with torch.autocast(video.device.type, enabled=False):
            frames = frames_of(video)
            faces = self.detector.detect(frames)
            known = [pool.float().cpu() for pool in pools]
            tracks = follow_known(faces, known, self._embeddings(frames, faces))
            tracked = [track for track in tracks if track is not None]
            if not tracked:
                return [None] * len(pools)
            landmarks = torch.stack([track.landmarks[1:] for track in tracked])  # (people, F - 1, 5, 2)
            if jitter > 0:
                widths = torch.stack([track.width[1:] for track in tracked])[..., None, None]
                drawn = torch.Generator().manual_seed(seed_of(video, "landmarks"))
                landmarks = landmarks + jitter * widths * torch.randn(landmarks.shape, generator=drawn)
            matrices = similarity_transform(landmarks.flatten(0, 1), ARCFACE_TEMPLATE)
            crops = align_each(frames[1:], matrices.unflatten(0, landmarks.shape[:2]))
            if views > 0:
                drawn = torch.Generator().manual_seed(seed_of(video, "views"))
                crops = torch.cat([crops, *(vary_crops(crops, drawn) for _ in range(views))])
            embeddings = iter(self._recognise(crops).unflatten(0, (1 + views, len(tracked), -1)).unbind(1))
            return [
                None if track is None else _score(next(embeddings), pool, track)
                for track, pool in zip(tracks, pools, strict=True)
            ]

    def _embeddings(self, frames: Tensor, faces: Sequence[Faces]) -> Embeddings:
        """The embeddings of what was detected in the frames, by which faces are told apart: without a gradient."""

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
        return self._recognise(align(frames, similarity_transform(landmarks, ARCFACE_TEMPLATE)))

    def _recognise(self, crops: Tensor) -> Tensor:
        """(N, D) unit embeddings of crops; of two recognisers side by side, so that a product is their mean cosine."""
        first = self.recogniser(crops)
        return first if self.second is None else torch.cat([first, self.second(crops)], 1) / math.sqrt(2)


def _score(embeddings: Tensor, pool: Tensor, track: Track) -> FaceScore:
    """Return the score of one person. embeddings: (1 + views, F - 1, D), those of the crops as they are first."""
    # all are unit vectors, so the mean of the cosines is the product with the mean embedding
    cosines = embeddings @ pool.to(embeddings).mean(0)
    speed, nonrigid = landmark_motion(track)
    means = (cosines[0].mean(), cosines.mean(), embeddings[0].mean(0))
    places = (_coverage(track), track.boxes, track.landmarks)
    return FaceScore(cosines[0], *means, track.detected, speed, nonrigid, *places)


def _coverage(track: Track) -> float:
    return track.detected[1:].float().mean().item()


def self_similarity(embeddings: Tensor) -> float:
    """Mean cosine between two different rows of (P, D) unit embeddings; 1.0 when P is 1."""
    count = len(embeddings)
    if count == 1:
        return 1.0
    cosines = embeddings @ embeddings.T
    return ((cosines.sum() - cosines.trace()) / (count * (count - 1))).item()
