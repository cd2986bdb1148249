"""Amount and steadiness of motion compared with the real clip, by optical flow, differentiable."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from rewardfl.config.schema import NonNegative, Number
from rewardfl.rewards.base import Reward, RewardOutput, score_clips
from rewardfl.rewards.pixels.motion import symmetric_ratio

# Larger frames are shrunk to this many pixels on their long side: a flow of one level follows motions of about a pixel.
FLOW_SIDE = 128
_WINDOW = 15  # pixels on a side of the window, in which motion is taken to be uniform
FLAT = 1e-4  # added to the sums of squared gradients (grey in 0..1), so that the flow of a flat picture is 0, not noise
DAMPED = 1e-3  # the judge's: flow of weak gradients, such as shimmer, hardly counts
MIN_FLOW = 0.02  # pixels per shrunk frame; below it a real clip stands still, and a field has no direction
_GREY = (0.299, 0.587, 0.114)  # OpenCV's


class OpticalFlowReward(Reward):
    """min(r, 1 / r) - reversals * max(0, b - b_real) of an optical flow with gradient.

    r is the mean length of the generated clip's flow over the real one's. b is minus the cosine of successive flow
    fields, from -1 (steady) to 1 (back and forth): it prices trembling. Unlike `motion`, this reward ignores flicker.

    The flow is Lucas and Kanade's (IJCAI 1981), of one level, on grey frames of at most FLOW_SIDE pixels. wanted_flow,
    in pixels per shrunk frame, and wanted_reversals replace the real clip's if there is none.

    Parts: ratio, r; reversals, b - b_real, NaN for a clip of two frames. A sample is invalid when its real clip stands
    still or has one frame.
    """

    name = "optical_flow"
    differentiable = True
    fewest_frames = 2
    licence = "this project's"
    range = "[-2, 1]; [0, 1] without reversals"
    has_cap = True
    nothing_found = "nothing moves in"

    def __init__(
        self,
        reversals: NonNegative = 1.0,
        wanted_flow: Annotated[Number, Field(ge=MIN_FLOW)] | None = None,
        wanted_reversals: Annotated[Number, Field(ge=-1, le=1)] | None = None,
    ):
        super().__init__()
        if (wanted_flow is None) != (wanted_reversals is None):
            raise ValueError("wanted_flow and wanted_reversals stand for the real clip's together; give both or none")
        self.reversals = reversals
        self.wanted_flow, self.wanted_reversals = wanted_flow, wanted_reversals

    @classmethod
    def comparison(cls, settings: Mapping[str, Any]) -> str:
        return "motion" if settings.get("wanted_flow") is None else "nothing"

    @torch.no_grad()
    def reference(self, video: Tensor, prompt: str = "") -> dict[str, Tensor] | None:
        """Return mean length of flow, in pixels per shrunk frame, and reversals, of the real clip or the settings."""
        if self.wanted_flow is not None:
            return {"flow": torch.tensor(self.wanted_flow), "reversals": torch.tensor(self.wanted_reversals)}
        if video.shape[1] < 2:
            return None
        fields = lucas_kanade(video)
        flow = mean_length(fields)
        return {"flow": flow, "reversals": mean_reversal(fields)} if flow >= MIN_FLOW else None

    def fingerprint(self) -> dict[str, object]:
        """Return the settings of the flow and the wanted motion, but not the weight of reversals."""
        target = {} if self.wanted_flow is None else {"wanted": [self.wanted_flow, self.wanted_reversals]}
        return {"name": self.name, "flow": [FLOW_SIDE, _WINDOW, FLAT], **target}

    def forward(self, video: Tensor, batch: Sequence[Mapping[str, Tensor] | None]) -> RewardOutput:
        with torch.autocast(video.device.type, enabled=False):
            return score_clips(video, batch, self._sample, ("ratio", "reversals"))

    def _sample(self, video: Tensor, reference: Mapping[str, Tensor]) -> tuple[Tensor | None, dict[str, float]]:
        fields = lucas_kanade(video)
        ratio = mean_length(fields) / reference["flow"].to(fields)
        excess = mean_reversal(fields) - reference["reversals"].to(fields)
        if not ratio.isfinite():
            return None, {}
        score = symmetric_ratio(ratio)
        if excess.isfinite():
            score = score - self.reversals * excess.clamp(min=0)
        return score, {"ratio": ratio.item(), "reversals": excess.item()}


@torch.no_grad()
def damped_flow(video: Tensor) -> float:
    """Return the mean length of a video's `lucas_kanade` flow, damped by DAMPED, in pixels per shrunk frame."""
    with torch.autocast(video.device.type, enabled=False):
        return float(mean_length(lucas_kanade(video, DAMPED)))


