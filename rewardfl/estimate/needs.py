"""Costs of a run: FLOPs of a video, bytes of one GPU by phase and of the host, from the costs that `measure` returns.

Not counted: activations of the rewards' networks, and their weights where the files are missing; videos that wait for a
concurrent reward; a distillation LoRA as an adapter.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rewardfl.backbones.protocol import DecodeCaches
from rewardfl.estimate.measure import ChunkCost, Costs, ExpertCost
from rewardfl.estimate.rates import OPERATIONS, Operation, Rates
from rewardfl.training.launch import REDUCE_BUCKET
from rewardfl.training.workload import Workload

RESERVE = 2e9  # bytes of a GPU that tensors cannot use: CUDA context, workspaces, fragmentation
ADAM_BYTES = 16  # per LoRA parameter: float32 weight, gradient and two moments
_FLOAT32 = 4


def flops(costs: Costs, work: Workload, operation: Operation | None = None) -> dict[str, float]:
    """Return a process's FLOPs for one video, by part; of all operations or of one.

    A frozen expert's replayed steps are counted as trained ones.
    """

    def decode(chunks: Sequence[ChunkCost], name: str) -> int:
        return sum(chunk.total(name, operation) for chunk in chunks)

    def total(passes: Mapping[str, float], *names: str) -> float:
        amounts = (
            count * costs.experts[expert].total(name, operation) for expert, count in passes.items() for name in names
        )
        return sum(amounts) / work.processes_per_clip

    cached = work.untrained if work.untrained_placement == "boundary_cache" else None
    # in the rollout, only a trained expert has an adapter
    rollout = sum(
        total({name: count}, "forward" if name in work.trained else "forward_frozen")
        for name, count in work.rollout.items()
        if name != cached
    )
    decodes = 1 + work.verdict_decodes if work.rollout else 0
    parts = {"rollout": rollout, "decode": decodes * decode(costs.chunks, "forward")}
    if work.reward_gradient:
        decodes = 2 if work.decode_caches == "segment" else 1
        again = decodes * decode(_decoded_twice(costs, work), "forward")
        parts["decode VJP"] = again + decode(costs.chunks, "backward")
    recompute = ["forward"] * work.checkpointing
    if work.anchor:
        reference = ["forward_frozen"] * work.anchor_to_reference
        parts["data anchor"] = total(work.anchor, "forward", "backward", *recompute, *reference)
    return parts | {
        "replay forward": total(_replayed(work), "forward"),
        "replay recompute": total(work.backward_passes, *recompute),
        "replay backward": total(work.backward_passes, "backward"),
        "reference": total(work.reference, "forward_frozen"),
    }


def of_base_video(work: Workload) -> Workload:
    """Return the work of one of the base model's videos, without the adapter."""
    without = replace(work, replay={}, backward_passes={}, reference={}, anchor={}, reward_gradient=False)
    return replace(without, trained=(), rollout=work.base)


def _replayed(work: Workload) -> dict[str, float]:
    """Return the passes of `work.replay` whose graphs are not the rollout's."""
    graphs = Counter(work.active_experts[len(work.active_experts) - work.kept_steps :])
    return {name: count - work.graphs * graphs[name] for name, count in work.replay.items()}


def _decoded_twice(costs: Costs, work: Workload) -> Sequence[ChunkCost]:
    """Return the chunks whose graph the decoding does not keep."""
    return costs.chunks[: max(0, len(costs.chunks) - work.kept_chunks)]


