"""What a model's parts cost, measured without data: on the meta device, by torch's own accounts.

One transformer block and three chunks of the VAE's decoder of the real size are run forward and backward under torch's
FLOP counter, its saved-tensor hooks and a count of living storages; `needs` works out from them what a run takes. Bytes
and FLOPs are plain integers.

The meta device takes torch's composite rms_norm, which keeps more for the backward pass than the GPU's fused one.
"""

import functools
import json
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from transformers import UMT5Config, UMT5EncoderModel

from rewardfl.backbones.seam import Adapter, Caches
from rewardfl.backbones.wan import model as wan
from rewardfl.backbones.wan.model import new_expert
from rewardfl.run.work import Video

# ------------------------------------------------------------------------------------------------------------
# Measuring


class _Flash(TorchFunctionMode):
    """Attention as a fused kernel does it: on the meta device torch would take the one that keeps the scores."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is not nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        query, key, value = args or (kwargs["query"], kwargs["key"], kwargs["value"])
        # the CPU's fused kernel keeps what the GPU's keep (q, k, v, out, logsumexp) and runs on meta and CPU alike
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)[0]


class _Living(TorchDispatchMode):
    """Counts the bytes of the storages that operators make, and the most that lived at once; `given` ones are not."""

    def __init__(self, given: Iterable[Tensor]):
        super().__init__()
        self.now = self.peak = 0
        self.known: dict[int, object] = {_storage(tensor): None for tensor in given}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and _storage(tensor) not in self.known:
                self._born(tensor.untyped_storage())
        return out

    def _born(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()

        def died(_):
            del self.known[key]
            self.now -= size

        self.known[key] = weakref.ref(storage, died)
        self.now += size
        self.peak = max(self.peak, self.now)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def counter() -> FlopCounterMode:
    """A counter of the FLOPs of matrix products, convolutions and attentions, the CPU's fused one included."""
    fused = torch.ops.aten
    known = {
        fused._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
        fused._scaled_dot_product_flash_attention_for_cpu_backward: (
            lambda grad, q, k, v, *_, **__: sdpa_backward_flop_count(grad, q, k, v)
        ),
    }
    return FlopCounterMode(display=False, custom_mapping=known)


@dataclass(frozen=True)
class Cost:
    """What running something once takes. Bytes and FLOPs."""

    peak: int  # the most that lived at once
    forward: int
    saved: int = 0  # for the backward pass, each storage once
    backward: int = 0


def with_graph(forward: Callable[[], Sequence[Tensor]], leaves: Sequence[Tensor], given: Iterable[Tensor]) -> Cost:
    """The cost of the tensors `forward()` and of their gradients, which the leaves are left with.

    given: bytes that are not counted. leaves: those that require a gradient, not counted in the peak and in what is
    saved only where the graph keeps them.
    """
    given = list(given)
    known, saved = {_storage(tensor) for tensor in given}, {}

    def pack(tensor: Tensor) -> Tensor:
        if _storage(tensor) not in known:
            saved[_storage(tensor)] = tensor.untyped_storage().nbytes()
        return tensor  # kept alive by the graph, so that no address is used twice

    with _Flash(), counter() as flops, _Living([*given, *leaves]) as living:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = forward()
        there = flops.get_total_flops()
        cotangents = [torch.empty_like(output) for output in outputs]
        torch.autograd.backward(outputs, cotangents)  # autograd.grad and the counter's module hooks do not go together
    return Cost(living.peak, there, sum(saved.values()), flops.get_total_flops() - there)


def without_graph(run: Callable[[], Any], given: Iterable[Tensor]) -> Cost:
    """The cost of `run()` without gradients; given: bytes that are not counted."""
    with torch.no_grad(), _Flash(), counter() as flops, _Living(given) as living:
        run()
    return Cost(living.peak, flops.get_total_flops())


def nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _meta(*shape: int, dtype: torch.dtype, grad: bool = False) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


# ------------------------------------------------------------------------------------------------------------
# What the model's parts cost


@dataclass(frozen=True)
class ExpertCost:
    """One expert and one video. Bytes of weights; of activations of one block; FLOPs of all its blocks."""

    layers: int
    tokens: int
    block_weights: int
    other_weights: int
    weights_fp8: int  # of the whole expert under diffusers' layerwise casting
    adapter_parameters: int  # a number
    block_input: int
    block_saved: int  # for the backward pass, with the adapter
    block_peak: int  # the most that lives in one block's forward and backward pass, its input not counted
    block_peak_frozen: int  # the same without a graph
    forward: int  # with the adapter
    forward_frozen: int  # without: the reference, the other expert
    backward: int

    @property
    def weights(self) -> int:
        return self.layers * self.block_weights + self.other_weights

    @property
    def stored(self) -> int:
        """What checkpointing stores of one forward pass: every block's input."""
        return self.layers * self.block_input


