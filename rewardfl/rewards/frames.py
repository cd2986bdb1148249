"""Rewards of single images as rewards of videos: select frames, score them, pool their scores."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TypedDict

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rewardfl import data
from rewardfl.config.schema import Count
from rewardfl.rewards.base import Reference, Reward, RewardOutput, score_clips
from rewardfl.rewards.settings import Frames, Pooling


class FrameSettings(TypedDict, total=False):
    """The settings of every FrameReward, which subclasses take as **frame_settings: Unpack[FrameSettings]."""

    frames: Frames
    pooling: Pooling
    first_frame: bool
    chunk: Count


class FrameReward(Reward):
    """Base class that scores frames of each video one by one and pools their scores.

    frames: "all", "first_middle_last", or a number n of frames spread evenly over the clip (all if it has fewer).
    pooling: "mean", "min", or "worst-k": the mean over the k lowest scores. first_frame: score frame 0 too, which is
    the input image in image-to-video; a video's only frame is always scored. chunk: frames that are scored at a time;
    the backward pass recomputes each chunk from its pixels, so that memory holds one chunk's graph.

    Parts: frame_mean and frame_min over the scored frames, NaN for invalid samples. A sample is invalid when its
    reference is None or the score of a frame is not finite.
    """

    def __init__(
        self, frames: Frames = "all", pooling: Pooling = "mean", *, first_frame: bool = False, chunk: Count = 8
    ):
        super().__init__()
        self.frames, self.pooling, self.first_frame, self.chunk = frames, pooling, first_frame, chunk

    def score_frames(self, frames: Tensor, reference: Mapping[str, Tensor]) -> Tensor:
        """Return scores (N,) of frames (N, 3, H, W) in [-1, 1] (values outside may occur), N at most `chunk`."""
        raise NotImplementedError

    def forward(self, video: Tensor, batch: Sequence[Reference]) -> RewardOutput:
        graph = self.differentiable and torch.is_grad_enabled()
        with torch.autocast(video.device.type, enabled=False), torch.set_grad_enabled(graph):
            return score_clips(video, batch, self._sample, ("frame_mean", "frame_min"))

    def _sample(self, video: Tensor, reference: Mapping[str, Tensor]) -> tuple[Tensor | None, dict[str, float]]:
        frames = select_frames(video.shape[1], self.frames, first_frame=self.first_frame)
        in_a_row = len(frames) == frames[-1] + 1 - frames[0]  # a slice needs no copy of the indices to the GPU
        chosen = video[:, frames[0] : frames[-1] + 1] if in_a_row else video[:, frames]
        chunks = chosen.transpose(0, 1).split(self.chunk)
        recomputed = partial(checkpoint, self.score_frames, use_reentrant=False, preserve_rng_state=False)
        scores = torch.cat([recomputed(chunk, reference) for chunk in chunks])
        finite, mean, least = torch.stack([scores.isfinite().all(), scores.mean(), scores.min()]).tolist()  # one copy
        if not finite:
            return None, {}
        return pool(scores, self.pooling), {"frame_mean": mean, "frame_min": least}


def select_frames(count: int, frames: Frames, *, first_frame: bool) -> list[int]:
    """Return the indices, in 0 .. count - 1, of the frames that FrameReward scores."""
    start = 0 if first_frame or count == 1 else 1
    if frames == "all":
        return list(range(start, count))
    if frames == "first_middle_last":
        return sorted({start, (start + count - 1) // 2, count - 1})
    if frames == 1:
        return [(start + count - 1) // 2]
    return sorted(set(torch.linspace(start, count - 1, frames).round().int().tolist()))


def to_uint8_frames(
    video: Tensor, batch: Sequence[Reference], frames: Sequence[int] | slice
) -> tuple[Tensor, list[Reference]]:
    """Return the frames of videos (B, 3, F, H, W) in [-1, 1] as (B, F', H, W, 3) uint8 in CPU memory, and references.

    The reference of a clip is None if its pixels are not finite: as uint8 they would be arbitrary colours.
    """
    finite = video.flatten(1).isfinite().all(1).tolist()
    levels = torch.stack([data.to_uint8(clip[:, frames]) for clip in video]).cpu().contiguous()
    return levels, [reference if ok else None for reference, ok in zip(batch, finite, strict=True)]


def pool(scores: Tensor, pooling: str) -> Tensor:
    """Pool finite scores (N,) of frames to the clip's score ()."""
    if pooling == "mean":
        return scores.mean()
    if pooling == "min":
        return scores.min()
    lowest = int(pooling.removeprefix("worst-"))
    return scores.topk(min(lowest, len(scores)), largest=False).values.mean()