def lucas_kanade(video: Tensor, flat: float = FLAT) -> Tensor:
    """Return the flow (x, y) (F - 1, 2, h, w), in pixels, between the frames of a (3, F, H, W) video in [-1, 1].

    h x w is the frame's size, shrunk to FLOW_SIDE if larger. The flow of a pixel is the least squares solution of
    I_x u + I_y v = -I_t over its window, damped by `flat`.
    """
    frames = _grey(video)
    middle = F.pad((frames[:-1] + frames[1:]) / 2, (1, 1, 1, 1), mode="replicate")
    x = (middle[..., 1:-1, 2:] - middle[..., 1:-1, :-2]) / 2
    y = (middle[..., 2:, 1:-1] - middle[..., :-2, 1:-1]) / 2
    t = frames[1:] - frames[:-1]
    products = torch.cat([x * x, x * y, y * y, x * t, y * t], 1)
    for window in ((_WINDOW, 1), (1, _WINDOW)):  # the mean over a square, one axis at a time
        products = F.avg_pool2d(products, window, 1, [side // 2 for side in window], count_include_pad=False)
    xx, xy, yy, xt, yt = products.split(1, 1)
    xx, yy = xx + flat, yy + flat
    determinant = xx * yy - xy * xy  # at least `flat` squared
    return torch.cat([xy * yt - yy * xt, xy * xt - xx * yt], 1) / determinant


def mean_length(fields: Tensor) -> Tensor:
    """Return the () mean length of (N, 2, h, w) vectors."""
    return (fields.square().sum(1) + 1e-6).sqrt().mean()  # 1e-6: sqrt has no gradient at 0


def mean_reversal(fields: Tensor) -> Tensor:
    """Return () minus the mean cosine of each of (N, 2, h, w) fields with the next, in [-1, 1]; NaN for one field.

    Fields shorter than MIN_FLOW count less in proportion to their length.
    """
    flat = fields.flatten(1)
    length = flat.norm(dim=1).clamp(min=MIN_FLOW * math.sqrt(flat.shape[1] / 2))
    cosine = (flat[:-1] * flat[1:]).sum(1) / (length[:-1] * length[1:])
    return -cosine.mean()


def _grey(video: Tensor) -> Tensor:
    """Return a video (3, F, H, W) in [-1, 1] as (F, 1, h, w) in [0, 1], shrunk if large, smoothed over 3 x 3 pixels."""
    video = video.to(torch.promote_types(video.dtype, torch.float32))
    grey = torch.einsum("c,cfhw->fhw", torch.tensor(_GREY).to(video), video)[:, None] / 2 + 0.5
    scale = FLOW_SIDE / max(grey.shape[-2:])
    if scale < 1:
        size = [max(1, round(side * scale)) for side in grey.shape[-2:]]
        grey = F.interpolate(grey, size, mode="area")
    binomial = torch.tensor([1.0, 2.0, 1.0]).to(grey) / 4
    kernel = (binomial[:, None] * binomial)[None, None]
    return F.conv2d(F.pad(grey, (1, 1, 1, 1), mode="replicate"), kernel)
