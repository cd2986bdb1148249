"""Alarms of a run: reward hacking, frozen faces, artifacts, early stop, the score of `best`."""

import math
import statistics
from collections.abc import Iterator, Sequence

_WINDOW = 10  # updates whose means are compared
# Smallest motion over the real clip's. Smallest flow, landmark motion, sharpness and coverage of the judge over their
# values in the run's first updates.
MOTION_ALARM = 0.8
REVERSALS_GUARD = 0.1  # rise of the mean reversals; -1 is steady motion, 1 a change of direction with every frame
# Factors. Over five updates on the tiny world a healthy run changes its grid by 1.08 and its saturation by 1.04. A run
# that trains on a colour reaches 10 and 3.
GRID_GUARD, SATURATION_GUARD = 1.5, 1.25
COLOUR_GUARD = 0.05  # change of the mean red, green or blue in [0, 1]; 13 of 255 levels are a visible tint
LOOK_GUARD = 0.03  # fall of the look of the face in [0, 1] (rewards/face/look.py)
GAIN_GUARD, SHARE_GUARD = 0.05, 0.5  # hacked: the face score gained this much, and the judge less than this share of it
DATA_LOSS_GUARD = 0.1  # rise of the data loss, relative


def recent_mean(history: Sequence[dict[str, float]], since: int, keys: Sequence[str]) -> float | None:
    """Return the mean of the first of `keys` that has values after step `since`; None where none has."""
    means = (_mean(key, [line for line in history if line["step"] > since]) for key in keys)
    return next((mean for mean in means if math.isfinite(mean)), None)


def _finite(key: str, lines: Sequence[dict[str, float]]) -> list[float]:
    """Return the finite values."""
    return [line[key] for line in lines if line.get(key) is not None and math.isfinite(line[key])]


def _mean(key: str, lines: Sequence[dict[str, float]]) -> float:
    """Return the mean of the finite values; nan without any."""
    values = _finite(key, lines)
    return sum(values) / len(values) if values else math.nan


def suspects(ids: Sequence[str], finite: Sequence[bool]) -> str:
    """Describe which samples may have made a gradient nan or inf. finite: their values before the backward pass."""
    broken = dict.fromkeys(sample for sample, is_finite in zip(ids, finite, strict=True) if not is_finite)
    if broken:
        return f"before the backward pass, of {', '.join(broken)}"
    return f"in the backward pass of {', '.join(dict.fromkeys(ids))}"


def alarms(history: Sequence[dict[str, float]], window: int = _WINDOW) -> Iterator[str]:
    """Yield warnings about the last `window` updates, compared with the run's first; once per window.

    The reward may fall by the first window's standard deviation, motion to MOTION_ALARM of the real clips'.
    `broken_guards` has the held-out judge's limits. history: the lines of metrics.jsonl after every update.
    """
    history = _updates(history)
    if len(history) < 2 * window or len(history) % window:
        return

    first, last = history[:window], history[-window:]
    was, now = (_mean("reward/mean", steps) for steps in (first, last))
    spread = _spread("reward/mean", first)
    if now < was - spread:
        yield (
            f"reward/mean is {now:.3f}, it was {was:.3f} (standard deviation {spread:.3f}) in the first {window} "
            "updates: the run unlearns; go back to checkpoints/best, lower train.learning_rate or raise kl_weight"
        )
    motion = _mean("reward/motion", last)
    if motion < MOTION_ALARM:
        yield f"motion is {motion:.2f} of the real clips', below {MOTION_ALARM:g}"
    if _finite("verdict/accepted", last) and _mean("verdict/accepted", last) == 0:
        yield "not one move was accepted (verdict/accepted); verdict/refused/... says which term refuses them"
    yield from broken_guards(first, last, MOTION_ALARM)


