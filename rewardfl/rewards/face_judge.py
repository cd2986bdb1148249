"""The held-out judge: identity, motion and look of a clip, by measures that no training used."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from rewardfl import data
from rewardfl.config.schema import Cap, Count, DetectionSide, NonNegative
from rewardfl.copies import to_host
from rewardfl.rewards.base import Reference, RewardOutput
from rewardfl.rewards.face.identity import FaceScore
from rewardfl.rewards.face.look import MOUTH_MOVES, PATCHES, compare_look, cut_patches, mouth_movement
from rewardfl.rewards.face.pack import PackFolder
from rewardfl.rewards.face.reward import FaceIdentityReward, ratio
from rewardfl.rewards.face.track import track_largest
from rewardfl.rewards.pixels.measures import FARNEBACK, GRAIN, LONG_SIDE, mean, measure_artifacts, video_motion
from rewardfl.rewards.pixels.motion import MIN_CHANGE
from rewardfl.rewards.pixels.optical_flow import DAMPED, MIN_FLOW, damped_flow

# Figures over the real clip's. A real clip with less than this gives no ratio, which would divide by noise: pixels per
# frame; share of 255; levels of 255 squared; two levels of 255, the difference of a grey clip's channels after a codec;
# pixels per clip and per shrunk frame.
_LEAST = {
    "flow": 0.05, "face_flow": 0.05, "pixel_change": MIN_CHANGE, "sharpness": 0.1, "saturation": 2 / 255, "grid": 0.0,
    "displacement": 1.0, "lk_flow": MIN_FLOW, "mouth": MOUTH_MOVES,
}  # fmt: skip
DIFFERENCES = ("reversals", "red", "green", "blue")  # figures minus the real clip's


class FaceJudge(FaceIdentityReward):
    """`face_identity` without gradient, and the motion and look of the clip by measures that no training used.

    It adds these parts, measured on the 8-bit frames on the CPU, also where the generated clip shows no face:

    - over the real clip's, NaN where that is too small: flow, mean optical flow of the frame; face_flow, within the
      face's box, and displacement, both means over people; lk_flow, `damped_flow`; mouth, mean of `mouth_movement`;
      pixel_change; sharpness; saturation. Also grid, without that limit.
    - minus the real clip's: reversals, in [-2, 2], above 0 for a clip that trembles more; red, green, blue, in [-1, 1].
    - look, in [-1, 1]: similarity of eyes and mouth to the real clip's (face/look.py), mean over people.

    grid_period: pixels on a side of the generating model's tokens, the period of a grid; with 0, grid is NaN.
    """

    name = "face_judge"
    fewest_frames = 2
    differentiable = False

    def __init__(
        self,
        pack_dir: PackFolder,
        cap: Cap = "self_similarity",
        det_size: DetectionSide = 640,
        chunk: Count = 8,
        people: Literal["largest", "all"] = "largest",
        min_face_size: NonNegative = 0.0,
        grid_period: Annotated[int, Field(ge=0, le=4_096, multiple_of=2)] = 0,
    ):
        super().__init__(pack_dir, cap, det_size, chunk, people, min_face_size)
        self.grid_period = grid_period

    @property
    def part_names(self) -> tuple[str, ...]:
        return (*super().part_names, *_LEAST, *DIFFERENCES, "look")

    def reference(self, video: Tensor, prompt: str = "") -> dict[str, Tensor] | None:
        """Return face_identity's reference, with the real clip's eyes and mouths, motion and artifacts."""
        pool = super().reference(video, prompt)
        if pool is None:
            return None
        figures, people = self._measure(video, list(zip(pool["landmarks"], pool["boxes"], strict=True)))
        patches = {f"look/{name}": torch.stack([person[name] for person in people]) for name in PATCHES}
        return pool | patches | {name: torch.tensor(value) for name, value in figures.items()}

    def with_motion(self, reference: Reference, video: Tensor, prompt: str = "") -> Reference:
        """Return face_identity's reference, with the motion and artifacts of the clip (3, F, H, W)."""
        reference = super().with_motion(reference, video, prompt)
        if reference is None:
            return None
        track = track_largest(self.identity.detector.detect(video.transpose(0, 1).float()))
        figures, _ = self._measure(video, [] if track is None else [(track.landmarks, track.boxes)])
        return {**reference, **{name: torch.tensor(value) for name, value in figures.items()}}

    def fingerprint(self) -> dict[str, object]:
        """Return face_identity's fingerprint with the settings of flows, grid and look."""
        look = {name: str(patch) for name, patch in PATCHES.items()}
        flows = {"flow": [*FARNEBACK, LONG_SIDE], "lk_flow": DAMPED}
        return super().fingerprint() | flows | {"grid": [self.grid_period, GRAIN], "look": look}

    @torch.no_grad()
    def forward(self, video: Tensor, batch: Sequence[Mapping[str, Tensor] | None]) -> RewardOutput:
        return super().forward(video, batch)

    def measured(
        self, video: Tensor, faces: Sequence[FaceScore | None], reference: Mapping[str, Tensor]
    ) -> dict[str, float]:
        figures, people = self._measure(video, [(face.landmarks, face.boxes) for face in faces if face is not None])
        real = {name: float(reference.get(name, math.nan)) for name in figures}  # NaN for photos
        ratios = {name: ratio(figures[name], real[name], least) for name, least in _LEAST.items()}
        differences = {name: figures[name] - real[name] for name in DIFFERENCES}
        if "look/eyes" not in reference:
            return ratios | differences | {"look": math.nan}
        owners = [k for k, face in enumerate(faces) if face is not None]
        patches = [{name: reference[f"look/{name}"][k] for name in PATCHES} for k in owners]
        looks = [compare_look(*pair) for pair in zip(people, patches, strict=True)]
        return ratios | differences | {"look": sum(looks) / len(faces)}  # 0 for a person who is not found

    def _measure(
        self, video: Tensor, faces: Sequence[tuple[Tensor, Tensor]]
    ) -> tuple[dict[str, float], list[dict[str, Tensor]]]:
        """Return the 8-bit frames' figures and each person's patches. faces: landmarks (F, 5, 2) and boxes (F, 4)."""
        people = [cut_patches(video.transpose(0, 1), landmarks) for landmarks, _ in faces]
        levels = to_host(data.to_uint8(video))  # one copy to the CPU
        frames = levels.numpy()
        periods = [self.grid_period] if self.grid_period else []
        motion = video_motion(frames, torch.stack([boxes for _, boxes in faces]).numpy() if faces else None)
        motion["lk_flow"] = damped_flow(data.to_float(levels))
        motion["mouth"] = mean([mouth_movement(person["mouth"]) for person in people])
        return motion | measure_artifacts(frames, periods), people
