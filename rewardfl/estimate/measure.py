"""What a model's parts cost, measured without data: on the meta device, by torch's own accounts.

One transformer block and three chunks of the decoder of the real size are run forward and backward under torch's
FLOP counter, its saved-tensor hooks and a count of living storages; `needs` works out from them what a run takes. Bytes
and FLOPs are plain integers.

The meta device takes torch's composite rms_norm, which keeps more for the backward pass than the GPU's fused one.
"""

import math
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count, shape_wrapper

from rewardfl.attention import is_self_attention
from rewardfl.backbones.seam import Adapter, Caches, ChunksOnMeta, ExpertOnMeta
from rewardfl.rewards.face.detect import FaceDetector
from rewardfl.rewards.face.view import View
from rewardfl.run.work import TracedDetector, Video
from rewardfl.swap import laid_out

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


class _SelfAttention(TorchDispatchMode):
    """Sums up what self-attention takes: FLOPs, and the bytes that train.keep_attention keeps of it."""

    def __init__(self):
        super().__init__()
        self.flops = self.kept = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if is_self_attention(func, args):
            self.flops += sdpa_flop_count(*(tensor.shape for tensor in args[:3]))
            self.kept += nbytes(out)
        return out


class _Layouts(TorchDispatchMode):
    """Answers an operator on the meta device that it has seen before by an empty tensor of the same layout.

    torch works layouts out in Python, and a decoder's chunks, and what is computed again, ask for the same ones: this
    halves the time of `measure`. Operators that change or share the memory of what they are given always run.
    """

    known: ClassVar[dict[Hashable, tuple[torch.Size, tuple[int, ...], torch.dtype] | None]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not _makes_one_tensor(func):
            return func(*args, **kwargs)
        key = (func, _layout(args), _layout(tuple(kwargs.items())))
        if (layout := self.known.get(key)) is not None:
            size, stride, dtype = layout
            return torch.empty_strided(size, stride, dtype=dtype, device="meta")
        out = func(*args, **kwargs)
        if key not in self.known:
            given = {_storage(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)}
            fresh = out.device.type == "meta" and _storage(out) not in given  # _unsafe_view does not say what it shares
            self.known[key] = (out.shape, out.stride(), out.dtype) if fresh else None
        return out


@cache
def _makes_one_tensor(func: torch._ops.OpOverload) -> bool:
    """By its schema, which says what of its arguments it changes or gives back."""
    returns = func._schema.returns
    changes = any(one.alias_info is not None and one.alias_info.is_write for one in func._schema.arguments)
    return len(returns) == 1 and str(returns[0].type) == "Tensor" and returns[0].alias_info is None and not changes


def _layout(value: Any) -> Hashable:
    """All of an argument that the layout of an answer depends on."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, list | tuple):
        return tuple(map(_layout, value))
    return type(value), value


class Living(TorchDispatchMode):
    """Counts the bytes of the storages that operators make, and the most that lived at once; `given` ones are not."""

    def __init__(self, given: Iterable[Tensor]):
        super().__init__()
        self.now = self.peak = 0
        self.known: dict[int, object] = {_storage(tensor): None for tensor in given}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {_storage(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and not self.lives(tensor) and _storage(tensor) not in given:
                self._born(tensor.untyped_storage())
        return out

    def lives(self, tensor: Tensor) -> bool:
        """Whether an operator made the tensor's storage, or it was given."""
        return _storage(tensor) in self.known

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


# torch's formulas know the GPU's fused attentions and not the CPU's, which stands for them on the meta device
FUSED = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, q, k, v, *_, **__: sdpa_backward_flop_count(grad, q, k, v)
    ),
}
FORMULAS = flop_registry | {operator: shape_wrapper(formula) for operator, formula in FUSED.items()}


class Flops(TorchDispatchMode):
    """Adds up the FLOPs of matrix products, convolutions and attentions, by torch's formulas.

    torch's own counter also tells modules apart, by hooks that keep alive what a checkpoint computes again.
    """

    def __init__(self):
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in FORMULAS:
            self.total += FORMULAS[func.overloadpacket](*args, **(kwargs or {}), out_val=out)
        return out


