"""Motion of the generated face compared with the real one's, by a detector's landmarks, with gradient."""

import hashlib
import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from rewardfl.config.schema import Count, DetectionSide, NonNegative
from rewardfl.files import sha256
from rewardfl.rewards.base import Reward, RewardOutput, score_clips
from rewardfl.rewards.face.detect import STRIDES, FaceDetector, View
from rewardfl.rewards.face.look import PATCHES, grey_patches
from rewardfl.rewards.face.pack import PackFolder, pack_files
from rewardfl.rewards.face.track import MIN_MOTION, Track, step_motion, step_reversals, track_largest
from rewardfl.rewards.pixels.motion import MIN_CHANGE, mean_change, symmetric_ratio

# Half of the detector's finest stride to each side covers every position of a face between two of its cells.
MAX_SHIFT = STRIDES[0] / 2  # detector pixels
MAX_ZOOM = 0.03
# fractions (x, y, zoom) of these, the means of the drawn ones
FIXED_VIEWS = ((0.5, 0.5, 0.5), (0.5, -0.5, -0.5), (-0.5, -0.5, 0.5), (-0.5, 0.5, -0.5))

# A real clip that moves less gives no ratio.
MIN_REAL_MOTION = dict.fromkeys(("speed", "nonrigid"), MIN_MOTION)
MIN_REAL_MOTION |= dict.fromkeys(("face_change", "background_change"), MIN_CHANGE)

COARSE = 6  # pixels of the aligned patch whose mean is compared over time, so that noise cancels
# Added to both sides of a ratio of `expression_changes`: silent mouths have 0.01 to 0.02, talkers 0.09.
STILL_CHANGE = 0.02

NAMES = ("speed", "nonrigid", "reversals", "face_change", "background_change", *PATCHES, "lost")


