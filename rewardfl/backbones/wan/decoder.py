"""Decoding of Wan latents, and the exact vector-Jacobian product of the decoder, one chunk of frames at a time.

diffusers' AutoencoderKLWan decodes one latent frame after the other; causal convolutions remember the last
frames they saw in a list of caches. So the decoder is a recurrence (frames_i, caches_{i+1}) =
chunk(latents_i, caches_i), and its vector-Jacobian product walks back through the chunks with the cotangent
of the caches, holding one chunk's graph, of which all but one part's is computed again in its turn. The caches that
the chunks start from can wait in host memory, and be computed again, too.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import (
    WanCausalConv3d,
    WanDecoder3d,
    WanResample,
    WanResidualBlock,
    WanRMS_norm,
    unpatchify,
)
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from rewardfl.backbones.protocol import Caches, Conditioning, Decoded
from rewardfl.memory.offload import InHost, to_host

Kept = list[Tensor | InHost | str | None]  # caches for a VJP to come
STRIP = 2**24  # numbers of a strip of pictures whose norm is computed again at a time; it takes five float32 copies


@dataclass(frozen=True)
class WanDecoder:
    """The seam's Decoder. A cache per causal convolution: None before anything, "Rep" as diffusers marks the first.

    frame_given: whether the first latent frame is the conditioning's image, and not one of those that were sampled.
    """

    vae: AutoencoderKLWan
    frame_given: bool = False

    def decode(self, latents: Tensor, given: Conditioning | None = None) -> Tensor:
        """Video (B, 3, F, H, W) in [-1, 1] of latents (B, C, T, H/s, W/s) as the transformer sees them (normalised)."""
        return self._decode(self._whole(latents, given), stride=None, offload=False).video

    def decode_with_caches(self, latents: Tensor, caches: str = "keep", given: Conditioning | None = None) -> Decoded:
        """Like `decode`, for a `vjp` to come.

        caches: keep (on the device), offload (in host memory), or segment (in host memory, those of every
        ceil(sqrt(T))-th chunk; the VJP decodes each segment once more for the others, which wait there, too). The
        gradients are the same to the last bit.
        """
        if caches not in ("keep", "offload", "segment"):
            raise ValueError(f"caches must be keep, offload or segment, got {caches!r}")
        latents = self._whole(latents, given)
        stride = math.ceil(math.sqrt(latents.shape[2])) if caches == "segment" else 1
        return self._decode(latents, stride, offload=caches != "keep")

    def _whole(self, latents: Tensor, given: Conditioning | None) -> Tensor:
        """All latent frames of the video."""
        return torch.cat([given["image"].to(latents), latents], 2) if self.frame_given else latents

    @torch.no_grad()
    def _decode(self, latents: Tensor, stride: int | None, offload: bool) -> Decoded:
        caches: Caches = [None] * self.vae._cached_conv_counts["decoder"]
        chunks, kept = [], {}
        for i in range(latents.shape[2]):
            if stride is not None and i % stride == 0:
                kept[i] = _waiting(caches) if offload else caches
            frames, caches = self._chunk(latents[:, :, i : i + 1], caches, first=i == 0)
            chunks.append(frames)
        return Decoded(torch.cat(chunks, 2).clamp(-1, 1), kept)

    def vjp(
        self, latents: Tensor, grad_video: Tensor, decoded: Decoded | None = None, given: Conditioning | None = None
    ) -> Tensor:
        """grad_latents (B, C, T, h, w) = (d video / d latents)^T grad_video, equal to autograd through `vae.decode`.

        grad_video: (B, 3, F, H, W); it is zero, as in autograd, where the decoder's output is clamped. Chunks
        after the last frame with a gradient are skipped, which is exact: the decoder is causal. decoded: from
        `decode_with_caches` on the same latents; computed here when not given.
        """
        decoded = self.decode_with_caches(latents, given=given) if decoded is None else decoded
        latents, sampled = self._whole(latents, given), int(self.frame_given)  # the first one that was sampled
        grad_latents = torch.zeros_like(latents)
        end = latents.shape[2]
        frames_of = self._frame_ranges(end)
        grad_caches: list[Tensor | None] = [None] * len(decoded.caches[0])
        while end > 0 and not grad_video[:, :, slice(*frames_of[end - 1])].any():
            end -= 1
        segment: dict[int, Kept] = {}
        for i in reversed(range(sampled, end)):
            segment = segment if i in segment else self._segment(latents, decoded.caches, i)
            x = latents[:, :, i : i + 1].detach().requires_grad_()
            start = [
                c.detach().requires_grad_() if isinstance(c, Tensor) else c
                for c in _there(segment.pop(i), latents.device)
            ]
            leaves = [x] + [c for c in start if isinstance(c, Tensor)]
            with torch.enable_grad(), parts_checkpointed(self.vae.decoder):
                frames, after = self._chunk(x, start, first=i == 0)
                frames = frames.clamp(-1, 1)
                # where the graph begins, and not the values: there is no more use for them
                outputs = [get_gradient_edge(frames)]
                cotangents = [grad_video[:, :, slice(*frames_of[i])].to(frames.dtype)]
                for cache, cotangent in zip(after, grad_caches, strict=True):
                    if cotangent is not None and isinstance(cache, Tensor):
                        outputs.append(get_gradient_edge(cache))
                        cotangents.append(cotangent)
                del frames, after, cache
                # not torch.autograd.grad: its answers for the caches are parts of larger tensors, which they keep alive
                torch.autograd.backward(outputs, cotangents, inputs=leaves)
            del outputs, cotangents
            grad_latents[:, :, i : i + 1] = x.grad
            grad_caches = [c.grad if isinstance(c, Tensor) else None for c in start]
        return grad_latents[:, :, sampled:]

    @torch.no_grad()
    def _segment(self, latents: Tensor, kept: dict[int, Kept], last: int) -> dict[int, Kept]:
        """The caches that chunks start from, from the nearest kept one up to chunk `last`; the others in the host."""
        first = max(i for i in kept if i <= last)
        found = {first: kept[first]}
        caches: Caches = _there(kept[first], latents.device) if first < last else []
        for i in range(first, last):
            caches = self._chunk(latents[:, :, i : i + 1], caches, first=i == 0)[1]
            found[i + 1] = _waiting(caches)
        return found

    def _chunk(self, latents: Tensor, caches: Caches, first: bool) -> tuple[Tensor, Caches]:
        """One latent frame (B, C, 1, h, w) -> its video frames, unclamped, and the caches after it."""
        latents, config = latents.to(self.vae.dtype), self.vae.config
        mean, std = (latents.new_tensor(v).view(1, -1, 1, 1, 1) for v in (config.latents_mean, config.latents_std))
        # diffusers' pipeline multiplies by 1 / std and divides by that; the same roundings give the same pixels
        x = self.vae.post_quant_conv(latents / (1.0 / std) + mean)
        after = list(caches)  # diffusers replaces the list's entries, never a cached tensor's contents
        frames = self.vae.decoder(x, feat_cache=after, feat_idx=[0], first_chunk=first)
        return frames if config.patch_size is None else unpatchify(frames, config.patch_size), after

    def _frame_ranges(self, num_latents: int) -> list[tuple[int, int]]:
        """Which video frames each latent frame makes: the first makes one, every other one `temporal factor`."""
        factor = self.vae.config.scale_factor_temporal
        return [(0, 1)] + [(1 + factor * i, 1 + factor * (i + 1)) for i in range(num_latents - 1)]


def _waiting(caches: Caches) -> Kept:
    """The same caches in host memory."""
    return [InHost(to_host(cache)) if isinstance(cache, Tensor) else cache for cache in caches]


def _there(kept: Kept, device: torch.device) -> Caches:
    """The same caches on the device, where they may have stayed."""
    return [cache.back(device) if isinstance(cache, InHost) else cache for cache in kept]


@contextlib.contextmanager
def parts_checkpointed(decoder: WanDecoder3d) -> Iterator[None]:
    """Within, a graph through the decoder keeps of its residual blocks and upsamplers what goes into them alone.

    The backward pass, which belongs within, computes each of them again: norms, which take most, in strips, and a
    convolution's input before its cache and its padding are put around it. The gradients are the same: the graph is
    the same, and only what its nodes keep is made anew. They are so to the last bit where there is one strip; of
    several the channels may be summed in another order than those of a whole picture. diffusers' own
    `enable_gradient_checkpointing` does nothing here.
    """
    how: dict[type, Callable[..., Tensor]] = {
        WanResidualBlock: _checkpointed,
        WanResample: _checkpointed,
        WanRMS_norm: _in_strips,
        WanCausalConv3d: _before_padding,
    }
    parts = [one for one in decoder.modules() if type(one) in how]
    for part in parts:
        part.forward = partial(how[type(part)], part.forward)
    try:
        yield
    finally:
        for part in parts:
            del part.forward  # the class's own is left


def _in_strips(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """`forward(x)` of what looks at every position alone, (..., h, w); each strip is computed again in its turn."""
    rows = max(1, STRIP * x.shape[-2] // x.numel())
    again = partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)
    return again(x) if rows >= x.shape[-2] else torch.cat([again(strip) for strip in x.split(rows, -2)], -2)


def _before_padding(forward: Callable[..., Tensor], x: Tensor, cache_x: Tensor | None = None) -> Tensor:
    """A convolution's `forward(x, cache_x)`. It is not computed again: it needs no more than its padded input."""
    return checkpoint(forward, x, cache_x, use_reentrant=False, preserve_rng_state=False)


def _checkpointed(forward: Callable[..., Tensor], x: Tensor, feat_cache: Caches, feat_idx: list[int]) -> Tensor:
    """`forward(x, feat_cache, feat_idx)` of a part, computed again in the backward pass.

    A part replaces entries of `feat_cache` from `feat_idx[0]` on, and counts them there. So that it finds the same ones
    the second time, it gets a copy of the list.
    """
    given, start = list(feat_cache), feat_idx[0]

    def run(x: Tensor) -> tuple[Tensor, Caches]:
        after, index = list(given), [start]
        return forward(x, feat_cache=after, feat_idx=index), after[start : index[0]]

    out, new = checkpoint(run, x, use_reentrant=False, preserve_rng_state=False)
    feat_cache[start : start + len(new)] = new
    feat_idx[0] = start + len(new)
    return out
