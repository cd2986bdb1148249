"""Costs of a model's parts, measured on the meta device, without data. Bytes and FLOPs are plain integers.

One transformer block and three chunks of the decoder run in real size, forward and backward; `needs` computes the cost
of a run from the results. The meta device takes torch's composite rms_norm, which saves more for the backward pass than
the GPU's fused one.
"""

import inspect
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count, shape_wrapper

from rewardfl.backbones.protocol import Adapter, ChunksOnMeta, ExpertOnMeta
from rewardfl.estimate.rates import Operation
from rewardfl.memory.offload import checkpointing
from rewardfl.training.workload import Video


class _Flash(TorchFunctionMode):
    """Attention by a fused kernel; on the meta device torch would take a kernel that stores the scores."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is not nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        query, key, value = args or (kwargs["query"], kwargs["key"], kwargs["value"])
        # the CPU's fused kernel saves the GPU's tensors (q, k, v, out, logsumexp) and also runs on the meta device
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)[0]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


# torch has formulas for the GPU's fused attentions, but not for the CPU's, which replaces them on the meta device
FUSED = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, q, k, v, *_, **__: sdpa_backward_flop_count(grad, q, k, v)
    ),
}
FORMULAS = flop_registry | {operator: shape_wrapper(formula) for operator, formula in FUSED.items()}


class Living(TorchDispatchMode):
    """Count FLOPs by pass (`name`) and operation, with torch's formulas, and the living bytes that operators allocate.

    `external` tensors do not count. The hooks of torch's FlopCounterMode would keep recomputed tensors of checkpoints
    alive.
    """

    def __init__(self, external: Iterable[Tensor], name: str = "forward"):
        super().__init__()
        self.now = self.peak = 0
        self.name, self.flops = name, Counter[tuple[str, Operation]]()
        self.storages: dict[int, object] = {_storage(tensor): None for tensor in external}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in FORMULAS:
            amount = FORMULAS[func.overloadpacket](*args, **(kwargs or {}), out_val=out)
            name = func.overloadpacket.__name__
            operation = "attention" if "attention" in name else "convolution" if "conv" in name else "matmul"
            self.flops[self.name, operation] += amount
        inputs = {_storage(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)}
        for tensor in _tensors(tree_leaves(out)):
            if _storage(tensor) not in self.storages and _storage(tensor) not in inputs:
                self._add(tensor.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()

        def remove(_):
            del self.storages[key]
            self.now -= size

        self.storages[key] = weakref.ref(storage, remove)
        self.now += size
        self.peak = max(self.peak, self.now)


@dataclass(frozen=True, kw_only=True)
class Flops:
    """FLOPs by pass and type of operation."""

    flops: Counter[tuple[str, Operation]]

    def total(self, name: str, operation: Operation | None = None) -> int:
        """Return the FLOPs of a pass, of all operations or of one."""
        return sum(n for (passed, each), n in self.flops.items() if passed == name and operation in (None, each))

    forward = property(lambda self: self.total("forward"))
    backward = property(lambda self: self.total("backward"))


@dataclass(frozen=True, kw_only=True)
class Cost(Flops):
    """Bytes and FLOPs of running something once."""

    peak: int  # largest number of living bytes
    saved: int = 0  # bytes that the graph saves for the backward pass
    graph: int = 0  # bytes that live before the backward pass, with the outputs if they are kept
    forward_peak: int = 0  # largest number of living bytes before the backward pass


def with_graph(
    forward: Callable[[], Sequence[Tensor]], leaves: Sequence[Tensor], external: Iterable[Tensor], *, keep: bool = True
) -> Cost:
    """Return the cost of `forward()` and of its backward pass, which leaves gradients on `leaves`.

    external: tensors that do not count. leaves: tensors that require a gradient, not counted in the peak. keep: whether
    the outputs live through the backward pass.
    """
    external, saved = list(external), dict[int, int]()

    def note(tensor: Tensor) -> Tensor:
        saved[_storage(tensor)] = tensor.untyped_storage().nbytes()
        return tensor  # the graph keeps it alive, so that no address is used twice

    with _Flash(), Living([*external, *leaves]) as living:
        with saved_tensors_hooks(note, lambda tensor: tensor):
            outputs = forward()
        living.name, forward_peak = "backward", living.peak
        free = {_storage(tensor) for tensor in external}
        edges = [get_gradient_edge(output) for output in outputs]
        cotangents = [torch.empty_like(output) for output in outputs]
        if not keep:
            del outputs
        graph = living.now - nbytes(cotangents)
        torch.autograd.backward(edges, cotangents)
    saved_bytes = sum(size for storage, size in saved.items() if storage not in free)
    return Cost(flops=living.flops, peak=living.peak, saved=saved_bytes, graph=graph, forward_peak=forward_peak)


def without_graph(run: Callable[[], Any], external: Iterable[Tensor], name: str = "forward") -> Cost:
    """Return the cost of `run()` without gradients. external: tensors that do not count. name: of the pass."""
    with torch.no_grad(), _Flash(), Living(external, name) as living:
        run()
    return Cost(flops=living.flops, peak=living.peak)


def nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@dataclass(frozen=True, kw_only=True)
class ExpertCost(Flops):
    """FLOPs and bytes of one expert for one video.

    Its passes are forward and backward, with the adapter, and forward_frozen, without it.
    """

    tokens: int
    weights: int
    block_weights: int
    other_weights: int
    weights_fp8: int  # the complete expert's under diffusers' layerwise casting
    adapter_parameters: int  # a number
    block_input: int
    stored: int  # every block's input and `shared`, which checkpointing stores of one forward pass
    shared: int  # tensors without a gradient that all blocks take; on the GPU as long as a graph, wherever it is
    nested: int  # such tensors in tuples, as rotary embeddings; checkpoints hold, but do not save them
    saved: int  # for the backward pass, with the adapter, by all blocks
    saved_outside: int  # the same outside of the blocks
    block_saved: int
    block_peak: int  # in one block's forward and backward pass, without its input
    block_peak_frozen: int  # the same without a graph
    forward_frozen = property(lambda self: self.total("forward_frozen"))


@dataclass(frozen=True, kw_only=True)
class ChunkCost(Flops):
    """Bytes and FLOPs of one chunk's pass through the VAE's decoder. Other bytes are without the input caches."""

    caches_in: int
    peak: int  # without a graph; with the output caches
    peak_vjp: int  # with forward, backward and the cotangents
    graph: int  # between forward and backward, without the output caches


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of a model for one video. shape: (C, T, h, w) of its latents."""

    shape: tuple[int, int, int, int]
    num_pixels: int  # values in the video
    itemsize: int  # bytes of one number of the frozen weights' dtype
    experts: Mapping[str, ExpertCost]  # by name
    vae_weights: int
    decoder_weights: int  # the VAE's without its encoder, as in training
    chunks: tuple[ChunkCost, ...]  # by latent frame
    vision_weights: int  # a separate image encoder's, or 0
    text_weights: int
    text: Cost  # for encoding one prompt
    image: Cost  # for encoding a clip by the VAE, from its float32 pixels; 0 for an image model
    cached: Mapping[str, int]  # bytes of one sample's conditioning, by part


