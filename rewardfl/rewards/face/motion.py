"""Does the generated face move as the real one does? By a detector's landmarks, with gradient."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import cast

import torch
from torch import Tensor

from rewardfl.config.schema import Count, DetectionSide, NonNegative
from rewardfl.files import sha256
from rewardfl.rewards.base import Reward, RewardOutput, by_sample
from rewardfl.rewards.face.align import frames_of
from rewardfl.rewards.face.detect import STRIDES, FaceDetector
from rewardfl.rewards.face.pack import PackFolder, pack_files
from rewardfl.rewards.face.track import MIN_MOTION, Track, step_motion, step_reversals, track_largest
from rewardfl.rewards.face.view import View, seed_of
from rewardfl.rewards.pixels.motion import MIN_CHANGE, alike, mean_change

# Half of the detector's finest stride to each side: every place of a face between two of its cells comes up.
MAX_SHIFT = STRIDES[0] / 2  # detector pixels
MAX_ZOOM = 0.03
# A real clip that moves less gives no ratio.
LEAST = {"speed": MIN_MOTION, "nonrigid": MIN_MOTION, "face_change": MIN_CHANGE, "background_change": MIN_CHANGE}


@dataclass(frozen=True)
class FaceMotion:
    """How a tracked face moves, () each and NaN where that could not be measured."""

    speed: Tensor  # step_motion
    nonrigid: Tensor
    reversals: Tensor  # step_reversals
    face_change: Tensor  # mean_change within the face's boxes
    background_change: Tensor  # and outside of them
    lost: Tensor  # share of the frames after the first without the face


NAMES = tuple(field.name for field in fields(FaceMotion))


class FaceMotionReward(Reward):
    """The weighted mean of three terms, of those that could be measured:

    landmarks: mean of min(s, 1) and min(n, 1), less reversals * max(0, b - b_real). s, n: landmark speed and non-rigid
    motion over the real clip's; b: step_reversals. What moves more than the real clip is not paid more, and above 1 has
    no gradient; a half in which the real clip hardly moves is left out.
    face_change, background_change: min(r, 1 / r), r the mean change of pixels from frame to frame over the real
    clip's, inside the face's box and outside of it (each step's: the two frames' boxes together).

    A detector that is trained against can be fooled: pixels can move its landmarks and nothing else. So with `jitter`
    a clip that is given a gradient is shown to it a little shifted and scaled, as a whole, anew in each call; with
    `second_pack_dir` it is one of two detectors that sees it; and `reversals` takes back what trembling would gain.
    Both are drawn from the clip itself: a resumed run and other numbers of processes draw the same. Without a gradient
    the first detector sees the frames as they are.

    `chunk` frames are detected at a time, and again in the backward. Parts: speed, nonrigid, face_change,
    background_change over the real clip's, NaN where that hardly moves; reversals less the real clip's; lost, the
    share of the frames after the first in which the detector lost the face, which then count for nothing. A sample is
    invalid when nothing can be compared. Its many settings are the weights and the devices against cheating.
    """

    name = "face_motion"
    differentiable = True
    fewest_frames = 2
    weights = "face pack: SCRFD or YuNet detector (.onnx)"
    licence = "insightface's packs: non-commercial research; YuNet MIT"
    range = "at most 1; [0, 1] without reversals"
    nothing_found = "no moving face was found in"

    def __init__(
        self,
        pack_dir: PackFolder,
        det_size: DetectionSide = 640,
        chunk: Count = 8,
        landmarks: NonNegative = 1.0,
        face_change: NonNegative = 0.0,
        background_change: NonNegative = 0.0,
        reversals: NonNegative = 0.5,
        jitter: bool = True,
        second_pack_dir: PackFolder | None = None,
    ):
        super().__init__()
        self.term_weights = {"landmarks": landmarks, "face_change": face_change, "background_change": background_change}
        if not any(self.term_weights.values()):
            raise ValueError("landmarks, face_change and background_change are all 0: nothing is scored")
        packs = [pack_dir] if second_pack_dir is None else [pack_dir, second_pack_dir]
        files = [pack_files(pack)[0] for pack in packs]
        self.detectors = torch.nn.ModuleList(FaceDetector(file, det_size) for file in files)
        self._weights = [sha256(file) for file in files]
        self.det_size, self.chunk = det_size, chunk
        self.reversals, self.jitter = reversals, jitter

    @torch.no_grad()
    def reference(self, video: Tensor, prompt: str = "") -> dict[str, Tensor] | None:
        """FaceMotion of a real clip (3, F, H, W), by name, each (detectors, 2); None when nothing moves in it.

        The second column is the mean over `views`, with which a clip seen through a view is compared: landmarks tremble
        otherwise on pixels that were moved, and the small non-rigid motion may be half as large again by that alone.
        """
        moved = views(self._most_shifted(video))
        kept: dict[str, list[list[Tensor]]] = {name: [] for name in NAMES[:-1]}
        for which in range(len(self.detectors)):
            plain, *others = [self._measure(video, which, view) for view in (None, *moved)]
            for name, rows in kept.items():
                mean = torch.stack([_value(one, name) for one in others]).nanmean()
                rows.append([_value(plain, name), mean])
        reference = {name: torch.tensor(rows) for name, rows in kept.items()}
        moves = (reference["speed"] >= MIN_MOTION) | (reference["face_change"] >= MIN_CHANGE)
        return reference if moves.any() else None

    def fingerprint(self) -> dict[str, object]:
        """The networks and the size at which faces are looked for; no weight of a term takes part in the reference."""
        return {"name": self.name, "weights": self._weights, "det_size": self.det_size}

    def forward(self, video: Tensor, batch: Sequence[Mapping[str, Tensor] | None]) -> RewardOutput:
        return by_sample(video, batch, self._sample, NAMES)

    def _sample(self, video: Tensor, reference: Mapping[str, Tensor]) -> tuple[Tensor | None, dict[str, float]]:
        """Score and known parts of one clip (3, F, H, W); no score where no term could be measured."""
        which, view = self._draw(video)
        mine = self._measure(video, which, view)
        if mine is None:
            return None, {"lost": 1.0}
        real = {name: values[which, 0 if view is None else 1].item() for name, values in reference.items()}
        ratios = {name: getattr(mine, name) / real[name] for name, least in LEAST.items() if real[name] >= least}
        ratios = {name: ratio for name, ratio in ratios.items() if ratio.isfinite()}
        excess = mine.reversals - real["reversals"]  # NaN where one of them is
        parts = {name: ratio.item() for name, ratio in ratios.items()}
        parts |= {"reversals": excess.item(), "lost": mine.lost.item()}
        score = self._score(ratios, excess)
        return (None if score is None else score.to(video.device)), parts

    def _score(self, ratios: Mapping[str, Tensor], excess: Tensor) -> Tensor | None:
        """The weighted mean of the terms that could be measured; None for none."""
        terms = {name: alike(ratios[name]) for name in ("face_change", "background_change") if name in ratios}
        halves = [ratios[name].clamp(max=1) for name in ("speed", "nonrigid") if name in ratios]
        if halves:
            terms["landmarks"] = torch.stack(halves).mean()
            if excess.isfinite():
                terms["landmarks"] = terms["landmarks"] - self.reversals * excess.clamp(min=0)
        weights = {name: self.term_weights[name] for name in terms if self.term_weights[name] > 0}
        if not weights:
            return None
        weighted = [weight * terms[name].cpu() for name, weight in weights.items()]
        return torch.stack(weighted).sum() / sum(weights.values())

    def _measure(self, video: Tensor, which: int, view: View | None) -> FaceMotion | None:
        """How the clip moves, with gradient where a term has a weight; None when no frame shows a face."""
        detector = cast(FaceDetector, self.detectors[which])
        with torch.autocast(video.device.type, enabled=False):
            frames = frames_of(video)
            with _gradient_if(self.term_weights["landmarks"] > 0):
                track = track_largest(detector.trace(frames, self.chunk, view))
                if track is None:
                    return None
                nothing = torch.tensor(math.nan)
                speed, nonrigid = step_motion(track) or (nothing, nothing)
                back = step_reversals(track)
            inside = _inside(track, frames)
            changes = []
            for name, where in (("face_change", inside), ("background_change", ~inside)):
                with _gradient_if(self.term_weights[name] > 0):
                    changes.append(mean_change(frames.transpose(0, 1), where))
            lost = 1 - track.detected[1:].float().mean()
            return FaceMotion(speed, nonrigid, nothing if back is None else back, changes[0], changes[1], lost)

    def _draw(self, video: Tensor) -> tuple[int, View | None]:
        """Which detector sees this clip, and how; the first and the frames as they are where no gradient is wanted."""
        if not (torch.is_grad_enabled() and video.requires_grad):
            return 0, None
        drawn = torch.Generator().manual_seed(seed_of(video))
        which, *places = torch.rand(4, generator=drawn, dtype=torch.float64).tolist()
        x, y, zoom = (2 * place - 1 for place in places)
        shift = self._most_shifted(video)
        view = View(1 + MAX_ZOOM * zoom, (shift * x, shift * y)) if self.jitter else None
        return int(which * len(self.detectors)), view

    def _most_shifted(self, video: Tensor) -> float:
        """MAX_SHIFT in frame pixels."""
        return MAX_SHIFT * max(video.shape[-2:]) / self.det_size


def views(most: float) -> list[View]:
    """Four views that shift by half of `most` frame pixels, the mean size of what is drawn, each to another side."""
    signs = ((1, 1, 1), (-1, 1, -1), (1, -1, -1), (-1, -1, 1))
    return [View(1 + MAX_ZOOM * zoom / 2, (most * x / 2, most * y / 2)) for zoom, x, y in signs]


def _gradient_if(wanted: bool) -> torch.set_grad_enabled:
    return torch.set_grad_enabled(wanted and torch.is_grad_enabled())


def _value(motion: FaceMotion | None, name: str) -> Tensor:
    return torch.tensor(math.nan) if motion is None else getattr(motion, name).cpu()


def _inside(track: Track, frames: Tensor) -> Tensor:
    """(F - 1, H, W) bool: the pixels within the box of either frame of a step."""
    left, top, right, bottom = (side[:, None, None] for side in track.boxes.to(frames.device).unbind(1))
    x = torch.arange(frames.shape[-1], device=frames.device)
    y = torch.arange(frames.shape[-2], device=frames.device)[:, None]
    inside = (left <= x) & (x <= right) & (top <= y) & (y <= bottom)
    return inside[:-1] | inside[1:]
