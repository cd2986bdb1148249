"""What a model's parts cost, measured without data: on the meta device, by torch's own accounts.

One transformer block and three chunks of the VAE's decoder of the real size are run forward and backward under torch's
FLOP counter, its saved-tensor hooks and a count of living storages; `plan` works out from them what a run takes. Bytes
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
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from transformers import UMT5Config, UMT5EncoderModel

from rewardfl import lora
from rewardfl.backbones.wan import model as wan
from rewardfl.backbones.wan.decoder import Caches
from rewardfl.weights import wan_names

# ------------------------------------------------------------------------------------------------------------
# Measuring, on the meta device


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


def attention_flops(query, key, value, *_, out_shape=None, **__) -> int:
    """For FlopCounterMode, of the shapes of _scaled_dot_product_flash_attention_for_cpu's arguments."""
    return sdpa_flop_count(query, key, value)


def attention_backward_flops(grad, query, key, value, *_, out_shape=None, **__) -> int:
    """For FlopCounterMode, of that operator's backward pass."""
    return sdpa_backward_flop_count(grad, query, key, value)


def _counter() -> FlopCounterMode:
    """Of matrix products, convolutions and attentions."""
    fused = torch.ops.aten
    known = {
        fused._scaled_dot_product_flash_attention_for_cpu: attention_flops,
        fused._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward_flops,
    }
    return FlopCounterMode(display=False, custom_mapping=known)


@dataclass(frozen=True)
class GraphCost:
    """Of a forward and a backward pass. Bytes and FLOPs."""

    saved: int  # for the backward pass, each storage once
    peak: int  # the most that lived at once
    forward: int
    backward: int


def with_graph(forward: Callable[[], Sequence[Tensor]], leaves: Sequence[Tensor], given: Iterable[Tensor]) -> GraphCost:
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

    living = _Living([*given, *leaves])
    with _Flash(), _counter() as counter, living:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = forward()
        flops = counter.get_total_flops()
        cotangents = [torch.empty_like(output) for output in outputs]
        torch.autograd.backward(outputs, cotangents)  # autograd.grad and the counter's module hooks do not go together
    return GraphCost(sum(saved.values()), living.peak, flops, counter.get_total_flops() - flops)


@dataclass(frozen=True)
class FrozenCost:
    """Of a forward pass without a graph. Bytes and FLOPs."""

    peak: int
    forward: int


def without_graph(run: Callable[[], Any], given: Iterable[Tensor]) -> FrozenCost:
    """The cost of `run()`; given: bytes that are not counted."""
    living = _Living(given)
    with torch.no_grad(), _Flash(), _counter() as counter, living:
        run()
    return FrozenCost(living.peak, counter.get_total_flops())


def nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _meta(*shape: int, dtype: torch.dtype, grad: bool = False) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


# ------------------------------------------------------------------------------------------------------------
# What the model's parts cost


@dataclass(frozen=True)
class Adapter:
    """The LoRA that is trained; `dtype` is float32 in training, and another only to see what that costs."""

    rank: int
    targets: tuple[str, ...]  # diffusers' module names
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class ExpertCost:
    """One expert and one clip. Bytes of weights; of activations of one block; FLOPs of all its blocks."""

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
class EncodeCost:
    """What is computed once per clip and cached: text and image. Bytes and FLOPs."""

    text_weights: int
    text_peak: int
    text_flops: int
    image_peak: int  # with the clip's pixels
    image_flops: int


@dataclass(frozen=True)
class Costs:
    """All of a model for one clip. `shape`: (C, T, h, w) of its latents."""

    shape: tuple[int, int, int, int]
    num_pixels: int  # values in the clip's video
    itemsize: int  # bytes of one number of the frozen weights' dtype
    experts: Mapping[str, ExpertCost]  # high_noise, low_noise
    vae_weights: int
    chunks: tuple[ChunkCost, ...]  # by latent frame
    encode: EncodeCost
    text_bytes: int  # of one prompt's embedding as it is cached
    image_bytes: int  # of one image's conditioning as it is cached


def new_expert(config: Mapping[str, Any], dtype: torch.dtype, layers: int, adapter: Adapter | None) -> nn.Module:
    """An expert on the meta device, in the dtypes that loading and `lora.inject` give it."""
    with torch.device("meta"):
        model = WanTransformer3DModel.from_config(dict(config) | {"num_layers": layers})
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if wan_names.stays_float32(name) else dtype)
    model.requires_grad_(False)
    if adapter:
        lora.inject(model, adapter.rank, adapter.rank, list(adapter.targets), seed=0)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(adapter.dtype)
    return model


@dataclass(frozen=True)
class BlockInputs:
    """Of the first block, on the meta device: hidden (B, S, D), text (B, 512, D), time (B, 6, D), rotary."""

    hidden: Tensor
    text: Tensor
    time: Tensor
    rotary: tuple[Tensor, Tensor]

    @property
    def shared(self) -> tuple[Tensor, ...]:
        """Those that all blocks get."""
        return (self.text, self.time, *self.rotary)


def block_inputs(config: Mapping[str, Any], dtype: torch.dtype, tokens: int, grad: bool) -> BlockInputs:
    head, width = config["attention_head_dim"], config["attention_head_dim"] * config["num_attention_heads"]
    return BlockInputs(
        _meta(1, tokens, width, dtype=dtype, grad=grad),
        _meta(1, wan.TEXT_LENGTH, width, dtype=dtype),
        _meta(1, 6, width, dtype=dtype),
        (_meta(1, tokens, 1, head, dtype=torch.float32), _meta(1, tokens, 1, head, dtype=torch.float32)),
    )


