"""Decoding of Wan latents, and the exact vector-Jacobian product of the decoder, one chunk of frames at a time.

diffusers' AutoencoderKLWan decodes one latent frame after the other; causal convolutions keep their last input frames
in a list of caches. So the decoder is a recurrence (frames_i, caches_{i+1}) = chunk(latents_i, caches_i). Its
vector-Jacobian product walks back through the chunks with the cotangent of the caches, and holds one chunk's graph.
"""

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanDecoder3d, WanResidualBlock, WanRMS_norm, unpatchify
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import checkpoint

from rewardfl.backbones import stock
from rewardfl.backbones.protocol import Caches, Conditioning, DecodeCaches, Decoded
from rewardfl.memory.convolutions import FrozenConvolutions
from rewardfl.memory.host_pool import OffloadedTensors, host_pool

STRIP = 2**24  # numbers in a strip of pictures whose norm is recomputed at once; it takes five float32 copies


@dataclass(frozen=True)
class _CachesOnHost:
    """The caches before a chunk, in host memory. entries: numbers of `tensors`, and caches that are no tensors."""

    tensors: OffloadedTensors
    entries: list[int | str | None]


StoredCaches = Caches | _CachesOnHost  # for a later VJP


@dataclass(frozen=True)
class _Graph:
    """The graph of some chunks, to be walked back once: its leaves, and the edges of its outputs."""

    latents: Tensor
    before: Caches  # before the first chunk
    frames: list[GradientEdge]  # by chunk
    after: list[GradientEdge | None]  # the caches after the last chunk

    def pull_back(
        self, grad_frames: Sequence[Tensor], grad_after: Sequence[Tensor | None]
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Return the gradients of the latents (B, C, chunks, h, w) and of the first caches; None for non-tensors."""
        pairs = [*zip(self.frames, grad_frames, strict=True), *zip(self.after, grad_after, strict=True)]
        outputs, cotangents = zip(*((edge, grad) for edge, grad in pairs if edge and grad is not None), strict=True)
        leaves = [self.latents] + [cache for cache in self.before if isinstance(cache, Tensor)]
        # not torch.autograd.grad: its results for the caches are views that keep larger tensors alive
        torch.autograd.backward(outputs, cotangents, inputs=leaves)
        assert self.latents.grad is not None
        return self.latents.grad, [cache.grad if isinstance(cache, Tensor) else None for cache in self.before]


@dataclass(frozen=True)
class WanDecoder:
    """The Decoder of Wan. One cache per causal convolution: None at first, then "Rep" as diffusers marks the first.

    frame_given: whether the first latent frame is the conditioning's image instead of a sampled one.
    """

    vae: AutoencoderKLWan
    frame_given: bool = False

    def decode(self, latents: Tensor, conditioning: Conditioning | None = None) -> Tensor:
        """Return the video (B, 3, F, H, W) in [-1, 1] of normalised latents (B, C, T, H/s, W/s)."""
        return self.decode_with_caches(latents, conditioning, None).video

    @torch.no_grad()
    def decode_with_caches(
        self,
        latents: Tensor,
        conditioning: Conditioning | None = None,
        caches: DecodeCaches | None = "keep",
        kept_chunks: int = 0,
    ) -> Decoded:
        """Decode for a later `vjp`, which may run once if chunks are kept; its bits do not depend on these settings.

        caches: keep (on the device), offload (in host memory; the VJP copies them one chunk ahead), or segment (in host
        memory, for every ceil(sqrt(T))-th chunk; the VJP decodes each segment again). None stores no caches.
        kept_chunks: the last chunks whose graph stays for the VJP.
        """
        latents = self._whole(latents, conditioning)
        count = latents.shape[2]
        stride = {None: 1, "keep": 1, "offload": 1, "segment": math.ceil(math.sqrt(count))}[caches]  # between caches
        first_kept = max(count - kept_chunks, int(self.frame_given))
        state: Caches = [None] * self.vae._cached_conv_counts["decoder"]
        chunks, stored = [], dict[int, StoredCaches]()
        for i in range(first_kept):
            if caches is not None and i % stride == 0:
                before = stored.get(i - 1)  # none with segments
                stored[i] = list(state) if caches == "keep" else _to_host(state, latents.device, before)
            frames, state = self._chunk(latents[:, :, i : i + 1], state)
            chunks.append(frames.clamp(-1, 1))
        graphs = {}
        if first_kept < count:
            frames, graphs[count] = self._with_graph(latents[:, :, first_kept:], state)
            chunks.append(frames)
        return Decoded(torch.cat(chunks, 2), stored, graphs)

    def _whole(self, latents: Tensor, conditioning: Conditioning | None) -> Tensor:
        if not self.frame_given:
            return latents
        assert conditioning is not None, "a decoder with a given frame is called with the batch's conditioning"
        return torch.cat([conditioning["image"].to(latents), latents], 2)

    def vjp(
        self,
        latents: Tensor,
        grad_video: Tensor,
        decoded: Decoded | None = None,
        conditioning: Conditioning | None = None,
    ) -> Tensor:
        """Return (d video / d latents)^T grad_video, (B, C, T, h, w), equal to autograd through `vae.decode`.

        decoded: from `decode_with_caches` on the same latents; None: computed here.
        """
        decoded = self.decode_with_caches(latents, conditioning) if decoded is None else decoded
        latents, first_sampled = self._whole(latents, conditioning), int(self.frame_given)
        grad_latents = torch.zeros_like(latents)
        factor = self.vae.config.scale_factor_temporal
        # the first latent frame has one video frame, every other has `factor`
        ranges = [slice(0, 1)] + [slice(1 + factor * i, 1 + factor * (i + 1)) for i in range(latents.shape[2] - 1)]
        grad_caches: list[Tensor | None] = [None] * self.vae._cached_conv_counts["decoder"]
        segment: dict[int, StoredCaches] = {}
        end = len(ranges)  # the end of the remaining chunks
        while end > first_sampled:
            graph = decoded.graphs.pop(end, None)
            if graph is None:
                segment = segment if end - 1 in segment else self._segment(latents, decoded.caches, end - 1)
                graph = self._with_graph(latents[:, :, end - 1 : end], _to_device(segment.pop(end - 1)))[1]
            start = end - len(graph.frames)
            cotangents = [grad_video[:, :, frames].to(self.vae.dtype) for frames in ranges[start:end]]
            grad_latents[:, :, start:end], grad_caches = graph.pull_back(cotangents, grad_caches)
            end = start
            del graph  # its caches
        return grad_latents[:, :, first_sampled:]

    @torch.enable_grad()
    def _with_graph(self, latents: Tensor, caches: Caches) -> tuple[Tensor, _Graph]:
        """Return the clamped frames of chunks, without their graph, and the graph. caches: before the first one."""
        x = latents.detach().requires_grad_()
        state = before = [cache.detach().requires_grad_() if isinstance(cache, Tensor) else cache for cache in caches]
        chunks, edges = [], []
        with lean_graph(self.vae.decoder):
            for i in range(x.shape[2]):
                frames, state = self._chunk(x[:, :, i : i + 1], state, forget=i == x.shape[2] - 1)
                frames = frames.clamp(-1, 1)
                chunks.append(frames.detach())
                edges.append(get_gradient_edge(frames))
        after = [get_gradient_edge(cache) if isinstance(cache, Tensor) else None for cache in state]
        return torch.cat(chunks, 2), _Graph(x, before, edges, after)

    @torch.no_grad()
    def _segment(self, latents: Tensor, stored: dict[int, StoredCaches], last: int) -> dict[int, StoredCaches]:
        """Return the first caches of chunks up to `last`, from the nearest stored ones; recomputed ones in the host."""
        first = max(i for i in stored if i <= last)
        segment = {first: stored[first]}
        caches: Caches = _to_device(stored[first]) if first < last else []
        for i in range(first, last):
            caches = self._chunk(latents[:, :, i : i + 1], caches)[1]
            segment[i + 1] = _to_host(caches, latents.device, None)  # one chunk's on the device, not two
        return segment

    def _chunk(self, latents: Tensor, caches: Caches, *, forget: bool = False) -> tuple[Tensor, Caches]:
        """Decode one latent frame (B, C, 1, h, w) to unclamped video frames; return them and the caches after it."""
        mean, inverse_std = self._normalisation
        return run_chunk(self.vae, latents.to(self.vae.dtype) / inverse_std + mean, caches, forget=forget)

    @cached_property
    def _normalisation(self) -> tuple[Tensor, Tensor]:
        """Return mean and 1 / std of the latents, by which diffusers' pipeline divides, too."""
        return stock.latent_statistics(self.vae, self.vae.dtype)


def run_chunk(vae: AutoencoderKLWan, x: Tensor, caches: Caches, *, forget: bool = False) -> tuple[Tensor, Caches]:
    """Decode one frame of the VAE's own latents; return video frames and the caches, without values if `forget`."""
    after = _ForgottenCaches(caches) if forget else list(caches)
    # diffusers replaces the list's entries, and reads none that it has replaced; it never changes a cached tensor
    first, patch = caches[0] is None, vae.config.patch_size
    frames = vae.decoder(vae.post_quant_conv(x), feat_cache=after, feat_idx=[0], first_chunk=first)
    return frames if patch is None else unpatchify(frames, patch), after


class _ForgottenCaches(list[Tensor | str | None]):
    """Caches that only a backward pass will need: entries that are set keep shape and gradient, and no memory."""

    def __setitem__(self, index: Any, cache: Any) -> None:
        super().__setitem__(index, _Forgotten.apply(cache) if isinstance(cache, Tensor) else cache)


class _Forgotten(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cache: Tensor) -> Tensor:
        return cache.new_empty(1).expand(cache.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def lay_out_for_cudnn(vae: AutoencoderKLWan) -> AutoencoderKLWan:
    """Store the 3D convolutions' weights with the channels last, the layout in which cuDNN computes.

    It would convert the input and output of each convolution: 9 % of the time with torch 2.8, far more with 2.9
    (LightX2V#860, sglang#23200). In bfloat16 gradients round otherwise.
    """
    for module in vae.modules():
        if isinstance(module, nn.Conv3d):
            module.weight.data = module.weight.data.to(memory_format=torch.channels_last_3d)
    return vae


def _to_host(caches: Caches, device: torch.device, before: StoredCaches | None) -> _CachesOnHost:
    """Start to copy the caches to host memory. before: the next to come back, while the VJP works on these."""
    previous = weakref.ref(before.tensors) if isinstance(before, _CachesOnHost) else None
    tensors = OffloadedTensors(host_pool(device), previous)
    return _CachesOnHost(tensors, [tensors.put(cache) if isinstance(cache, Tensor) else cache for cache in caches])


def _to_device(stored: StoredCaches) -> Caches:
    if not isinstance(stored, _CachesOnHost):
        return stored
    return [stored.tensors.take(entry) if isinstance(entry, int) else entry for entry in stored.entries]


@contextlib.contextmanager
def lean_graph(decoder: WanDecoder3d) -> Iterator[None]:
    """Make the decoder's graph hold the inputs of its norms and little else, within the context.

    A norm and the activation after it are recomputed together in strips. With one strip the gradients are the same to
    the last bit. diffusers' own `enable_gradient_checkpointing` does nothing here.
    """
    normed = [module for module in decoder.modules() if isinstance(module, WanResidualBlock | WanDecoder3d)]
    changed: list[nn.Module] = []
    for module in normed:
        norms = [child for child in module.children() if isinstance(child, WanRMS_norm)]
        for norm in norms:
            norm.forward = partial(_in_strips, norm.forward, module.nonlinearity.forward)
        module.nonlinearity.forward = lambda x: x
        changed += [*norms, module.nonlinearity]
    try:
        with FrozenConvolutions():
            yield
    finally:
        for module in changed:
            del module.forward  # the class's own is left


def _in_strips(norm: Callable[[Tensor], Tensor], activation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Run both, pointwise, on x (..., h, w) in strips; the backward pass recomputes each by itself."""
    recompute = partial(_recompute, lambda strip: activation(norm(strip)))
    rows = max(1, STRIP * x.shape[-2] // x.numel())
    return recompute(x) if rows >= x.shape[-2] else torch.cat([recompute(strip) for strip in x.split(rows, -2)], -2)


_recompute = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
