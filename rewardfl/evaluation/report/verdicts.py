"""Is the person kept, and what was paid? An evaluation in two sentences and its warnings, by rules."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rewardfl.evaluation.intervals import format_interval
from rewardfl.evaluation.report.meanings import (
    CANARIES,
    FROZEN_MOST,
    MEANINGS,
    MOVES,
    as_told,
    judge_words,
    main_judge,
    meaning,
    outside,
)
from rewardfl.training.alarms import GAIN_GUARD, SHARE_GUARD

FEW = 8  # people: an interval over fewer of them is rough


@dataclass(frozen=True)
class Verdict:
    """person: 1 where the arm keeps the person more than its base, -1 where less, 0 where that cannot be told.

    moves: whether every motion that could be measured is kept; None where none could be.
    """

    person: int
    moves: bool | None
    sentences: tuple[str, str]
    warnings: tuple[str, ...]


def verdict(report: Mapping, arm: Mapping) -> Verdict:
    """What is to be said of an arm that has a base.

    The person is kept more, or less, where the whole interval of FaceSim's change is on one side of 0. Motion is kept
    where the mean of each of MOVES over the base's is healthy.
    """
    person, first = _person(report, arm)
    moves, second = _motion(report, arm, person)
    return Verdict(person, moves, (first + _look(arm), second), tuple(_warnings(report, arm)))


def _person(report: Mapping, arm: Mapping) -> tuple[int, str]:
    judge, name, base = main_judge(report), arm["name"], arm["against"]
    found = arm["compared"][f"{judge}/face_sim"]
    if found is None:
        return 0, f"{name} and {base} have no clip in common, so nothing can be said of the person."
    change = found["difference"]
    by = (
        f"FaceSim by {judge_words(judge)} changes by {change['mean']:+.3f} "
        f"[{change['low']:+.3f}, {change['high']:+.3f}] "
        f"(95 % interval over {report['people']} people), and rises for {found['people_with_more']:.0%} of them"
    )
    if change["low"] > 0:
        return 1, f"{name} keeps the person more than {base}: {by}."
    if change["high"] < 0:
        return -1, f"{name} keeps the person less than {base}: {by}."
    return 0, f"Whether {name} keeps the person more than {base} cannot be told: {by}; the interval holds 0."


def _look(arm: Mapping) -> str:
    look = arm["compared"].get("look/face")
    if look is None:
        return ""
    change, share = format_interval(look["difference"]), look["people_with_more"]
    return f" The look of eyes and mouth changes by {change}; it rises for {share:.0%} of the people."


def _motion(report: Mapping, arm: Mapping, person: int) -> tuple[bool | None, str]:
    judge = main_judge(report)
    bases = {one["name"]: one for one in report["arms"]}
    kept: list[str] = []
    lost: list[str] = []
    for key in MOVES:
        name = key.replace("face/", f"{judge}/")
        found, before = arm["compared"].get(name), bases[arm["against"]]["figures"].get(name)
        if not found or not before or not before["mean"] > 0:  # what stands still has no share to keep
            continue
        told = f"{MEANINGS[key].label} is {format_interval(found['ratio'])}"
        (lost if outside(found, MEANINGS[key]) else kept).append(told)
    if lost:
        begin = "That is paid for with motion" if person > 0 else "Motion is lost"
        also = f"; kept: {', '.join(kept)}" if kept else ""
        return False, f"{begin}: {', '.join(lost)} of the base's{also}."
    if kept:
        return True, f"The motion is kept: {', '.join(kept)} of the base's."
    return None, "Nothing moves in the base's clips, so its motion has no measure."


def frozen(arm: Mapping) -> bool:
    """Whether more of the arm's clips are frozen than is healthy."""
    share = arm["frozen_share"] if arm["against"] else None
    return share is not None and as_told(share["mean"]) > FROZEN_MOST


def _warnings(report: Mapping, arm: Mapping) -> Iterator[str]:
    judge, judges, compared = main_judge(report), list(report["real"]["per_frame"]), arm["compared"]
    for name in CANARIES:
        if problem := outside(compared.get(name), MEANINGS[name]):
            yield f"{problem}."
    if frozen(arm):
        yield (
            f"{arm['frozen_share']['mean']:.0%} of the clips are frozen: they have less than half of the base's own "
            f"non-rigid motion (healthy: at most {FROZEN_MOST:.0%})."
        )
    for name, found in compared.items():
        if name.startswith("still/") and found and found["difference"]["low"] > 0:
            label = meaning(name, judges).label.capitalize()
            yield f"{label} has risen by {format_interval(found['difference'])}, which rewards stillness."
    trained, seen = (compared[f"{one}/face_sim"] for one in (judges[0], judge))
    if judges[0] != judge and trained and seen:
        gains = [one["difference"]["mean"] for one in (trained, seen)]
        if gains[0] > GAIN_GUARD and gains[1] < SHARE_GUARD * gains[0]:
            yield (
                f"The recogniser that was trained against has gained {gains[0]:.3f}, the held-out judge "
                f"{gains[1]:.3f}: the reward may be hacked."
            )
    if judge == "reward":
        yield "There is no held-out judge: the recogniser that was trained against is the only one that speaks here."
    if arm["decoded"] != {one["name"]: one["decoded"] for one in report["arms"]}[arm["against"]]:
        yield "One of the two was decoded from mp4 and the other was not; a codec takes detail and motion."
    if report["people"] < FEW:
        yield f"{report['people']} people are few, and intervals over fewer than {FEW} are rough."
