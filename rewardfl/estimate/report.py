"""The estimate as text."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace

from rewardfl.estimate import needs
from rewardfl.estimate.advice import Machine, Option, fits, lacking, recommend, with_options
from rewardfl.estimate.measure import Costs, measure
from rewardfl.machine import memory as machine_memory
from rewardfl.run.job import Job
from rewardfl.run.monitor import total_memory
from rewardfl.run.work import Sampling, Work

TFLOPS = 400.0  # TFLOP/s that an H100 reaches in bfloat16, when nothing else is said


def estimate(work: Work, machine: Machine, tflops: float = TFLOPS) -> tuple[str, bool]:
    """(what the run takes, as text, and whether it fits)."""
    costs = measure(work.video)
    tables = [work_table(costs, work, tflops), memory_lines(needs.memory(costs, work)), disk_table(costs, work)]
    sections = [*tables, verdict(costs, work, machine)]
    return "\n\n".join("\n".join(lines) for lines in sections), fits(costs, work, machine)


def dry_run(work: Work, job: Job) -> int:
    """Print what the run takes. Return the exit code: 2 where it does not fit the machine that it is on."""
    text, enough = estimate(work, Machine(total_memory(job.device), machine_memory(), job.processes_here()))
    job.say(text)
    return 0 if enough else 2


def work_table(costs: Costs, work: Work, tflops: float) -> list[str]:
    """FLOPs by part, and seconds at `tflops` TFLOP/s: of one video, and of parts of the run."""
    tokens, shape = costs.experts[work.trained[0]].tokens, "x".join(map(str, costs.shape))
    parts = needs.flops(costs, work)
    total, second = sum(parts.values()), tflops * 1e12  # FLOPs of a second
    lines = [f"{tokens} tokens, latents {shape}", f"compute, one video         TFLOP   s at {tflops:g} TFLOP/s"]
    for name, amount in (parts | {"total": total}).items():
        digits = f"{amount / 1e12:.0f}" if amount >= 1e14 else f"{amount / 1e12:.3g}"
        lines.append(f"  {name:20s}{digits:>10s}{amount / second:10.3g}")
    swapped = "cpu_swap" in (work.placement, work.trained_placement)
    if work.offload_inputs or swapped or work.decode_caches == "offload":
        lines.append("  assuming that copies to and from the host are hidden behind computing")
    for span in work.spans:
        spent = _spent(work.processes, span.videos * total, span.of_process * total / second)
        lines.append(f"{span.name}: {spent}")
    if work.evaluation:
        lines.append(_evaluation_line(costs, work, work.evaluation, second))
    encode = costs.text.forward + costs.image.forward
    return [*lines, f"VAE encode and text: {encode / 1e12:.4g} TFLOP once per clip, then from the cache"]


def _evaluation_line(costs: Costs, work: Work, evaluation: Sampling, second: float) -> str:
    one = needs.sampled(costs, work, evaluation.passes) + sum(chunk.forward for chunk in costs.chunks)
    if evaluation.videos is None:
        return f"a video of the evaluation ({evaluation.steps} steps): {_spent(1, one, one / second)}"
    times = f"; {evaluation.times} in the run" if evaluation.times else ""
    of_process = math.ceil(evaluation.videos / work.processes) * one / second
    spent = _spent(work.processes, evaluation.videos * one, of_process)
    return f"an evaluation of {evaluation.videos} videos ({evaluation.steps} steps): {spent}{times}"


def _spent(processes: int, amount: float, time: float) -> str:
    """amount: FLOPs; time: seconds of each process, which are those of all."""
    spent = f"{time:.4g} s" if time < 3600 else f"{time / 3600:.4g} h"
    hours = f" ({processes * time / 3600:.4g} GPU hours)" if processes * time >= 3600 else ""
    return f"{amount / 1e15:.4g} PFLOP, {spent}{hours}"


def memory_lines(found: needs.Memory) -> list[str]:
    rows = [("resident", sum(found.resident.values()), _parts(found.resident))]
    rows += [(phase, found.of(phase), f"resident + {_parts(parts)}") for phase, parts in found.phases.items()]
    for phase, parts in found.encode.items():
        rows.append((phase, sum(parts.values()), f"before the experts: {_parts(parts)}"))
    phase = max(found.by_phase, key=found.by_phase.get)
    rows.append(("peak", found.peak, f"in {phase}; with {size(needs.RESERVE)} for CUDA, libraries, fragmentation"))
    rows.append(("host", sum(found.host.values()), f"of each process: {_parts(found.host) or 'nothing'}"))
    return ["memory of one GPU", *(f"  {name:11s}{size(amount):>9s}   {parts}" for name, amount, parts in rows)]


def disk_table(costs: Costs, work: Work) -> list[str]:
    adapter, state = needs.checkpoint_bytes(costs, work)
    cache = needs.clip_cache_bytes(costs, work)
    saved = f"  a checkpoint: {size(adapter + state)} (adapter {size(adapter)}, state {size(state)})"
    if work.saves is not None:
        saved += f"; {work.saves} in {work.steps} steps: {size(work.saves * (adapter + state))}"
    cached = f"  conditioning cache of a clip: {size(sum(cache.values()))} ({_parts(cache)})"
    if work.clips is not None:
        cached += f"; of {work.clips} clips: {size(work.clips * sum(cache.values()))}"
    return ["disk", saved, cached]


def verdict(costs: Costs, work: Work, machine: Machine) -> list[str]:
    """Whether the run fits the machine, and what to set when it does not."""
    needed = _needed(needs.memory(costs, work), machine)
    if fits(costs, work, machine):
        return [f"fits: {needed}", *_room(costs, work, machine)]
    lines, before = [f"does not fit: {needed}"], work
    for option in recommend(costs, work, machine):
        after = with_options(before, [option])
        saved = needs.memory(costs, before).peak - needs.memory(costs, after).peak
        share = _more_time(costs, work, before, after)
        of_host = _in_host(costs, before, machine) - _in_host(costs, after, machine)
        saves = f"{size(saved)}" if saved > 0 else f"{size(of_host)} of host memory"
        lines.append(f"  set {_settings(option)} (saves {saves}, {share}{option.note})")
        before = after
    closest = f"takes {_needed(needs.memory(costs, before), machine)}"
    if fits(costs, before, machine):
        return [*lines, f"  then it {closest}"]
    if lacking(costs, before, machine)[1]:
        lines.append("  fewer processes on the machine, or less that waits in host memory, take less of it")
    return [*lines, f"no setting makes it fit; the closest {closest}"]


def _needed(found: needs.Memory, machine: Machine) -> str:
    """The bytes that a run takes of what the machine has, in words."""
    gpu = [] if machine.gpu is None else [f"{size(found.peak + needs.RESERVE)} of {size(machine.gpu)} on the GPU"]
    host = machine.processes * sum(found.host.values())
    each = f" for {machine.processes} processes" if machine.processes > 1 else ""
    known = f" of {size(machine.host)}" if machine.host < math.inf else ""
    return ", ".join([*gpu, f"{size(host)}{known} in host memory{each}"])


def _in_host(costs: Costs, work: Work, machine: Machine) -> int:
    return machine.processes * sum(needs.memory(costs, work).host.values())


def _room(costs: Costs, work: Work, machine: Machine) -> list[str]:
    """What saves time and fits, too."""
    after = replace(work, keep_attention=True)
    if not work.checkpointing or work.keeps_graphs or work.keep_attention or not fits(costs, after, machine):
        return []
    more = size(needs.memory(costs, after).peak - needs.memory(costs, work).peak)
    share = _more_time(costs, work, work, after)
    return [f"  there is room for train.keep_attention: true (takes {more} more, {share})"]


def _more_time(costs: Costs, work: Work, before: Work, after: Work) -> str:
    """How many more FLOPs `after` has than `before`, in words, as a share of what `work` has."""
    base, one, other = (sum(needs.flops(costs, run).values()) for run in (work, before, after))
    return f"{100 * (other - one) / base:+.1f} % time"


def _settings(option: Option) -> str:
    return ", ".join(f"{key}: {json.dumps(value).strip(chr(34))}" for key, value in option.settings.items())


def _parts(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {size(amount)}" for name, amount in parts.items())


def size(amount: float) -> str:
    """Bytes in words: 57.3 GB, 4.2 MB."""
    unit, divisor = ("GB", 1e9) if amount >= 1e9 else ("MB", 1e6)
    return f"{amount / divisor:.1f} {unit}"
