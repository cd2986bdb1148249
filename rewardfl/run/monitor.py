"""What a training script tells of itself: seconds, memory, and warnings when the numbers look wrong."""

import contextlib
import math
import resource
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

PROCESS = Path("/proc/self")
# How much the judge's mean reversals may rise before a warning: a clip that goes on as it does has -1, one that goes
# back and forth with every frame has 1.
REVERSALS_ALARM = 0.1


class Timer:
    """Seconds by name: `with timer("decode"): ...` adds up."""

    def __init__(self):
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def peak_memory_gb(device: torch.device) -> float:
    """Peak since it was last asked, in 1e9 bytes: of the device's allocator, or on a CPU of the process's memory.

    Where the system does not let a process reset its own peak, it is that since the start.
    """
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak / 1e9
    if not PROCESS.is_dir():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    (line,) = (line for line in (PROCESS / "status").read_text().splitlines() if line.startswith("VmHWM"))
    with contextlib.suppress(OSError):  # a container may forbid it
        (PROCESS / "clear_refs").write_text("5")  # proc(5): resets the peak resident set size
    return int(line.split()[1]) * 1024 / 1e9


def total_memory(device: torch.device) -> int | None:
    """Bytes of a GPU; None for the CPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def recent_mean(history: Sequence[dict[str, float]], since: int, keys: Sequence[str]) -> float | None:
    """Mean of the first of `keys` that is there at all, over the lines after step `since`; None without any."""
    means = (_mean(key, [line for line in history if line["step"] > since]) for key in keys)
    return next((mean for mean in means if math.isfinite(mean)), None)


def _finite(key: str, lines: Sequence[dict[str, float]]) -> list[float]:
    """The values of the lines that have a finite number."""
    return [line[key] for line in lines if line.get(key) is not None and math.isfinite(line[key])]


def _mean(key: str, lines: Sequence[dict[str, float]]) -> float:
    """Over the lines that have a finite number; nan where none has."""
    values = _finite(key, lines)
    return sum(values) / len(values) if values else math.nan


def suspects(ids: Sequence[str], finite: Sequence[bool]) -> str:
    """Which of an update's samples a gradient that is not finite may come from.

    finite: of each sample, whether its own values were, before the backward pass.
    """
    broken = dict.fromkeys(one for one, fine in zip(ids, finite, strict=True) if not fine)
    if broken:
        return f"before the backward pass, of {', '.join(broken)}"
    return f"in the backward pass of {', '.join(dict.fromkeys(ids))}"


def alarms(history: Sequence[dict[str, float]], motion_alarm: float, window: int = 10) -> Iterator[str]:
    """Warnings about the last `window` updates: the reward falls, the faces freeze, or the judge does not see the gain.

    The last window is compared with the run's first. The reward may fall by the first one's standard deviation; by the
    held-out judge, flow, landmark motion and sharpness may fall to `motion_alarm` of what they were, and reversals rise
    by REVERSALS_ALARM.

    history: the lines of metrics.jsonl; an evaluation before the first update is none of them. To be asked after every
    update, whatever of them is logged elsewhere: it speaks after each `window` of them, from the second on.
    """
    history = [line for line in history if line["step"] > 0]
    if len(history) < 2 * window or len(history) % window:
        return

    first, last = history[:window], history[-window:]
    was, now = (_mean("reward/mean", steps) for steps in (first, last))
    spread = statistics.pstdev(_finite("reward/mean", first) or [0.0])
    if now < was - spread:
        yield (
            f"reward/mean is {now:.3f}, it was {was:.3f} (standard deviation {spread:.3f}) in the first {window} "
            "updates: the run unlearns; go back to checkpoints/best, lower train.learning_rate or raise kl_weight"
        )
    motion = _mean("reward/motion", last)
    if motion < motion_alarm:
        yield f"motion is {motion:.2f} of the real clips', below reward.motion_alarm {motion_alarm:g}"
    gain = _mean("actor/face_score", last) - _mean("actor/face_score", first)
    judged = _mean("reward/held_out", last) - _mean("reward/held_out", first)
    if gain > 0.05 and judged < 0.5 * gain:
        yield f"the face score gained {gain:.3f} but the held-out judge saw {judged:.3f}: the reward may be hacked"
    for part, words in (("flow", "optical flow"), ("motion", "landmark motion"), ("sharpness", "sharpness")):
        was, now = (_mean(f"reward/held_out/{part}", steps) for steps in (first, last))
        if was > 0 and now < motion_alarm * was:
            yield (
                f"the held-out judge's {words} (reward/held_out/{part}) is {now / was:.2f} of what it was in the first "
                f"{window} updates, below reward.motion_alarm {motion_alarm:g}"
            )
    was, now = (_mean("reward/held_out/reversals", steps) for steps in (first, last))
    if now - was > REVERSALS_ALARM:
        yield (
            f"the held-out judge's reversals (reward/held_out/reversals) rose from {was:.2f} to {now:.2f}, by more "
            f"than {REVERSALS_ALARM:g}: the clips tremble"
        )
