"""Does the generated clip show the person of the real one? Differentiable. After IPRO, arXiv 2510.14255."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rewardfl.files import sha256
from rewardfl.rewards.base import Reward, RewardOutput, no_score
from rewardfl.rewards.face.identity import FaceIdentity, FacePool, FaceScore
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
    weights = "insightface pack: SCRFD detector, ArcFace recogniser (.onnx)"
    licence = "insightface's packs: non-commercial research"
    range = "[-1, 1], at most the cap"
    nothing_found = "no face was found in"
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
        if len(batch) != len(video):
            raise ValueError(f"{len(video)} videos need as many references, got {len(batch)}")
        results = [self._sample(clip, reference) for clip, reference in zip(video, batch, strict=True)]
        scores, valid, parts = zip(*results, strict=True)
        rows = torch.tensor([[known.get(name, math.nan) for name in self.part_names] for known in parts])
        return RewardOutput(
            torch.stack(scores),
            torch.tensor(valid, device=video.device),
            dict(zip(self.part_names, rows.to(video.device).unbind(1), strict=True)),
        )

    def _sample(self, video: Tensor, reference: Mapping[str, Tensor] | None) -> tuple[Tensor, bool, dict[str, float]]:
        """Score, validity and what is known of the parts of one clip (3, F, H, W)."""
        if not reference:
            return no_score(video), False, {}
        pool = _pool(reference)
        caps: dict[object, Any] = {"self_similarity": pool.cap, "none": 1.0}
        cap = caps.get(self.cap, self.cap)
        face = self.identity.score(video, pool)
        parts = {"cap": cap, "coverage": face.coverage if face else 0.0} | self.measured(video, face, reference)
        if face is None or not face.mean.isfinite():
            return no_score(video), False, parts
        speed, nonrigid = _motion(face, pool)
        motion = {"motion_speed": speed, "motion_nonrigid": nonrigid, "motion": _smaller(speed, nonrigid)}
        return face.mean.clamp(max=cap), True, parts | {"face_score": face.mean.item()} | motion

    def measured(self, video: Tensor, face: FaceScore | None, reference: Mapping[str, Tensor]) -> dict[str, float]:
        """More parts of one clip, of a subclass that has more `part_names`."""
        return {}


def _pool(reference: Mapping[str, Tensor]) -> FacePool:
    values = {field.name: reference[field.name] for field in dataclasses.fields(FacePool)}
    fields: dict[str, Any] = {name: value if value.ndim else value.item() for name, value in values.items()}
    return FacePool(**fields)


def _motion(face: FaceScore, pool: FacePool) -> tuple[float, float]:
    """Speed and non-rigid motion of the generated clip over those of the real one."""
    pairs = ((face.speed, pool.speed), (face.nonrigid, pool.nonrigid))
    speed, nonrigid = (mine / real if real >= MIN_MOTION else math.nan for mine, real in pairs)
    return speed, nonrigid


def _smaller(x: float, y: float) -> float:
    """min(x, y) where NaN counts as not measured: NaN only if both are."""
    known = [value for value in (x, y) if not math.isnan(value)]
    return min(known, default=math.nan)
