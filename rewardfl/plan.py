"""What a run takes before it is run: FLOPs, memory by phase, host memory and disk, and what to set when it is too much.

`costs` measures one block and one chunk; how many of them there are is arithmetic, and here: what any run takes, and
what reward feedback learning (train_reward_fl.py) does. `plan_grpo` has what Flow-GRPO does. Bytes and FLOPs are plain
numbers, GB is 1e9 bytes, and everything is per GPU.

Not counted: the face networks' activations; a distillation LoRA kept as an adapter; DDP's copy of the gradients (the
LoRA's size). RESERVE stands for the CUDA context, the libraries' workspaces and the allocator's fragmentation.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rewardfl import config as configuration
from rewardfl import data, flow, grpo, lora
from rewardfl.backbones.wan import model as wan
from rewardfl.config import AnyConfig, ConfigError, FlowGrpoConfig, RewardFlConfig
from rewardfl.costs import Adapter, ChunkCost, Costs, ExpertCost, measure
from rewardfl.run import checks
from rewardfl.run.job import REDUCE_BUCKET

HOST_BANDWIDTH = 50e9  # bytes/s between host and GPU, PCIe 5 x16 as it is reached
GPU_BANDWIDTH = 3e12  # bytes/s of the GPU's own memory, H100
TFLOPS = 400.0  # TFLOP/s that an H100 reaches in bfloat16, when nothing else is said
RESERVE = 2e9  # bytes of a GPU that no tensor gets: CUDA context, workspaces, fragmentation
ADAM_BYTES = 16  # per LoRA parameter: float32 weight, gradient and two moments
FLOAT32 = 4
SHARDINGS = ("none", "zero2", "fsdp2")  # of the optimizer into host memory, of all that is trained; see docs/guide.md 9

# ------------------------------------------------------------------------------------------------------------
# What a run does with them


@dataclass(frozen=True)
class AnyLevers:
    """The settings that trade memory for time in both scripts; KEYS says which configuration keys they are."""

    untrained: str = "gpu"
    checkpointing: bool = True
    offload_inputs: bool = False
    batch: int = 1


@dataclass(frozen=True)
class Levers(AnyLevers):
    """Those of train_reward_fl.py."""

    decode_caches: str = "keep"
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
    "samples_on": "grpo.samples_on",
}  # of Levers, and of plan_grpo's
CACHED_NOISES = 4  # noises_per_sample that is proposed together with boundary_cache


@dataclass(frozen=True, kw_only=True)
class AnyRun:
    """What the runs of both scripts have. sigmas: by step and the last one, 0; active: the steps with gradient."""

    sigmas: tuple[float, ...]
    experts: tuple[str, ...]  # by step, as wan.Schedule has them
    active: tuple[int, ...]
    trained: tuple[str, ...]  # high_noise, low_noise
    kl: bool
    levers: AnyLevers
    save_steps: int = 25
    steps: int | None = None  # updates in all, where known
    clips: int | None = None  # in the data, where known
    pack_bytes: int = 0  # of the face networks, where they are on disk
    processes: int = 1  # one for each GPU
    sharding: str = "none"  # of SHARDINGS, over the processes

    @property
    def untrained(self) -> str | None:
        """The one expert that is not trained."""
        rest = [expert for expert in wan.PARTS if expert not in self.trained]
        return rest[0] if rest else None

    # what `recommend` compares

    def memory(self, costs: Costs) -> "Memory":
        raise NotImplementedError

    def seconds(self, costs: Costs, tflops: float) -> float:
        """For one clip."""
        raise NotImplementedError

    def options(self) -> list["Option"]:
        """What can be switched on in this run."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Run(AnyRun):
    """What a run of train_reward_fl.py does to each clip."""

    coupled: bool
    fixed_trajectory: bool
    levers: Levers

    def memory(self, costs: Costs) -> "Memory":
        return memory(costs, self)

    def seconds(self, costs: Costs, tflops: float) -> float:
        return seconds(costs, self, tflops)

    def options(self) -> list["Option"]:
        return options(self)


def forwards(run: Run) -> dict[str, int]:
    """How many forward passes of each expert one rollout takes."""
    counts = {expert: run.experts.count(expert) for expert in wan.PARTS}
    if run.levers.untrained == "boundary_cache" and run.untrained:
        counts[run.untrained] = 0
    return counts


