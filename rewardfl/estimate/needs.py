"""What a run takes: FLOPs and seconds of a video, bytes by phase, in the host and on disk.

`measure` has one block and one chunk; how many of them there are is arithmetic, and here. Bytes and FLOPs are plain
numbers, GB is 1e9 bytes, and memory is that of one GPU.

Of the rewards' networks at work only a detector that a gradient goes through is counted (face_motion). Not counted: the
others; videos that a concurrent reward still has; a distillation LoRA kept as an adapter; DDP's copy of the gradients
(the LoRA's size). RESERVE stands for the CUDA context, the libraries' workspaces and the allocator's fragmentation.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rewardfl.config import SWAPPED
from rewardfl.estimate.measure import ChunkCost, Costs, ExpertCost, detector_graph
from rewardfl.run.job import REDUCE_BUCKET
from rewardfl.run.work import Sampling, Work

RESERVE = 2e9  # bytes of a GPU that no tensor gets: CUDA context, workspaces, fragmentation
ADAM_BYTES = 16  # per LoRA parameter: float32 weight, gradient and two moments
FLOAT32 = 4
SHARED = "swapped experts"  # what the processes of a machine have one copy of in its host memory

# ------------------------------------------------------------------------------------------------------------
# Compute


def flops(costs: Costs, work: Work) -> dict[str, float]:
    """FLOPs of one video, by part. A frozen expert's replayed steps are counted as trained ones."""
    decode = sum(chunk.forward for chunk in costs.chunks)
    made_before = work.untrained if work.placement == "boundary_cache" else None
    rolled = {expert: passes for expert, passes in work.rollout.items() if expert != made_before}
    parts = {"rollout": _sampled(costs, work, rolled), "decode": decode}
    if work.reward_gradient:
        again = 2 if work.decode_caches == "segment" else 1
        parts["decode VJP"] = again * decode + sum(chunk.backward for chunk in costs.chunks)

    def total(passes: Mapping[str, float], of_one: Callable[[ExpertCost], int]) -> float:
        return sum(count * of_one(costs.experts[expert]) for expert, count in passes.items())

    def recomputed(expert: ExpertCost) -> int:
        return expert.forward - expert.attention if work.keep_attention else expert.forward

    return parts | {
        "replay forward": 0 if work.keeps_graphs else total(work.replay, lambda expert: expert.forward),
        "replay recompute": total(work.pulled, recomputed) if work.checkpointing else 0,
        "replay backward": total(work.pulled, lambda expert: expert.backward),
        "reference": total(work.reference, lambda expert: expert.forward_frozen),
    }


def evaluation_flops(costs: Costs, work: Work, evaluation: Sampling) -> float:
    """FLOPs of one video of the evaluation."""
    return _sampled(costs, work, evaluation.passes) + sum(chunk.forward for chunk in costs.chunks)


def _sampled(costs: Costs, work: Work, passes: Mapping[str, float]) -> float:
    """FLOPs of forward passes without a graph, by expert; a trained one has its adapter."""
    return sum(
        count * (costs.experts[name].forward if name in work.trained else costs.experts[name].forward_frozen)
        for name, count in passes.items()
    )


# ------------------------------------------------------------------------------------------------------------
# Memory


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
    def by_phase(self) -> dict[str, int]:
        """The GPU's bytes in every phase."""
        return {phase: self.of(phase) for phase in self.phases} | {"encode": sum(self.encode.values())}

    @property
    def peak(self) -> int:
        return max(self.by_phase.values())