class FaceMotionReward(Reward):
    """Weighted mean of the four terms, over those that could be measured.

    landmarks: mean of min(s, 1) and min(n, 1), less reversals * max(0, b - b_real). s and n are landmark speed and
    non-rigid motion over the real clip's, left out if that hardly moves; b is step_reversals, which prices trembling.

    face_change, background_change: min(r, 1 / r). r is the mean change of pixels from frame to frame over the real
    clip's, inside and outside the face's box (of a step: both frames' boxes together).

    expression: min(r, 1 / r). r is the mouth's `expression_changes` over the real clip's, both plus STILL_CHANGE:
    landmarks do not see a mouth open. Eyes are only a part: smears change them more than blinks.

    Pixels can move a detector's landmarks without visible motion. Therefore, with a gradient, `jitter` shifts and
    scales the clip a little in each call, and with `second_pack_dir` one of two detectors is drawn, both by a seed of
    the clip. `chunk` frames are detected at a time, and again in the backward pass.

    Parts: speed, nonrigid, face_change, background_change, eyes and mouth over the real clip's, NaN if that hardly
    moves; reversals less the real clip's; lost, the share of frames after the first without the face. A sample is
    invalid when nothing can be compared.
    """

    name = "face_motion"
    differentiable = True
    fewest_frames = 2
    weights = "face pack: SCRFD or YuNet detector (.onnx)"
    licence = "insightface's packs: non-commercial research; YuNet MIT"
    range = "at most 1; [0, 1] without reversals"
    has_cap = True
    nothing_found = "no moving face was found in"
    compares_with = "motion"

    def __init__(
        self,
        pack_dir: PackFolder,
        det_size: DetectionSide = 640,
        chunk: Count = 8,
        landmarks: NonNegative = 1.0,
        face_change: NonNegative = 0.0,
        background_change: NonNegative = 0.0,
        reversals: NonNegative = 0.5,
        *,
        expression: NonNegative = 0.0,
        jitter: bool = True,
        second_pack_dir: PackFolder | None = None,
    ):
        super().__init__()
        self.term_weights = {"landmarks": landmarks, "face_change": face_change, "background_change": background_change}
        self.term_weights["expression"] = expression
        if not any(self.term_weights.values()):
            raise ValueError("landmarks, face_change, background_change and expression are all 0: nothing is scored")
        packs = [pack_dir] if second_pack_dir is None else [pack_dir, second_pack_dir]
        files = [pack_files(pack)[0] for pack in packs]
        self.detectors = torch.nn.ModuleList(FaceDetector(file, det_size) for file in files)
        self._weights = [sha256(file) for file in files]
        self.det_size, self.chunk = det_size, chunk
        self.reversals, self.jitter = reversals, jitter

    @torch.no_grad()
    def reference(self, video: Tensor, prompt: str = "") -> dict[str, Tensor] | None:
        """Return the motion of a real clip (3, F, H, W), by name, each (detectors, 2); None when nothing moves.

        The second column, the mean over FIXED_VIEWS, is for clips seen through a view: on moved pixels landmarks
        tremble differently, which may raise the small non-rigid motion by half.
        """
        all_views = (None, *(self.view(video, *fractions) for fractions in FIXED_VIEWS))
        table: dict[str, list[list[float]]] = {name: [] for name in NAMES[:-1]}
        for index in range(len(self.detectors)):
            plain, *viewed = [self._measure(video, index, view) for view in all_views]
            for name, rows in table.items():
                rows.append([plain[name].item(), torch.stack([motion[name] for motion in viewed]).nanmean().item()])
        reference = {name: torch.tensor(rows) for name, rows in table.items()}
        moves = (reference["speed"] >= MIN_MOTION) | (reference["face_change"] >= MIN_CHANGE)
        return reference if moves.any() else None

    def fingerprint(self) -> dict[str, object]:
        """Return what the reference depends on: detectors, detection size and patches, but no weight of a term."""
        patches = {name: str(patch) for name, patch in PATCHES.items()} | {"coarse": COARSE}
        return {"name": self.name, "weights": self._weights, "det_size": self.det_size, "patches": patches}

    def forward(self, video: Tensor, batch: Sequence[Mapping[str, Tensor] | None]) -> RewardOutput:
        return score_clips(video, batch, self._sample, NAMES)

    def _sample(self, video: Tensor, reference: Mapping[str, Tensor]) -> tuple[Tensor | None, dict[str, float]]:
        detector, view = self._draw(video)
        motion = self._measure(video, detector, view)
        real = {name: values[detector, 0 if view is None else 1].item() for name, values in reference.items()}
        moving = [name for name, least in MIN_REAL_MOTION.items() if real[name] >= least]
        ratios = {name: motion[name] / real[name] for name in moving}
        ratios |= {name: (motion[name] + STILL_CHANGE) / (real[name] + STILL_CHANGE) for name in PATCHES}
        ratios = {name: ratio for name, ratio in ratios.items() if ratio.isfinite()}
        excess = motion["reversals"] - real["reversals"]  # NaN where either is
        parts = {name: ratio.item() for name, ratio in ratios.items()}
        parts |= {"reversals": excess.item(), "lost": motion["lost"].item()}
        score = self._score(ratios, excess)
        return (None if score is None else score.to(video.device)), parts

    def _score(self, ratios: Mapping[str, Tensor], excess: Tensor) -> Tensor | None:
        """Return the weighted mean of the terms that could be measured; None without any."""
        measured = {"face_change": "face_change", "background_change": "background_change", "expression": "mouth"}
        terms = {term: symmetric_ratio(ratios[name]) for term, name in measured.items() if name in ratios}
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

    def _measure(self, video: Tensor, index: int, view: View | None) -> dict[str, Tensor]:
        """Return the motion of the clip, () each, with gradient where a term has a weight; NaN without a face."""
        detector = self.detectors[index]
        assert isinstance(detector, FaceDetector)
        graph = torch.is_grad_enabled()
        with torch.autocast(video.device.type, enabled=False):
            frames = video.transpose(0, 1).float()
            with torch.set_grad_enabled(graph and self.term_weights["landmarks"] > 0):
                track = track_largest(detector.trace(frames, self.chunk, view))
                if track is None:
                    return dict.fromkeys(NAMES, torch.tensor(math.nan)) | {"lost": torch.tensor(1.0)}
                speed, nonrigid = step_motion(track)
                reversals = step_reversals(track)
            lost = 1 - track.detected[1:].float().mean()
            motion = {"speed": speed, "nonrigid": nonrigid, "reversals": reversals, "lost": lost}
            with torch.set_grad_enabled(graph and self.term_weights["expression"] > 0):
                motion |= expression_changes(frames[track.detected], track.landmarks[track.detected].detach())
            inside = _inside(track, frames)
            for name, mask in (("face_change", inside), ("background_change", ~inside)):
                with torch.set_grad_enabled(graph and self.term_weights[name] > 0):
                    motion[name] = mean_change(frames.transpose(0, 1), mask)
            return motion

    def _draw(self, video: Tensor) -> tuple[int, View | None]:
        """Draw a detector and a view; return the first detector and no view without a gradient."""
        if not (torch.is_grad_enabled() and video.requires_grad):
            return 0, None
        # from the clip's mean to 1e-4, so that a resumed run and other numbers of processes, whose sums differ by far
        # less, draw the same; hashed, so that neighbouring means give unrelated draws
        mean = round(video.detach().double().mean().nan_to_num().item() * 1e4)
        seed = int.from_bytes(hashlib.sha256(f"{mean}".encode()).digest()[:7], "big")
        fractions = torch.rand(4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).tolist()
        x, y, zoom = (2 * fraction - 1 for fraction in fractions[1:])
        return int(fractions[0] * len(self.detectors)), self.view(video, x, y, zoom) if self.jitter else None

    def view(self, video: Tensor, x: float, y: float, zoom: float) -> View:
        """Return the view with these fractions, in [-1, 1], of MAX_SHIFT and MAX_ZOOM."""
        shift = MAX_SHIFT * max(video.shape[-2:]) / self.det_size  # frame pixels
        return View(1 + MAX_ZOOM * zoom, (shift * x, shift * y))