def work(costs: Costs, run: Run) -> dict[str, int]:
    """FLOPs of one clip's part in an update, by part. A frozen expert's active steps are counted as trained ones."""
    active = [costs.experts[run.experts[i]] for i in run.active]
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
    return sum(work(costs, run).values()) / (tflops * 1e12) + sum(exposed_seconds(costs, run, tflops))


def exposed_seconds(costs: Costs, run: Run, tflops: float) -> Iterator[float]:
    """What each lever's copying adds for one clip; every copy goes on beside the computing of its own part."""
    parts = {name: amount / (tflops * 1e12) for name, amount in work(costs, run).items()}
    levers = run.levers
    if levers.checkpointing and levers.offload_inputs:
        inputs = sum(costs.experts[run.experts[i]].stored for i in run.active)
        yield beyond(inputs, parts["replay forward"])
        yield beyond(inputs, parts["replay recompute"] + parts["replay backward"])
    if levers.decode_caches == "offload":
        caches = sum(chunk.caches_in for chunk in costs.chunks)
        yield beyond(caches, parts["decode"])
        yield beyond(caches, parts["decode VJP"])
    if run.untrained:
        waits = pass_wait(costs.experts[run.untrained], levers.untrained, levers.batch, tflops)
        yield forwards(run)[run.untrained] * waits / levers.batch


def beyond(copied: float, computing: float) -> float:
    """Seconds that copying `copied` bytes to or from the host adds to `computing` seconds beside it."""
    return max(0.0, copied / HOST_BANDWIDTH - computing)


def pass_wait(cost: ExpertCost, place: str, clips: int, tflops: float) -> float:
    """Seconds that the weights' place adds to one forward pass of an untrained expert with `clips` clips."""
    if place == "cpu_swap":
        return beyond(cost.weights, clips * cost.forward_frozen / (tflops * 1e12))
    if place == "fp8":  # eight bits are read, sixteen written
        return 3 * cost.weights_fp8 / GPU_BANDWIDTH
    return 0.0


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


def memory(costs: Costs, run: Run) -> Memory:
    """Memory by phase. The conditioning comes from its cache, so text encoder and VAE encoder need not be resident."""
    batch = run.levers.batch
    resident, host_weights = resident_weights(costs, run)
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
    host = {
        **host_weights,
        "block inputs": batch * host_inputs,
        "decoder caches": batch * host_caches,
    }
    return Memory(resident, phases, encode_memory(costs), {name: amount for name, amount in host.items() if amount})


def encode_memory(costs: Costs) -> dict[str, int]:
    """Bytes on the GPU while the conditioning is computed, before the experts load."""
    return {
        "text encoder": costs.encode.text_weights,
        "VAE": costs.vae_weights,
        "activations": max(costs.encode.text_peak, costs.encode.image_peak),
    }


def resident_weights(costs: Costs, run: AnyRun) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of all that is on the GPU all through training, and of what waits in the host, by what it is."""
    experts, host = expert_weights(costs, run)
    adapter, host_adapter = adapter_bytes(run, trained_parameters(costs, run))
    packs = {"face networks' weights": run.pack_bytes} if run.pack_bytes else {}
    away = {"expert that is swapped": host, "optimizer": host_adapter}
    return {**experts, "LoRA, gradient, Adam": adapter, "VAE": costs.vae_weights, **packs}, away


def adapter_bytes(run: AnyRun, parameters: int) -> tuple[int, int]:
    """Bytes that training so many parameters takes on each GPU, the forward and backward passes apart, and in the host.

    zero2: weight and gradient whole, and a buffer to reduce it; the part of a process, in float32 with its gradient and
    moments, in the host. fsdp2: all four in parts, and the gradient whole until an update's last backward.
    """
    if run.sharding == "zero2":
        return 2 * FLOAT32 * parameters + FLOAT32 * REDUCE_BUCKET, ADAM_BYTES * parameters // run.processes
    if run.sharding == "fsdp2":
        return ADAM_BYTES * parameters // run.processes + FLOAT32 * parameters, 0
    return ADAM_BYTES * parameters, 0


def trained_parameters(costs: Costs, run: AnyRun) -> int:
    return sum(costs.experts[expert].adapter_parameters for expert in run.trained)


def expert_weights(costs: Costs, run: AnyRun) -> tuple[dict[str, int], int]:
    """Bytes of weights on the GPU by expert, and in the host."""
    on_gpu = {f"{expert} expert": trained_weights(run, costs.experts[expert]) for expert in run.trained}
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


def trained_weights(run: AnyRun, cost: ExpertCost) -> int:
    """Bytes of a trained expert's frozen weights on each GPU."""
    if run.sharding != "fsdp2":
        return cost.weights
    # the block at work and the next are whole, and what is outside of the blocks stays so
    return cost.layers * cost.block_weights // run.processes + 2 * cost.block_weights + cost.other_weights