def memory(costs: Costs, work: Work) -> Memory:
    """Memory by phase. The conditioning comes from its cache, so text encoder and VAE encoder need not be resident."""
    resident, host = _resident(costs, work)
    replay, inputs = _replay(costs, work)
    phases = {
        "rollout": {
            "one block, no graph": max(2 * one.block_input + one.block_peak_frozen for one in costs.experts.values())
        },
        **_decoding(costs, work),
        "replay": replay,
    }
    graphs = sum(work.replay.values()) if work.keeps_graphs else work.graphs
    host |= {"block inputs": work.batch * round(graphs * inputs)}
    if work.reward_gradient:
        host |= {"decoder caches": work.batch * decode_caches(costs.chunks, work.decode_caches)[2]}
    encode = {
        "text encoder": costs.text_weights,
        "VAE": costs.vae_weights,
        **({"image encoder": costs.vision_weights} if costs.vision_weights else {}),
        "activations": max(costs.text.peak, costs.image.peak),
    }
    phases = {phase: {name: work.batch * amount for name, amount in parts.items()} for phase, parts in phases.items()}
    for phase, passes in (("rollout", work.rollout), ("replay", work.replay)):  # between them no block is on the GPU
        if swapped := [costs.experts[name].block_weights for name in _swapped_experts(work) if name in passes]:
            phases[phase]["two blocks' weights"] = 2 * max(swapped)
    if work.traced:  # clip by clip, whatever the batch
        graphs = [detector_graph(one, work.video.height, work.video.width) for one in work.traced]
        phases["reward"]["a chunk of the detector's graph"] = max(graphs)
    return Memory(
        resident={name: amount for name, amount in resident.items() if amount},
        phases=phases,
        encode=encode,
        host={name: amount for name, amount in host.items() if amount},
    )


def _resident(costs: Costs, work: Work) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of all that is on the GPU all through training, and of what waits in the host, by what it is."""
    resident = {f"{expert} expert": trained_weights(work, costs.experts[expert]) for expert in work.trained}
    if work.untrained:
        cost = costs.experts[work.untrained]
        resident[f"{work.untrained} expert ({work.placement})"] = {
            "gpu": cost.weights,
            "cpu_swap": cost.other_weights,
            "cpu_swap_int8": cost.other_weights,
            "fp8": cost.weights_fp8,
            "boundary_cache": 0,
        }[work.placement]
    parameters = trained_parameters(costs, work)
    adapter, optimizer = adapter_bytes(work, parameters)
    waiting = work.waiting * kept_bytes(costs, work)
    resident |= {
        "LoRA, gradient, Adam": adapter,
        "VAE's decoder": costs.decoder_weights,
        "face networks' weights": work.pack_bytes,
        "averaged LoRA": FLOAT32 * parameters // (work.processes if work.sharding == "fsdp2" else 1) * work.averaged,
        "the epoch's samples": waiting if work.samples_on == "gpu" else 0,
    }
    host = {
        SHARED: sum(_in_host(costs.experts[name], place) for name, place in _swapped_experts(work).items()),
        "optimizer": optimizer,
        "the epoch's samples": waiting if work.samples_on == "cpu" else 0,
    }
    return resident, host


def trained_parameters(costs: Costs, work: Work) -> int:
    return sum(costs.experts[expert].adapter_parameters for expert in work.trained)


def _swapped_experts(work: Work) -> dict[str, str]:
    """The places of those whose blocks come from host memory, each for its turn."""
    places = dict.fromkeys(work.trained, work.trained_placement)
    if work.untrained:
        places[work.untrained] = work.placement
    return {name: place for name, place in places.items() if place in SWAPPED}


def _in_host(cost: ExpertCost, place: str) -> int:
    """Bytes of the blocks of an expert that waits in host memory."""
    return cost.blocks_int8 if place == "cpu_swap_int8" else cost.weights - cost.other_weights


def trained_weights(work: Work, cost: ExpertCost) -> int:
    """Bytes of a trained expert's frozen weights that stay on each GPU."""
    if work.trained_placement in SWAPPED:
        return cost.other_weights
    if work.sharding != "fsdp2":
        return cost.weights
    # the block at work and the next are whole, and what is outside of the blocks stays so
    inside = cost.weights - cost.other_weights
    return inside // work.processes + 2 * cost.block_weights + cost.other_weights


def adapter_bytes(work: Work, parameters: int) -> tuple[int, int]:
    """Bytes that training so many parameters takes on each GPU, the forward and backward passes apart, and in the host.

    zero2: weight and gradient whole, and a buffer to reduce it; the part of a process, in float32 with its gradient and
    moments, in the host. fsdp2: all four in parts, and the gradient whole until an update's last backward. Without:
    the moments may wait in the host.
    """
    if work.sharding == "zero2":
        return 2 * FLOAT32 * parameters + FLOAT32 * REDUCE_BUCKET, ADAM_BYTES * parameters // work.processes
    if work.sharding == "fsdp2":
        return ADAM_BYTES * parameters // work.processes + FLOAT32 * parameters, 0
    in_host = 2 * FLOAT32 * parameters if work.moments_on == "cpu" else 0
    return ADAM_BYTES * parameters - in_host, in_host


