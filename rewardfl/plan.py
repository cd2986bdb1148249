"""What a run costs before it is run: FLOPs, memory by phase, host memory and disk, and what to do when it does not fit.

Costs are measured where torch can tell, on the meta device: one transformer block and three chunks of the VAE's
decoder of the real size are run forward and backward without data, under torch's FLOP counter, saved-tensor hooks and
a count of living storages. What follows from them (how many blocks, steps, chunks) is arithmetic. Bytes and FLOPs are
plain integers; GB is 1e9 bytes. Everything is per GPU.

Not measured: the face networks' activations, what the CUDA context, the libraries' workspaces and the allocator's
fragmentation take (RESERVE stands for those), kernels that save less on a GPU than torch's composite ones
(rms_norm).
"""

import dataclasses
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

from rewardfl import config as configuration
from rewardfl import flow, lora, reward_flow, wan, wan_names

HOST_BANDWIDTH = 50e9  # bytes/s between host and GPU, PCIe 5 x16 as it is reached
GPU_BANDWIDTH = 3e12  # bytes/s of the GPU's own memory, H100
RESERVE = 2e9  # bytes of a GPU that no tensor gets: CUDA context, workspaces, fragmentation
ADAM_BYTES = 16  # per LoRA parameter: float32 weight, gradient and two moments

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


