"""The held-out judge: who is seen, and what the clip does, by measures that nothing was trained against."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from rewardfl import data
from rewardfl.rewards.base import RewardOutput
from rewardfl.rewards.face.identity import FaceScore
from rewardfl.rewards.face.reward import FaceIdentityReward, ratio
from rewardfl.rewards.motion import MIN_CHANGE
from rewardfl.rewards.video_motion import FARNEBACK, LONG_SIDE, VideoMotion, video_motion

# A real clip with less gives no ratio, which would divide by noise: pixels per frame; levels of 255 squared.
LEAST_FLOW, LEAST_SHARPNESS = 0.05, 0.1


class FaceJudge(FaceIdentityReward):
    """`face_identity` without gradient, and beside it how the clip moves by measures that nothing was trained against.

    Parts beside face_identity's: flow (mean optical flow of the frame), face_flow (within the face's box; the mean over
    people), pixel_change and sharpness, each over the real clip's, NaN where that stands still; reversals, the
    generated clip's minus the real clip's, in [-2, 2]: above 0 it trembles more. They are taken of the 8-bit frames, on
    the CPU, whether or not the generated clip shows a face. Their definitions: rewards/video_motion.py.
    """

    name = "face_judge"
    fewest_frames = 2
    differentiable = False

    @property
    def part_names(self) -> tuple[str, ...]:
        return (*super().part_names, "flow", "face_flow", "pixel_change", "sharpness", "reversals")

    def reference(self, video: Tensor, prompt: str = "") -> dict[str, Tensor] | None:
        """face_identity's, with the figures of the real clip's own motion."""
        pool = super().reference(video, prompt)
        if pool is None:
            return None
        figures = video_motion(_frames(video), pool["boxes"].numpy())
        return pool | {name: torch.tensor(value) for name, value in vars(figures).items()}

    def fingerprint(self) -> dict[str, object]:
        """face_identity's, and how flow is taken."""
        return super().fingerprint() | {"flow": [*FARNEBACK, LONG_SIDE]}

    @torch.no_grad()
    def forward(self, video: Tensor, batch: Sequence[Mapping[str, Tensor] | None]) -> RewardOutput:
        return super().forward(video, batch)

    def measured(
        self, video: Tensor, faces: Sequence[FaceScore | None], reference: Mapping[str, Tensor]
    ) -> dict[str, float]:
        boxes = [face.boxes.numpy() for face in faces if face is not None]
        made = video_motion(_frames(video), np.stack(boxes) if boxes else None)
        real = VideoMotion(**{name: float(reference[name]) for name in vars(made)})
        return {
            "flow": ratio(made.flow, real.flow, LEAST_FLOW),
            "face_flow": ratio(made.face_flow, real.face_flow, LEAST_FLOW),
            "pixel_change": ratio(made.pixel_change, real.pixel_change, MIN_CHANGE),
            "sharpness": ratio(made.sharpness, real.sharpness, LEAST_SHARPNESS),
            "reversals": made.reversals - real.reversals,
        }


def _frames(video: Tensor) -> np.ndarray:
    """The 8-bit frames (F, H, W, 3) of a video (3, F, H, W) in [-1, 1], by one copy to the CPU."""
    return data.to_uint8(video).contiguous().cpu().numpy()
