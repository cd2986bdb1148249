"""Figures in words, their healthy ranges, and the verdict on an arm by rules.

A verdict is a sentence on identity, a sentence on motion, the origin of the run's start, and warnings.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rewardfl.evaluation.figures import format_interval
from rewardfl.training.alarms import COLOUR_GUARD, GAIN_GUARD, GRID_GUARD, LOOK_GUARD, SATURATION_GUARD, SHARE_GUARD

# an arm over its base, and an arm minus its base: "Reading the figures" of docs/motion.md
FLOW_KEPT, LANDMARKS_KEPT, SHARPNESS_KEPT = 0.95, 0.93, 0.95

PIXELS_KEPT = (0.9, 1.1)

REVERSALS_RISE = 0.02

FROZEN_MOST = 0.1  # maximum share of frozen clips

FEW = 8  # minimum number of people for a good interval

UP = math.inf


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """A figure in words. ratio, change: healthy ranges of arm / base, arm - base. broken: meaning of a bad value."""

    label: str
    says: str
    ratio: tuple[float, float] | None = None
    change: tuple[float, float] | None = None
    broken: str = ""


MEANINGS = {
    "face/face_sim": Meaning(label="FaceSim", says="Mean cosine of the later frames with the real clip's faces."),
    "face/identity_kept": Meaning(
        label="identity kept",
        says="FaceSim from other people's real clips (0) to the person's own (1), both through the model's VAE.",
    ),
    "face/coverage": Meaning(label="coverage", says="Share of the frames in which a face is detected."),
    "face/drift": Meaning(label="drift per frame", says="Slope of FaceSim along the clip; below 0 it drifts."),
    "face/worst_tenth": Meaning(label="worst tenth", says="Mean FaceSim of the lowest tenth of the frames."),
    "face/last_quarter": Meaning(label="last quarter", says="Mean FaceSim of the last quarter of the frames."),
    "face/above_threshold": Meaning(label="above threshold", says="Share of frames with FaceSim above --threshold."),
    "face/cap": Meaning(label="self-similarity", says="Similarity of the real clip's frames: the ceiling."),
    "face/speed": Meaning(
        label="landmark speed", says="How fast the face's landmarks move, in face widths per frame.",
        ratio=(LANDMARKS_KEPT, UP), broken="the head stands still",
    ),
    "face/nonrigid": Meaning(
        label="non-rigid motion", says="How much the landmarks move against each other: the expression.",
        ratio=(LANDMARKS_KEPT, UP), broken="the expression stands still",
    ),
    "look/face": Meaning(
        label="look of the face", says="Correlation of eyes and mouth with the real clip's, from -1 to 1.",
        change=(-LOOK_GUARD, UP), broken="eyes or mouth are drawn worse",
    ),
    "motion/flow": Meaning(
        label="optical flow", says="Mean flow over the whole frame, in pixels per frame; no network measures it.",
        ratio=(FLOW_KEPT, UP), broken="the clip moves less",
    ),
    "motion/face_flow": Meaning(
        label="face flow", says="Optical flow in the face's box alone.",
        ratio=(FLOW_KEPT, UP), broken="the head is still before what moves around it",
    ),
    "motion/pixel_change": Meaning(
        label="pixel change", says="Mean absolute change of a pixel from frame to frame.",
        ratio=PIXELS_KEPT, broken="above, the picture flickers; below, it stands still",
    ),
    "motion/sharpness": Meaning(
        label="sharpness", says="Energy of the picture's finest detail.",
        ratio=(SHARPNESS_KEPT, UP), broken="the picture is blurred",
    ),
    "motion/reversals": Meaning(
        label="reversals", says="How much successive flows point against each other: -1 is steady motion, 1 trembles.",
        change=(-UP, REVERSALS_RISE), broken="the motion trembles",
    ),
    "canary/grid": Meaning(
        label="grid energy", says="Energy at the period of the VAE's and the patch's grid; 1 is a picture without one.",
        ratio=(0.0, GRID_GUARD), broken="the model's tokens show",
    ),
    "canary/saturation": Meaning(
        label="saturation", says="How strong the colours are.",
        ratio=(1 / SATURATION_GUARD, SATURATION_GUARD), broken="the colours have become stronger or weaker",
    ),
    **{
        f"canary/{colour}": Meaning(
            label=f"mean {colour}", says=f"Mean of the {colour} channel, of 1.",
            change=(-COLOUR_GUARD, COLOUR_GUARD), broken="the picture has taken on a tint",
        )
        for colour in ("red", "green", "blue")
    },
    "colour_shift": Meaning(label="colour shift", says="Distance of mean colours from the base's, in RGB of [0, 1]."),
    "frozen_share": Meaning(
        label="frozen clips",
        says=f"Share of clips with less than half of the base's non-rigid motion (healthy: at most {FROZEN_MOST:g}).",
    ),
}  # fmt: skip

MOVES = ("face/speed", "face/nonrigid", "motion/flow", "motion/face_flow")  # by which motion is judged

CANARIES = (
    "look/face", "motion/sharpness", "motion/reversals", "motion/pixel_change", "canary/grid", "canary/saturation",
    "canary/red", "canary/green", "canary/blue",
)  # fmt: skip


def main_judge(report: Mapping) -> str:
    """Return the recogniser that decides (`judging.Judges.main`)."""
    return list(report["real"]["per_frame"])[-1]


def judge_words(judge: str) -> str:
    """Return a recogniser's name in texts. One of --judge has its own."""
    return {"held_out": "the held-out judge", "reward": "the reward's own recogniser"}.get(judge, judge)