def saved_bytes(forward: Callable[[], Any], given: Iterable[Tensor]) -> int:
    """Bytes that autograd keeps for the backward pass of `forward()`, each storage once, those of `given` not."""
    known, saved = {_storage(tensor) for tensor in given}, {}

    def pack(tensor: Tensor) -> Tensor:
        if _storage(tensor) not in known:
            saved[_storage(tensor)] = tensor.untyped_storage().nbytes()
        return tensor  # kept alive by the graph, so that no address is used twice

    with _Flash(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        graph = forward()
    del graph
    return sum(saved.values())


def peak_bytes(run: Callable[[], Any], given: Iterable[Tensor]) -> int:
    """The most bytes that `run()` has alive at once, without the storages of `given`."""
    living = _Living(given)
    with _Flash(), living:
        run()
    return living.peak


def _attention_flops(query, key, value, *_, out_shape=None, **__) -> int:
    return sdpa_flop_count(query, key, value)


def _attention_backward_flops(grad, query, key, value, *_, out_shape=None, **__) -> int:
    return sdpa_backward_flop_count(grad, query, key, value)


def flops(run: Callable[[], Any]) -> int:
    """FLOPs of the matrix products, convolutions and attentions in `run()`."""
    fused = torch.ops.aten
    known = {
        fused._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
        fused._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
    }
    with _Flash(), FlopCounterMode(display=False, custom_mapping=known) as counter:
        run()
    return counter.get_total_flops()


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
    layers, (_, frames, height, width) = config["num_layers"], shape
    tokens = math.prod(size // patch for size, patch in zip((frames, height, width), config["patch_size"], strict=True))
    inputs = block_inputs(config, dtype, tokens, grad=True)
    block, weights = model.blocks[0], [*model.parameters(), *bare.parameters()]
    given = [*weights, inputs.hidden, *inputs.shared]
    gradient = torch.empty_like(inputs.hidden)

    def forward_backward() -> None:
        call_block(block, inputs).backward(gradient)

    def peak_frozen() -> int:
        with torch.no_grad():
            return peak_bytes(lambda: call_block(block, inputs), given)

    forward, backward = _expert_flops(model, config, dtype, shape, inputs)
    forward_frozen, _ = _expert_flops(bare, config, dtype, shape, inputs)
    block_weights = nbytes(bare.blocks.parameters())
    other_weights = nbytes([*bare.parameters(), *bare.buffers()]) - block_weights
    bare.enable_layerwise_casting(torch.float8_e4m3fn, dtype)
    block_fp8 = nbytes(bare.blocks.parameters())
    other_fp8 = nbytes([*bare.parameters(), *bare.buffers()]) - block_fp8
    return ExpertCost(
        layers=layers,
        tokens=tokens,
        block_weights=block_weights,
        other_weights=other_weights,
        weights_fp8=layers * block_fp8 + other_fp8,
        adapter_parameters=layers * sum(p.numel() for p in block.parameters() if p.requires_grad),
        block_input=nbytes([inputs.hidden]),
        # the block's own input too is kept, but by whoever made it
        block_saved=saved_bytes(lambda: call_block(block, inputs), [*weights, *inputs.shared]),
        block_peak=peak_bytes(forward_backward, given),
        block_peak_frozen=peak_frozen(),
        forward=forward,
        forward_frozen=forward_frozen,
        backward=backward,
    )


def _expert_flops(model: nn.Module, config, dtype: torch.dtype, shape: Sequence[int], inputs: BlockInputs):
    """(forward, backward) FLOPs of an expert of which `model` is the one-block version."""
    x = _meta(1, config["in_channels"], *shape[1:], dtype=dtype, grad=True)
    text = _meta(1, wan.TEXT_LENGTH, config["text_dim"], dtype=dtype)
    timestep = _meta(1, dtype=torch.float32)
    out = []
    forward = flops(lambda: out.append(model(x, timestep, text, return_dict=False)[0]))
    backward = flops(lambda: out[0].backward(torch.empty_like(out[0])))
    block_forward = flops(lambda: out.append(call_block(model.blocks[0], inputs)))
    block_backward = flops(lambda: out[1].backward(torch.empty_like(out[1])))
    more = config["num_layers"] - 1
    return forward + more * block_forward, backward + more * block_backward


def measure_decoder(vae: AutoencoderKLWan, dtype: torch.dtype, shape: Sequence[int]) -> tuple[ChunkCost, ...]:
    """The cost of each latent frame's chunk. `vae` is on the meta device; shape: (C, T, h, w)."""
    channels, frames, height, width = shape
    caches: list[Tensor | str | None] = [None] * vae._cached_conv_counts["decoder"]
    costs = []
    for i in range(min(frames, 3)):  # the caches have two frames from the third chunk on, and nothing changes after it
        x = _meta(1, channels, 1, height, width, dtype=dtype, grad=True)
        start = [c.detach().requires_grad_() if isinstance(c, Tensor) else c for c in caches]
        tensors = [c for c in start if isinstance(c, Tensor)]
        cost, caches = _measure_chunk(vae, x, start, tensors, first=i == 0)
        costs.append(cost)
    return tuple(costs + costs[-1:] * (frames - len(costs)))


def _measure_chunk(vae: AutoencoderKLWan, x: Tensor, start: list, tensors: list[Tensor], first: bool):
    """(ChunkCost, the caches after it). tensors: those of `start`."""
    given = [*vae.parameters(), x, *tensors]

    def forward() -> tuple[Tensor, list]:
        after = list(start)
        return vae.decoder(vae.post_quant_conv(x), feat_cache=after, feat_idx=[0], first_chunk=first), after

    def outputs() -> list[Tensor]:
        frames, after = forward()
        return [frames.clamp(-1, 1), *(c for c in after if isinstance(c, Tensor))]

    def backward(values: list[Tensor]) -> None:
        cotangents = [torch.empty_like(value) for value in values]
        torch.autograd.grad(values, [x, *tensors], cotangents, allow_unused=True)

    with torch.no_grad():
        peak = peak_bytes(outputs, given)
        _, caches = forward()
    made = []
    cost = ChunkCost(
        caches_in=nbytes(tensors),
        saved=saved_bytes(outputs, given),
        peak=peak,
        peak_vjp=peak_bytes(lambda: backward(outputs()), given),
        forward=flops(lambda: made.extend(outputs())),
        backward=flops(lambda: backward(made)),
    )
    return cost, caches


def measure_encode(
    vae: AutoencoderKLWan, text_config: Mapping[str, Any], dtype: torch.dtype, video: Sequence[int]
) -> EncodeCost:
    """The cost of one clip's text and image conditioning. video: (3, F, H, W)."""
    channels, num_frames, height, width = video
    factor = vae.config.scale_factor_temporal
    latent_frames = 1 + (num_frames - 1) // factor
    caches: list[Tensor | str | None] = [None] * vae._cached_conv_counts["encoder"]
    work, peaks = [], []
    for i in range(min(3, latent_frames)):
        x = _meta(1, channels, factor if i else 1, height, width, dtype=dtype)
        held = [c for c in caches if isinstance(c, Tensor)]
        after = list(caches)
        with torch.no_grad():
            peak = peak_bytes(_encoder_call(vae, x, list(caches)), [*vae.parameters(), x, *held])
            work.append(flops(_encoder_call(vae, x, after)))
        peaks.append(nbytes(held) + peak)
        caches = after
    work += work[-1:] * (latent_frames - len(work))
    with torch.device("meta"):
        text = UMT5EncoderModel(UMT5Config(**text_config)).to(dtype).eval()
    tokens = torch.empty(1, wan.TEXT_LENGTH, dtype=torch.long, device="meta")
    with torch.no_grad():
        text_flops = flops(lambda: text(tokens))
        text_peak = peak_bytes(lambda: text(tokens), [*text.parameters(), *text.buffers(), tokens])
    pixels = math.prod(video) * 4  # float32
    return EncodeCost(nbytes(text.parameters()), text_peak, text_flops, pixels + max(peaks), sum(work))


def _encoder_call(vae: AutoencoderKLWan, x: Tensor, caches: list) -> Callable[[], Tensor]:
    return lambda: vae.encoder(x, feat_cache=caches, feat_idx=[0])


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


# ------------------------------------------------------------------------------------------------------------
# What a run does with them


@dataclass(frozen=True)
class Levers:
    """The settings that trade memory for time; KEYS says which configuration keys they are."""

    untrained: str = "gpu"
    checkpointing: bool = True
    offload_inputs: bool = False
    decode_caches: str = "keep"
    batch: int = 1
    accumulation: int = 1
    noises: str | int = "fresh"


KEYS = {
    "untrained": "experts.untrained",
    "checkpointing": "train.use_gradient_checkpointing",
    "offload_inputs": "train.use_gradient_checkpointing_offload",
    "decode_caches": "train.decode_caches",
    "batch": "train.per_device_train_batch_size",
    "accumulation": "train.gradient_accumulation_steps",
    "noises": "sample.noises_per_sample",
}  # of Levers
CACHED_NOISES = 4  # noises_per_sample that is proposed together with boundary_cache


@dataclass(frozen=True)
class Run:
    """What a run does to each clip. sigmas: by step and the last one, 0; active: the steps with gradient."""

    sigmas: tuple[float, ...]
    boundary: float
    active: tuple[int, ...]
    trained: tuple[str, ...]  # high_noise, low_noise
    coupled: bool
    kl: bool
    fixed_trajectory: bool
    levers: Levers
    save_steps: int = 25
    steps: int | None = None  # updates in all, where known
    clips: int | None = None  # in the data, where known
    pack_bytes: int = 0  # of the face networks, where they are on disk

    @property
    def untrained(self) -> str | None:
        """The one expert that is not trained."""
        rest = [expert for expert in wan.PARTS if expert not in self.trained]
        return rest[0] if rest else None

    def expert_at(self, step: int) -> str:
        return wan.expert_at(self.sigmas[step], self.boundary)


def forwards(run: Run) -> dict[str, int]:
    """How many forward passes of each expert one rollout takes."""
    answering = [run.expert_at(i) for i in range(len(run.sigmas) - 1)]
    counts = {expert: answering.count(expert) for expert in wan.PARTS}
    if run.levers.untrained == "boundary_cache" and run.untrained:
        counts[run.untrained] = 0
    return counts


def work(costs: Costs, run: Run) -> dict[str, int]:
    """FLOPs of one clip's part in an update, by part. A frozen expert's active steps are counted as trained ones."""
    active = [costs.experts[run.expert_at(i)] for i in run.active]
    rolled = {
        expert: count * (cost.forward if expert in run.trained else cost.forward_frozen)
        for (expert, count), cost in zip(forwards(run).items(), costs.experts.values(), strict=True)
    }
    # the KL's gradient kept off the trajectory is a backward pass of its own at each step that hands one on
    twice = active[1:] if run.kl and run.fixed_trajectory and run.coupled else []
    decode = sum(chunk.forward for chunk in costs.chunks)
    again = 2 if run.levers.decode_caches == "segment" else 1
    return {
        "rollout": sum(rolled.values()),
        "decode": decode,
        "decode VJP": again * decode + sum(chunk.backward for chunk in costs.chunks),
        "replay forward": sum(cost.forward for cost in active),
        "replay recompute": sum(cost.forward for cost in active + twice) if run.levers.checkpointing else 0,
        "replay backward": sum(cost.backward for cost in active + twice),
        "reference": sum(cost.forward_frozen for cost in active) if run.kl else 0,
    }


def seconds(costs: Costs, run: Run, tflops: float) -> float:
    """Seconds for one clip at `tflops` TFLOP/s, with the copies to and from the host that computing does not hide."""
    parts = {name: amount / (tflops * 1e12) for name, amount in work(costs, run).items()}
    return sum(parts.values()) + sum(_exposed(costs, run, parts, tflops))


def _exposed(costs: Costs, run: Run, parts: Mapping[str, float], tflops: float) -> Iterable[float]:
    """Seconds that each lever's copying adds; every copy goes on beside the computing of its own part."""

    def beyond(copied: float, computing: float) -> float:
        return max(0.0, copied / HOST_BANDWIDTH - computing)

    levers = run.levers
    if levers.checkpointing and levers.offload_inputs:
        inputs = sum(costs.experts[run.expert_at(i)].stored for i in run.active)
        yield beyond(inputs, parts["replay forward"])
        yield beyond(inputs, parts["replay recompute"] + parts["replay backward"])
    if levers.decode_caches == "offload":
        caches = sum(chunk.caches_in for chunk in costs.chunks)
        yield beyond(caches, parts["decode"])
        yield beyond(caches, parts["decode VJP"])
    if run.untrained and levers.untrained in ("cpu_swap", "fp8"):
        cost = costs.experts[run.untrained]
        if levers.untrained == "cpu_swap":
            once = beyond(cost.weights / levers.batch, cost.forward_frozen / (tflops * 1e12))
        else:  # eight bits are read, sixteen written
            once = 3 * cost.weights_fp8 / GPU_BANDWIDTH / levers.batch
        yield forwards(run)[run.untrained] * once


@dataclass(frozen=True)
class Memory:
    """Bytes. resident: on the GPU all through training; phases: what each adds; encode: before the experts load."""

    resident: Mapping[str, int]
    phases: Mapping[str, Mapping[str, int]]
    encode: Mapping[str, int]
    host: Mapping[str, int]

    def of(self, phase: str) -> int:
        """The GPU's bytes in one phase of training, with what is resident."""
        return sum(self.resident.values()) + sum(self.phases[phase].values())

    @property
    def peak(self) -> int:
        """Of the GPU, over all phases."""
        return max(*(self.of(phase) for phase in self.phases), sum(self.encode.values()))


def memory(costs: Costs, run: Run) -> Memory:
    """Memory by phase. The conditioning comes from its cache, so text encoder and VAE encoder need not be resident."""
    batch = run.levers.batch
    weights, host_weights = expert_weights(costs, run)
    caches, segment, host_caches = decode_caches(costs.chunks, run.levers.decode_caches)
    activations, host_inputs = replay_activations(costs, run)
    frozen = max(2 * cost.block_input + cost.block_peak_frozen for cost in costs.experts.values())
    decoded = costs.num_pixels * costs.itemsize
    frames = {"frames, also float32, and gradient": batch * (decoded + 2 * 4 * costs.num_pixels)}
    phases = {
        "rollout": {"one block, no graph": batch * frozen},
        "decode": {
            "decoder caches": batch * caches,
            "one chunk, no graph": batch * max(chunk.peak for chunk in costs.chunks),
            "frames by chunk and in one": batch * 2 * decoded,
        },
        "reward": {"decoder caches": batch * caches, **frames},
        "decode VJP": {
            "decoder caches": batch * (caches + segment),
            "one chunk, forward and backward": batch * max(chunk.peak_vjp for chunk in costs.chunks),
            **frames,
        },
        "replay": {name: batch * amount for name, amount in activations.items()},
    }
    encode = {
        "text encoder": costs.encode.text_weights,
        "VAE": costs.vae_weights,
        "activations": max(costs.encode.text_peak, costs.encode.image_peak),
    }
    adapters = sum(costs.experts[expert].adapter_parameters for expert in run.trained)
    resident = {**weights, "LoRA, gradient, Adam": ADAM_BYTES * adapters, "VAE": costs.vae_weights}
    if run.pack_bytes:
        resident["face networks' weights"] = run.pack_bytes
    host = {
        "expert that is swapped": host_weights,
        "block inputs": batch * host_inputs,
        "decoder caches": batch * host_caches,
    }
    return Memory(resident, phases, encode, {name: amount for name, amount in host.items() if amount})


def expert_weights(costs: Costs, run: Run) -> tuple[dict[str, int], int]:
    """Bytes of weights on the GPU by expert, and in the host."""
    on_gpu = {f"{expert} expert": costs.experts[expert].weights for expert in run.trained}
    if run.untrained is None:
        return on_gpu, 0
    cost = costs.experts[run.untrained]
    placed = {
        "gpu": cost.weights,
        "cpu_swap": cost.other_weights + 2 * cost.block_weights,  # the block at work and the next
        "fp8": cost.weights_fp8,
        "boundary_cache": 0,
    }
    on_gpu[f"{run.untrained} expert ({run.levers.untrained})"] = placed[run.levers.untrained]
    return on_gpu, cost.weights if run.levers.untrained == "cpu_swap" else 0


def decode_caches(chunks: Sequence[ChunkCost], place: str) -> tuple[int, int, int]:
    """Bytes of one clip's decoder caches: on the GPU, there during the VJP besides, and in the host."""
    sizes = [chunk.caches_in for chunk in chunks]
    if place == "keep":
        return sum(sizes), 0, 0
    if place == "offload":
        return 2 * max(sizes), 0, sum(sizes)
    length = math.ceil(math.sqrt(len(sizes)))
    return sum(sizes[::length]), max(sum(sizes[i : i + length]) for i in range(0, len(sizes), length)), 0


def replay_activations(costs: Costs, run: Run) -> tuple[dict[str, int], int]:
    """Bytes of activations in the replay of one step of one clip: on the GPU, and in the host."""
    largest = max((costs.experts[run.expert_at(i)] for i in run.active), key=lambda cost: cost.layers * cost.block_saved)
    if not run.levers.checkpointing:
        backward = largest.block_peak - largest.block_saved
        return {"all blocks, saved": largest.layers * largest.block_saved, "backward of one": backward}, 0
    recompute = {"recompute and backward of one": largest.block_peak}
    if run.levers.offload_inputs:
        return {"two block inputs": 2 * largest.block_input} | recompute, largest.stored
    return {"block inputs": largest.stored} | recompute, 0


@dataclass(frozen=True)
class FullGraph:
    """What plain autograd through all active steps and the decoder would take for a clip. FLOPs and bytes."""

    flops: int  # with the decoder checkpointed by chunk
    block_inputs: int
    decode: int  # the decoder as it is
    decode_chunks: int  # checkpointed by chunk


def full_graph(costs: Costs, run: Run) -> FullGraph:
    """For comparison. The experts are as the run has them; its other levers do not count here."""
    levers = dataclasses.replace(run.levers, checkpointing=True, decode_caches="keep")
    parts = work(costs, dataclasses.replace(run, levers=levers))
    caches, _, _ = decode_caches(costs.chunks, "keep")
    return FullGraph(
        flops=sum(parts.values()) - parts["replay forward"],  # the rollout's own forward passes have the graph
        block_inputs=sum(costs.experts[run.expert_at(i)].stored for i in run.active),
        decode=sum(chunk.saved for chunk in costs.chunks),
        decode_chunks=caches + max(chunk.saved for chunk in costs.chunks),
    )


# ------------------------------------------------------------------------------------------------------------
# What to switch on


@dataclass(frozen=True)
class Option:
    """Settings of some Levers fields. exact: the run computes the same numbers with them."""

    fields: Mapping[str, Any]
    exact: bool = True
    note: str = ""

    @property
    def settings(self) -> dict[str, Any]:
        """By configuration key."""
        return {KEYS[field]: value for field, value in self.fields.items()}

    def on(self, run: Run) -> Run:
        return dataclasses.replace(run, levers=dataclasses.replace(run.levers, **self.fields))


def options(run: Run) -> list[Option]:
    """What can be switched on in this run."""
    levers = run.levers
    found = [Option({"decode_caches": place}) for place in ("offload", "segment") if place != levers.decode_caches]
    if not levers.checkpointing:
        found.append(Option({"checkpointing": True}))
    elif not levers.offload_inputs:
        found.append(Option({"offload_inputs": True}))
    if levers.batch > 1:
        found.append(Option({"batch": 1, "accumulation": levers.batch * levers.accumulation}))
    if run.untrained:
        found += [Option({"untrained": "cpu_swap"}), Option({"untrained": "fp8"}, False, "rounds its weights by 3 %")]
    if run.untrained == "high_noise" and all(run.expert_at(i) == "low_noise" for i in run.active):
        fields: dict[str, Any] = {"untrained": "boundary_cache"}
        if levers.noises == "fresh":
            fields["noises"] = CACHED_NOISES
        found.append(Option(fields, False, "each clip has a few noises, used in turn"))
    return [option for option in found if option.on(run) != run]


def fits(costs: Costs, run: Run, gpu_memory: float) -> bool:
    return memory(costs, run).peak + RESERVE <= gpu_memory


def recommend(costs: Costs, run: Run, gpu_memory: float, tflops: float) -> list[Option]:
    """What makes the run fit `gpu_memory` bytes, or comes closest: always what costs least time of what lowers the peak.

    What computes the same numbers comes before what does not. What turns out to be unnecessary is left out again.
    """
    chosen: list[Option] = []
    current = run
    while not fits(costs, current, gpu_memory):
        peak = memory(costs, current).peak
        lower = [option for option in options(current) if memory(costs, option.on(current)).peak < peak]
        if not lower:
            return chosen
        now = current
        best = min(lower, key=lambda option: (not option.exact, seconds(costs, option.on(now), tflops)))
        chosen.append(best)
        current = best.on(current)
    for option in reversed(chosen):
        rest = [other for other in chosen if other is not option]
        if fits(costs, with_options(run, rest), gpu_memory):
            chosen = rest
    return chosen


def with_options(run: Run, chosen: Iterable[Option]) -> Run:
    for option in chosen:
        run = option.on(run)
    return run


# ------------------------------------------------------------------------------------------------------------
# Disk


def checkpoint_bytes(costs: Costs, run: Run) -> tuple[int, int]:
    """Bytes of one checkpoint: the float32 adapter, and Adam's two moments of it."""
    adapter = 4 * sum(costs.experts[expert].adapter_parameters for expert in run.trained)
    return adapter, 2 * adapter


def clip_cache_bytes(costs: Costs, run: Run) -> dict[str, int]:
    """Bytes that the conditioning cache takes for one clip."""
    cache = {"text": costs.text_bytes, "image": costs.image_bytes}
    if run.levers.untrained == "boundary_cache" and run.levers.noises != "fresh":
        cache["boundary latents"] = run.levers.noises * math.prod(costs.shape) * 4
    return cache


# ------------------------------------------------------------------------------------------------------------
# From a configuration


def source_of(model_folder: Path | None, published: Path) -> Path:
    """The folder that says the model's shape: its own where its configurations are there, else the published ones."""
    parts = [*wan.PARTS.values(), "vae", "text_encoder"]
    if model_folder and all((model_folder / part / "config.json").is_file() for part in parts):
        return model_folder
    return published


def of_config(
    cfg: configuration.RunConfig, configs: Path, clips: int | None = None, steps: int | None = None
) -> tuple[Costs, Run]:
    """The costs and the run of a configuration. configs: see `source_of`; clips, steps: where they are known."""
    sample, train = cfg.sample, cfg.train
    boundary = cfg.model.min_timestep_boundary
    boundary = configuration.boundary_ratio(configs) if boundary is None else boundary
    sigmas = reward_flow.until_final_step(
        flow.linear_sigmas(sample.num_inference_steps, sample.shift), sample.final_timestep
    )
    packs = [Path(folder) for folder in (cfg.reward.reward_model_path, cfg.reward.held_out_model_path) if folder]
    adapter = Adapter(cfg.lora.lora_rank, tuple(lora.target_modules(cfg.lora.lora_target_modules)))
    dtype = wan.DTYPES[cfg.model.dtype]
    costs = measure(configs, dtype, cfg.data.height, cfg.data.width, cfg.data.num_frames, adapter)
    run = Run(
        sigmas=tuple(sigmas.tolist()),
        boundary=boundary,
        active=configuration.active_steps(cfg),
        trained=configuration.trainable_experts(cfg),
        coupled=configuration.resolved_coupling(cfg) != 0,
        kl=cfg.reward.kl_weight != 0,
        fixed_trajectory=cfg.reward.kl_gradient == "fixed_trajectory",
        levers=Levers(
            untrained=cfg.experts.untrained,
            checkpointing=train.use_gradient_checkpointing,
            offload_inputs=train.use_gradient_checkpointing_offload,
            decode_caches=train.decode_caches,
            batch=train.per_device_train_batch_size,
            accumulation=train.gradient_accumulation_steps,
            noises=sample.noises_per_sample,
        ),
        save_steps=cfg.run.save_steps,
        steps=steps,
        clips=clips,
        pack_bytes=sum(file.stat().st_size for folder in packs for file in folder.glob("*.onnx")),
    )
    return costs, run


# ------------------------------------------------------------------------------------------------------------
# For people


def report(costs: Costs, run: Run, tflops: float, gpu_memory: float | None) -> str:
    """The whole plan as text. gpu_memory: bytes to compare with; None compares with nothing."""
    sections = [_sigma_table(run), _work_table(costs, run, tflops), _memory_table(costs, run), _disk_lines(costs, run)]
    if gpu_memory is not None:
        sections.append(_verdict(costs, run, gpu_memory, tflops))
    return "\n\n".join("\n".join(lines) for lines in sections)


def sde_stds(sigmas: Sequence[float]) -> list[tuple[float, float]]:
    """By step, the standard deviation of a Flow-SDE and of a Dance-SDE transition at noise_level 1."""
    flow_g = [math.sqrt(sigma / (1 - min(sigma, sigmas[1]))) for sigma in sigmas[:-1]]
    widths = [math.sqrt(sigma - after) for sigma, after in zip(sigmas[:-1], sigmas[1:], strict=True)]
    return [(g * width, width) for g, width in zip(flow_g, widths, strict=True)]


def _sigma_table(run: Run) -> list[str]:
    lines = ["step   sigma   timestep  expert      gradient  Flow-SDE std  Dance-SDE std (x noise_level)"]
    for i, (flow_std, dance_std) in enumerate(sde_stds(run.sigmas)):
        sigma, gradient = run.sigmas[i], "replayed" if i in run.active else "-"
        lines.append(
            f"{i:4d}  {sigma:6.4f}  {1000 * sigma:9.3f}  {run.expert_at(i):10s}  {gradient:8s}  "
            f"{flow_std:12.4f}  {dance_std:13.4f}"
        )
    return lines


def _work_table(costs: Costs, run: Run, tflops: float) -> list[str]:
    tokens = costs.experts["low_noise"].tokens
    latents = "x".join(map(str, costs.shape))
    lines = [f"{tokens} tokens, latents {latents}", f"compute by part, one clip   TFLOP  s at {tflops:g} TFLOP/s"]
    parts = work(costs, run)
    for name, amount in parts.items():
        lines.append(f"  {name:22s}{amount / 1e12:10.4g}{amount / tflops / 1e12:10.3g}")
    total, time, clips = sum(parts.values()), seconds(costs, run, tflops), run.levers.batch * run.levers.accumulation
    exposed = time - total / tflops / 1e12
    if exposed > 0:
        lines.append(f"  {'copies not hidden':22s}{'':10s}{exposed:10.3g}")
    encode = costs.encode.text_flops + costs.encode.image_flops
    return lines + [
        f"  {'total':22s}{total / 1e12:10.4g}{time:10.3g}",
        f"one step of {clips} clips per GPU: {clips * total / 1e15:.4g} PFLOP, {clips * time:.4g} s",
        f"VAE encode and text, once per clip: {encode / 1e12:.4g} TFLOP, then from the cache",
    ]


def _memory_table(costs: Costs, run: Run) -> list[str]:
    needs, full = memory(costs, run), full_graph(costs, run)
    resident = sum(needs.resident.values())
    lines = ["GPU memory, GB", f"  {'resident':12s}{_gb(resident):>8s}   {_parts(needs.resident)}"]
    for phase, parts in needs.phases.items():
        lines.append(f"  {phase:12s}{_gb(needs.of(phase)):>8s}   resident + {_parts(parts)}")
    lines.append(f"  {'encode':12s}{_gb(sum(needs.encode.values())):>8s}   before the experts: {_parts(needs.encode)}")
    lines.append(f"  {'peak':12s}{_gb(needs.peak):>8s}   and about {_gb(RESERVE)} for CUDA, libraries, fragmentation")
    lines.append(f"host memory per process, GB: {_parts(needs.host) if needs.host else 'nothing pinned or swapped'}")
    plain = full.block_inputs + full.decode
    return lines + [
        f"plain autograd through {len(run.active)} steps and the decoder would keep {_gb(run.levers.batch * plain)} GB "
        f"(block inputs {_gb(run.levers.batch * full.block_inputs)}, decoder {_gb(run.levers.batch * full.decode)})",
    ]


def _disk_lines(costs: Costs, run: Run) -> list[str]:
    adapter, state = checkpoint_bytes(costs, run)
    line = f"  a checkpoint: {_gb(adapter + state)} (adapter {_gb(adapter)}, state {_gb(state)})"
    if run.steps is not None:
        count = math.ceil(run.steps / run.save_steps)
        line += f"; {count} in {run.steps} steps: {_gb(count * (adapter + state))}"
    cache = clip_cache_bytes(costs, run)
    cached = f"  conditioning cache of a clip: {_gb(sum(cache.values()))} ({_parts(cache)})"
    if run.clips is not None:
        cached += f"; of {run.clips} clips: {_gb(run.clips * sum(cache.values()))}"
    return ["disk, GB", line, cached]


def _verdict(costs: Costs, run: Run, gpu_memory: float, tflops: float) -> list[str]:
    need = f"{_gb(memory(costs, run).peak + RESERVE)} GB"
    if fits(costs, run, gpu_memory):
        return [f"fits: {need} of {_gb(gpu_memory)} GB"]
    chosen = recommend(costs, run, gpu_memory, tflops)
    lines = [f"does not fit: {need} of {_gb(gpu_memory)} GB" + ("; then" if chosen else ", and no setting lowers it")]
    before, base = run, seconds(costs, run, tflops)
    for option in chosen:
        after = option.on(before)
        saved = memory(costs, before).peak - memory(costs, after).peak
        share = 100 * (seconds(costs, after, tflops) - seconds(costs, before, tflops)) / base
        settings = ", ".join(f"{key}: {_yaml(value)}" for key, value in option.settings.items())
        note = f"; {option.note}" if option.note else ""
        lines.append(f"  set {settings} (saves {_gb(saved)} GB, {share:+.1f} % time{note})")
        before = after
    after = memory(costs, before)
    needed = f"{_gb(after.peak + RESERVE)} GB on the GPU, {_gb(sum(after.host.values()))} GB pinned in the host"
    if fits(costs, before, gpu_memory):
        return [*lines, f"  which takes {needed}"]
    return [*lines, f"nothing more can be switched on; the closest is {needed}"]


def _yaml(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)


def _parts(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {_gb(amount)}" for name, amount in parts.items())


def _gb(amount: float) -> str:
    """GB with one decimal; three where that would hide it."""
    return f"{amount / 1e9:.1f}" if amount >= 1e9 else f"{amount / 1e9:.3g}"
