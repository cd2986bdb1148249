"""The held-out judge: who is seen, how the clip moves and looks, by measures that nothing was trained against."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from rewardfl import data
from rewardfl.config.schema import Cap, Count, DetectionSide, NonNegative
from rewardfl.rewards.base import RewardOutput
from rewardfl.rewards.face.identity import FaceScore
from rewardfl.rewards.face.look import PATCHES, compare_look, cut_patches
from rewardfl.rewards.face.pack import PackFolder
from rewardfl.rewards.face.reward import FaceIdentityReward, ratio
from rewardfl.rewards.pixels.artifacts import GRAIN, measure_artifacts
from rewardfl.rewards.pixels.motion import MIN_CHANGE
from rewardfl.rewards.pixels.video_motion import FARNEBACK, LONG_SIDE, VideoMotion, video_motion

# A real clip with less gives no ratio, which would divide by noise: pixels per frame; levels of 255 squared; two levels
# of 255, as far as the channels of a grey clip are apart after a video codec.
LEAST_FLOW, LEAST_SHARPNESS, LEAST_SATURATION = 0.05, 0.1, 2 / 255

COLOURS = ("red", "green", "blue")

MEASURED = ("flow", "face_flow", "pixel_change", "sharpness", "reversals", "grid", "saturation", *COLOURS, "look")


class FaceJudge(FaceIdentityReward):
    """`face_identity` without gradient, and beside it what the clip does by measures that nothing was trained against.

    Parts beside face_identity's: flow (mean optical flow of the frame), face_flow (within the face's box; the mean over
    people), pixel_change and sharpness, each over the real clip's, NaN where that stands still; reversals, the
    generated clip's minus the real clip's, in [-2, 2]: above 0 it trembles more. Of the canaries grid and saturation,
    over the real clip's; red, green and blue, the mean of that colour minus the real clip's, in [-1, 1]. look, in
    [-1, 1]: how much eyes and mouth look like the real clip's (face/look.py), the mean over people. They are
    taken of the 8-bit frames, on the CPU, whether or not the generated clip shows a face. Their definitions:
    rewards/video_motion.py and rewards/canaries.py.

    grid_period: pixels on a side of the generating model's tokens, in whose period a grid is looked for; with 0 grid is
    not measured, NaN.
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
        return (*super().part_names, *MEASURED)

    def reference(self, video: Tensor, prompt: str = "") -> dict[str, Tensor] | None:
        """face_identity's, with the real clip's eyes and mouths, the figures of its motion and of its canaries."""
        pool = super().reference(video, prompt)
        if pool is None:
            return None
        frames = _frames(video)
        figures = vars(video_motion(frames, pool["boxes"].numpy())) | self._canaries(frames)
        of_all = [cut_patches(video.transpose(0, 1), landmarks) for landmarks in pool["landmarks"]]
        patches = {f"look/{name}": torch.stack([of_one[name] for of_one in of_all]) for name in PATCHES}
        return pool | patches | {name: torch.tensor(value) for name, value in figures.items()}

    def fingerprint(self) -> dict[str, object]:
        """face_identity's, how flow is taken, where a grid is looked for, and what of a face is compared."""
        look = {name: str(place) for name, place in PATCHES.items()}
        measures = {"flow": [*FARNEBACK, LONG_SIDE], "grid": [self.grid_period, GRAIN], "look": look}
        return super().fingerprint() | measures

    @torch.no_grad()
    def forward(self, video: Tensor, batch: Sequence[Mapping[str, Tensor] | None]) -> RewardOutput:
        return super().forward(video, batch)

    def measured(
        self, video: Tensor, faces: Sequence[FaceScore | None], reference: Mapping[str, Tensor]
    ) -> dict[str, float]:
        frames, boxes = _frames(video), [face.boxes.numpy() for face in faces if face is not None]
        made = video_motion(frames, np.stack(boxes) if boxes else None)
        real = VideoMotion(**{name: float(reference[name]) for name in vars(made)})
        colours = self._canaries(frames)
        real_colours = {name: float(reference[name]) for name in colours}
        return {
            "flow": ratio(made.flow, real.flow, LEAST_FLOW),
            "face_flow": ratio(made.face_flow, real.face_flow, LEAST_FLOW),
            "pixel_change": ratio(made.pixel_change, real.pixel_change, MIN_CHANGE),
            "sharpness": ratio(made.sharpness, real.sharpness, LEAST_SHARPNESS),
            "reversals": made.reversals - real.reversals,
            "grid": colours["grid"] / real_colours["grid"],
            "saturation": ratio(colours["saturation"], real_colours["saturation"], LEAST_SATURATION),
            **{name: colours[name] - real_colours[name] for name in COLOURS},
            "look": self._look(video, faces, reference),
        }

    def _look(self, video: Tensor, faces: Sequence[FaceScore | None], reference: Mapping[str, Tensor]) -> float:
        """The mean look of the people; 0 for one who is not found."""
        values = []
        for k, face in enumerate(faces):
            real = {name: reference[f"look/{name}"][k] for name in PATCHES}
            patches = None if face is None else cut_patches(video.transpose(0, 1), face.landmarks)
            values.append(0.0 if patches is None else compare_look(patches, real))
        return sum(values) / len(values)

    def _canaries(self, frames: np.ndarray) -> dict[str, float]:
        """grid, saturation and the COLOURS of the frames."""
        found = measure_artifacts(frames, [self.grid_period] if self.grid_period else [])
        return {"grid": found.grid, "saturation": found.saturation, **dict(zip(COLOURS, found.colour, strict=True))}


def _frames(video: Tensor) -> np.ndarray:
    """The 8-bit frames (F, H, W, 3) of a video (3, F, H, W) in [-1, 1], by one copy to the CPU."""
    return data.to_uint8(video).contiguous().cpu().numpy()
