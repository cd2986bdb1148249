"""Alarms of a run: reward hacking, frozen faces, artifacts, early stop, the score of `best`."""

import math
import statistics
from collections.abc import Iterator, Sequence

WINDOW = 10  # updates whose means are compared

# How much the judge's mean reversals may rise: a clip that goes on as it does has -1, one that goes back and forth with
# every frame has 1.
REVERSALS_GUARD = 0.1

# By what factor the judge's grid may rise, where 1 is a picture without one, and its saturation rise or fall. On the
# tiny world, over five updates, a healthy run's go by 1.08 and 1.04; one that trains on a colour reaches 10 and 3.
GRID_GUARD = 1.5

SATURATION_GUARD = 1.25

# How far the clips' mean red, green or blue may move, of 1: 13 levels of 255 over a whole picture are a tint.
COLOUR_GUARD = 0.05

# How far the look of the face (rewards/face/look.py) may fall, of 1.
LOOK_GUARD = 0.03

# The reward is taken for hacked when the trained face score has gained this much and the judge less than this share.
GAIN_GUARD, SHARE_GUARD = 0.05, 0.5

# By what share of itself the data loss may rise.
DATA_LOSS_GUARD = 0.1


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


def alarms(history: Sequence[dict[str, float]], motion_alarm: float, window: int = WINDOW) -> Iterator[str]:
    """Warnings about the last `window` updates: the reward falls, the faces freeze, or the judge speaks against them.

    The last window is compared with the run's first. The reward may fall by the first one's standard deviation, the
    trained detector's motion to `motion_alarm` of the real clips'; for the judge see `broken_guards`.

    history: the lines of metrics.jsonl; an evaluation before the first update is none of them. To be asked after every
    update, whatever of them is logged elsewhere: it speaks after each `window` of them, from the second on.
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
    if motion < motion_alarm:
        yield f"motion is {motion:.2f} of the real clips', below reward.motion_alarm {motion_alarm:g}"
    yield from broken_guards(first, last, motion_alarm)


def broken_guards(
    first: Sequence[dict[str, float]], last: Sequence[dict[str, float]], motion: float, grid: float = GRID_GUARD
) -> list[str]:
    """What the held-out judge has against the updates `last`, beside the run's `first`: a line for each broken guard.

    Of the means over the updates, reward/held_out may fall by the first ones' standard deviation; flow, landmark
    motion, sharpness and coverage to `motion` of what they were; reversals may rise by REVERSALS_GUARD, grid to `grid`
    times what it was; saturation may go to SATURATION_GUARD times what it was or to what it was over that, red, green
    and blue by COLOUR_GUARD either way; the look of the face may fall by LOOK_GUARD. And where the trained face score
    has gained more than GAIN_GUARD, the judge must have seen SHARE_GUARD of that. The data loss may rise by
    DATA_LOSS_GUARD of what it was. What was not measured breaks nothing.
    """
    found = []

    def means(key: str) -> tuple[float, float]:
        return _mean(key, first), _mean(key, last)

    def judge(part: str, words: str, was: float, now: float, limit: str) -> None:
        found.append(f"the held-out judge's {words} (reward/held_out{part}) went from {was:.3f} to {now:.3f}, {limit}")

    was, now = means("reward/held_out")
    spread = _spread("reward/held_out", first)
    if now < was - spread:
        judge("", "score", was, now, f"by more than its standard deviation {spread:.3f}")
    (score_was, score_now), gain = means("actor/face_score"), now - was
    if score_now - score_was > GAIN_GUARD and gain < SHARE_GUARD * (score_now - score_was):
        found.append(
            f"the face score (actor/face_score) went from {score_was:.3f} to {score_now:.3f}, and the held-out judge "
            f"(reward/held_out) from {was:.3f} to {now:.3f}: the reward may be hacked"
        )
    parts = {"flow": "optical flow", "motion": "landmark motion", "sharpness": "sharpness", "coverage": "coverage"}
    for part, words in parts.items():
        was, now = means(f"reward/held_out/{part}")
        if was > 0 and now < motion * was:
            judge(f"/{part}", words, was, now, f"{now / was:.2f} of what it was, below {motion:g}")
    was, now = means("reward/held_out/reversals")
    if now - was > REVERSALS_GUARD:
        judge("/reversals", "reversals", was, now, f"by more than {REVERSALS_GUARD:g}: the clips tremble")
    was, now = means("reward/held_out/grid")
    if now > grid * was:
        judge("/grid", "grid", was, now, f"{now / was:.2f} of what it was, above {grid:g}: the model's tokens show")
    was, now = means("reward/held_out/saturation")
    if was > 0 and not was / SATURATION_GUARD <= now <= was * SATURATION_GUARD and math.isfinite(now):
        judge("/saturation", "saturation", was, now, f"by more than a factor of {SATURATION_GUARD:g}")
    was, now = means("reward/held_out/look")
    if now < was - LOOK_GUARD:
        judge("/look", "look of the face", was, now, f"by more than {LOOK_GUARD:g}: eyes or mouth are drawn worse")
    was, now = means("actor/data_loss")
    if now > (1 + DATA_LOSS_GUARD) * was:
        found.append(
            f"the data loss (actor/data_loss) went from {was:.4f} to {now:.4f}, by more than {DATA_LOSS_GUARD:.0%}: "
            "the model leaves its data; raise anchor.weight, or lower train.learning_rate"
        )
    for colour in ("red", "green", "blue"):
        was, now = means(f"reward/held_out/{colour}")
        if abs(now - was) > COLOUR_GUARD:
            judge(f"/{colour}", colour, was, now, f"by more than {COLOUR_GUARD:g}: the clips take on a tint")
    return found


def early_stop(history: Sequence[dict[str, float]], *, window: int, patience: int, motion: float, grid: float) -> str:
    """Why train.early_stop ends a run with this history, in one line; "" where the run goes on.

    The updates are cut into windows. The run ends when each of the last `patience` whole windows, compared with the
    first, breaks one of `broken_guards`. A function of metrics.jsonl alone: a resumed run ends at the same update.

    history: the lines of metrics.jsonl. motion, grid: of broken_guards.
    """
    updates = _updates(history)
    windows = [updates[end - window : end] for end in range(window, len(updates) + 1, window)]
    if len(windows) <= patience:
        return ""
    broken = [broken_guards(windows[0], one, motion, grid) for one in windows[-patience:]]
    if not all(broken):
        return ""
    since, until = windows[-patience][0]["step"], windows[-1][-1]["step"]
    return (
        f"train.early_stop: beside steps {windows[0][0]['step']} to {windows[0][-1]['step']}, steps {since} to {until} "
        f"break guards (window {window}, patience {patience}); in the last window {'; '.join(broken[-1])}"
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
    """(what checkpoints/best is chosen by, the guards that keep this checkpoint from it, which then has None).

    The score is `recent_mean` after step `since`. The guards are broken_guards of the updates since then, at least
    `window` of them, beside the run's first `window`, which have nothing to be compared with; None: WINDOW.
    """
    updates, window = _updates(history), window or WINDOW
    asked = max(window, sum(line["step"] > since for line in updates))
    broken = broken_guards(updates[:window], updates[window:][-asked:], motion, grid)
    return None if broken else recent_mean(history, since, keys), broken


def _updates(history: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    """Without an evaluation before the first update."""
    return [line for line in history if line["step"] > 0]


def _spread(key: str, lines: Sequence[dict[str, float]]) -> float:
    """Standard deviation over the lines that have a finite number; 0 where none has."""
    return statistics.pstdev(_finite(key, lines) or [0.0])