@dataclass(frozen=True)
class ChunkCost:
    """One latent frame's pass through the VAE's decoder. Bytes and FLOPs."""

    caches_in: int
    saved: int  # for the backward pass
    peak: int  # without a graph; the caches that go in are not counted, those that come out are
    peak_vjp: int  # forward, backward and the cotangents; the caches that go in are not counted
    forward: int
    backward: int


@dataclass(frozen=True)
class Costs:
    """All of a model for one video. `shape`: (C, T, h, w) of its latents."""

    shape: tuple[int, int, int, int]
    num_pixels: int  # values in the video
    itemsize: int  # bytes of one number of the frozen weights' dtype
    experts: Mapping[str, ExpertCost]  # high_noise, low_noise
    vae_weights: int
    chunks: tuple[ChunkCost, ...]  # by latent frame
    text_weights: int
    text: Cost  # of encoding one prompt
    image: Cost  # of encoding one image; the peak is with the clip's pixels
    text_bytes: int  # of one prompt's embedding as it is cached
    image_bytes: int  # of one image's conditioning as it is cached


@dataclass(frozen=True)
class BlockInputs:
    """What a block gets, on the meta device: hidden (B, S, D), text (B, 512, D), time (B, 6, D), rotary."""

    hidden: Tensor
    text: Tensor
    time: Tensor
    rotary: tuple[Tensor, Tensor]

    @property
    def shared(self) -> tuple[Tensor, ...]:
        """Those that all blocks get."""
        return (self.text, self.time, *self.rotary)

    def through(self, block: nn.Module) -> Tensor:
        return block(self.hidden, self.text, self.time, self.rotary)


def block_inputs(config: Mapping[str, Any], dtype: torch.dtype, tokens: int) -> BlockInputs:
    head, width = config["attention_head_dim"], config["attention_head_dim"] * config["num_attention_heads"]
    return BlockInputs(
        _meta(1, tokens, width, dtype=dtype, grad=True),
        _meta(1, wan.TEXT_LENGTH, width, dtype=dtype),
        _meta(1, 6, width, dtype=dtype),
        (_meta(1, tokens, 1, head, dtype=torch.float32), _meta(1, tokens, 1, head, dtype=torch.float32)),
    )