def broken_guards(
    first: Sequence[dict[str, float]], last: Sequence[dict[str, float]], motion: float, grid: float = GRID_GUARD
) -> list[str]:
    """Return a line for each guard that the means over the updates `last` break, compared with the `first` updates.

    motion: smallest flow, landmark motion, sharpness and coverage, as a share of the first mean. grid: largest grid, as
    a multiple of it. A metric without values breaks no guard.
    """
    judge, spread = "reward/held_out", _spread("reward/held_out", first)  # the judge's score may fall by the spread
    steady = {"flow": "optical flow", "motion": "landmark motion", "sharpness": "sharpness", "coverage": "coverage"}
    leaves = "data loss: the model leaves its data; raise anchor.weight, or lower train.learning_rate"
    tint = ("the clips take on a tint", -COLOUR_GUARD, COLOUR_GUARD)
    # {metric: (words, lowest, highest)} of last mean / first mean, and of last mean - first mean
    factors = {f"{judge}/{part}": (words, motion, math.inf) for part, words in steady.items()} | {
        f"{judge}/grid": ("grid: the model's tokens show", 0.0, grid),
        f"{judge}/saturation": ("saturation", 1 / SATURATION_GUARD, SATURATION_GUARD),
        "actor/data_loss": (leaves, 0.0, 1 + DATA_LOSS_GUARD),
    }
    differences = {
        judge: ("the held-out judge's score", -spread, math.inf),
        f"{judge}/reversals": ("reversals: the clips tremble", -math.inf, REVERSALS_GUARD),
        f"{judge}/look": ("look of the face: eyes or mouth are drawn worse", -LOOK_GUARD, math.inf),
        **dict.fromkeys((f"{judge}/red", f"{judge}/green", f"{judge}/blue"), tint),
    }
    broken = []
    for key, (words, lowest, highest) in (factors | differences).items():
        was, now = _mean(key, first), _mean(key, last)
        name, change = ("factor", now / (was or math.nan)) if key in factors else ("difference", now - was)
        if change < lowest or change > highest:
            how = f"{name} {change:.3f}, allowed {lowest:.3g} to {highest:.3g}"
            broken.append(f"{key} went from {was:.3f} to {now:.3f} ({how}): {words}")
    gain, judge_gain = (_mean(key, last) - _mean(key, first) for key in ("actor/face_score", judge))
    if gain > GAIN_GUARD and judge_gain < SHARE_GUARD * gain:
        why = f"the held-out judge's ({judge}) by {judge_gain:.3f}: the reward may be hacked"
        broken.append(f"the face score (actor/face_score) rose by {gain:.3f}, and {why}")
    return broken


def early_stop(history: Sequence[dict[str, float]], *, window: int, patience: int, motion: float, grid: float) -> str:
    """Return in one line why train.early_stop ends a run with this history; "" where the run continues.

    It ends when each of the last `patience` full windows of updates breaks a guard (broken_guards), compared with the
    first. history: the lines of metrics.jsonl: a resumed run ends at the same update.
    """
    updates = _updates(history)
    windows = [updates[end - window : end] for end in range(window, len(updates) + 1, window)]
    if len(windows) <= patience:
        return ""
    broken = [broken_guards(windows[0], steps, motion, grid) for steps in windows[-patience:]]
    if not all(broken):
        return ""
    measure = f"steps {windows[0][0]['step']} to {windows[0][-1]['step']}"
    broke = f"steps {windows[-patience][0]['step']} to {windows[-1][-1]['step']}"
    return (
        f"train.early_stop: compared with {measure}, {broke} break guards (window {window}, patience {patience}); "
        f"in the last window {'; '.join(broken[-1])}"
    )


def score_for_best(
    history: Sequence[dict[str, float]],
    since: int,
    keys: Sequence[str],
    *,
    window: int | None = None,
    motion: float,
    grid: float = GRID_GUARD,
) -> tuple[float | None, list[str]]:
    """Return (score of a checkpoint, guards that it breaks). The score is `recent_mean`; None with a broken guard.

    The guards compare the updates after step `since`, at least `window` (None: _WINDOW), with the run's first `window`.
    """
    updates, window = _updates(history), window or _WINDOW
    count = max(window, sum(line["step"] > since for line in updates))
    broken = broken_guards(updates[:window], updates[window:][-count:], motion, grid)
    return None if broken else recent_mean(history, since, keys), broken


def _updates(history: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    """Return the history without step 0, an evaluation before the first update."""
    return [line for line in history if line["step"] > 0]


def _spread(key: str, lines: Sequence[dict[str, float]]) -> float:
    """Return the standard deviation of the finite values; 0 without any."""
    return statistics.pstdev(_finite(key, lines) or [0.0])
