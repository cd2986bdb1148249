"""The estimate as text: costs, whether the run fits the machine, and settings that take less memory."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rewardfl.estimate import needs
from rewardfl.estimate.measure import Costs, measure
from rewardfl.estimate.rates import OPERATIONS, RATES, Rates
from rewardfl.machine import usable_memory
from rewardfl.training.distributed import Distributed
from rewardfl.training.timer import total_memory
from rewardfl.training.workload import Workload


@dataclass(frozen=True)
class Machine:
    """Bytes of one GPU (None without one) and of the host's memory, and the number of processes that share it."""

    gpu: float | None
    host: float = math.inf
    processes: int = 1

    def gpu_fits(self, memory: needs.Memory) -> bool:
        """Return whether a GPU has the run's peak and the reserve."""
        return self.gpu is None or memory.peak + needs.RESERVE <= self.gpu

    def host_fits(self, memory: needs.Memory) -> bool:
        """Return whether the host has the memory of all its processes."""
        return self.processes * sum(memory.host.values()) <= self.host


def rates_on(device: torch.device) -> Rates:
    """Return the rates of a GPU, an H100's for an unknown one and for a CPU."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((rates for name, rates in RATES.items() if name in gpu), RATES["H100"])


def estimate(work: Workload, machine: Machine, rates: Rates) -> tuple[str, bool]:
    """Return the estimate as text, and whether the run fits."""
    costs = measure(work.video)
    memory = needs.memory(costs, work)
    sections = [work_table(costs, work, rates), memory_lines(memory), fit_verdict(memory, work, machine)]
    return "\n\n".join("\n".join(lines) for lines in sections), machine.gpu_fits(memory) and machine.host_fits(memory)


def dry_run(work: Workload, job: Distributed) -> int:
    """Print the estimate. Return the exit code: 2 where the run does not fit this machine."""
    processes = job.all_reduce_max(job.accelerator.local_process_index) + 1  # on the machine that has the most
    machine = Machine(total_memory(job.device), usable_memory(), processes)
    text, enough = estimate(work, machine, rates_on(job.device))
    job.print(text)
    return 0 if enough else 2


def work_table(costs: Costs, work: Workload, rates: Rates) -> list[str]:
    """List FLOPs by part and operation, and seconds at the rates: of one video, and of parts of the run."""
    tokens, shape = costs.experts[work.trained[0]].tokens, "x".join(map(str, costs.shape))
    flops = [needs.flops(costs, work, operation) for operation in (None, *OPERATIONS)]
    times = needs.seconds(costs, work, rates)
    rows = {part: [*(amounts[part] / 1e12 for amounts in flops), *spent] for part, spent in times.items()}
    rows["total"] = [sum(column) for column in zip(*rows.values(), strict=True)]
    lines = [f"{tokens} tokens, latents {shape}", f"one video at {rates}"]
    columns = ("TFLOP", *OPERATIONS, "s", "copies, s", "exposed, s")
    lines.append(f"  {'':16s}" + "".join(f"{column:>12s}" for column in columns))
    for name, numbers in rows.items():
        lines.append(f"  {name:16s}" + "".join(f"{x:12.0f}" if x >= 100 else f"{x:12.3g}" for x in numbers))
    total, time = sum(flops[0].values()), sum(spent for spent, _, _ in times.values())
    spans = [(span.name, span.videos * total, span.of_process * time) for span in work.spans]
    if work.base_videos:
        base, at_once = needs.of_base_video(work), work.processes // work.processes_per_clip
        amount = work.base_videos * sum(needs.flops(costs, base).values())
        elapsed = work.base_videos / at_once * sum(spent for spent, _, _ in needs.seconds(costs, base, rates).values())
        spans.append((f"before training, {work.base_videos} videos of the base model", amount, elapsed))
    for name, amount, elapsed in spans:
        spent = f"{elapsed:.4g} s" if elapsed < 3600 else f"{elapsed / 3600:.4g} h"
        gpu_hours = work.processes * elapsed / 3600
        hours = f" ({gpu_hours:.4g} GPU hours)" if gpu_hours >= 1 else ""
        lines.append(f"{name}: {amount / 1e15:.4g} PFLOP, {spent}{hours}")
    return lines


def memory_lines(memory: needs.Memory) -> list[str]:
    rows = [("resident", sum(memory.resident.values()), _parts(memory.resident))]
    rows += [(phase, memory.of(phase), f"resident + {_parts(parts)}") for phase, parts in memory.phases.items()]
    for phase, parts in memory.encode.items():
        rows.append((phase, sum(parts.values()), f"before the experts: {_parts(parts)}"))
    (phase, _), reserve = max(memory.by_phase.items(), key=lambda item: item[1]), format_size(needs.RESERVE)
    rows.append(("peak", memory.peak, f"in {phase}; with {reserve} for CUDA, libraries, fragmentation"))
    rows.append(("host", sum(memory.host.values()), f"of each process: {_parts(memory.host) or 'nothing'}"))
    return ["memory of one GPU", *(f"  {name:11s}{format_size(amount):>9s}   {parts}" for name, amount, parts in rows)]


def fit_verdict(memory: needs.Memory, work: Workload, machine: Machine) -> list[str]:
    """Report whether the run fits the machine, and the settings to change when it does not."""
    host = format_size(machine.processes * sum(memory.host.values()))
    limit = f" of {format_size(machine.host)}" if machine.host < math.inf else ""
    processes = f" for {machine.processes} processes" if machine.processes > 1 else ""
    needed = f"{host}{limit} in host memory{processes}"
    if machine.gpu is not None:
        needed = f"{format_size(memory.peak + needs.RESERVE)} of {format_size(machine.gpu)} on the GPU, {needed}"
    if not machine.host_fits(memory):
        return [f"does not fit: {needed}", "  start fewer processes, or keep more on the GPU"]
    if machine.gpu_fits(memory):
        return [f"fits: {needed}"]
    lines = [f"  {key}: {json.dumps(value).strip(chr(34))}" for key, value in smaller_settings(work).items()]
    lines = lines or ["  nothing: take larger GPUs"]
    return [f"does not fit: {needed}", "settings that take less, the fastest first:", *lines]


def smaller_settings(work: Workload) -> Mapping[str, Any]:
    """Return {configuration key: value} that take less memory of a GPU, in the order in which they cost time."""
    levers = {
        "train.memory.samples_on": ("cpu", work.samples_in_flight > 0 and work.samples_on == "gpu"),
        "train.memory.untrained": ("cpu_swap", work.untrained is not None and work.untrained_placement == "gpu"),
        "train.memory.decode_caches": ("offload", work.reward_gradient and work.decode_caches == "keep"),
        "train.memory.use_gradient_checkpointing": (True, not work.checkpointing),
        "train.memory.use_gradient_checkpointing_offload": (True, not work.offload_inputs),
        "train.per_device_train_batch_size": (1, work.batch > 1),
        "train.memory.trained": ("cpu_swap", work.sharding == "none" and work.trained_placement == "gpu"),
        "train.memory.kept_chunks": (0, work.kept_chunks > 0),
        "train.memory.active_graphs": ("replay", work.kept_steps > 0),
    }
    return {key: value for key, (value, helps) in levers.items() if helps}


def _parts(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {format_size(amount)}" for name, amount in parts.items())


def format_size(amount: float) -> str:
    """Format bytes as 57.3 GB or 4.2 MB."""
    unit, divisor = ("GB", 1e9) if amount >= 1e9 else ("MB", 1e6)
    return f"{amount / divisor:.1f} {unit}"