def measure_expert(
    forms: Sequence[ExpertOnMeta], dtype: torch.dtype, block_classes: Sequence[str], adapter: Adapter | None
) -> ExpertCost:
    """Return one network's cost, from one block of each type. dtype: of its frozen weights."""
    blocks = [_measure_block(form, dtype, block_classes, adapter) for form in forms]
    outside, largest = blocks[0][2], Counter[str]()
    sums = Counter(outside)
    for form, (additive, maxima, _) in zip(forms, blocks, strict=True):
        sums.update({name: form.count * amount for name, amount in additive.items()})
        largest |= maxima
    flops = Counter({key: amount for key, amount in sums.items() if isinstance(key, tuple)})
    others = {name: amount for name, amount in sums.items() if isinstance(name, str)}
    return ExpertCost(other_weights=outside["weights"], flops=flops, **others, **largest)


def _measure_block(
    form: ExpertOnMeta, dtype: torch.dtype, block_classes: Sequence[str], adapter: Adapter | None
) -> tuple[dict[Any, int], Counter[str], dict[Any, int]]:
    """Return fields of ExpertCost and keys of its flops: sums over blocks, their maxima, those outside of blocks."""
    model, bare = form.build(adapter), form.build(None)
    block, bare_block = (
        next(module for module in network.modules() if type(module).__name__ in block_classes)
        for network in (model, bare)
    )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    arguments, inputs = block_arguments(form, bare, bare_block)
    shared = [value for value in _tensors(tree_leaves(arguments)) if not value.requires_grad]
    saved_once = nbytes(value for value in _tensors(arguments.values()) if not value.requires_grad)

    def run(block: nn.Module) -> list[Tensor]:
        return _tensors(tree_leaves(block(**arguments)))

    graph = with_graph(lambda: run(block), [*inputs, *trained], [*model.parameters(), *shared])
    adapted = without_graph(lambda: run(block), [*model.parameters(), *inputs, *shared])
    frozen = without_graph(lambda: run(bare_block), [*bare.parameters(), *inputs, *shared], "forward_frozen")
    network = with_graph(lambda: [form.run(model)], [form.x, *trained], model.parameters())
    network_frozen = without_graph(lambda: form.run(bare), bare.parameters(), "forward_frozen")
    block_weights, weights = nbytes(bare_block.parameters()), nbytes([*bare.parameters(), *bare.buffers()])
    model.enable_gradient_checkpointing(checkpointing(form.x.device, inputs_on_host=False))
    bare.enable_layerwise_casting(torch.float8_e4m3fn, dtype)
    flops, outside_flops = graph.flops + frozen.flops, network.flops + network_frozen.flops
    outside_flops.subtract(flops)  # `-` drops negative counts: the first block has no gradient of its input
    additive: dict[Any, int] = {
        "weights": block_weights,
        "weights_fp8": nbytes(bare_block.parameters()),
        "adapter_parameters": sum(parameter.numel() for parameter in trained),
        "stored": nbytes(inputs),
        "saved": graph.saved,
        **flops,
    }
    maxima = Counter(
        tokens=sum(value.shape[1] for value in inputs),
        block_weights=block_weights,
        block_input=nbytes(inputs),
        block_saved=graph.saved,
        block_peak=graph.peak,
        block_peak_frozen=adapted.peak,
    )
    outside: dict[Any, int] = {
        "weights": weights - block_weights,
        "weights_fp8": nbytes([*bare.parameters(), *bare.buffers()]) - additive["weights_fp8"],
        "stored": saved_once,
        "shared": saved_once,
        "nested": nbytes(shared) - saved_once,
        "saved_outside": _packed(lambda: form.run(model)) - nbytes(inputs) - saved_once,
        **outside_flops,
    }
    return additive, maxima, outside