@dataclass(frozen=True)
class Cost:
    """What running something once takes. Bytes and FLOPs."""

    peak: int  # the most that lived at once
    forward: int
    backward: int = 0


def saved_by(forward: Callable[[], object], given: Iterable[Tensor]) -> int:
    """Bytes that a graph through `forward()` keeps for the backward pass, each storage once, `given` ones not."""
    known, saved = {_storage(tensor) for tensor in given}, {}

    def pack(tensor: Tensor) -> Tensor:
        if _storage(tensor) not in known:
            saved[_storage(tensor)] = tensor.untyped_storage().nbytes()
        return tensor  # kept alive by the graph, so that no address is used twice

    with _Flash(), _Layouts(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        graph = forward()
    del graph  # it had to be alive until all was counted
    return sum(saved.values())


def with_graph(
    forward: Callable[[], Sequence[Tensor]], leaves: Sequence[Tensor], given: Iterable[Tensor], keep: bool = True
) -> Cost:
    """The cost of the tensors `forward()` and of their gradients, which the leaves are left with.

    given: bytes that are not counted in the peak. leaves: those that require a gradient, not counted either. keep:
    whether the values of what `forward` gives live through the backward pass.
    """
    with _Flash(), _Layouts(), Flops() as flops, Living([*given, *leaves]) as living:
        outputs = forward()
        there = flops.total
        edges, cotangents = [get_gradient_edge(one) for one in outputs], [torch.empty_like(one) for one in outputs]
        if not keep:
            del outputs
        torch.autograd.backward(edges, cotangents)
    return Cost(living.peak, there, flops.total - there)


def without_graph(run: Callable[[], Any], given: Iterable[Tensor]) -> Cost:
    """The cost of `run()` without gradients; given: bytes that are not counted."""
    with torch.no_grad(), _Flash(), _Layouts(), Flops() as flops, Living(given) as living:
        run()
    return Cost(living.peak, flops.total)


def nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@cache
def detector_graph(traced: TracedDetector, height: int, width: int) -> int:
    """Bytes of one chunk's graph, forward and backward, of a face detector on frames of this size."""
    detector = FaceDetector(traced.file, traced.det_size).to("meta")
    frames = torch.empty(traced.chunk, 3, height, width, device="meta", requires_grad=True)
    view = View(1.01, (1.0, 1.0))  # as jitter has it; the numbers do not matter
    return with_graph(lambda: [detector.rows(frames, view)[0]], [frames], detector.buffers()).peak


# ------------------------------------------------------------------------------------------------------------
# What the model's parts cost


@dataclass(frozen=True)
class ExpertCost:
    """One expert and one video. Bytes of weights; of activations, of its largest block and of all; FLOPs of all."""

    layers: int
    tokens: int
    weights: int
    block_weights: int
    other_weights: int
    weights_fp8: int  # of the whole expert under diffusers' layerwise casting
    blocks_int8: int  # of all blocks as rewardfl.swap stores them in 8 bits
    adapter_parameters: int  # a number
    block_input: int
    stored: int  # what checkpointing stores of one forward pass: every block's input
    attention_kept: int  # what train.keep_attention keeps of one
    saved: int  # for the backward pass, with the adapter, by all blocks
    block_saved: int
    block_peak: int  # the most that lives in one block's forward and backward pass, its input not counted
    block_peak_frozen: int  # the same without a graph
    forward: int  # with the adapter
    forward_frozen: int  # without: the reference, the other expert
    backward: int
    attention: int  # the forward pass's that train.keep_attention does not compute again


@dataclass(frozen=True)
class BlockCost:
    """One block, of which the network has `count`; as in ExpertCost. given: bytes of its input."""

    count: int
    weights: int
    other_weights: int
    weights_fp8: int
    other_fp8: int
    weights_int8: int
    adapter_parameters: int
    given: int
    saved: int
    graph: Cost
    adapted: Cost  # without a graph
    frozen: Cost  # without adapter and graph
    attention: int  # as in ExpertCost
    attention_kept: int


@dataclass(frozen=True)
class ChunkCost:
    """One latent frame's pass through the VAE's decoder. Bytes and FLOPs."""

    caches_in: int
    saved: int  # for the backward pass, by plain autograd
    peak: int  # without a graph; the caches that go in are not counted, those that come out are
    peak_vjp: int  # forward, backward and the cotangents, as training has it; the caches that go in are not counted
    forward: int
    backward: int  # with what is computed again


@dataclass(frozen=True)
class Costs:
    """All of a model for one video. `shape`: (C, T, h, w) of its latents."""

    shape: tuple[int, int, int, int]
    num_pixels: int  # values in the video
    itemsize: int  # bytes of one number of the frozen weights' dtype
    experts: Mapping[str, ExpertCost]  # by name
    vae_weights: int
    decoder_weights: int  # the VAE's without what only encoding needs, as training has it
    chunks: tuple[ChunkCost, ...]  # by latent frame
    vision_weights: int  # of what else sees the image, 0 for nothing
    text_weights: int
    text: Cost  # of encoding one prompt
    image: Cost  # of encoding one image; the peak is with the clip's pixels
    cached: Mapping[str, int]  # bytes of one sample's conditioning, by its parts


def measure_expert(kinds: Sequence[ExpertOnMeta], dtype: torch.dtype, adapter: Adapter | None) -> ExpertCost:
    """One network's cost, from one of each kind of its blocks; dtype: of its frozen weights. Without an adapter it is
    that of the bare network."""
    first, blocks = kinds[0], [_measure_block(kind, dtype, adapter) for kind in kinds]
    model, bare = first.build(adapter), first.build(None)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    whole = with_graph(lambda: [first.run(model)], [first.x, *trained], model.parameters())
    frozen_whole = without_graph(lambda: first.run(bare), bare.parameters())

    def total(of: Callable[[BlockCost], int]) -> int:
        return sum(block.count * of(block) for block in blocks)

    def largest(of: Callable[[BlockCost], int]) -> int:
        return max(map(of, blocks))

    return ExpertCost(
        layers=total(lambda block: 1),
        tokens=first.tokens,
        weights=total(lambda block: block.weights) + blocks[0].other_weights,
        block_weights=largest(lambda block: block.weights),
        other_weights=blocks[0].other_weights,
        weights_fp8=total(lambda block: block.weights_fp8) + blocks[0].other_fp8,
        blocks_int8=total(lambda block: block.weights_int8),
        adapter_parameters=total(lambda block: block.adapter_parameters),
        block_input=largest(lambda block: block.given),
        stored=total(lambda block: block.given),
        attention_kept=total(lambda block: block.attention_kept),
        saved=total(lambda block: block.saved),
        block_saved=largest(lambda block: block.saved),
        block_peak=largest(lambda block: block.graph.peak),
        block_peak_frozen=largest(lambda block: block.adapted.peak),
        forward=whole.forward - blocks[0].graph.forward + total(lambda block: block.graph.forward),
        forward_frozen=frozen_whole.forward - blocks[0].frozen.forward + total(lambda block: block.frozen.forward),
        backward=whole.backward - blocks[0].graph.backward + total(lambda block: block.graph.backward),
        attention=total(lambda block: block.attention),
    )


def _measure_block(kind: ExpertOnMeta, dtype: torch.dtype, adapter: Adapter | None) -> BlockCost:
    model, bare = kind.build(adapter), kind.build(None)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    (model_block,), (bare_block,) = kind.blocks(model), kind.blocks(bare)
    given = [*model.parameters(), *kind.block_shared]
    saved = saved_by(partial(kind.run_block, model_block), given)
    graph = with_graph(partial(kind.run_block, model_block), [*kind.block_inputs, *trained], given)
    frozen, adapted = (
        without_graph(partial(kind.run_block, one), [*of.parameters(), *kind.block_inputs, *kind.block_shared])
        for one, of in ((bare_block, bare), (model_block, model))
    )
    with torch.no_grad(), _Flash(), _SelfAttention() as attention:
        kind.run_block(bare_block)
    weights, other_weights = _weights(bare, bare_block)
    _, weights_int8 = laid_out(bare_block, in_8_bits=True)
    bare.enable_layerwise_casting(torch.float8_e4m3fn, dtype)
    weights_fp8, other_fp8 = _weights(bare, bare_block)
    return BlockCost(
        count=kind.count,
        weights=weights,
        other_weights=other_weights,
        weights_fp8=weights_fp8,
        other_fp8=other_fp8,
        weights_int8=weights_int8,
        adapter_parameters=sum(parameter.numel() for parameter in trained),
        given=nbytes(kind.block_inputs),
        saved=saved,
        graph=graph,
        adapted=adapted,
        frozen=frozen,
        attention=attention.flops,
        attention_kept=attention.kept,
    )


def _weights(model: nn.Module, block: nn.Module) -> tuple[int, int]:
    """Bytes of a one-block network's block, and of the rest."""
    inside = nbytes(block.parameters())
    return inside, nbytes([*model.parameters(), *model.buffers()]) - inside


def measure_decoder(decoder: ChunksOnMeta) -> tuple[ChunkCost, ...]:
    """The cost of each latent frame's chunk."""
    caches, costs, weights = decoder.caches, [], list(decoder.module.parameters())
    for i in range(min(decoder.count, 3)):  # the caches have two frames from the third chunk on, nothing changes then
        x, start = decoder.chunk(i), [c.detach().requires_grad_() if isinstance(c, Tensor) else c for c in caches]
        held = [c for c in start if isinstance(c, Tensor)]

        def forward(first: bool = i == 0, x: Tensor = x, start: Caches = start) -> list[Tensor]:
            frames, after = decoder.run(x, start, first)
            return [frames, *(c for c in after if isinstance(c, Tensor))]

        def go_on(first: bool = i == 0, x: Tensor = x, start: Caches = start) -> Tensor:
            nonlocal caches
            frames, caches = decoder.run(x, start, first)
            return frames

        saved, frozen = saved_by(forward, weights), without_graph(go_on, [*weights, x, *held])
        with decoder.checkpointed():
            graph = with_graph(forward, [x, *held], weights, keep=False)
        costs.append(ChunkCost(nbytes(held), saved, frozen.peak, graph.peak, graph.forward, graph.backward))
    return tuple(costs + costs[-1:] * (decoder.count - len(costs)))


def measure_encoder(encoder: ChunksOnMeta, video: Sequence[int]) -> Cost:
    """A whole clip (3, F, H, W), chunk by chunk; the peak has the clip in float32 in it."""
    caches, costs, weights = encoder.caches, [], list(encoder.module.parameters())
    for i in range(min(encoder.count, 3)):
        x, held = encoder.chunk(i), [c for c in caches if isinstance(c, Tensor)]

        def forward(first: bool = i == 0, x: Tensor = x, start: Caches = caches) -> Tensor:
            nonlocal caches
            latents, caches = encoder.run(x, start, first)
            return latents

        cost = without_graph(forward, [*weights, x, *held])
        costs.append(Cost(cost.peak + nbytes(held), cost.forward))
    costs += costs[-1:] * (encoder.count - len(costs))
    return Cost(4 * math.prod(video) + max(cost.peak for cost in costs), sum(cost.forward for cost in costs))


def measure(video: Video) -> Costs:
    """Everything about one video of a model."""
    parts = video.backbone.on_meta(video.height, video.width, video.num_frames)
    measured: dict[int, ExpertCost] = {}  # by identity: equal ones are measured once
    for kinds in parts.experts.values():
        if id(kinds) not in measured:
            measured[id(kinds)] = measure_expert(kinds, parts.dtype, video.adapter)
    text = parts.text_encoder
    return Costs(
        shape=parts.shape,
        num_pixels=math.prod(parts.video),
        itemsize=parts.dtype.itemsize,
        experts={name: measured[id(kinds)] for name, kinds in parts.experts.items()},
        vae_weights=nbytes(parts.vae.parameters()),
        decoder_weights=nbytes(
            one for name, one in parts.vae.named_parameters() if name.split(".")[0] not in ("encoder", "quant_conv")
        ),
        chunks=measure_decoder(parts.decoder),
        vision_weights=0 if parts.vision is None else nbytes(parts.vision.parameters()),
        text_weights=nbytes(text.parameters()),
        text=without_graph(parts.encode_text, [*text.parameters(), *text.buffers()]),
        image=Cost(0, 0) if parts.image_encoder is None else measure_encoder(parts.image_encoder, parts.video),
        cached={name: nbytes([value]) for name, value in parts.conditioning.items()},
    )
