"""The estimate as text."""

import json
import math
from collections.abc import Callable, Mapping

import torch

from rewardfl.config import SWAPPED
from rewardfl.estimate.advice import KEEP_ATTENTION, Option, fits, recommend, with_options
from rewardfl.estimate.measure import Costs, measure
from rewardfl.estimate.needs import (
    RESERVE,
    SHARED,
    Memory,
    checkpoint_bytes,
    clip_cache_bytes,
    evaluation_flops,
    flops,
    full_graph,
    memory,
)
from rewardfl.run.monitor import total_memory
from rewardfl.run.work import Sampling, Work

TFLOPS = 400.0  # TFLOP/s that an H100 reaches in bfloat16, when nothing else is said


def estimate(work: Work, gpu_memory: float | None, tflops: float = TFLOPS) -> tuple[str, bool]:
    """(what the run takes, as text, and whether it fits). gpu_memory: of one GPU, in bytes; anything fits in None."""
    costs = measure(work.video)
    sections = [work_table(costs, work, tflops), memory_table(costs, work), disk_table(costs, work)]
    if gpu_memory is not None:
        sections.append(verdict(costs, work, gpu_memory))
    return "\n\n".join("\n".join(lines) for lines in sections), gpu_memory is None or fits(costs, work, gpu_memory)


def dry_run(work: Work, device: torch.device, say: Callable[[str], None]) -> int:
    """Say what the run takes. The exit code: 2 where it does not fit the GPU that is there."""
    text, enough = estimate(work, total_memory(device))
    say(text)
    return 0 if enough else 2


def work_table(costs: Costs, work: Work, tflops: float) -> list[str]:
    """FLOPs by part, and seconds at `tflops` TFLOP/s: of one video, and of parts of the run."""
    tokens, shape = costs.experts[work.trained[0]].tokens, "x".join(map(str, costs.shape))
    parts = flops(costs, work)
    total, second = sum(parts.values()), tflops * 1e12  # FLOPs of a second
    lines = [f"{tokens} tokens, latents {shape}", f"compute, one video         TFLOP   s at {tflops:g} TFLOP/s"]
    for name, amount in (parts | {"total": total}).items():
        digits = f"{amount / 1e12:.0f}" if amount >= 1e14 else f"{amount / 1e12:.3g}"
        lines.append(f"  {name:20s}{digits:>10s}{amount / second:10.3g}")
    swapped = work.placement in SWAPPED or work.trained_placement in SWAPPED
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
    one = evaluation_flops(costs, work, evaluation)
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


def memory_table(costs: Costs, work: Work) -> list[str]:
    lines = memory_lines(memory(costs, work))
    if work.reward_gradient:
        inputs, decode, chunks = (work.batch * amount for amount in full_graph(costs, work))
        lines.append(
            f"plain autograd through {sum(work.replay.values())} steps and the decoder would keep "
            f"{size(inputs + decode)}: block inputs {size(inputs)}, decoder {size(decode)} ({size(chunks)} "
            "checkpointed by chunk)"
        )
    return lines


def memory_lines(needs: Memory) -> list[str]:
    lines = ["memory of one GPU", _memory_line("resident", sum(needs.resident.values()), _parts(needs.resident))]
    for phase, parts in needs.phases.items():
        lines.append(_memory_line(phase, needs.of(phase), f"resident + {_parts(parts)}"))
    lines.append(_memory_line("encode", sum(needs.encode.values()), f"before the experts: {_parts(needs.encode)}"))
    phase = max(needs.by_phase, key=needs.by_phase.get)
    lines.append(
        _memory_line("peak", needs.peak, f"in {phase}; with {size(RESERVE)} for CUDA, libraries, fragmentation")
    )
    own = {name: amount for name, amount in needs.host.items() if name != SHARED}
    shared = f"; once on each machine: {_parts({SHARED: needs.host[SHARED]})}" if SHARED in needs.host else ""
    lines.append(f"host memory of one process: {_parts(own) if own else 'nothing'}{shared}")
    return lines


def _memory_line(name: str, amount: float, parts: str) -> str:
    return f"  {name:11s}{size(amount):>9s}   {parts}"


def disk_table(costs: Costs, work: Work) -> list[str]:
    adapter, state = checkpoint_bytes(costs, work)
    cache = clip_cache_bytes(costs, work)
    saved = f"  a checkpoint: {size(adapter + state)} (adapter {size(adapter)}, state {size(state)})"
    if work.saves is not None:
        saved += f"; {work.saves} in {work.steps} steps: {size(work.saves * (adapter + state))}"
    cached = f"  conditioning cache of a clip: {size(sum(cache.values()))} ({_parts(cache)})"
    if work.clips is not None:
        cached += f"; of {work.clips} clips: {size(work.clips * sum(cache.values()))}"
    return ["disk", saved, cached]


def verdict(costs: Costs, work: Work, gpu_memory: float) -> list[str]:
    """Whether the run fits `gpu_memory` bytes, and what to set when it does not."""
    need = f"{size(memory(costs, work).peak + RESERVE)} of {size(gpu_memory)}"
    if fits(costs, work, gpu_memory):
        return [f"fits: {need}", *_room(costs, work, gpu_memory)]
    lines, before, base = [f"does not fit: {need}"], work, sum(flops(costs, work).values())
    for option in recommend(costs, work, gpu_memory):
        after = with_options(before, [option])
        saved = memory(costs, before).peak - memory(costs, after).peak
        share = 100 * (sum(flops(costs, after).values()) - sum(flops(costs, before).values())) / base
        lines.append(f"  set {_settings(option)} (saves {size(saved)}, {share:+.1f} % time{option.note})")
        before = after
    closest = memory(costs, before)
    needs = f"{size(closest.peak + RESERVE)} on the GPU and {size(sum(closest.host.values()))} in the host"
    if fits(costs, before, gpu_memory):
        return [*lines, f"  then it takes {needs}"]
    return [*lines, f"no setting makes it fit; the closest takes {needs}"]


def _room(costs: Costs, work: Work, gpu_memory: float) -> list[str]:
    """What saves time and fits, too."""
    after = with_options(work, [KEEP_ATTENTION])
    if not work.checkpointing or work.keeps_graphs or work.keep_attention or not fits(costs, after, gpu_memory):
        return []
    more = memory(costs, after).peak - memory(costs, work).peak
    before = sum(flops(costs, work).values())
    share = 100 * (sum(flops(costs, after).values()) - before) / before
    return [f"  there is room for {_settings(KEEP_ATTENTION)} (takes {size(more)} more, {share:+.1f} % time)"]


def _settings(option: Option) -> str:
    return ", ".join(f"{key}: {json.dumps(value).strip(chr(34))}" for key, value in option.settings.items())


def _parts(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {size(amount)}" for name, amount in parts.items())


def size(amount: float) -> str:
    """Bytes in words: 57.3 GB, 4.2 MB."""
    unit, divisor = ("GB", 1e9) if amount >= 1e9 else ("MB", 1e6)
    return f"{amount / divisor:.1f} {unit}"