def decode_caches(chunks: Sequence[ChunkCost], place: str) -> tuple[int, int, int]:
    """Bytes of one clip's decoder caches: on the GPU, there during the VJP besides, and in the host."""
    sizes = [chunk.caches_in for chunk in chunks]
    if place == "keep":
        return sum(sizes), 0, 0
    if place == "offload":
        return 2 * max(sizes), 0, sum(sizes)
    length = math.ceil(math.sqrt(len(sizes)))
    return sum(sizes[::length]), max(sum(sizes[i : i + length]) for i in range(0, len(sizes), length)), 0


def replay_activations(costs: Costs, run: AnyRun, graphs: int = 1) -> tuple[dict[str, int], int]:
    """Bytes of activations in the replay of one step of one clip: on the GPU, and in the host.

    graphs: forward passes whose graphs live together (guidance takes two); back they go block by block.
    """
    largest = max((costs.experts[run.experts[i]] for i in run.active), key=lambda cost: cost.layers * cost.block_saved)
    if not run.levers.checkpointing:
        backward = largest.block_peak - largest.block_saved
        return {"all blocks, saved": graphs * largest.layers * largest.block_saved, "backward of one": backward}, 0
    recompute = {"recompute and backward of one": largest.block_peak}
    if run.levers.offload_inputs:
        return {"two block inputs": 2 * largest.block_input} | recompute, graphs * largest.stored
    return {"block inputs": graphs * largest.stored} | recompute, 0


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
        block_inputs=sum(costs.experts[run.experts[i]].stored for i in run.active),
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
    note: str = ""  # for people, behind the figures

    @property
    def settings(self) -> dict[str, Any]:
        """By configuration key."""
        return {KEYS[field]: value for field, value in self.fields.items()}

    def on(self, run: AnyRun) -> AnyRun:
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
        found.append(Option({"untrained": "cpu_swap"}))
        found.append(Option({"untrained": "fp8"}, False, "; its weights are rounded by 3 %"))
        # what comes before the boundary can be cached when nothing there is trained or handed a gradient
        if all(run.experts[i] == "low_noise" for i in run.active):
            noises = {"noises": CACHED_NOISES} if levers.noises == "fresh" else {}
            note = "; each clip then has a few noises, used in turn"
            found.append(Option({"untrained": "boundary_cache"} | noises, False, note))
    return [option for option in found if option.on(run) != run]


def fits(costs: Costs, run: AnyRun, gpu_memory: float) -> bool:
    return run.memory(costs).peak + RESERVE <= gpu_memory


def recommend(costs: Costs, run: AnyRun, gpu_memory: float, tflops: float) -> list[Option]:
    """What makes the run fit `gpu_memory` bytes, or comes closest.

    Of what lowers the peak always the one that adds the least time, what computes the same numbers before what does
    not. What turns out to be unnecessary is left out again.
    """
    chosen: list[Option] = []
    current = run
    while not fits(costs, current, gpu_memory):
        peak = current.memory(costs).peak
        lower = [option for option in current.options() if option.on(current).memory(costs).peak < peak]
        if not lower:
            return chosen
        now = current
        best = min(lower, key=lambda option: (not option.exact, option.on(now).seconds(costs, tflops)))
        chosen.append(best)
        current = best.on(current)
    for option in reversed(chosen):
        rest = [other for other in chosen if other is not option]
        if fits(costs, with_options(run, rest), gpu_memory):
            chosen = rest
    return chosen


def with_options(run: AnyRun, chosen: Iterable[Option]) -> AnyRun:
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


def source_of(model_paths: str, published: Path) -> Path:
    """The folder that says the model's shape: the model's own where its configurations are there, else `published`."""
    folder = Path(model_paths)
    if folder.suffix == ".json" and folder.is_file():
        given = json.loads(folder.read_text(encoding="utf-8"))
        if not isinstance(given, dict) or not given.get("configs"):
            return published
        folder = folder.parent / given["configs"]
    parts = [*wan.PARTS.values(), "vae", "text_encoder"]
    return folder if model_paths and all((folder / part / "config.json").is_file() for part in parts) else published


