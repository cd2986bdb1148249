"""What a run of train_flow_grpo.py takes before it is run: as `plan`, of groups of rollouts and their policy updates.

An epoch of one process is `forwards` rollouts of `batch` samples (no graph), their decoding and reward, and then,
inner_epochs times, one forward and backward pass for every SDE step of every sample. Each epoch draws its own window,
so work is the mean over the run's epochs and memory is that of the widest window.

Counted as the script does it: under same_noise_in_group the steps before the window are computed once for all members
that a process has of a group; guidance is a second forward pass, whose graph lives beside the first's; every sample
keeps its own copy of its conditioning, its window's latents and, for `guard`, their means (K steps in a row: K + 1
latents on the GPU, where one step's last are the next one's first, 2 K in the host, and K means). Not counted: the
rewards' networks at work and videos that a concurrent reward (`remote`) still has, the evaluation, and what `plan` does
not count.
"""

import functools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rewardfl import config as configuration
from rewardfl import data, flow, grpo
from rewardfl import plan as planning
from rewardfl.backbones.wan import model as wan
from rewardfl.config import EvaluationConfig, FlowGrpoConfig
from rewardfl.costs import Costs
from rewardfl.plan import FLOAT32, AnyLevers, AnyRun, Memory, Option, beyond
from rewardfl.run import checks

EPOCHS = 100  # whose windows stand for the run's, where its length is not known
KINDS = ("flow", "dance", "cps")

# ------------------------------------------------------------------------------------------------------------
# What a run does


@dataclass(frozen=True)
class GrpoLevers(AnyLevers):
    """Those of train_flow_grpo.py."""

    samples_on: str = "gpu"


@dataclass(frozen=True, kw_only=True)
class GrpoRun(AnyRun):
    """What each of `processes` does. active: the steps that some window may have."""

    levers: GrpoLevers
    group_size: int
    groups: int  # per epoch, over all processes
    spread: str = "contiguous"
    same_noise: bool = False
    updates_per_epoch: int = 1
    inner_epochs: int = 1
    sde: str = "flow"
    noise_level: float = 0.7
    guided: bool = False
    guarded: bool = True  # the objective needs the rollout's means
    drawn: bool = False  # each epoch draws its window from the active steps; else it is all of them
    windows: tuple[tuple[int, ...], ...]  # by epoch
    eval_experts: tuple[str, ...] = ()  # by step of the evaluation's schedule; empty: no evaluation
    eval_videos: int | None = None  # of each evaluation, where its clips are there
    eval_steps: int = 50

    @property
    def samples(self) -> int:
        """Per epoch, over all processes."""
        return self.groups * self.group_size

    @property
    def samples_of_process(self) -> int:
        return self.samples // self.processes

    @property
    def forwards(self) -> int:
        """Batches that one process rolls out in an epoch."""
        return self.samples_of_process // self.levers.batch

    @property
    def updates(self) -> int:
        """Optimizer updates per epoch."""
        return self.updates_per_epoch * self.inner_epochs

    @property
    def answers(self) -> int:
        """Forward passes that one velocity takes."""
        return 2 if self.guided else 1

    @property
    def epochs(self) -> int | None:
        """In all, where known."""
        return None if self.steps is None else self.steps // self.updates

    def memory(self, costs: Costs) -> Memory:
        return memory(costs, self)

    def seconds(self, costs: Costs, tflops: float) -> float:
        return seconds(costs, self, tflops)

    def options(self) -> list[Option]:
        return options(self)


