"""The people of a video: detect (no gradient) -> track -> align (gradient) -> embed (gradient) -> score.

Template, normalisation, decoding and suppression are insightface's, so that scores compare with published ones.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rewardfl.rewards.face.align import ARCFACE_TEMPLATE, CROP_SIZE, Faces, align, similarity_transform
from rewardfl.rewards.face.detect import FaceDetector
from rewardfl.rewards.face.onnx_module import OnnxModule
from rewardfl.rewards.face.pack import is_sface, pack_files
from rewardfl.rewards.face.track import SAME_PERSON, Embeddings, Track, first_frame, follow_first, follow_known


@dataclass(frozen=True, kw_only=True)
class FacePool(Track):
    """The track of a person in a real clip, with identity pool and self-similarity."""

    embeddings: Tensor  # (P, D) unit float32, of the tracked face in every frame but the first
    cap: float  # mean cosine between two different embeddings of the pool; 1.0 for a pool of one


@dataclass(frozen=True, kw_only=True)
class FaceScore(Track):
    """The track of a person in a generated clip, with identity similarity to the person of a pool."""

    per_frame: Tensor  # (F - 1,) mean cosine with the pool of frames 1 .. F - 1, in [-1, 1], with gradient
    mean: Tensor  # () of per_frame, with gradient
    embedding: Tensor  # (D,) mean of the unit embeddings of frames 1 .. F - 1, with gradient


class FaceRecogniser(nn.Module):
    """ArcFace or SFace: crops (N, 3, 112, 112), RGB in [-1, 1] -> unit embeddings (N, D), with gradient to the crops.

    `chunk` crops are embedded at a time, and again in the backward pass.
    """

    def __init__(self, path: str | Path, chunk: int = 8):
        super().__init__()
        self.file = Path(path)
        self.net = OnnxModule(path)
        if self.net.input_shape[2:] != [CROP_SIZE, CROP_SIZE]:
            raise ValueError(f"{path} takes {self.net.input_shape[2:]} pixels; a recogniser here takes 112 x 112")
        self.net.check_size(1, 3, CROP_SIZE, CROP_SIZE)
        self.chunk = chunk
        # insightface's rule (model_zoo/arcface_onnx.py): mxnet exports normalise inside, and have these node names
        subtracts = any(name.startswith(("Sub", "_minus")) for name in self.net.first_nodes)
        multiplies = any(name.startswith(("Mul", "_mul")) for name in self.net.first_nodes)
        # OpenCV gives SFace levels of 0..255 (modules/objdetect/src/face_recognize.cpp: feature)
        self.wants_bytes = (subtracts and multiplies) or is_sface(path)

    def forward(self, crops: Tensor) -> Tensor:
        x = (crops + 1) * 127.5 if self.wants_bytes else crops  # 0..255, or (0..255 - 127.5) / 127.5
        chunks = x.split(self.chunk)
        embeddings = [checkpoint(self.net, part, use_reentrant=False, preserve_rng_state=False) for part in chunks]
        return F.normalize(torch.cat(embeddings).flatten(1))


class FaceIdentity(nn.Module):
    """Detector and recogniser of one insightface-style pack, frozen; scores videos (3, F, H, W) in [-1, 1].

    pack_dir: see pack.pack_files, which finds `files`, the detector's and the recogniser's. second_pack_dir: each
    cosine is then the mean over the recognisers of both packs, on the same crops.

    Everything is computed in float32, also under autocast. Frame 0 of a clip is the given image: it starts the tracks
    and is neither pooled nor scored. Faces are matched across frames by track.py.
    """

    def __init__(
        self, pack_dir: str | Path, det_size: int = 640, chunk: int = 8, second_pack_dir: str | Path | None = None
    ):
        super().__init__()
        self.files = pack_files(pack_dir)
        self.detector = FaceDetector(self.files[0], det_size)
        self.recogniser = FaceRecogniser(self.files[1], chunk)
        self.second = None if second_pack_dir is None else FaceRecogniser(pack_files(second_pack_dir)[1], chunk)

    def pool(self, video: Tensor) -> FacePool | None:
        """Return the pool of the largest face in a real clip's first frame with one; None if later frames lack it."""
        return next(iter(self.pools(video)), None)

    @torch.no_grad()
    def pools(self, video: Tensor, *, everybody: bool = False, min_width: float = 0.0) -> list[FacePool]:
        """Return the pools of the people of a real clip, largest face first.

        The people are the largest face, or with `everybody` all faces, of the first frame that has one. Faces narrower
        than `min_width` pixels there are left out, and so are people missing from all later frames.
        """
        with torch.autocast(video.device.type, enabled=False):
            frames = video.transpose(0, 1).float()
            faces = self.detector.detect(frames)
            start = first_frame(faces)
            if start is None:
                return []
            widths = faces[start].boxes[:, 2] - faces[start].boxes[:, 0]
            rows = (widths >= min_width).nonzero().flatten().tolist()
            rows = rows if everybody else [row for row in rows if row == 0]
            tracks = follow_first(faces, rows, partial(self._embeddings, frames, faces))
            return [self._pool(frames, track) for track in tracks if track.detected[1:].any()]

    def _pool(self, frames: Tensor, track: Track) -> FacePool:
        shown = 1 + track.detected[1:].nonzero().flatten()
        embeddings = self._embed(frames[shown.to(frames.device)], track.landmarks[shown])
        return FacePool(embeddings=embeddings, cap=self_similarity(embeddings), **vars(track))

    @torch.no_grad()
    def embed_photo(self, photo: Tensor, min_width: float = 0.0) -> Tensor | None:
        """Return the embedding (D,) of the largest face of a photo (3, H, W); None if it is narrower than min_width."""
        with torch.autocast(photo.device.type, enabled=False):
            frames = photo[None].float()
            (faces,) = self.detector.detect(frames)
            if not len(faces.scores) or faces.boxes[0, 2] - faces.boxes[0, 0] < min_width:
                return None
            return self._embed(frames, faces.landmarks[:1])[0]

    def photo_pool(
        self, photos: Sequence[Tensor], min_width: float = 0.0, same_person: float = SAME_PERSON
    ) -> tuple[dict[int, Tensor], dict[int, str]]:
        """Return ({place of a usable photo: embedding (D,)}, {place of another photo: why it cannot be used}).

        A photo shows another person if the median of its cosines with the other usable ones is below `same_person`.
        """
        embedded = {i: self.embed_photo(photo, min_width) for i, photo in enumerate(photos)}
        usable = {i: embedding for i, embedding in embedded.items() if embedding is not None}
        width = f" at least {min_width:g} pixels wide (min_face_size)" if min_width else ""
        problems = {i: f"no face{width} was found in it" for i in embedded.keys() - usable.keys()}
        while usable:
            pool = torch.stack([*usable.values()])
            medians = (pool @ pool.T).cpu().fill_diagonal_(math.nan).nanquantile(0.5, dim=1).tolist()
            strangers = {i: median for i, median in zip(usable, medians, strict=True) if median < same_person}
            if not strangers:
                break
            text = "shows another person (median cosine {:.2f} with the other photos)"
            problems |= {i: text.format(median) for i, median in strangers.items()}
            usable = {i: embedding for i, embedding in usable.items() if i not in strangers}
        return usable, dict(sorted(problems.items()))

    def score(self, video: Tensor, pool: Tensor) -> FaceScore | None:
        """Return the score of one person; see `scores`."""
        return self.scores(video, [pool])[0]

    def scores(self, video: Tensor, pools: Sequence[Tensor]) -> list[FaceScore | None]:
        """Return the scores of the people of a generated clip, differentiable to the video; None for a missing person.

        pools: each person's FacePool.embeddings. A frame without a detection is cut at the last landmarks, so that
        hiding the face costs score.
        """
        with torch.autocast(video.device.type, enabled=False):
            frames = video.transpose(0, 1).float()
            faces = self.detector.detect(frames)
            references = [pool.float().cpu() for pool in pools]
            tracks = follow_known(faces, references, partial(self._embeddings, frames, faces))
            tracked = [track for track in tracks if track is not None]
            if not tracked:
                return [None] * len(pools)
            landmarks = torch.stack([track.landmarks[1:] for track in tracked])  # (people, F - 1, 5, 2)
            matrices = similarity_transform(landmarks.flatten(0, 1), ARCFACE_TEMPLATE)
            crops = align(frames[1:], matrices.unflatten(0, landmarks.shape[:2]))
            embeddings = iter(self._recognise(crops).unflatten(0, (len(tracked), -1)))
            return [
                None if track is None else _score(next(embeddings), pool, track)
                for track, pool in zip(tracks, pools, strict=True)
            ]

    @torch.no_grad()
    def similarity_to_first(self, video: Tensor) -> Tensor:
        """Return the cosines (n,) of the most similar face of each later frame with the first frame's largest face."""
        frames = video.transpose(0, 1).float()
        faces = self.detector.detect(frames)
        if (start := first_frame(faces)) is None:
            return torch.ones(0)
        vectors = self._embeddings(frames, faces)
        return torch.tensor([(rows @ vectors[start][0]).max().item() for rows in vectors[start + 1 :] if len(rows)])

    @torch.no_grad()
    def _embeddings(self, frames: Tensor, faces: Sequence[Faces]) -> Embeddings:
        """Return the embeddings of all detections, which match faces across frames; 0 for NaN."""
        owners = torch.tensor([j for j, frame in enumerate(faces) for _ in frame.scores])
        landmarks = torch.cat([frame.landmarks for frame in faces])
        chunks = zip(owners.split(self.recogniser.chunk), landmarks.split(self.recogniser.chunk), strict=True)
        # indexing copies frames: a chunk at a time
        embeddings = torch.cat([self._embed(frames[j.to(frames.device)], points).cpu() for j, points in chunks])
        return embeddings.nan_to_num().split([len(frame.scores) for frame in faces])

    def _embed(self, frames: Tensor, landmarks: Tensor) -> Tensor:
        return self._recognise(align(frames, similarity_transform(landmarks, ARCFACE_TEMPLATE)))

    def _recognise(self, crops: Tensor) -> Tensor:
        """Return (N, D) unit embeddings, of two recognisers concatenated: a product is then their mean cosine."""
        first = self.recogniser(crops)
        return first if self.second is None else torch.cat([first, self.second(crops)], 1) / math.sqrt(2)


def _score(embeddings: Tensor, pool: Tensor, track: Track) -> FaceScore:
    """Return the score of one person. embeddings: (F - 1, D)."""
    # all are unit vectors, so the mean of the cosines is the product with the mean embedding
    cosines = embeddings @ pool.to(embeddings).mean(0)
    return FaceScore(per_frame=cosines, mean=cosines.mean(), embedding=embeddings.mean(0), **vars(track))


def self_similarity(embeddings: Tensor) -> float:
    """Return the mean cosine between two different rows of (P, D) unit embeddings; 1.0 when P is 1."""
    count = len(embeddings)
    if count == 1:
        return 1.0
    cosines = embeddings @ embeddings.T
    return ((cosines.sum() - cosines.trace()) / (count * (count - 1))).item()