def meaning(name: str, judges: Sequence[str]) -> Meaning:
    """Return the meaning of a figure of a recogniser or a block, or of a reward's score."""
    block, _, key = name.partition("/")
    if block in judges:
        return MEANINGS[f"face/{key}"]
    if block == "rewards":
        return Meaning(label=key, says=f"Score of reward.others.{key}, on that reward's own scale.")
    return MEANINGS[name]


def describe_unhealthy(change: Mapping | None, bounds: Meaning) -> str:
    """Describe a figure's change that is not healthy; empty where it is, or where there is no range.

    change: from `figures.compare`. Its mean decides, and the border itself is healthy.
    """
    key = "ratio" if bounds.ratio else "difference"
    limits = bounds.ratio or bounds.change
    if limits is None or not change or not change.get(key):
        return ""
    mean = change[key]["mean"]
    if limits[0] <= round(mean, 6) <= limits[1]:  # float32 has 0.1 above 0.1
        return ""
    text = f"{mean:.3f} of the base's" if bounds.ratio else f"{mean:+.3f} from the base's"
    return f"{bounds.label[0].upper()}{bounds.label[1:]} is {text}{healthy(bounds)}: {bounds.broken}"


def healthy(bounds: Meaning) -> str:
    """Format the healthy range as a remark in brackets; empty where there is none."""
    limits = bounds.ratio or bounds.change
    if limits is None:
        return ""
    low, high = limits
    words = f"{low:g} and more" if high == UP else f"{high:g} at most" if low == -UP else f"{low:g} to {high:g}"
    return f" (healthy: {words}, {'of' if bounds.ratio else 'from'} the base's)"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Verdict on an arm.

    person: 1 where the arm keeps the person more than its start, or else its base, -1 where less, 0 where the interval
    holds 0. moves: whether every measured motion is kept; None where none is measured.
    """

    person: int
    moves: bool | None
    sentences: tuple[str, ...]
    warnings: tuple[str, ...]


def compared_arms(report: Mapping) -> list[Mapping]:
    """Return the arms that have a base, in the order of their verdicts: starts last."""
    return sorted((arm for arm in report["arms"] if arm["against"]), key=lambda arm: bool(arm.get("origin")))


def verdict(report: Mapping, arm: Mapping) -> Verdict:
    """Judge an arm that has a base.

    The person is kept more, or less, where the whole interval of FaceSim's change is on one side of 0: against the
    start, or without one against the base. Motion is kept where the mean of each of MOVES over the base's is healthy.
    """
    start = next((other for other in report["arms"] if other["name"] == arm.get("start")), None)
    person, first = _person(report, arm, start)
    moves, second = _motion(report, arm, start, person)
    sentences = (first, second, *([f"{start['name']}: {start['origin']}."] if start else []))
    return Verdict(person=person, moves=moves, sentences=sentences, warnings=tuple(_warnings(report, arm)))


def _person(report: Mapping, arm: Mapping, start: Mapping | None) -> tuple[int, str]:
    judge, name, base = main_judge(report), arm["name"], "the run's start" if start else arm["against"]
    changes = arm["over_start"] if start else arm["compared"]
    face_sim = changes[f"{judge}/face_sim"]
    if face_sim is None:
        return 0, f"{name} and {base} have no clip in common, so nothing can be said of the person."
    change = face_sim["difference"]
    person = 1 if change["low"] > 0 else -1 if change["high"] < 0 else 0
    begin = {
        1: f"{name} keeps the person more than {base}",
        0: f"Whether {name} keeps the person more than {base} cannot be told",
        -1: f"{name} keeps the person less than {base}",
    }[person]
    mean, low, high = (f"{change[key]:+.3f}" for key in ("mean", "low", "high"))
    sentence = (
        f"{begin}: FaceSim by {judge_words(judge)} changes by {mean} [{low}, {high}] (95 % interval over "
        f"{report['people']} people), and rises for {face_sim['people_with_more']:.0%} of them"
        f"{'' if person else '; the interval holds 0'}."
    )
    if start:
        both = [(other["name"], other["compared"][f"{judge}/face_sim"]) for other in (arm, start)]
        gains = [f"{name} {format_interval(change['difference'])}" for name, change in both if change]
        sentence += f" From {arm['against']} it changes by: {', '.join(gains)}."
    return person, sentence


def _motion(report: Mapping, arm: Mapping, start: Mapping | None, person: int) -> tuple[bool | None, str]:
    judge = main_judge(report)
    of_start = start["compared"] if start else {}
    bases = {base["name"]: base for base in report["arms"]}
    held: list[str] = []
    lost: list[str] = []
    for key in MOVES:
        name = key.replace("face/", f"{judge}/")
        change, before = arm["compared"].get(name), bases[arm["against"]]["figures"].get(name)
        if change and before and before["mean"] > 0:  # a ratio to a base without motion means nothing
            texts = lost if describe_unhealthy(change, MEANINGS[key]) else held
            also = f" (start {of_start[name]['ratio']['mean']:.3f})" if of_start.get(name) else ""
            texts.append(f"{MEANINGS[key].label} is {format_interval(change['ratio'])}{also}")
    if lost:
        begin = "That is paid for with motion" if person > 0 and not start else "Motion is lost"
        also = f"; kept: {', '.join(held)}" if held else ""
        return False, f"{begin}: {', '.join(lost)} of the base's{also}."
    if held:
        return True, f"The motion is kept: {', '.join(held)} of the base's."
    return None, "Nothing moves in the base's clips, so its motion has no measure."


def frozen(arm: Mapping) -> bool:
    """Return whether more of the arm's clips are frozen than is healthy."""
    share = arm.get("frozen_share")
    return share is not None and round(share["mean"], 6) > FROZEN_MOST


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
    changes = [(arm.get("over_start") or compared)[f"{name}/face_sim"] for name in (judges[0], judge)]
    if judges[0] != judge and all(changes):
        trained, other = (change["difference"]["mean"] for change in changes)
        if trained > GAIN_GUARD and other < SHARE_GUARD * trained:
            yield (
                f"The recogniser that was trained against has gained {trained:.3f}, the held-out judge {other:.3f}: "
                "the reward may be hacked."
            )
    if judge == "reward":
        yield "There is no held-out judge: the recogniser that was trained against is the only one that speaks here."
    if arm["decoded"] != {other["name"]: other["decoded"] for other in report["arms"]}[arm["against"]]:
        yield "One of the two was decoded from mp4 and the other was not; a codec takes detail and motion."
    if report["people"] < FEW:
        yield f"{report['people']} people are few, and intervals over fewer than {FEW} are rough."