def run_of(
    cfg: FlowGrpoConfig, configs: Path, clips: int | None, steps: int | None, processes: int, sharding: str = "none"
) -> GrpoRun:
    """What the configuration does on `processes` processes. configs: see `plan.source_of`; clips, steps: where known.

    ConfigError for samples that do not divide among processes, batches and updates, and for an impossible window.
    """
    sample, section, train = cfg.sample, cfg.grpo, cfg.train
    planning.epoch_geometry(cfg, processes)
    schedule = planning.schedule_of(cfg, configs)
    window = planning.windows(cfg, schedule.experts)
    epochs = EPOCHS if steps is None else steps // (section.updates_per_epoch * section.inner_epochs)
    evaluation = cfg.evaluation
    eval_steps = evaluation.eval_inference_steps or sample.num_inference_steps
    boundary = checks.boundary_of(cfg, configs)
    eval_experts = wan.schedule(eval_steps, sample.shift, boundary).experts if evaluation.eval_clips else ()
    return GrpoRun(
        sigmas=tuple(schedule.sigmas.tolist()),
        experts=schedule.experts,
        active=planning.drawable(cfg, schedule.experts),
        trained=configuration.trainable_experts(cfg),
        kl=section.kl_weight != 0,
        levers=GrpoLevers(
            untrained=cfg.experts.untrained,
            checkpointing=train.use_gradient_checkpointing,
            offload_inputs=train.use_gradient_checkpointing_offload,
            batch=train.per_device_train_batch_size,
            samples_on=section.samples_on,
        ),
        save_steps=cfg.run.save_steps,
        steps=steps,
        clips=clips,
        pack_bytes=planning.pack_bytes(cfg),
        group_size=section.group_size,
        groups=section.groups,
        processes=processes,
        sharding=sharding,
        spread=section.spread,
        same_noise=section.same_noise_in_group,
        updates_per_epoch=section.updates_per_epoch,
        inner_epochs=section.inner_epochs,
        sde=section.sde,
        noise_level=section.noise_level,
        guided=sample.guidance_scale != 1,
        guarded=section.objective == "guard",
        drawn=section.window != "list",
        windows=tuple(window(epoch) for epoch in range(epochs)),
        eval_experts=eval_experts,
        eval_videos=_eval_videos(evaluation),
        eval_steps=evaluation.eval_steps,
    )


def _eval_videos(evaluation: EvaluationConfig) -> int | None:
    if evaluation.eval_clips is None or not Path(evaluation.eval_clips).is_file():
        return None
    return len(data.load_metadata(evaluation.eval_clips, "evaluation.eval_clips")) * evaluation.eval_noises


def total_steps(cfg: FlowGrpoConfig, clips: int | None) -> int | None:
    """Optimizer updates of the run, whole epochs: max_steps, or what visits every clip num_train_epochs times.

    None where the clips that must say are not there.
    """
    train, section = cfg.train, cfg.grpo
    if train.max_steps is not None or clips is None:
        return train.max_steps
    epochs = data.total_steps(clips, section.groups, train.num_train_epochs, None)
    return epochs * section.updates_per_epoch * section.inner_epochs


# ------------------------------------------------------------------------------------------------------------
# Compute


@functools.cache
def starts(
    processes: int, batch: int, group_size: int, groups: int, spread: str, same_noise: bool, updates: int
) -> tuple[int, int]:
    """(clips, forward passes) with which one process, of an epoch, computes a step before the window.

    Of the process that has the most clips; the passes are the same on all (grpo.new_starts).
    """
    plans = [
        grpo.plan(
            0, world=processes, rank=rank, batch=batch, group_size=group_size, groups=groups, sample_ids=("",), seed=0,
            spread=spread, same_noise_in_group=same_noise, updates=updates,
        )
        for rank in range(processes)
    ]  # fmt: skip
    new = grpo.new_starts(plans)
    clips = [
        sum(len({member.start for member in members}) for members, is_new in zip(plan, new, strict=True) if is_new)
        for plan in plans
    ]
    return max(clips), sum(new)


def rollout_counts(run: GrpoRun, window: Sequence[int]) -> list[tuple[int, int]]:
    """By step, (clips, forward passes) of one process in an epoch; guidance is not in it."""
    before = starts(
        run.processes, run.levers.batch, run.group_size, run.groups, run.spread, run.same_noise, run.updates_per_epoch
    )
    after = (run.samples_of_process, run.forwards)
    return [before if i < window[0] else after for i in range(len(run.sigmas) - 1)]


def work(costs: Costs, run: GrpoRun) -> dict[str, float]:
    """FLOPs of one sample, by part, from its noise to its share of the epoch's updates. The mean over the epochs."""
    drawn = Counter(run.windows)
    parts: Counter[str] = Counter()
    for window, times in drawn.items():
        for name, amount in _work_under(costs, run, window).items():
            parts[name] += amount * times / drawn.total()
    return dict(parts)


def _forwards(costs: Costs, run: GrpoRun, experts: Sequence[str]) -> list[int]:
    """FLOPs of a forward pass of each of these experts without a graph, guidance not in it."""
    return [costs.experts[e].forward if e in run.trained else costs.experts[e].forward_frozen for e in experts]


def evaluation_flops(costs: Costs, run: GrpoRun) -> int:
    """FLOPs of one video of the evaluation."""
    sampled = run.answers * sum(_forwards(costs, run, run.eval_experts))
    return sampled + sum(chunk.forward for chunk in costs.chunks)


