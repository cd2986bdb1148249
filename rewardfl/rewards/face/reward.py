"""Does the generated clip show the person of the real one? Differentiable. After IPRO, arXiv 2510.14255."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rewardfl.files import sha256
from rewardfl.rewards.base import Reward, RewardOutput, by_sample
from rewardfl.rewards.face.identity import FaceIdentity, FaceScore
from rewardfl.rewards.face.track import MIN_MOTION

PARTS = ("face_score", "cap", "coverage", "motion_speed", "motion_nonrigid", "motion")


class FaceIdentityReward(Reward):
    """R = min(mean_j s_j, cap): s_j is the mean cosine of generated frame j >= 1 with the real clip's pool.

    `cap` is "self_similarity" (the real clip's own mean pairwise cosine: more likeness than the person has to
    herself is not paid for), "none", or a number in (0, 1]. Above the cap the gradient is zero.

    Parts: face_score, the mean before the cap; cap (1 for "none"); coverage, the share of generated frames
    with a detection; motion_speed and motion_nonrigid, landmark motion over the real clip's, NaN where that
    hardly moves; motion, the smaller of the two. A sample is invalid when its real clip has no usable face,
    the generated clip shows no face in any frame, or the score is not finite.
    """

    name = "face_identity"
    differentiable = True
    fewest_frames = 2
    weights = "insightface pack: SCRFD detector, ArcFace recogniser (.onnx)"
    licence = "insightface's packs: non-commercial research"
    range = "[-1, 1], at most the cap"
    nothing_found = "no face was found in"
    compares_with = "picture"
    part_names: tuple[str, ...] = PARTS

    def __init__(self, pack_dir: str | Path, cap: str | float = "self_similarity", det_size: int = 640, chunk: int = 8):
        super().__init__()
        named = cap in ("self_similarity", "none")
        if not named and (isinstance(cap, str) or not 0 < cap <= 1):
            raise ValueError(f"reward.cap must be self_similarity, none or a number in (0, 1], got {cap!r}")
        self.cap = cap
        self.identity = FaceIdentity(pack_dir, det_size, chunk)
        self._weights = [sha256(file) for file in self.identity.files]

    def reference(self, video: Tensor, prompt: str = "") -> dict[str, Tensor] | None:
        """The face pool of a real clip (3, F, H, W); None when no frame after the first shows the face."""
        pool = self.identity.pool(video)
        return None if pool is None else {field: torch.as_tensor(value) for field, value in vars(pool).items()}

    def fingerprint(self) -> dict[str, object]:
        """The networks and the size at which faces are looked for; the cap takes no part in the pool."""
        return {"name": self.name, "weights": self._weights, "det_size": self.identity.detector.det_size}

    def forward(self, video: Tensor, batch: Sequence[Mapping[str, Tensor] | None]) -> RewardOutput:
        return by_sample(video, batch, self._sample, self.part_names)

    def _sample(self, video: Tensor, reference: Mapping[str, Tensor]) -> tuple[Tensor | None, dict[str, float]]:
        """Score and what is known of the parts of one clip (3, F, H, W)."""
        caps: dict[object, Any] = {"self_similarity": reference["cap"].item(), "none": 1.0}
        cap = caps.get(self.cap, self.cap)
        face = self.identity.score(video, reference["embeddings"])
        parts = {"cap": cap, "coverage": face.coverage if face else 0.0} | self.measured(video, face, reference)
        if face is None or not face.mean.isfinite():
            return None, parts
        speed = ratio(face.speed, reference["speed"].item(), MIN_MOTION)
        nonrigid = ratio(face.nonrigid, reference["nonrigid"].item(), MIN_MOTION)
        # fmin: a part that was not measured, NaN, leaves the other
        parts |= {"motion_speed": speed, "motion_nonrigid": nonrigid, "motion": float(np.fmin(speed, nonrigid))}
        return face.mean.clamp(max=cap), parts | {"face_score": face.mean.item()}

    def measured(self, video: Tensor, face: FaceScore | None, reference: Mapping[str, Tensor]) -> dict[str, float]:
        """More parts of one clip, of a subclass that has more `part_names`."""
        return {}


def ratio(made: float, real: float, least: float) -> float:
    """How a generated clip's figure compares with the real one's; NaN where that is below `least`, mere noise."""
    return made / real if real >= least else math.nan