def copies(costs: Costs, work: Workload) -> dict[str, tuple[float, float]]:
    """Return the bytes of one video that go to the GPU and to the host, by part. A batch shares the weights' copies."""
    experts = {name: costs.experts[name] for name in _swapped(work)}
    sizes = [chunk.caches_in for chunk in _decoded_twice(costs, work)] if work.decode_caches != "keep" else []
    segmented = work.decode_caches == "segment"  # the first caches of each come twice, the others leave in the VJP
    caches, stored = sum(sizes), sum(sizes[:: math.ceil(math.sqrt(len(sizes))) or 1 if segmented else 1])

    def weights(passes: Mapping[str, float], there: int = 0) -> float:  # blocks that are on the GPU already
        sizes = {name: cost.weights - cost.other_weights - there * cost.block_weights for name, cost in experts.items()}
        return sum(passes.get(name, 0) * size for name, size in sizes.items()) / work.batch

    def inputs(passes: Mapping[str, float]) -> float:
        return sum(count * costs.experts[name].stored for name, count in passes.items()) if work.offload_inputs else 0

    replayed = _replayed(work)
    with_graph = {name: count - replayed[name] for name, count in work.replay.items()}
    outside = sum(
        count * costs.experts[name].saved_outside for name, count in with_graph.items() if work.offload_inputs
    )
    anchored = (1 + work.anchor_to_reference) * weights(work.anchor)
    return {
        "rollout": (weights(work.rollout), inputs(with_graph) + outside),
        "decode": (0, stored),
        "decode VJP": (caches + segmented * stored, caches - stored),
        "data anchor": (anchored + weights(work.anchor, there=1) + inputs(work.anchor), inputs(work.anchor)),
        "replay forward": (weights(replayed), inputs(replayed)),
        "replay backward": (weights(work.backward_passes, there=1) + inputs(work.backward_passes) + outside, 0),
        "reference": (weights(work.reference), 0),
    }