def measure_expert(
    config: Mapping[str, Any], dtype: torch.dtype, shape: Sequence[int], adapter: Adapter | None
) -> ExpertCost:
    """shape: (C, T, h, w) of the latents. Without an adapter the figures with one are those of the bare model."""
    model, bare = new_expert(config, dtype, 1, adapter), new_expert(config, dtype, 1, None)
    tokens = math.prod(size // patch for size, patch in zip(shape[1:], config["patch_size"], strict=True))
    layers = config["num_layers"]
    x = _meta(1, config["in_channels"], *shape[1:], dtype=dtype, grad=True)
    text = _meta(1, wan.TEXT_LENGTH, config["text_dim"], dtype=dtype)
    timestep = _meta(1, dtype=torch.float32)
    inputs = block_inputs(config, dtype, tokens)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    whole = with_graph(lambda: model(x, timestep, text, return_dict=False), [x, *trained], model.parameters())
    block = with_graph(
        lambda: [inputs.through(model.blocks[0])], [inputs.hidden, *trained], [*model.parameters(), *inputs.shared]
    )
    frozen_whole = without_graph(lambda: bare(x, timestep, text), bare.parameters())
    frozen_block, adapted_block = (
        without_graph(lambda one=one: inputs.through(one.blocks[0]), [*one.parameters(), inputs.hidden, *inputs.shared])
        for one in (bare, model)
    )
    block_weights, other_weights = _weights(bare)
    bare.enable_layerwise_casting(torch.float8_e4m3fn, dtype)
    block_fp8, other_fp8 = _weights(bare)
    return ExpertCost(
        layers=layers,
        tokens=tokens,
        block_weights=block_weights,
        other_weights=other_weights,
        weights_fp8=layers * block_fp8 + other_fp8,
        adapter_parameters=layers * sum(parameter.numel() for parameter in trained),
        block_input=nbytes([inputs.hidden]),
        block_saved=block.saved,
        block_peak=block.peak,
        block_peak_frozen=adapted_block.peak,
        forward=whole.forward + (layers - 1) * block.forward,
        forward_frozen=frozen_whole.forward + (layers - 1) * frozen_block.forward,
        backward=whole.backward + (layers - 1) * block.backward,
    )


def _weights(model: nn.Module) -> tuple[int, int]:
    """Bytes of a one-block expert's block, and of the rest."""
    block = nbytes(model.blocks.parameters())
    return block, nbytes([*model.parameters(), *model.buffers()]) - block


def measure_decoder(vae: AutoencoderKLWan, dtype: torch.dtype, shape: Sequence[int]) -> tuple[ChunkCost, ...]:
    """The cost of each latent frame's chunk. `vae` is on the meta device; shape: (C, T, h, w)."""
    channels, frames, height, width = shape
    caches: Caches = [None] * vae._cached_conv_counts["decoder"]
    costs = []
    for i in range(min(frames, 3)):  # the caches have two frames from the third chunk on, and nothing changes after it
        x = _meta(1, channels, 1, height, width, dtype=dtype, grad=True)
        start = [c.detach().requires_grad_() if isinstance(c, Tensor) else c for c in caches]
        held = [c for c in start if isinstance(c, Tensor)]

        def forward(first: bool = i == 0, x: Tensor = x, start: Caches = start) -> list[Tensor]:
            caches[:] = start
            frames = vae.decoder(vae.post_quant_conv(x), feat_cache=caches, feat_idx=[0], first_chunk=first)
            return [frames.clamp(-1, 1), *(c for c in caches if isinstance(c, Tensor))]

        graph = with_graph(forward, [x, *held], vae.parameters())
        frozen = without_graph(forward, [*vae.parameters(), x, *held])
        costs.append(ChunkCost(nbytes(held), graph.saved, frozen.peak, graph.peak, graph.forward, graph.backward))
    return tuple(costs + costs[-1:] * (frames - len(costs)))


def measure_encoder(vae: AutoencoderKLWan, dtype: torch.dtype, video: Sequence[int]) -> Cost:
    """The VAE's encoder on a whole clip (3, F, H, W), chunk by chunk; the peak has the clip in float32 in it."""
    channels, num_frames, height, width = video
    factor = vae.config.scale_factor_temporal
    chunks = 1 + (num_frames - 1) // factor
    caches: Caches = [None] * vae._cached_conv_counts["encoder"]
    costs = []
    for i in range(min(3, chunks)):
        x = _meta(1, channels, factor if i else 1, height, width, dtype=dtype)
        held = [c for c in caches if isinstance(c, Tensor)]
        call = functools.partial(vae.encoder, x, feat_cache=caches, feat_idx=[0])
        cost = without_graph(call, [*vae.parameters(), x, *held])
        costs.append(Cost(cost.peak + nbytes(held), cost.forward))
    costs += costs[-1:] * (chunks - len(costs))
    return Cost(4 * math.prod(video) + max(cost.peak for cost in costs), sum(cost.forward for cost in costs))


def measure(video: Video) -> Costs:
    """Everything about one video of a model, from its folder of configurations (model_index.json's)."""
    dtype = video.dtype
    with torch.device("meta"):
        vae = AutoencoderKLWan.from_config(_config(video.configs, "vae"))
        text = UMT5EncoderModel(UMT5Config(**_config(video.configs, "text_encoder"))).to(dtype).eval()
        tokens = torch.empty(1, wan.TEXT_LENGTH, dtype=torch.long)
    vae.requires_grad_(False)
    for parameter in vae.parameters():
        parameter.data = parameter.data.to(dtype)
    temporal, spatial = vae.config.scale_factor_temporal, vae.config.scale_factor_spatial
    latent_frames = 1 + (video.num_frames - 1) // temporal
    shape = (vae.config.z_dim, latent_frames, video.height // spatial, video.width // spatial)
    high, low = (_config(video.configs, wan.PARTS[name]) for name in ("high_noise", "low_noise"))
    measured = {"high_noise": measure_expert(high, dtype, shape, video.adapter)}
    measured["low_noise"] = measured["high_noise"] if low == high else measure_expert(low, dtype, shape, video.adapter)
    pixels = (vae.config.in_channels, video.num_frames, video.height, video.width)
    return Costs(
        shape=shape,
        num_pixels=math.prod(pixels),
        itemsize=dtype.itemsize,
        experts=measured,
        vae_weights=nbytes(vae.parameters()),
        chunks=measure_decoder(vae, dtype, shape),
        text_weights=nbytes(text.parameters()),
        text=without_graph(lambda: text(tokens), [*text.parameters(), *text.buffers(), tokens]),
        image=measure_encoder(vae, dtype, pixels),
        text_bytes=wan.TEXT_LENGTH * low["text_dim"] * dtype.itemsize,
        image_bytes=(temporal + shape[0]) * math.prod(shape[1:]) * 4,  # wan.encode makes it float32
    )


def _config(configs: Path, part: str) -> dict[str, Any]:
    return json.loads((configs / part / "config.json").read_text(encoding="utf-8"))