def _work_under(costs: Costs, run: GrpoRun, window: Sequence[int]) -> dict[str, float]:
    clips = [clips for clips, _ in rollout_counts(run, window)]
    rolled = sum(n * flops for n, flops in zip(clips, _forwards(costs, run, run.experts), strict=True))
    trained, replays = [costs.experts[run.experts[i]] for i in window], run.inner_epochs * run.answers
    forward = replays * sum(cost.forward for cost in trained)
    return {
        "rollout": run.answers * rolled / run.samples_of_process,
        "decode": sum(chunk.forward for chunk in costs.chunks),
        "replay forward": forward,
        "replay recompute": forward if run.levers.checkpointing else 0,
        "replay backward": replays * sum(cost.backward for cost in trained),
        "reference": replays * sum(cost.forward_frozen for cost in trained) if run.kl else 0,
    }


def seconds(costs: Costs, run: GrpoRun, tflops: float) -> float:
    """Seconds for one sample at `tflops` TFLOP/s, with the copies to and from the host that computing does not hide."""
    return sum(work(costs, run).values()) / (tflops * 1e12) + sum(exposed_seconds(costs, run, tflops))


def exposed_seconds(costs: Costs, run: GrpoRun, tflops: float) -> Iterator[float]:
    """What each lever's copying adds for one sample; every copy goes on beside the computing of its own part."""
    parts = {name: amount / (tflops * 1e12) for name, amount in work(costs, run).items()}
    levers, epochs = run.levers, len(run.windows)
    replay = parts["replay recompute"] + parts["replay backward"]
    if levers.checkpointing and levers.offload_inputs:
        stored = sum(costs.experts[run.experts[i]].stored for window in run.windows for i in window) / epochs
        inputs = run.inner_epochs * run.answers * stored
        yield beyond(inputs, parts["replay forward"])
        yield beyond(inputs, replay)
    if levers.samples_on == "cpu":
        yield beyond(kept_bytes(costs, run), parts["rollout"])
        yield beyond(run.inner_epochs * kept_bytes(costs, run), parts["replay forward"] + replay)
    if run.untrained:
        waits = sum(times * _swap_wait(costs, run, window, tflops) for window, times in Counter(run.windows).items())
        yield run.answers * waits / epochs / run.samples_of_process


def _swap_wait(costs: Costs, run: GrpoRun, window: Sequence[int], tflops: float) -> float:
    """Seconds that one process waits for the untrained expert's weights in an epoch, without guidance."""
    cost, place = costs.experts[run.untrained], run.levers.untrained
    counts = [count for i, count in enumerate(rollout_counts(run, window)) if run.experts[i] == run.untrained]
    return sum(passes * planning.pass_wait(cost, place, clips / passes, tflops) for clips, passes in counts)


# ------------------------------------------------------------------------------------------------------------
# Memory


def kept_bytes(costs: Costs, run: GrpoRun) -> int:
    """What one sample leaves between its rollout and the epoch's updates, under the widest window."""
    on_gpu = run.levers.samples_on == "gpu"
    latents = [len({*window, *(i + 1 for i in window)}) if on_gpu else 2 * len(window) for window in run.windows]
    tensors = max(latents) + (max(map(len, run.windows)) if run.guarded else 0)  # and a mean for each step
    return tensors * math.prod(costs.shape) * FLOAT32 + costs.text_bytes + costs.image_bytes


def memory(costs: Costs, run: GrpoRun) -> Memory:
    """Memory by phase. The conditioning comes from its cache, so text encoder and VAE encoder need not be resident."""
    batch = run.levers.batch
    resident, host_weights = planning.resident_weights(costs, run)
    kept = run.samples_of_process * kept_bytes(costs, run)
    parts = run.processes if run.sharding == "fsdp2" else 1
    resident["averaged LoRA"] = FLOAT32 * planning.trained_parameters(costs, run) // parts
    if run.levers.samples_on == "gpu":
        resident["the epoch's samples"] = kept
    frozen = max(2 * cost.block_input + cost.block_peak_frozen for cost in costs.experts.values())
    decoded = costs.num_pixels * costs.itemsize
    activations, inputs = planning.replay_activations(costs, run, graphs=run.answers)
    phases = {
        "rollout": {"one block, no graph": batch * frozen},
        "decode": {
            "one chunk, its caches and the next's": batch * max(chunk.caches_in + chunk.peak for chunk in costs.chunks),
            "frames by chunk and in one": batch * 2 * decoded,
        },
        "reward": {"frames, also float32": batch * (decoded + FLOAT32 * costs.num_pixels)},
        "replay": {name: batch * amount for name, amount in activations.items()},
    }
    host = {
        **host_weights,
        "block inputs": batch * inputs,
        "the epoch's samples": kept if run.levers.samples_on == "cpu" else 0,
    }
    present = {name: amount for name, amount in host.items() if amount}
    return Memory(resident, phases, planning.encode_memory(costs), present)