def expression_changes(frames: Tensor, landmarks: Tensor) -> dict[str, Tensor]:
    """Return how much eyes and mouth change in frames (F, 3, H, W), in [0, 1], () each, with gradient to the frames.

    It is the standard deviation over time of the aligned grey patch, in squares of COARSE pixels, less the patch's mean
    in each frame and each square's least-squares line over time: brightness, noise and drift hardly count. landmarks:
    (F, 5, 2).
    """
    changes = {}
    for name, patch in grey_patches(frames, landmarks).items():
        squares = F.avg_pool2d(patch[:, None], COARSE, COARSE // 2).flatten(1)  # (F, n), half overlapping
        squares = squares - squares.mean(1, keepdim=True)
        squares = squares - squares.mean(0)
        time = torch.arange(len(squares), device=squares.device).to(squares) - (len(squares) - 1) / 2
        line = time[:, None] * (time @ squares) / time.square().sum().clamp(min=0.5)  # 0 for a single frame
        changes[name] = ((squares - line).square().mean() + 1e-8).sqrt()  # 1e-8: sqrt has no gradient at 0
    return changes


def _inside(track: Track, frames: Tensor) -> Tensor:
    """Return (F - 1, H, W) bool: the pixels within the box of either frame of a step."""
    left, top, right, bottom = (side[:, None, None] for side in track.boxes.to(frames.device).unbind(1))
    x = torch.arange(frames.shape[-1], device=frames.device)
    y = torch.arange(frames.shape[-2], device=frames.device)[:, None]
    inside = (left <= x) & (x <= right) & (top <= y) & (y <= bottom)
    return inside[:-1] | inside[1:]
