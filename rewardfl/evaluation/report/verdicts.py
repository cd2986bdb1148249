"""Verdict on an arm by rules: a sentence on identity, a sentence on motion, and warnings."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rewardfl.evaluation.intervals import format_interval
from rewardfl.evaluation.report.meanings import (
    CANARIES,
    FROZEN_MOST,
    MEANINGS,
    MOVES,
    describe_unhealthy,
    judge_words,
    main_judge,
    meaning,
    round_mean,
)
from rewardfl.training.alarms import GAIN_GUARD, SHARE_GUARD

FEW = 8  # minimum number of people for a good interval


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Verdict on an arm.

    person: 1 where the arm keeps the person more than its base, -1 where less, 0 where the interval holds 0. moves:
    whether every measured motion is kept; None where none is measured.
    """

    person: int
    moves: bool | None
    sentences: tuple[str, str]
    warnings: tuple[str, ...]


def verdict(report: Mapping, arm: Mapping) -> Verdict:
    """Judge an arm that has a base.

    The person is kept more, or less, where the whole interval of FaceSim's change is on one side of 0. Motion is kept
    where the mean of each of MOVES over the base's is healthy.
    """
    person, first = _person(report, arm)
    moves, second = _motion(report, arm, person)
    sentences, warnings = (first + _look(arm), second), tuple(_warnings(report, arm))
    return Verdict(person=person, moves=moves, sentences=sentences, warnings=warnings)


def _person(report: Mapping, arm: Mapping) -> tuple[int, str]:
    judge, name, base = main_judge(report), arm["name"], arm["against"]
    face_sim = arm["compared"][f"{judge}/face_sim"]
    if face_sim is None:
        return 0, f"{name} and {base} have no clip in common, so nothing can be said of the person."
    change = face_sim["difference"]
    by = (
        f"FaceSim by {judge_words(judge)} changes by {change['mean']:+.3f} "
        f"[{change['low']:+.3f}, {change['high']:+.3f}] "
        f"(95 % interval over {report['people']} people), and rises for {face_sim['people_with_more']:.0%} of them"
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
    bases = {base["name"]: base for base in report["arms"]}
    healthy: list[str] = []
    lost: list[str] = []
    for key in MOVES:
        name = key.replace("face/", f"{judge}/")
        change, before = arm["compared"].get(name), bases[arm["against"]]["figures"].get(name)
        if not change or not before or not before["mean"] > 0:  # a ratio to a base without motion means nothing
            continue
        text = f"{MEANINGS[key].label} is {format_interval(change['ratio'])}"
        (lost if describe_unhealthy(change, MEANINGS[key]) else healthy).append(text)
    if lost:
        begin = "That is paid for with motion" if person > 0 else "Motion is lost"
        also = f"; kept: {', '.join(healthy)}" if healthy else ""
        return False, f"{begin}: {', '.join(lost)} of the base's{also}."
    if healthy:
        return True, f"The motion is kept: {', '.join(healthy)} of the base's."
    return None, "Nothing moves in the base's clips, so its motion has no measure."


def frozen(arm: Mapping) -> bool:
    """Return whether more of the arm's clips are frozen than is healthy."""
    share = arm["frozen_share"] if arm["against"] else None
    return share is not None and round_mean(share["mean"]) > FROZEN_MOST


def _warnings(report: Mapping, arm: Mapping) -> Iterator[str]:
    judge, judges, compared = main_judge(report), list(report["real"]["per_frame"]), arm["compared"]
    for name in CANARIES:
        if problem := describe_unhealthy(compared.get(name), MEANINGS[name]):
            yield f"{problem}."
    if frozen(arm):
        yield (
            f"{arm['frozen_share']['mean']:.0%} of the clips are frozen: they have less than half of the base's own "
            f"non-rigid motion (healthy: at most {FROZEN_MOST:.0%})."
        )
    for name, change in compared.items():
        if name.startswith("still/") and change and change["difference"]["low"] > 0:
            label = meaning(name, judges).label.capitalize()
            yield f"{label} has risen by {format_interval(change['difference'])}, which rewards stillness."
    changes = [compared[f"{name}/face_sim"] for name in (judges[0], judge)]
    if judges[0] != judge and all(changes):
        gains = [change["difference"]["mean"] for change in changes]
        if gains[0] > GAIN_GUARD and gains[1] < SHARE_GUARD * gains[0]:
            yield (
                f"The recogniser that was trained against has gained {gains[0]:.3f}, the held-out judge "
                f"{gains[1]:.3f}: the reward may be hacked."
            )
    if judge == "reward":
        yield "There is no held-out judge: the recogniser that was trained against is the only one that speaks here."
    if arm["decoded"] != {other["name"]: other["decoded"] for other in report["arms"]}[arm["against"]]:
        yield "One of the two was decoded from mp4 and the other was not; a codec takes detail and motion."
    if report["people"] < FEW:
        yield f"{report['people']} people are few, and intervals over fewer than {FEW} are rough."