def _packed(run: Callable[[], Any]) -> int:
    """Return the bytes that saved-tensor hooks get of the graph of `run()`: weights, too, and a tensor at each use."""
    sizes: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    with _Flash(), saved_tensors_hooks(note, lambda tensor: tensor):
        run()
    return sum(sizes)


def block_arguments(form: ExpertOnMeta, model: nn.Module, block: nn.Module) -> tuple[dict[str, Any], list[Tensor]]:
    """Return a block's arguments by name in a pass through the network, and the list of those with a gradient."""
    arguments: dict[str, Any] = {}

    def note(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        arguments.update(inspect.signature(module.forward).bind(*args, **kwargs).arguments)

    hook = block.register_forward_pre_hook(note, with_kwargs=True)
    with torch.no_grad():
        form.run(model)
    hook.remove()
    for name in form.streams:
        if arguments.get(name) is not None:
            arguments[name] = torch.empty_like(arguments[name], requires_grad=True)
    return arguments, [arguments[name] for name in form.streams if arguments.get(name) is not None]


def measure_chunks(chunks: ChunksOnMeta, module: nn.Module) -> tuple[ChunkCost, ...]:
    """Measure each chunk of a module, forward and backward."""
    x, caches, costs, weights = chunks.latents, chunks.caches, [], list(module.parameters())
    for _ in range(min(chunks.count, 3)):  # from the third on caches have two frames, and the cost is constant
        start = [cache.detach().requires_grad_() if isinstance(cache, Tensor) else cache for cache in caches]
        held, forward = _tensors(start), partial(lambda x, start: _tensors(tree_leaves(chunks.run(x, start))), x, start)
        frozen = without_graph(forward, [*weights, x, *held])
        x.grad = None  # else the next one is added to it
        with chunks.vjp_context():
            vjp = with_graph(forward, [x, *held], weights, keep=False)
        with torch.no_grad():
            _, caches = chunks.run(x, caches)
        # the cotangents of the caches after it are there before its forward pass
        peak_vjp = max(vjp.peak, vjp.forward_peak + nbytes(_tensors(caches)))
        sizes = {"caches_in": nbytes(held), "peak": frozen.peak, "peak_vjp": peak_vjp, "graph": vjp.graph}
        costs.append(ChunkCost(flops=vjp.flops, **sizes))
    return tuple(costs + costs[-1:] * (chunks.count - len(costs)))


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    return [value for value in values if isinstance(value, Tensor)]


def measure(video: Video) -> Costs:
    """Measure all costs of one video of a model."""
    backbone, size = video.backbone, (video.height, video.width, video.num_frames)
    parts = backbone.on_meta(*size)
    measured = {  # equal experts are one object, which is measured once
        forms: measure_expert(forms, backbone.dtype, backbone.block_classes, video.adapter)
        for forms in set(parts.experts.values())
    }
    text = parts.text_encoder
    return Costs(
        shape=backbone.latent_shape(*size),
        num_pixels=3 * math.prod(size),
        itemsize=backbone.dtype.itemsize,
        experts={name: measured[forms] for name, forms in parts.experts.items()},
        vae_weights=nbytes(parts.vae.parameters()),
        decoder_weights=nbytes(
            weight for name, weight in parts.vae.named_parameters() if not name.startswith(("encoder.", "quant_conv."))
        ),
        chunks=measure_chunks(parts.decoder, parts.vae),
        vision_weights=0 if parts.vision is None else nbytes(parts.vision.parameters()),
        text_weights=nbytes(text.parameters()),
        text=without_graph(parts.encode_text, [*text.parameters(), *text.buffers()]),
        image=without_graph(parts.encode_clip, parts.vae.parameters()),
        cached={name: nbytes([value]) for name, value in parts.conditioning.items()},
    )