def options(run: GrpoRun) -> list[Option]:
    """What can be switched on in this run. A smaller batch is more forward passes: groups stay as they are."""
    levers = run.levers
    found = [Option({"samples_on": "cpu"})]
    if not levers.checkpointing:
        found.append(Option({"checkpointing": True}))
    elif not levers.offload_inputs:
        found.append(Option({"offload_inputs": True}))
    if levers.batch > 1:
        found.append(Option({"batch": max(n for n in range(1, levers.batch) if levers.batch % n == 0)}))
    if run.untrained:
        found.append(Option({"untrained": "cpu_swap"}))
        found.append(Option({"untrained": "fp8"}, False, "; its weights are rounded by 3 %"))
    return [option for option in found if option.on(run) != run]


fits = planning.fits

# ------------------------------------------------------------------------------------------------------------
# Disk


def checkpoint_bytes(costs: Costs, run: GrpoRun) -> tuple[int, int]:
    """Bytes of one checkpoint: the averaged adapter; Adam's two moments, the last weights and the average itself."""
    adapter, moments = planning.checkpoint_bytes(costs, run)
    return adapter, moments + 2 * adapter


def epochs_due(run: GrpoRun, every: int) -> set[int] | None:
    """The epochs, from 1, at whose end something is done `every` so many steps: those in which a multiple falls, and
    the last one. None where the run's length is not known.
    """
    if run.steps is None:
        return None
    return {math.ceil(step / run.updates) for step in range(every, run.steps + 1, every)} | {run.epochs}


# ------------------------------------------------------------------------------------------------------------
# For people


def overview(cfg: FlowGrpoConfig, run: GrpoRun) -> str:
    """The resolved configuration and the arithmetic of its groups."""
    return "\n".join([configuration.dump(cfg), *arithmetic(run), ""])


def arithmetic(run: GrpoRun) -> list[str]:
    """Samples, forward passes, updates and epochs, in words."""
    per_update, batches = run.samples // run.updates_per_epoch, run.forwards // run.updates_per_epoch
    widest, guidance = max(map(len, run.windows)), " x 2 (guidance)" if run.guided else ""
    passes = [sum(passes for _, passes in rollout_counts(run, window)) for window in run.windows]
    rolled = run.answers * sum(passes) / len(passes)
    shared = ", its first steps once per group" if run.same_noise else ""
    first = ", ".join(str(list(window)) for window in run.windows[:3])
    window = (
        f"{widest} of {list(run.active)}, drawn in each epoch: {first}, ..." if run.drawn else f"{list(run.active)}"
    )
    lines = [
        f"an epoch: {run.groups} groups x {run.group_size} = {run.samples} samples = {run.forwards} forwards x "
        f"{run.levers.batch} batch x {run.processes} process{'es' if run.processes > 1 else ''}",
        f"  per process {rolled:g} forwards without gradient: {run.forwards} batches x {len(run.sigmas) - 1} steps"
        f"{guidance}{shared}",
        f"an update: {per_update} samples; per process {run.answers * batches * widest} forwards with gradient: "
        f"{batches} batches x {widest} window steps{guidance}",
        f"updates: {run.updates_per_epoch} per epoch x {run.inner_epochs} inner epochs = {run.updates}",
        f"SDE: {run.sde}, noise level {run.noise_level:g}, window {window}",
    ]
    if run.steps is None:
        return lines
    visits = f" = {run.epochs * run.groups / run.clips:.2f} x {run.clips} clips" if run.clips else ""
    return [*lines, f"the run: {run.steps} updates = {run.epochs} epochs = {run.epochs * run.groups} groups{visits}"]


def report(costs: Costs, run: GrpoRun, tflops: float, gpu_memory: float | None) -> str:
    """The whole plan as text. gpu_memory: bytes to compare with; None compares with nothing."""
    cache, saved = planning.clip_cache_bytes(costs, run), epochs_due(run, run.save_steps)
    sections = [
        sigma_table(run),
        work_table(costs, run, tflops),
        planning.memory_lines(memory(costs, run)),
        planning.disk_lines(run, *checkpoint_bytes(costs, run), saved and len(saved), cache),
    ]
    if gpu_memory is not None:
        sections.append(planning.verdict(costs, run, gpu_memory, tflops))
    return "\n\n".join("\n".join(lines) for lines in sections)