def kept_bytes(costs: Costs, work: Work) -> int:
    """What one video leaves until the epoch's updates: latents, and its own copy of the conditioning."""
    latents = work.kept.get(work.samples_on, 0)
    return latents * math.prod(costs.shape) * FLOAT32 + sum(costs.cached.values())


def _decoding(costs: Costs, work: Work) -> dict[str, dict[str, int]]:
    """Bytes for one video of the phases between rollout and replay, beside what is resident."""
    decoded, pixels = costs.num_pixels * costs.itemsize, FLOAT32 * costs.num_pixels
    frames = {"frames by chunk and in one": 2 * decoded}
    if not work.reward_gradient:
        chunk = max(chunk.caches_in + chunk.peak for chunk in costs.chunks)
        return {
            "decode": {"one chunk, its caches and the next's": chunk} | frames,
            "reward": {"frames, also float32": decoded + pixels},
        }
    kept, in_turn, _ = decode_caches(costs.chunks, work.decode_caches)
    chunk, vjp = max(chunk.peak for chunk in costs.chunks), max(chunk.peak_vjp for chunk in costs.chunks)
    return {
        "decode": {"decoder caches": kept + in_turn, "one chunk, no graph": chunk} | frames,
        "reward": {"decoder caches": kept, "frames, also float32, and gradient": decoded + 2 * pixels},
        "decode VJP": {
            "decoder caches": kept + in_turn,
            "one chunk, forward and backward": vjp,
            "frames and gradient": decoded + pixels,
        },
    }


def decode_caches(chunks: Sequence[ChunkCost], place: str) -> tuple[int, int, int]:
    """Bytes of one video's decoder caches: all along on the GPU, there for a chunk's turn, and in the host."""
    sizes = [chunk.caches_in for chunk in chunks]
    if place == "keep":
        return sum(sizes), 0, 0
    if place == "offload":
        return 0, max(sizes), sum(sizes)
    length = math.ceil(math.sqrt(len(sizes)))
    segment = max(sum(sizes[i : i + length]) for i in range(0, len(sizes), length))
    return 0, max(sizes), sum(sizes[::length]) + segment


def _replay(costs: Costs, work: Work) -> tuple[dict[str, int], int]:
    """Bytes of activations in the replay of one step of one video: on the GPU, and in the host for each graph."""
    largest = max((costs.experts[expert] for expert in work.replay), key=lambda cost: cost.saved)
    if not work.checkpointing:
        backward = largest.block_peak - largest.block_saved
        return {"all blocks, saved": work.graphs * largest.saved, "backward of one": backward}, 0
    recompute = {"recompute and backward of one": largest.block_peak}
    if work.keep_attention:
        recompute["attention's outputs"] = round(work.graphs * largest.attention_kept)
    if work.offload_inputs:
        return {"two block inputs": 2 * largest.block_input} | recompute, largest.stored
    return {"block inputs": work.graphs * largest.stored} | recompute, 0


def full_graph(costs: Costs, work: Work) -> tuple[int, int, int]:
    """Bytes that plain autograd through all active steps and the decoder would keep of one video, for comparison.

    (block inputs, the decoder as it is, the decoder checkpointed by chunk)
    """
    saved, caches = [chunk.saved for chunk in costs.chunks], decode_caches(costs.chunks, "keep")[0]
    inputs = sum(count * costs.experts[expert].stored for expert, count in work.replay.items())
    return round(inputs), sum(saved), caches + max(saved)


# ------------------------------------------------------------------------------------------------------------
# Disk


def checkpoint_bytes(costs: Costs, work: Work) -> tuple[int, int]:
    """Bytes of one checkpoint: the float32 adapter; Adam's two moments, and the average with the last weights."""
    adapter = FLOAT32 * trained_parameters(costs, work)
    return adapter, (4 if work.averaged else 2) * adapter


def clip_cache_bytes(costs: Costs, work: Work) -> dict[str, int]:
    """Bytes that the conditioning cache takes for one clip."""
    cache = dict(costs.cached)
    if work.placement == "boundary_cache" and isinstance(work.noises, int):
        cache["boundary latents"] = work.noises * math.prod(costs.shape) * FLOAT32
    return cache