def costs_of(cfg: AnyConfig, configs: Path) -> Costs:
    """What the configuration's model and clips cost. configs: see `source_of`."""
    adapter = Adapter(cfg.lora.lora_rank, tuple(lora.target_modules(cfg.lora.lora_target_modules)))
    # under max_pixels a square clip, which has no fewer tokens than one of another shape
    height, width = data.clip_size((4096, 4096), cfg.data.height, cfg.data.width, cfg.data.max_pixels)
    return measure(configs, wan.DTYPES[cfg.model.dtype], height, width, cfg.data.num_frames, adapter)


def schedule_of(cfg: AnyConfig, configs: Path) -> wan.Schedule:
    """The denoising steps that a run of the configuration takes."""
    boundary = checks.boundary_of(cfg, configs)
    return wan.schedule(cfg.sample.num_inference_steps, cfg.sample.shift, boundary).until(cfg.sample.final_timestep)


def run_of(
    cfg: RewardFlConfig,
    configs: Path,
    clips: int | None = None,
    steps: int | None = None,
    processes: int = 1,
    sharding: str = "none",
) -> Run:
    """What the configuration does with it. clips, steps: where they are known."""
    sample, train = cfg.sample, cfg.train
    schedule = schedule_of(cfg, configs)
    return Run(
        sigmas=tuple(schedule.sigmas.tolist()),
        experts=schedule.experts,
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
        pack_bytes=pack_bytes(cfg),
        processes=processes,
        sharding=sharding,
    )


def epoch_geometry(cfg: FlowGrpoConfig, processes: int) -> tuple[int, int]:
    """(forward passes of each process per epoch, per update); ConfigError when the groups do not divide into them."""
    batch, updates = cfg.train.per_device_train_batch_size, cfg.grpo.updates_per_epoch
    try:
        grpo.check_geometry(processes, batch, cfg.grpo.group_size, cfg.grpo.groups)
    except ValueError as error:
        raise ConfigError(
            f"grpo.groups, grpo.group_size and train.per_device_train_batch_size (batch): {error}"
        ) from error
    forwards = cfg.grpo.groups * cfg.grpo.group_size // (processes * batch)
    if forwards % updates:
        near = ", ".join(str(n) for n in range(1, forwards + 1) if forwards % n == 0)
        raise ConfigError(
            f"grpo.updates_per_epoch must divide the {forwards} forward passes of a process, got {updates}; take one "
            f"of {near}"
        )
    return forwards, forwards // updates


def pack_bytes(cfg: AnyConfig) -> int:
    """Of the face networks' weights, as far as they are on disk."""
    folders = [Path(folder) for folder in (cfg.reward.reward_model_path, cfg.reward.held_out_model_path) if folder]
    return sum(file.stat().st_size for folder in folders for file in folder.rglob("*.onnx"))


def windows(cfg: FlowGrpoConfig, answering: Sequence[str]) -> Callable[[int], tuple[int, ...]]:
    """epoch -> its SDE steps. ConfigError when there can be none, or a trained expert would answer at none.

    answering: the expert of each step. Usable are the steps of trained experts but the last step.
    """
    trained = configuration.trainable_experts(cfg)
    usable = _usable(cfg, answering)
    table = ", ".join(f"{i}: {expert}" for i, expert in enumerate(answering))

    def window(epoch: int) -> tuple[int, ...]:
        return grpo.window(
            cfg.grpo.window, len(answering), epoch=epoch, seed=cfg.run.seed, usable=usable,
            steps=cfg.grpo.window_steps or (), size=cfg.grpo.window_size, bounds=cfg.grpo.window_bounds,
            fraction=cfg.grpo.window_fraction,
        )  # fmt: skip

    try:
        window(0)
    except ValueError as error:
        raise ConfigError(
            f"grpo.window: {error}. Usable are the steps of {cfg.model.trainable_models} (model.trainable_models) but "
            f"the last step: {table}"
        ) from error
    drawn = drawable(cfg, answering)
    idle = [name for name in trained if name not in {answering[i] for i in drawn}]
    if idle:
        raise ConfigError(
            f"model.trainable_models: {', '.join(idle)} answers at no step that grpo.window may draw ({table}) and "
            "would not learn; train the other alone, or widen the window"
        )
    return window


