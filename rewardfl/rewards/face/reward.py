"""Does the generated clip show the person of the real one? Differentiable. After IPRO, arXiv 2510.14255."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from rewardfl.config.schema import Cap, Count, DetectionSide, NonNegative
from rewardfl.files import sha256
from rewardfl.rewards.base import Reward, RewardOutput, by_sample, no_score
from rewardfl.rewards.face.identity import FaceIdentity, FaceScore
from rewardfl.rewards.face.pack import PackFolder
from rewardfl.rewards.face.track import MIN_MOTION
from rewardfl.rewards.pixels.artifacts import mean

PARTS = ("face_score", "cap", "coverage", "motion_speed", "motion_nonrigid", "motion")
NUMBERS = ("cap", "speed", "nonrigid", "coverage")  # of a FacePool
MOST_VIEWS = 64
MOST_JITTER = 0.1  # face widths: beyond it the crop is no face's any more
PARTS_OF_ALL = ("people", "worst_person")  # beside these, where everybody is scored


class FaceIdentityReward(Reward):
    """R = mean over people of min(mean_j s_j, cap): s_j is the mean cosine of generated frame j >= 1 with her pool.

    `people` is "largest", the one person whose face is the largest in the real clip's first frame with one, or "all" of
    that frame, one to one with those of the generated clip (rewards/face/track.py); who is not found there scores 0.
    A face whose box there is less than `min_face_size` pixels wide is nobody's; generated faces may have any size.

    `cap` is "self_similarity" (the real clip's own mean pairwise cosine: more likeness than the person has to
    herself is not paid for), "none", or a number in (0, 1]. Above the cap the gradient is zero.

    `second_pack_dir`: a pack whose recogniser's cosines are averaged with the first's, detector and landmarks being
    the first's. `landmark_jitter`: deviation, in face widths, of what the landmarks are moved by before a face of a
    clip that is given a gradient is cut out, another at each visit. `views`: with a gradient, the score is the mean
    over each crop and so many varied ones of it (vary.py); face_score stays that of the crop itself.

    It has nine arguments because each is a setting of the configuration.

    Parts, means over people: face_score, the mean before the cap; cap (1 for "none"); coverage, the share of generated
    frames with a detection; motion_speed and motion_nonrigid, landmark motion over the real clip's, NaN where that
    hardly moves; motion, the smaller of the two. With "all" also people, their number, and worst_person, the smallest
    of their face_scores. A sample is invalid when its real clip has no usable face, the generated clip shows nobody in
    any frame, or the score is not finite.
    """

    name = "face_identity"
    differentiable = True
    fewest_frames = 2
    weights = "face pack: SCRFD or YuNet detector, ArcFace or SFace recogniser (.onnx)"
    licence = "insightface's packs: non-commercial research; YuNet MIT, SFace and AuraFace's recogniser Apache-2.0"
    range = "[-1, 1], at most the cap"
    nothing_found = "no face was found in"
    compares_with = "picture"

    def __init__(
        self,
        pack_dir: PackFolder,
        cap: Cap = "self_similarity",
        det_size: DetectionSide = 640,
        chunk: Count = 8,
        people: Literal["largest", "all"] = "largest",
        min_face_size: NonNegative = 0.0,
        second_pack_dir: PackFolder | None = None,
        landmark_jitter: Annotated[NonNegative, Field(le=MOST_JITTER)] = 0.0,
        views: Annotated[int, Field(ge=0, le=MOST_VIEWS)] = 0,
    ):
        super().__init__()
        self.views = views
        self.cap, self.people, self.min_face_size, self.landmark_jitter = cap, people, min_face_size, landmark_jitter
        if min_face_size:
            self.nothing_found = f"no face at least {min_face_size:g} pixels wide (min_face_size) was found in"
        self.identity = FaceIdentity(pack_dir, det_size, chunk, second_pack_dir)
        self._weights = [sha256(file) for file in (*self.identity.files, self.identity.second_file) if file]

    @property
    def part_names(self) -> tuple[str, ...]:
        return PARTS if self.people == "largest" else PARTS + PARTS_OF_ALL

    def reference(self, video: Tensor, prompt: str = "") -> dict[str, Tensor] | None:
        """The face pools of a real clip (3, F, H, W), fields of K people; None when no later frame shows any of them.

        embeddings (P, D) of all of them, one person after the other; owner (P,) whose each is; boxes (K, F, 4);
        landmarks (K, F, 5, 2); the other fields of FacePool (K,).
        """
        pools = self.identity.pools(video, self.people == "all", self.min_face_size)
        if not pools:
            return None
        owner = torch.cat([torch.full((len(pool.embeddings),), k) for k, pool in enumerate(pools)])
        numbers = {name: torch.tensor([getattr(pool, name) for pool in pools]) for name in NUMBERS}
        embeddings = torch.cat([pool.embeddings for pool in pools])
        places = {name: torch.stack([getattr(pool, name) for pool in pools]) for name in ("boxes", "landmarks")}
        return {"embeddings": embeddings, "owner": owner} | places | numbers

    def fingerprint(self) -> dict[str, object]:
        """The networks, the size at which faces are looked for, and who is; the cap takes no part in the pools."""
        return {
            "name": self.name,
            "weights": self._weights,
            "det_size": self.identity.detector.det_size,
            "people": self.people,
            "min_face_size": self.min_face_size,
        }

    def forward(self, video: Tensor, batch: Sequence[Mapping[str, Tensor] | None]) -> RewardOutput:
        return by_sample(video, batch, self._sample, self.part_names)

    def _sample(self, video: Tensor, reference: Mapping[str, Tensor]) -> tuple[Tensor | None, dict[str, float]]:
        """Score and what is known of the parts of one clip (3, F, H, W)."""
        pools = [reference["embeddings"][reference["owner"] == k] for k in range(len(reference["cap"]))]
        trained = torch.is_grad_enabled() and video.requires_grad
        jitter, views = (self.landmark_jitter, self.views) if trained else (0.0, 0)
        faces = self.identity.scores(video, pools, jitter, views)
        columns = [reference[name].tolist() for name in NUMBERS]
        real = [dict(zip(NUMBERS, row, strict=True)) for row in zip(*columns, strict=True)]
        of_all = 1.0 if self.cap == "none" else self.cap
        caps = [one["cap"] if isinstance(of_all, str) else of_all for one in real]
        parts = {"cap": float(np.mean(caps)), "people": float(len(pools))}
        parts["coverage"] = float(np.mean([0.0 if face is None else face.coverage for face in faces]))
        parts |= self.measured(video, faces, reference)
        paid = [no_score(video) if face is None else face.paid for face in faces]
        if all(face is None for face in faces) or not all(score.isfinite() for score in paid):
            return None, parts
        parts |= _motion(faces, real)
        of_each = [0.0 if face is None else face.mean.item() for face in faces]
        parts |= {"face_score": float(np.mean(of_each)), "worst_person": min(of_each)}
        return torch.stack([score.clamp(max=cap) for score, cap in zip(paid, caps, strict=True)]).mean(), parts

    def measured(
        self, video: Tensor, faces: Sequence[FaceScore | None], reference: Mapping[str, Tensor]
    ) -> dict[str, float]:
        """More parts of one clip, of a subclass that has more `part_names`."""
        return {}


def _motion(faces: Sequence[FaceScore | None], real: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The parts of landmark motion, means over the people for whom they could be measured."""
    rows = []
    for face, one in zip(faces, real, strict=True):
        speed = ratio(0.0 if face is None else face.speed, one["speed"], MIN_MOTION)
        nonrigid = ratio(0.0 if face is None else face.nonrigid, one["nonrigid"], MIN_MOTION)
        # fmin: a part that was not measured, NaN, leaves the other
        rows.append((speed, nonrigid, float(np.fmin(speed, nonrigid))))
    measured = [[value for value in column if not math.isnan(value)] for column in zip(*rows, strict=True)]
    names = ("motion_speed", "motion_nonrigid", "motion")
    return {name: mean(values) for name, values in zip(names, measured, strict=True)}


def ratio(made: float, real: float, least: float) -> float:
    """How a generated clip's figure compares with the real one's; NaN where that is below `least`, mere noise."""
    return made / real if real >= least else math.nan
