"""Who is in a video: detect (no gradient) -> track -> align (gradient) -> embed (gradient) -> score.

Template, normalisation, decoding and suppression are insightface's, so that scores compare with those published for
its packs; tests/test_face.py holds every stage against insightface itself.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from rewardfl.rewards.face.align import ARCFACE_TEMPLATE, align, frames_of, similarity_transform
from rewardfl.rewards.face.detect import FaceDetector
from rewardfl.rewards.face.embed import FaceRecogniser
from rewardfl.rewards.face.pack import pack_files
from rewardfl.rewards.face.track import Track, landmark_motion, track_largest


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
    the given image: it starts the track and is neither pooled nor scored.
    """

    def __init__(self, pack_dir: str | Path, det_size: int = 640, chunk: int = 8):
        super().__init__()
        self.files = pack_files(pack_dir)
        self.detector = FaceDetector(self.files[0], det_size)
        self.recogniser = FaceRecogniser(self.files[1], chunk)

    @torch.no_grad()
    def pool(self, video: Tensor) -> FacePool | None:
        """The pool of a real clip; None when no frame after the first shows the face."""
        with torch.autocast(video.device.type, enabled=False):
            frames = frames_of(video)
            track = track_largest(self.detector.detect(frames))
            if track is None or not track.detected[1:].any():
                return None
            shown = track.detected.nonzero().flatten()
            shown = shown[shown > 0]
            embeddings = self._embed(frames[shown.to(frames.device)], track.landmarks[shown])
            speed, nonrigid = landmark_motion(track)
            return FacePool(embeddings, self_similarity(embeddings), speed, nonrigid, _coverage(track), track.boxes)

    def score(self, video: Tensor, pool: Tensor) -> FaceScore | None:
        """The score of a generated clip, differentiable to the video; None when no frame shows a face.

        pool: a FacePool's embeddings. Where the detector finds nothing, the face is looked for at its last landmarks:
        hiding it costs score.
        """
        with torch.autocast(video.device.type, enabled=False):
            frames = frames_of(video)
            track = track_largest(self.detector.detect(frames))
            if track is None:
                return None
            embeddings = self._embed(frames[1:], track.landmarks[1:])
            # all are unit vectors, so the mean of the cosines is the product with the mean embedding
            per_frame = embeddings @ pool.to(embeddings).mean(0)
            speed, nonrigid = landmark_motion(track)
            coverage = _coverage(track)
            return FaceScore(per_frame, per_frame.mean(), track.detected, speed, nonrigid, coverage, track.boxes)

    def _embed(self, frames: Tensor, landmarks: Tensor) -> Tensor:
        return self.recogniser(align(frames, similarity_transform(landmarks, ARCFACE_TEMPLATE)))


def _coverage(track: Track) -> float:
    return track.detected[1:].float().mean().item()


def self_similarity(embeddings: Tensor) -> float:
    """Mean cosine between two different rows of (P, D) unit embeddings; 1.0 when P is 1."""
    count = len(embeddings)
    if count == 1:
        return 1.0
    cosines = embeddings @ embeddings.T
    return ((cosines.sum() - cosines.trace()) / (count * (count - 1))).item()