def drawable(cfg: FlowGrpoConfig, answering: Sequence[str]) -> tuple[int, ...]:
    """The steps that some epoch's window may have; arguments: `windows`, which refuses what cannot be."""
    low, high = cfg.grpo.window_bounds or (0, len(answering))
    return cfg.grpo.window_steps or tuple(i for i in _usable(cfg, answering) if low <= i < high)


def _usable(cfg: FlowGrpoConfig, answering: Sequence[str]) -> list[int]:
    """The trained experts' steps but the last, whose noise nothing would remove."""
    trained = configuration.trainable_experts(cfg)
    return [i for i, expert in enumerate(answering[:-1]) if expert in trained]


# ------------------------------------------------------------------------------------------------------------
# For people


def overview(cfg: RewardFlConfig, run: Run, global_batch: int, processes: int) -> str:
    """The resolved configuration and the batch arithmetic. run: with its clips and steps."""
    train, samples = cfg.train, run.steps * global_batch
    return "\n".join(
        [
            configuration.dump(cfg),
            f"batch: {train.per_device_train_batch_size} per process x {train.gradient_accumulation_steps} "
            f"accumulation x {processes} processes = {global_batch} clips per step",
            f"steps: {run.steps} = {samples} samples = {samples / run.clips:.2f} x {run.clips} rows",
            f"gradient: {cfg.sample.gradient_mode} through steps {list(run.active)}, coupling "
            f"{configuration.resolved_coupling(cfg):g}, KL weight {cfg.reward.kl_weight:g} ({cfg.reward.kl_gradient})",
            f"untrained expert: {cfg.experts.untrained}; decoder caches: {train.decode_caches}; their cost: --dry-run",
            "",
        ]
    )


def report(costs: Costs, run: Run, tflops: float, gpu_memory: float | None) -> str:
    """The whole plan as text. gpu_memory: bytes to compare with; None compares with nothing."""
    sections = [sigma_table(run), work_table(costs, run, tflops), memory_table(costs, run), disk_table(costs, run)]
    if gpu_memory is not None:
        sections.append(verdict(costs, run, gpu_memory, tflops))
    return "\n\n".join("\n".join(lines) for lines in sections)


def sde_stds(sigmas: Sequence[float]) -> list[tuple[float, float]]:
    """By step, the standard deviation of a Flow-SDE and of a Dance-SDE transition at noise_level 1."""
    steps = list(zip(sigmas[:-1], sigmas[1:], strict=True))
    return [tuple(flow.transition_std(kind, *step, 1.0, sigmas[1]) for kind in ("flow", "dance")) for step in steps]


def sigma_table(run: Run) -> list[str]:
    lines = ["step   sigma   timestep  expert      gradient  std of a Flow-SDE, Dance-SDE step / noise_level"]
    for i, (flow_std, dance_std) in enumerate(sde_stds(run.sigmas)):
        sigma, gradient = run.sigmas[i], "replayed" if i in run.active else "-"
        lines.append(
            f"{i:4d}  {sigma:6.4f}  {1000 * sigma:9.3f}  {run.experts[i]:10s}  {gradient:8s}"
            f"  {flow_std:17.4f}{dance_std:10.4f}"
        )
    return lines


def work_table(costs: Costs, run: Run, tflops: float) -> list[str]:
    tokens, shape = costs.experts["low_noise"].tokens, "x".join(map(str, costs.shape))
    parts, visible = work(costs, run), sum(exposed_seconds(costs, run, tflops))
    lines = [f"{tokens} tokens, latents {shape}", f"compute, one clip          TFLOP   s at {tflops:g} TFLOP/s"]
    lines += [work_line(name, amount / 1e12, amount / tflops / 1e12) for name, amount in parts.items()]
    if visible:
        lines.append(work_line("copies not hidden", 0, visible))
    total, time = sum(parts.values()), seconds(costs, run, tflops)
    clips = run.levers.batch * run.levers.accumulation
    encode = costs.encode.text_flops + costs.encode.image_flops
    return [
        *lines,
        work_line("total", total / 1e12, time),
        f"one update of {clips} clips per GPU: {clips * total / 1e15:.4g} PFLOP, {clips * time:.4g} s",
        f"VAE encode and text: {encode / 1e12:.4g} TFLOP once per clip, then from the cache",
    ]


