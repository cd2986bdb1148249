"""Does the generated clip move as much as the real one, and as steadily? By optical flow, differentiable."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from rewardfl.config.schema import NonNegative, Number
from rewardfl.rewards.base import Reward, RewardOutput, by_sample
from rewardfl.rewards.pixels.motion import alike

# Larger frames are shrunk to this many pixels on their long side: a flow of one level follows motions of a pixel or so.
LONG_SIDE = 128

WINDOW = 15  # pixels on a side, in which all is taken to move alike

# Added to the sums of squared gradients (grey in 0..1): where the picture is flat, the flow is 0 and no noise.
FLAT = 1e-4

# Pixels per frame, of the shrunk frames, below which a real clip stands still, and a field has no direction.
MIN_FLOW = 0.02

GREY = (0.299, 0.587, 0.114)  # OpenCV's


class OpticalFlowReward(Reward):
    """alike(r) - reversals * max(0, b - b_real), both of an optical flow with gradient.

    r is the mean length of the generated clip's flow over the real one's, alike(r) = min(r, 1 / r). b is minus the
    cosine of successive flow fields, from -1 (what moves goes on as it does) to 1 (it goes back and forth): a clip that
    trembles more than the real one loses what it would gain. This reward sees motion where `motion` sees pixels that
    change, a flicker too; and of a detector's landmarks, which pixels can move that show no motion, it knows nothing.

    The flow is Lucas and Kanade's (IJCAI 1981), of one level, on grey frames of at most LONG_SIDE pixels. The held-out
    judge's is another one (Farneback's, OpenCV): over real and generated clips of the tiny world the two have a
    correlation of 0.95, and their reversals of 0.94.

    wanted_flow, in pixels per (shrunk) frame, and wanted_reversals stand for the real clip's where there is none: a
    prompt's video is then to move as much as, say, the base model's videos do.

    Parts: ratio, r; reversals, b - b_real, NaN for a clip of two frames. A sample is invalid when its real clip stands
    still or has one frame.
    """

    name = "optical_flow"
    differentiable = True
    fewest_frames = 2
    licence = "this project's"
    range = "[-2, 1]; [0, 1] without reversals"
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
        self.wanted: tuple[float, float] | None = None
        if wanted_flow is not None and wanted_reversals is not None:
            self.wanted = (wanted_flow, wanted_reversals)

    @property
    def compares_with(self) -> str:
        return "clip" if self.wanted is None else "nothing"

    @torch.no_grad()
    def reference(self, video: Tensor, prompt: str = "") -> dict[str, Tensor] | None:
        """The real clip's mean length of flow, in pixels per shrunk frame, and its reversals, or what is wanted."""
        if self.wanted is not None:
            return {name: torch.tensor(value) for name, value in zip(("flow", "reversals"), self.wanted, strict=True)}
        if video.shape[1] < 2:
            return None
        fields = lucas_kanade(video)
        flow = mean_length(fields)
        return {"flow": flow, "reversals": mean_reversal(fields)} if flow >= MIN_FLOW else None

    def fingerprint(self) -> dict[str, object]:
        """How flow is taken; the weight of reversals takes no part in the reference."""
        kept: dict[str, object] = {"name": self.name, "flow": [LONG_SIDE, WINDOW, FLAT]}
        return kept if self.wanted is None else kept | {"wanted": list(self.wanted)}

    def forward(self, video: Tensor, batch: Sequence[Mapping[str, Tensor] | None]) -> RewardOutput:
        with torch.autocast(video.device.type, enabled=False):
            return by_sample(video, batch, self._sample, ("ratio", "reversals"))

    def _sample(self, video: Tensor, reference: Mapping[str, Tensor]) -> tuple[Tensor | None, dict[str, float]]:
        """Score and parts of one clip (3, F, H, W); no score for pixels that are not finite."""
        fields = lucas_kanade(video)
        ratio = mean_length(fields) / reference["flow"].to(fields)
        excess = mean_reversal(fields) - reference["reversals"].to(fields)
        if not ratio.isfinite():
            return None, {}
        score = alike(ratio)
        if excess.isfinite():
            score = score - self.reversals * excess.clamp(min=0)
        return score, {"ratio": ratio.item(), "reversals": excess.item()}


def lucas_kanade(video: Tensor) -> Tensor:
    """(F - 1, 2, h, w) flow (x, y) in pixels from each frame of a (3, F, H, W) video in [-1, 1] to the next.

    h x w is the frame's size, or what it is shrunk to (LONG_SIDE). At each place the least squares solution of
    I_x u + I_y v = -I_t over its window, with FLAT for what the window does not tell.
    """
    frames = _grey(video)
    middle = F.pad((frames[:-1] + frames[1:]) / 2, (1, 1, 1, 1), mode="replicate")
    x = (middle[..., 1:-1, 2:] - middle[..., 1:-1, :-2]) / 2
    y = (middle[..., 2:, 1:-1] - middle[..., :-2, 1:-1]) / 2
    t = frames[1:] - frames[:-1]
    products = torch.cat([x * x, x * y, y * y, x * t, y * t], 1)
    for window in ((WINDOW, 1), (1, WINDOW)):  # a square's mean, an axis at a time
        products = F.avg_pool2d(products, window, 1, [side // 2 for side in window], count_include_pad=False)
    xx, xy, yy, xt, yt = products.split(1, 1)
    xx, yy = xx + FLAT, yy + FLAT
    determinant = xx * yy - xy * xy  # at least FLAT squared
    return torch.cat([xy * yt - yy * xt, xy * xt - xx * yt], 1) / determinant


def mean_length(fields: Tensor) -> Tensor:
    """() mean length of (N, 2, h, w) vectors."""
    return (fields.square().sum(1) + 1e-6).sqrt().mean()  # a vector of 0 has a gradient, too


def mean_reversal(fields: Tensor) -> Tensor:
    """() minus the cosine of each of (N, 2, h, w) fields with the next one, mean, in [-1, 1]; NaN for one field.

    Fields that move less than MIN_FLOW count for the less, the less they move, and one of 0 as 0.
    """
    flat = fields.flatten(1)
    length = flat.norm(dim=1).clamp(min=MIN_FLOW * math.sqrt(flat.shape[1] / 2))
    cosine = (flat[:-1] * flat[1:]).sum(1) / (length[:-1] * length[1:])
    return -cosine.mean()


def _grey(video: Tensor) -> Tensor:
    """(3, F, H, W) in [-1, 1] -> (F, 1, h, w) in [0, 1], shrunk if large, each pixel a mean of nine."""
    video = video.to(torch.promote_types(video.dtype, torch.float32))
    grey = torch.einsum("c,cfhw->fhw", torch.tensor(GREY).to(video), video)[:, None] / 2 + 0.5
    scale = LONG_SIDE / max(grey.shape[-2:])
    if scale < 1:
        size = [max(1, round(side * scale)) for side in grey.shape[-2:]]
        grey = F.interpolate(grey, size, mode="area")
    binomial = torch.tensor([1.0, 2.0, 1.0]).to(grey) / 4
    kernel = (binomial[:, None] * binomial)[None, None]
    return F.conv2d(F.pad(grey, (1, 1, 1, 1), mode="replicate"), kernel)