def sigma_table(run: GrpoRun) -> list[str]:
    """By step: sigma, timestep, expert, whether it is trained; of each kind of SDE, at the run's noise level, std,
    gradient weight (`flow.gradient_weight`) and noise left over sigma_next (`flow.noise_scale_error`).
    """
    heads = "".join(f"{kind + ' std':>11s}{'weight':>8s}{'noise':>7s}" for kind in KINDS)
    lines = [f"step   sigma   timestep  expert      window {heads}"]
    for i, (sigma, sigma_next) in enumerate(zip(run.sigmas[:-1], run.sigmas[1:], strict=True)):
        place = "-" if i not in run.active else "drawn" if run.drawn else "trained"
        cells = "".join(_cells(kind, sigma, sigma_next, run) for kind in KINDS)
        lines.append(f"{i:4d}  {sigma:6.4f}  {1000 * sigma:9.3f}  {run.experts[i]:10s}  {place:7s}{cells}")
    return lines + [
        f"at noise level {run.noise_level:g}, trained with {run.sde}. weight: of the step's gradient, |dmean/dv| / std "
        "(cps: 2 |dmean/dv| std). noise: what one step leaves / sigma of the next, 1 is exact"
    ]


def _cells(kind: str, sigma: float, sigma_next: float, run: GrpoRun) -> str:
    """std, gradient weight and noise-scale error; - for what is not defined there."""
    if kind == "cps" and run.noise_level > 1:
        return f"{'-':>11s}{'-':>8s}{'-':>7s}"
    step = (kind, sigma, sigma_next, run.noise_level, run.sigmas[1])
    std = flow.transition_std(*step)
    weight = f"{flow.gradient_weight(*step):.4f}" if std > 0 else "-"
    noise = f"{flow.noise_scale_error(*step):.3f}" if sigma_next > 0 else "-"
    return f"{std:11.4f}{weight:>8s}{noise:>7s}"


def work_table(costs: Costs, run: GrpoRun, tflops: float) -> list[str]:
    tokens, shape = costs.experts["low_noise"].tokens, "x".join(map(str, costs.shape))
    parts, visible = work(costs, run), sum(exposed_seconds(costs, run, tflops))
    lines = [f"{tokens} tokens, latents {shape}", f"compute, one sample        TFLOP   s at {tflops:g} TFLOP/s"]
    lines += [planning.work_line(name, amount / 1e12, amount / tflops / 1e12) for name, amount in parts.items()]
    if visible:
        lines.append(planning.work_line("copies not hidden", 0, visible))
    total, time = sum(parts.values()), seconds(costs, run, tflops)
    epoch = run.samples * total, run.samples_of_process * time
    lines.append(planning.work_line("total", total / 1e12, time))
    lines.append(
        f"one update of {run.samples // run.updates_per_epoch} samples, with its share of the rollouts: "
        f"{_cost(run, epoch[0] / run.updates, epoch[1] / run.updates)}"
    )
    lines.append(f"one epoch of {run.samples} samples: {_cost(run, *epoch)}")
    if run.epochs is not None:
        spent = _cost(run, run.epochs * epoch[0], run.epochs * epoch[1])
        lines.append(f"the run of {run.epochs} epochs, without its evaluations: {spent}")
    if run.eval_experts:
        lines.append(_evaluation_line(costs, run, tflops))
    encode = costs.encode.text_flops + costs.encode.image_flops
    return [*lines, f"VAE encode and text: {encode / 1e12:.4g} TFLOP once per clip, then from the cache"]


def _evaluation_line(costs: Costs, run: GrpoRun, tflops: float) -> str:
    flops, steps = evaluation_flops(costs, run), len(run.eval_experts)
    if run.eval_videos is None:
        return f"a video of the evaluation ({steps} steps): {_cost(run, flops, flops / tflops / 1e12)}"
    time = math.ceil(run.eval_videos / run.processes) * flops / tflops / 1e12
    due = epochs_due(run, run.eval_steps)
    times = f"; {1 + len(due)} in the run" if due else ""  # one before the first epoch
    return (
        f"an evaluation of {run.eval_videos} videos ({steps} steps): {_cost(run, run.eval_videos * flops, time)}{times}"
    )


def _cost(run: GrpoRun, flops: float, time: float) -> str:
    """flops: of all processes; time: of each, which is that of all."""
    spent = f"{time:.4g} s" if time < 3600 else f"{time / 3600:.4g} h"
    hours = f" ({run.processes * time / 3600:.4g} GPU hours)" if run.processes * time >= 3600 else ""
    return f"{flops / 1e15:.4g} PFLOP, {spent}{hours}"