def work_line(name: str, tflop: float, time: float) -> str:
    digits = f"{tflop:.0f}" if tflop >= 100 else f"{tflop:.3g}"
    return f"  {name:20s}{digits:>10s}{time:10.3g}"


def memory_table(costs: Costs, run: Run) -> list[str]:
    full, batch = full_graph(costs, run), run.levers.batch
    return memory_lines(memory(costs, run)) + [
        f"plain autograd through {len(run.active)} steps and the decoder would keep "
        f"{size(batch * (full.block_inputs + full.decode))}: block inputs {size(batch * full.block_inputs)}, decoder "
        f"{size(batch * full.decode)} ({size(batch * full.decode_chunks)} checkpointed by chunk)",
    ]


def memory_lines(needs: Memory) -> list[str]:
    lines = ["memory of one GPU", _memory_line("resident", sum(needs.resident.values()), _parts(needs.resident))]
    for phase, parts in needs.phases.items():
        lines.append(_memory_line(phase, needs.of(phase), f"resident + {_parts(parts)}"))
    lines.append(_memory_line("encode", sum(needs.encode.values()), f"before the experts: {_parts(needs.encode)}"))
    phase = max(needs.by_phase, key=needs.by_phase.get)
    lines.append(
        _memory_line("peak", needs.peak, f"in {phase}; with {size(RESERVE)} for CUDA, libraries, fragmentation")
    )
    lines.append(f"host memory of one process: {_parts(needs.host) if needs.host else 'nothing pinned or swapped'}")
    return lines


def _memory_line(name: str, amount: float, parts: str) -> str:
    return f"  {name:11s}{size(amount):>9s}   {parts}"


def disk_table(costs: Costs, run: Run) -> list[str]:
    count = None if run.steps is None else math.ceil(run.steps / run.save_steps)
    return disk_lines(run, *checkpoint_bytes(costs, run), count, clip_cache_bytes(costs, run))


def disk_lines(run: AnyRun, adapter: int, state: int, count: int | None, cache: Mapping[str, int]) -> list[str]:
    """Bytes of a checkpoint's adapter and state, of which there will be `count`, and of one clip's cache."""
    saved = f"  a checkpoint: {size(adapter + state)} (adapter {size(adapter)}, state {size(state)})"
    if count is not None:
        saved += f"; {count} in {run.steps} steps: {size(count * (adapter + state))}"
    cached = f"  conditioning cache of a clip: {size(sum(cache.values()))} ({_parts(cache)})"
    if run.clips is not None:
        cached += f"; of {run.clips} clips: {size(run.clips * sum(cache.values()))}"
    return ["disk", saved, cached]


def verdict(costs: Costs, run: AnyRun, gpu_memory: float, tflops: float) -> list[str]:
    """Whether the run fits `gpu_memory` bytes, and what to set when it does not."""
    need = f"{size(run.memory(costs).peak + RESERVE)} of {size(gpu_memory)}"
    if fits(costs, run, gpu_memory):
        return [f"fits: {need}"]
    lines, before, base = [f"does not fit: {need}"], run, run.seconds(costs, tflops)
    for option in recommend(costs, run, gpu_memory, tflops):
        after = option.on(before)
        saved = before.memory(costs).peak - after.memory(costs).peak
        share = 100 * (after.seconds(costs, tflops) - before.seconds(costs, tflops)) / base
        settings = ", ".join(f"{key}: {json.dumps(value).strip(chr(34))}" for key, value in option.settings.items())
        lines.append(f"  set {settings} (saves {size(saved)}, {share:+.1f} % time{option.note})")
        before = after
    closest = before.memory(costs)
    needs = f"{size(closest.peak + RESERVE)} on the GPU and {size(sum(closest.host.values()))} in the host"
    if fits(costs, before, gpu_memory):
        return [*lines, f"  then it takes {needs}"]
    return [*lines, f"no setting makes it fit; the closest takes {needs}"]


def _parts(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {size(amount)}" for name, amount in parts.items())


def size(amount: float) -> str:
    """Bytes in words: 57.3 GB, 4.2 MB."""
    unit, divisor = ("GB", 1e9) if amount >= 1e9 else ("MB", 1e6)
    return f"{amount / divisor:.1f} {unit}"