def seconds(costs: Costs, work: Workload, rates: Rates) -> dict[str, tuple[float, float, float]]:
    """Return the seconds of one video, by part: in all, of its copies, and of those that no computing hides.

    Both directions copy at once, one block or chunk ahead of the computing; a pass waits for its first copy.
    """
    by_operation = [(getattr(rates, operation) * 1e12, flops(costs, work, operation)) for operation in OPERATIONS]
    compute = {part: sum(amounts[part] / rate for rate, amounts in by_operation) for part in by_operation[0][1]}
    moved, blocks = copies(costs, work), max(cost.weights // cost.block_weights for cost in costs.experts.values())
    chunks = 1 if work.decode_caches == "segment" else len(costs.chunks)  # segments copy no cache ahead
    spent = {}
    for part, computing in compute.items():
        into, out = (amount / rates.copies / 1e9 for amount in moved.get(part, (0, 0)))
        hiding = computing + (compute["replay recompute"] if part == "replay backward" else 0)
        exposed = max(into - hiding, out - hiding, into / (chunks if part == "decode VJP" else blocks))
        spent[part] = computing + exposed, max(into, out), exposed
    return spent


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes. resident: on the GPU in all of training; phases: additional, by phase; host: of one process.

    encode: total, by phase before the experts load. The text encoder is unloaded before the VAE loads.
    """

    resident: Mapping[str, int]
    phases: Mapping[str, Mapping[str, int]]
    encode: Mapping[str, Mapping[str, int]]
    host: Mapping[str, int]

    def of(self, phase: str) -> int:
        """Return the GPU's bytes in one phase of training, with the resident ones."""
        return sum(self.resident.values()) + sum(self.phases[phase].values())

    @property
    def by_phase(self) -> dict[str, int]:
        """Return the GPU's bytes in every phase."""
        before = {phase: sum(parts.values()) for phase, parts in self.encode.items()}
        return {phase: self.of(phase) for phase in self.phases} | before

    @property
    def peak(self) -> int:
        return max(self.by_phase.values())


def memory(costs: Costs, work: Workload) -> Memory:
    """Return memory by phase. Training does not load text and VAE encoder, because the conditioning is cached."""
    replay, on_host = _replay(costs, work)
    waiting, on_pages = _graph_bytes(costs, work, work.kept_steps)
    split = work.processes_per_clip
    rollout, replay = ({name: size // split for name, size in each.items()} for each in (_rollout(costs, work), replay))
    parts = {"rollout": rollout, **_decoding(costs, work), "replay": replay}
    if work.kept_steps:
        for phase in parts.keys() - {"rollout", "replay"}:
            parts[phase]["kept graphs"] = waiting
    phases = {
        phase: {name: work.batch * amount for name, amount in amounts.items()} for phase, amounts in parts.items()
    }
    swapped = _swapped(work)
    # in the other phases no block is on the GPU
    for phase, passes in (("rollout", work.rollout), ("replay", {**work.replay, **work.anchor})):
        if blocks := [costs.experts[name].block_weights for name in swapped if name in passes]:
            phases[phase]["two blocks' weights"] = 2 * max(blocks)
    parameters = sum(costs.experts[expert].adapter_parameters for expert in work.trained)
    adapter, optimizer = adapter_bytes(work, parameters)
    samples = work.samples_in_flight * kept_bytes(costs, work)
    caches = decode_caches(_decoded_twice(costs, work), work.decode_caches)[2] if work.reward_gradient else 0
    resident = _resident_weights(costs, work) | {
        "LoRA, gradient, Adam": adapter,
        "VAE's decoder": costs.decoder_weights,
        "reward networks' weights": work.reward_bytes,
        "averaged LoRA": work.averages * _FLOAT32 * parameters // (work.processes if work.sharding == "fsdp2" else 1),
        "the epoch's samples": samples if work.samples_on == "gpu" else 0,
        "the update's latents": work.latents_of_update * math.prod(costs.shape) * _FLOAT32,
    }
    # all share their pages: replay's block inputs wait where the decoder's caches waited, kept graphs wait with them
    inputs = max(on_pages, on_host // split - caches, 0)
    host = {
        "swapped experts": sum(costs.experts[name].weights - costs.experts[name].other_weights for name in swapped),
        "optimizer": optimizer,
        "the epoch's samples": samples if work.samples_on == "cpu" else 0,
        "block inputs": work.batch * inputs,
        "decoder caches": work.batch * caches,
    }
    rewards = {"reward networks' weights": work.reward_bytes}  # loaded first
    text = {"text encoder": costs.text_weights, "activations": costs.text.peak} | rewards
    clip = {"VAE": costs.vae_weights, "image encoder": costs.vision_weights, "activations": costs.image.peak} | rewards
    encode = {"encode text": _without_zeros(text)}
    if costs.image.peak:
        encode["encode clip"] = _without_zeros(clip)
    return Memory(resident=_without_zeros(resident), phases=phases, encode=encode, host=_without_zeros(host))


def _without_zeros(amounts: Mapping[str, int]) -> dict[str, int]:
    return {name: amount for name, amount in amounts.items() if amount}


def _swapped(work: Workload) -> list[str]:
    """Return the experts whose blocks wait in host memory."""
    untrained = [work.untrained] if work.untrained and work.untrained_placement == "cpu_swap" else []
    return [*work.trained, *untrained] if work.trained_placement == "cpu_swap" else untrained


def _resident_weights(costs: Costs, work: Workload) -> dict[str, int]:
    """Return the bytes of the experts' frozen weights that stay on each GPU."""
    resident = {}
    for expert in work.trained:
        cost = costs.experts[expert]
        blocks, stays = cost.weights - cost.other_weights, cost.other_weights
        if work.trained_placement == "gpu" and work.sharding == "fsdp2":  # the current and next block are unsharded
            stays += blocks // work.processes + 2 * cost.block_weights
        elif work.trained_placement == "gpu":
            stays += blocks
        resident[f"{expert} expert"] = stays
    if work.untrained:
        cost = costs.experts[work.untrained]
        sizes = {"gpu": cost.weights, "cpu_swap": cost.other_weights, "fp8": cost.weights_fp8, "boundary_cache": 0}
        resident[f"{work.untrained} expert ({work.untrained_placement})"] = sizes[work.untrained_placement]
    return resident


def adapter_bytes(work: Workload, parameters: int) -> tuple[int, int]:
    """Return the bytes of training `parameters` parameters: on each GPU, without activations, and in the host."""
    if work.sharding == "zero2":  # full weight and gradient, and a reduction buffer; optimizer shard in the host
        return 2 * _FLOAT32 * parameters + _FLOAT32 * REDUCE_BUCKET, ADAM_BYTES * parameters // work.processes
    if work.sharding == "fsdp2":  # all four sharded, and the full gradient until an update's last backward
        return ADAM_BYTES * parameters // work.processes + _FLOAT32 * parameters, 0
    return ADAM_BYTES * parameters, 0


def kept_bytes(costs: Costs, work: Workload) -> int:
    """Return the bytes of one video between rollout and update: latents, and its copy of the conditioning."""
    latents = work.latents_kept.get(work.samples_on, 0)
    return latents * math.prod(costs.shape) * _FLOAT32 + sum(costs.cached.values())


def _decoding(costs: Costs, work: Workload) -> dict[str, dict[str, int]]:
    """Return the bytes for one video of the phases between rollout and replay, without the resident ones."""
    decoded, pixels = costs.num_pixels * costs.itemsize, _FLOAT32 * costs.num_pixels
    frames = {"frames by chunk": decoded}
    if not work.reward_gradient:
        chunk = max(decoded, *(chunk.caches_in + chunk.peak for chunk in costs.chunks))  # or the frames in one
        decode = {"one chunk, its caches and the next's": chunk} | frames
        return {"decode": decode, "reward": {"frames, also float32": decoded + pixels}}
    first = _decoded_twice(costs, work)
    gpu, chunk_caches, _ = decode_caches(first, work.decode_caches)
    last = costs.chunks[len(first) :]
    graphs = {"kept chunks": sum(chunk.graph for chunk in last) + last[0].caches_in} if last else {}
    chunk = max(decoded, *(chunk.peak for chunk in costs.chunks))  # or the frames in one
    vjp = max(chunk.peak_vjp for chunk in costs.chunks)
    both = gpu + (2 if work.decode_caches == "offload" else 1) * chunk_caches  # also the next chunk's
    without_last = {name: amount - last[-1].graph for name, amount in graphs.items()}  # which is in the chunk's bytes
    backward = {"one chunk, forward and backward": vjp, "frames and gradient": decoded + pixels}
    return {
        "decode": {"decoder caches": gpu + chunk_caches, "one chunk, no graph": chunk} | frames | graphs,
        "reward": {"decoder caches": gpu, "frames, also float32, and gradient": decoded + 2 * pixels} | graphs,
        "decode VJP": {"decoder caches": both} | backward | without_last,
    }


def decode_caches(chunks: Sequence[ChunkCost], place: DecodeCaches) -> tuple[int, int, int]:
    """Return the bytes of one video's decoder caches: always on the GPU, there for one chunk, and in the host."""
    sizes = [chunk.caches_in for chunk in chunks]
    if place == "keep" or not sizes:
        return sum(sizes), 0, 0
    if place == "offload":
        return 0, max(sizes), sum(sizes)
    length = math.ceil(math.sqrt(len(sizes)))
    segment = max(sum(sizes[i + 1 : i + length]) for i in range(0, len(sizes), length))  # the first one is stored
    return 0, max(sizes), sum(sizes[::length]) + segment


def _largest(costs: Costs, work: Workload) -> ExpertCost:
    return max((costs.experts[name] for name in [*work.replay, *work.anchor]), key=lambda cost: cost.saved)


def _graph_bytes(costs: Costs, work: Workload, steps: int, begun: int = 0) -> tuple[int, int]:
    """Return the bytes of graphs on the GPU and in the host: of `steps` and of `begun` ones, without their outside."""
    largest, count = _largest(costs, work), work.graphs * (steps + begun)
    stored = largest.stored if work.checkpointing else largest.saved + largest.shared
    saved = count * stored + work.graphs * steps * largest.saved_outside
    if work.offload_inputs:
        return count * (largest.shared + largest.nested), saved
    return saved + count * largest.nested, 0


def _rollout(costs: Costs, work: Workload) -> dict[str, int]:
    """Return the bytes of the last pass of one video's rollout, and of the graphs before it if they are kept."""
    largest = _largest(costs, work)
    block = max(cost.block_peak_frozen for cost in costs.experts.values())
    block += 2 * largest.block_input if work.offload_inputs or not work.kept_steps else 0
    block += 0 if work.kept_steps else largest.shared + largest.nested
    parts = {
        "the last update's latents": 2 * len(work.active_experts) * math.prod(costs.shape) * _FLOAT32,
        "kept graphs": _graph_bytes(costs, work, work.kept_steps - 1, 1)[0] if work.kept_steps else 0,
    }
    return {"one block, no graph": block} | _without_zeros(parts)


def _replay(costs: Costs, work: Workload) -> tuple[dict[str, int], int]:
    """Return the bytes of activations in the replay of one step of one video: on the GPU, and in the host."""
    largest = _largest(costs, work)
    separate = work.kept_steps > 0 and work.backward_passes != work.replay  # a graph of the reference's, too
    on_gpu, on_host = _graph_bytes(costs, work, max(work.kept_steps - 1 + separate, 0), 1)
    if not work.checkpointing:
        return {"all blocks, saved": on_gpu, "backward of one": largest.block_peak - largest.block_saved}, 0
    recompute = {"recompute and backward of one": largest.block_peak}
    if work.offload_inputs:
        return {"two block inputs": 2 * largest.block_input, "what blocks share": on_gpu} | recompute, on_host
    return {"block inputs": on_gpu} | recompute, 0
