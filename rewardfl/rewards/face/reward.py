"""Identity similarity of the generated clip to the real one, differentiable. After IPRO, arXiv 2510.14255."""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from rewardfl.config.schema import Cap, Count, DetectionSide, NonNegative
from rewardfl.files import sha256
from rewardfl.rewards.base import PhotoError, Reference, Reward, RewardError, RewardOutput, invalid_score, score_clips
from rewardfl.rewards.face.identity import FaceIdentity, FaceScore, self_similarity
from rewardfl.rewards.face.pack import PackFolder
from rewardfl.rewards.face.track import MIN_MOTION, track_largest

PARTS = ("face_score", "cap", "coverage", "motion_speed", "motion_nonrigid", "motion")
_NUMBERS = ("cap", "speed", "nonrigid", "coverage")  # numbers of a FacePool
ONE_PHOTO = (
    "reward.cap: self_similarity takes two photos of a person, or a clip, and no row has them; add photos (the column "
    "photos), or set reward.cap to a number, such as 0.8"
)


class FaceIdentityReward(Reward):
    """R = mean over people of min(mean_j s_j, cap): s_j is the mean cosine of generated frame j >= 1 with their pool.

    people: "largest" scores the largest face of the real clip's first frame with a face, "all" every face of that
    frame. Generated faces are matched one to one (track.py); a person without a face scores 0. min_face_size: faces
    with a narrower box there, in pixels, are ignored; generated faces may have any size.

    cap: "self_similarity" (the mean pairwise cosine of the real clip's frames, or of the photos; one photo takes the
    other rows' median), "none", or a number in (0, 1]. Above the cap the gradient is zero.

    second_pack_dir: the cosines of this pack's recogniser are averaged with the first's, on the first's landmarks.

    Parts, means over people: face_score, the mean before the cap; cap (1 for "none"); coverage, the share of generated
    frames with a detection; motion_speed and motion_nonrigid, landmark motion over the real clip's, NaN if that hardly
    moves; motion, the smaller of the two. With "all" also people, their number, and worst_person, the smallest
    face_score. A sample is invalid if its real clip or all generated frames lack a face, or its score is not finite.
    """

    name = "face_identity"
    differentiable = True
    fewest_frames = 2
    weights = "face pack: SCRFD or YuNet detector, ArcFace or SFace recogniser (.onnx)"
    licence = "insightface's packs: non-commercial research; YuNet MIT, SFace and AuraFace's recogniser Apache-2.0"
    range = "[-1, 1], at most the cap"
    nothing_found = "no face was found in"
    compares_with = "picture"
    measures_motion = True

    def __init__(
        self,
        pack_dir: PackFolder,
        cap: Cap = "self_similarity",
        det_size: DetectionSide = 640,
        chunk: Count = 8,
        people: Literal["largest", "all"] = "largest",
        min_face_size: NonNegative = 0.0,
        second_pack_dir: PackFolder | None = None,
    ):
        super().__init__()
        self.cap, self.people, self.min_face_size = cap, people, min_face_size
        if min_face_size:
            self.nothing_found = f"no face at least {min_face_size:g} pixels wide (min_face_size) was found in"
        self.identity = FaceIdentity(pack_dir, det_size, chunk, second_pack_dir)
        second = self.identity.second
        self._weights = [sha256(file) for file in (*self.identity.files, *([second.file] if second else []))]

    @property
    def has_cap(self) -> bool:  # type: ignore[override]
        """Return whether the score ends at `cap`."""
        return self.cap != "none"

    @property
    def part_names(self) -> tuple[str, ...]:
        return {"largest": PARTS, "all": (*PARTS, "people", "worst_person")}[self.people]

    def reference(self, video: Tensor, prompt: str = "") -> dict[str, Tensor] | None:
        """Return the FacePools of a real clip (3, F, H, W) as tensors over K people; None when later frames show none.

        embeddings (P, D): of all people in turn. owner (P,): the person of each. boxes (K, F, 4), landmarks
        (K, F, 5, 2), and the other fields (K,).
        """
        pools = self.identity.pools(video, everybody=self.people == "all", min_width=self.min_face_size)
        if not pools:
            return None
        owner = torch.cat([torch.full((len(pool.embeddings),), k) for k, pool in enumerate(pools)])
        numbers = {name: torch.tensor([getattr(pool, name) for pool in pools]) for name in _NUMBERS}
        embeddings = torch.cat([pool.embeddings for pool in pools])
        tracks = {name: torch.stack([getattr(pool, name) for pool in pools]) for name in ("boxes", "landmarks")}
        return {"embeddings": embeddings, "owner": owner} | tracks | numbers

    def reference_from_photos(self, photos: Sequence[Tensor], prompt: str = "") -> dict[str, Tensor] | None:
        """Return the pool of the largest faces of a person's photos, without motion (NaN).

        The cap of one photo is NaN until `complete`. Raise PhotoError for a photo without a face or of another person.
        """
        usable, problems = self.identity.photo_pool(photos, self.min_face_size)
        if problems:
            raise PhotoError(problems)
        pool = torch.stack([*usable.values()])
        cap = self_similarity(pool) if len(pool) > 1 else math.nan
        numbers = {name: torch.tensor([cap if name == "cap" else math.nan]) for name in _NUMBERS}
        return {"embeddings": pool, "owner": torch.zeros(len(pool), dtype=torch.int64)} | numbers

    def with_motion(self, reference: Reference, video: Tensor, prompt: str = "") -> Reference:
        """Return the reference with the landmark motion of the largest face of a clip (3, F, H, W), if it has one."""
        track = track_largest(self.identity.detector.detect(video.transpose(0, 1).float()))
        if reference is None or track is None:
            return reference
        motion = {"speed": track.speed, "nonrigid": track.nonrigid, "coverage": track.coverage}
        return {**reference, **{name: torch.tensor([value]) for name, value in motion.items()}}

    def complete(self, references: Sequence[Reference]) -> list[Reference]:
        """Return the references with a cap: one photo takes the median cap of the rows that have several."""
        missing = [r is not None and bool(r["cap"].isnan().any()) for r in references]
        if self.cap != "self_similarity" or not any(missing):
            return list(references)
        caps = [r["cap"] for r, lacks in zip(references, missing, strict=True) if r is not None and not lacks]
        if not caps:
            raise RewardError(ONE_PHOTO)
        cap = torch.cat(caps).quantile(0.5)[None]
        return [{**r, "cap": cap} if r and lacks else r for r, lacks in zip(references, missing, strict=True)]

    def fingerprint(self) -> dict[str, object]:
        """Return what the pools depend on: networks, detection size and the choice of people, but not the cap."""
        detection = {"det_size": self.identity.detector.det_size, "people": self.people}
        return {"name": self.name, "weights": self._weights} | detection | {"min_face_size": self.min_face_size}

    def forward(self, video: Tensor, batch: Sequence[Mapping[str, Tensor] | None]) -> RewardOutput:
        return score_clips(video, batch, self._sample, self.part_names)

    def _sample(self, video: Tensor, reference: Mapping[str, Tensor]) -> tuple[Tensor | None, dict[str, float]]:
        pools = [reference["embeddings"][reference["owner"] == k] for k in range(len(reference["cap"]))]
        faces = self.identity.scores(video, pools)
        real = [{name: reference[name][k].item() for name in _NUMBERS} for k in range(len(pools))]
        cap = 1.0 if self.cap == "none" else self.cap
        caps = [person["cap"] if isinstance(cap, str) else cap for person in real]
        parts = {"cap": float(np.mean(caps)), "people": float(len(pools))}
        parts["coverage"] = float(np.mean([0.0 if face is None else face.coverage for face in faces]))
        parts |= self.measured(video, faces, reference)
        scores = [invalid_score(video) if face is None else face.mean for face in faces]
        face_scores = torch.stack(scores).tolist()  # one copy
        if all(face is None for face in faces) or not all(map(math.isfinite, face_scores)):
            return None, parts
        parts |= _motion(faces, real)
        parts |= {"face_score": float(np.mean(face_scores)), "worst_person": min(face_scores)}
        return torch.stack([score.clamp(max=cap) for score, cap in zip(scores, caps, strict=True)]).mean(), parts

    def measured(
        self, video: Tensor, faces: Sequence[FaceScore | None], reference: Mapping[str, Tensor]
    ) -> dict[str, float]:
        """Return the parts of one clip that a subclass adds to `part_names`."""
        return {}


def _motion(faces: Sequence[FaceScore | None], real: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the parts of landmark motion, means over the people for whom they could be measured."""
    rows = []
    for face, person in zip(faces, real, strict=True):
        speed = ratio(0.0 if face is None else face.speed, person["speed"], MIN_MOTION)
        nonrigid = ratio(0.0 if face is None else face.nonrigid, person["nonrigid"], MIN_MOTION)
        rows.append((speed, nonrigid, float(np.fmin(speed, nonrigid))))  # fmin ignores a NaN, which was not measured
    means = torch.tensor(rows, dtype=torch.float64).nanmean(0).tolist()
    return dict(zip(("motion_speed", "motion_nonrigid", "motion"), means, strict=True))


def ratio(generated: float, real: float, least: float) -> float:
    """Return generated / real; NaN where the real value is below `least`, which is noise."""
    return generated / real if real >= least else math.nan