def call_block(block: nn.Module, inputs: BlockInputs) -> Tensor:
    return block(inputs.hidden, inputs.text, inputs.time, inputs.rotary)


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
    inputs = block_inputs(config, dtype, tokens, grad=True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    whole = with_graph(lambda: model(x, timestep, text, return_dict=False), [x, *trained], model.parameters())
    block = with_graph(
        lambda: [call_block(model.blocks[0], inputs)], [inputs.hidden, *trained], [*model.parameters(), *inputs.shared]
    )
    frozen_whole = without_graph(lambda: bare(x, timestep, text), bare.parameters())
    frozen_block = without_graph(
        lambda: call_block(bare.blocks[0], inputs), [*bare.parameters(), inputs.hidden, *inputs.shared]
    )
    adapted_block = without_graph(
        lambda: call_block(model.blocks[0], inputs), [*model.parameters(), inputs.hidden, *inputs.shared]
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
        cost, caches = _measure_chunk(vae, x, start, first=i == 0)
        costs.append(cost)
    return tuple(costs + costs[-1:] * (frames - len(costs)))


def _measure_chunk(vae: AutoencoderKLWan, x: Tensor, start: Caches, first: bool) -> tuple[ChunkCost, Caches]:
    """The cost of one chunk, and the caches after it. x and start: leaves that require a gradient."""
    tensors = [c for c in start if isinstance(c, Tensor)]
    after: Caches = []

    def forward() -> list[Tensor]:
        after[:] = start
        frames = vae.decoder(vae.post_quant_conv(x), feat_cache=after, feat_idx=[0], first_chunk=first)
        return [frames.clamp(-1, 1), *(c for c in after if isinstance(c, Tensor))]

    graph = with_graph(forward, [x, *tensors], vae.parameters())
    frozen = without_graph(forward, [*vae.parameters(), x, *tensors])
    cost = ChunkCost(
        caches_in=nbytes(tensors),
        saved=graph.saved,
        peak=frozen.peak,
        peak_vjp=graph.peak,
        forward=graph.forward,
        backward=graph.backward,
    )
    return cost, after


def measure_encode(
    vae: AutoencoderKLWan, text_config: Mapping[str, Any], dtype: torch.dtype, video: Sequence[int]
) -> EncodeCost:
    """The cost of one clip's text and image conditioning. video: (3, F, H, W)."""
    image = _measure_encoder(vae, dtype, video)
    with torch.device("meta"):
        text = UMT5EncoderModel(UMT5Config(**text_config)).to(dtype).eval()
    tokens = torch.empty(1, wan.TEXT_LENGTH, dtype=torch.long, device="meta")
    words = without_graph(lambda: text(tokens), [*text.parameters(), *text.buffers(), tokens])
    return EncodeCost(nbytes(text.parameters()), words.peak, words.forward, image.peak, image.forward)


def _measure_encoder(vae: AutoencoderKLWan, dtype: torch.dtype, video: Sequence[int]) -> FrozenCost:
    """The VAE's encoder on a whole clip (3, F, H, W), chunk by chunk; the peak has the clip in float32 in it."""
    channels, num_frames, height, width = video
    factor = vae.config.scale_factor_temporal
    chunks = 1 + (num_frames - 1) // factor
    caches: Caches = [None] * vae._cached_conv_counts["encoder"]
    measured = []
    for i in range(min(3, chunks)):
        x = _meta(1, channels, factor if i else 1, height, width, dtype=dtype)
        held = [c for c in caches if isinstance(c, Tensor)]
        call = functools.partial(vae.encoder, x, feat_cache=caches, feat_idx=[0])
        cost = without_graph(call, [*vae.parameters(), x, *held])
        measured.append(FrozenCost(cost.peak + nbytes(held), cost.forward))
    measured += measured[-1:] * (chunks - len(measured))
    pixels = 4 * math.prod(video)
    return FrozenCost(pixels + max(cost.peak for cost in measured), sum(cost.forward for cost in measured))


def measure(
    configs: Path, dtype: torch.dtype, height: int, width: int, num_frames: int, adapter: Adapter | None
) -> Costs:
    """Everything about one clip of a model, from its folder of configurations (model_index.json's)."""
    with torch.device("meta"):
        vae = AutoencoderKLWan.from_config(_config(configs, "vae"))
    vae.requires_grad_(False)
    for parameter in vae.parameters():
        parameter.data = parameter.data.to(dtype)
    temporal, spatial = vae.config.scale_factor_temporal, vae.config.scale_factor_spatial
    shape = (vae.config.z_dim, 1 + (num_frames - 1) // temporal, height // spatial, width // spatial)
    expert_configs = {expert: _config(configs, part) for expert, part in wan.PARTS.items()}
    high, low = expert_configs["high_noise"], expert_configs["low_noise"]
    measured = {"high_noise": measure_expert(high, dtype, shape, adapter)}
    measured["low_noise"] = measured["high_noise"] if low == high else measure_expert(low, dtype, shape, adapter)
    video = (vae.config.in_channels, num_frames, height, width)
    return Costs(
        shape=shape,
        num_pixels=math.prod(video),
        itemsize=dtype.itemsize,
        experts=measured,
        vae_weights=nbytes(vae.parameters()),
        chunks=measure_decoder(vae, dtype, shape),
        encode=measure_encode(vae, _config(configs, "text_encoder"), dtype, video),
        text_bytes=wan.TEXT_LENGTH * low["text_dim"] * dtype.itemsize,
        image_bytes=(temporal + shape[0]) * math.prod(shape[1:]) * 4,  # wan.encode makes it float32
    )


def _config(configs: Path, part: str) -> dict[str, Any]:
    return json.loads((configs / part / "config.json").read_text(encoding="utf-8"))
