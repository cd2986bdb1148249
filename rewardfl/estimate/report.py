"""The estimate as text."""

import json
import math
from collections.abc import Mapping

from rewardfl.estimate import needs
from rewardfl.estimate.advice import INEXACT, Machine, changed_settings, fits, keep_more_graphs, recommend
from rewardfl.estimate.measure import Costs, measure
from rewardfl.machine import usable_memory
from rewardfl.training.distributed import Distributed
from rewardfl.training.timer import total_memory
from rewardfl.training.workload import Workload

TFLOPS = 400.0  # default TFLOP/s: an H100 in bfloat16


def estimate(work: Workload, machine: Machine, tflops: float = TFLOPS) -> tuple[str, bool]:
    """Return the estimate as text, and whether the run fits."""
    costs = measure(work.video)
    tables = [work_table(costs, work, tflops), memory_lines(needs.memory(costs, work)), disk_table(costs, work)]
    sections = [*tables, fit_verdict(costs, work, machine)]
    return "\n\n".join("\n".join(lines) for lines in sections), fits(costs, work, machine)


def dry_run(work: Workload, job: Distributed) -> int:
    """Print the estimate. Return the exit code: 2 where the run does not fit this machine."""
    text, enough = estimate(work, Machine(total_memory(job.device), usable_memory(), job.processes_per_machine()))
    job.print(text)
    return 0 if enough else 2


def work_table(costs: Costs, work: Workload, tflops: float) -> list[str]:
    """List FLOPs by part, and seconds at `tflops` TFLOP/s: of one video, and of parts of the run."""
    tokens, shape = costs.experts[work.trained[0]].tokens, "x".join(map(str, costs.shape))
    parts = needs.flops(costs, work)
    total, speed = sum(parts.values()), tflops * 1e12  # speed: FLOPs per second
    lines = [f"{tokens} tokens, latents {shape}", f"compute, one video         TFLOP   s at {tflops:g} TFLOP/s"]
    for name, amount in (parts | {"total": total}).items():
        digits = f"{amount / 1e12:.0f}" if amount >= 1e14 else f"{amount / 1e12:.3g}"
        lines.append(f"  {name:20s}{digits:>10s}{amount / speed:10.3g}")
    swapped = "cpu_swap" in (work.untrained_placement, work.trained_placement)
    if work.offload_inputs or swapped or work.decode_caches == "offload":
        lines.append("  assuming that copies to and from the host are hidden behind computing")
    for span in work.spans:
        spent = _spent(work.processes, span.videos * total, span.of_process * total / speed)
        lines.append(f"{span.name}: {spent}")
    encode = costs.text.forward + costs.image.forward
    return [*lines, f"VAE encode and text: {encode / 1e12:.4g} TFLOP once per clip, then from the cache"]


def _spent(processes: int, amount: float, time: float) -> str:
    """Format a cost. amount: FLOPs of all processes; time: seconds, in parallel."""
    spent = f"{time:.4g} s" if time < 3600 else f"{time / 3600:.4g} h"
    hours = f" ({processes * time / 3600:.4g} GPU hours)" if processes * time >= 3600 else ""
    return f"{amount / 1e15:.4g} PFLOP, {spent}{hours}"


def memory_lines(memory: needs.Memory) -> list[str]:
    rows = [("resident", sum(memory.resident.values()), _parts(memory.resident))]
    rows += [(phase, memory.of(phase), f"resident + {_parts(parts)}") for phase, parts in memory.phases.items()]
    for phase, parts in memory.encode.items():
        rows.append((phase, sum(parts.values()), f"before the experts: {_parts(parts)}"))
    (phase, _), reserve = max(memory.by_phase.items(), key=lambda item: item[1]), format_size(needs.RESERVE)
    rows.append(("peak", memory.peak, f"in {phase}; with {reserve} for CUDA, libraries, fragmentation"))
    rows.append(("host", sum(memory.host.values()), f"of each process: {_parts(memory.host) or 'nothing'}"))
    return ["memory of one GPU", *(f"  {name:11s}{format_size(amount):>9s}   {parts}" for name, amount, parts in rows)]


def disk_table(costs: Costs, work: Workload) -> list[str]:
    checkpoint, cache = needs.disk(costs, work)
    clip = sum(cache.values())
    count, steps = work.saves, work.steps
    saves = "" if count is None else f"; {count} in {steps} steps: {format_size(count * checkpoint)}"
    clips = "" if work.clips is None else f"; of {work.clips} clips: {format_size(work.clips * clip)}"
    cached = f"  conditioning cache of a clip: {format_size(clip)} ({_parts(cache)}){clips}"
    return ["disk", f"  a checkpoint: {format_size(checkpoint)}{saves}", cached]


def fit_verdict(costs: Costs, work: Workload, machine: Machine) -> list[str]:
    """Report whether the run fits the machine, and the settings to change when it does not."""
    needed = _needed(costs, work, machine)
    enough = fits(costs, work, machine)
    after = (keep_more_graphs if enough else recommend)(costs, work, machine)
    if enough and after == work:
        return [f"fits: {needed}"]
    lines = [f"fits: {needed}; with more graphs kept it is faster:" if enough else f"does not fit: {needed}"]
    for key, value in changed_settings(work, after).items():
        note = f"; {INEXACT[value]}" if value in INEXACT else ""
        lines.append(f"  set {key}: {json.dumps(value).strip(chr(34))}{note}")
    before, then = (sum(needs.flops(costs, run).values()) for run in (work, after))
    takes = f"takes {_needed(costs, after, machine)}, {100 * (then / before - 1):+.1f} % time"
    if fits(costs, after, machine):
        return [*lines, f"  then it {takes}"]
    return [*lines, f"no setting makes it fit; the closest {takes}"]


def _needed(costs: Costs, work: Workload, machine: Machine) -> str:
    """Format the bytes that a run takes, and those that the machine has."""
    memory = needs.memory(costs, work)
    host = format_size(machine.processes * sum(memory.host.values()))
    limit = f" of {format_size(machine.host)}" if machine.host < math.inf else ""
    processes = f" for {machine.processes} processes" if machine.processes > 1 else ""
    text = f"{host}{limit} in host memory{processes}"
    if machine.gpu is None:
        return text
    return f"{format_size(memory.peak + needs.RESERVE)} of {format_size(machine.gpu)} on the GPU, {text}"


def _parts(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {format_size(amount)}" for name, amount in parts.items())


def format_size(amount: float) -> str:
    """Format bytes as 57.3 GB or 4.2 MB."""
    unit, divisor = ("GB", 1e9) if amount >= 1e9 else ("MB", 1e6)
    return f"{amount / divisor:.1f} {unit}"
