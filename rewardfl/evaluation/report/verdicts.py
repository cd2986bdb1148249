"""Figures in words, their healthy ranges, and the verdict on an arm by rules: identity, motion, warnings."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from rewardfl.evaluation.figures import THRESHOLD, format_interval, is_ratio
from rewardfl.training.alarms import COLOUR_GUARD, GAIN_GUARD, GRID_GUARD, LOOK_GUARD, SATURATION_GUARD, SHARE_GUARD

FEW = 8  # minimum number of people for a good interval
UP = math.inf


class Meaning(NamedTuple):
    """A figure in words. low, high: healthy range of arm / base for ratios, else of arm - base (docs/motion.md)."""

    label: str
    says: str
    low: float = -UP
    high: float = UP


MEANINGS = {
    "face/face_sim": Meaning("FaceSim", "Mean cosine of the later frames with the real clip's faces."),
    "face/face_sim_photos": Meaning("FaceSim, photos", "The same with the photos of a person who also has a clip."),
    "face/identity_kept": Meaning("identity kept", "FaceSim from others' clips (0) to the own (1), through the VAE."),
    "face/identity_kept_photos": Meaning("identity kept, photos", "The same from others' photos (0) to the own (1)."),
    "face/accepted": Meaning("accepted", "Share of frames above the FaceSim that 1 % of other people's pictures pass."),
    "face/coverage": Meaning("coverage", "Share of the frames in which a face is detected."),
    "face/drift": Meaning("drift per frame", "Slope of FaceSim along the clip; below 0 it drifts."),
    "face/worst_tenth": Meaning("worst tenth", "Mean FaceSim of the lowest tenth of the frames."),
    "face/last_quarter": Meaning("last quarter", "Mean FaceSim of the last quarter of the frames."),
    "face/above_threshold": Meaning("above threshold", f"Share of frames with FaceSim above {THRESHOLD}."),
    "face/speed": Meaning("landmark speed", "How fast the face's landmarks move, in face widths per frame.", 0.93),
    "face/nonrigid": Meaning("non-rigid motion", "How much the landmarks move against each other.", 0.93),
    "look/face": Meaning("look of the face", "Correlation of eyes and mouth with the real clip's.", -LOOK_GUARD),
    "motion/flow": Meaning("optical flow", "Mean flow over the frame, in pixels per frame.", 0.95),
    "motion/face_flow": Meaning("face flow", "Optical flow in the face's box only.", 0.95),
    "motion/displacement": Meaning("displacement", "How far the face has moved in the end: shimmer cancels.", 0.9),
    "motion/lk_flow": Meaning("damped flow", "Lucas-Kanade flow of strong gradients: shimmer hardly counts.", 0.95),
    "motion/mouth": Meaning("mouth", "How far the mouth opens and shuts where the real one, or the base's, does.", 0.8),
    "motion/silent_mouth": Meaning("silent mouth", "The same where that mouth stays as it is.", high=0.03),
    "motion/pixel_change": Meaning("pixel change", "Mean change of a pixel; above, the clip flickers.", 0.9, 1.1),
    "motion/sharpness": Meaning("sharpness", "Energy of the finest detail; below, the picture is blurred.", 0.95),
    "motion/reversals": Meaning("reversals", "-1 is steady motion, and 1 trembles.", high=0.02),
    "canary/grid": Meaning("grid energy", "Energy at the period of the model's tokens; 1 is none.", high=GRID_GUARD),
    "canary/saturation": Meaning("saturation", "Strength of the colours.", 1 / SATURATION_GUARD, SATURATION_GUARD),
    "canary/red": Meaning("mean red", "Mean of red, of 1: the picture's tint.", -COLOUR_GUARD, COLOUR_GUARD),
    "canary/green": Meaning("mean green", "Mean of green, of 1: the picture's tint.", -COLOUR_GUARD, COLOUR_GUARD),
    "canary/blue": Meaning("mean blue", "Mean of blue, of 1: the picture's tint.", -COLOUR_GUARD, COLOUR_GUARD),
    "colour_shift": Meaning("colour shift", "Distance of mean colours from the base's, in RGB of [0, 1]."),
    "base/distance": Meaning("distance to base", "Mean squared difference of pixels, over the base's variance."),
    "frozen_share": Meaning("frozen clips", "Share of clips with under half of the base's non-rigid motion.", high=0.1),
}

MOVES = ("face/speed", "face/nonrigid", "motion/flow", "motion/face_flow")  # by which motion is judged

CANARIES = [name for name, figure in MEANINGS.items() if figure[2:] != (-UP, UP) and "/" in name and name not in MOVES]


def main_judge(report: Mapping) -> str:
    """Return the recogniser that decides (`judging.Judges.main`)."""
    return list(report["real"]["per_frame"])[-1]


def judge_words(judge: str) -> str:
    """Return a recogniser's name in texts. One of --judge has its own."""
    return {"held_out": "the held-out judge", "reward": "the reward's own recogniser"}.get(judge, judge)


def meaning(name: str, judges: Sequence[str]) -> Meaning:
    """Return the meaning of a figure of a recogniser or a block, or of a reward's score."""
    block, _, key = name.partition("/")
    if block == "rewards":
        return Meaning(key, f"Score of reward.terms.{key}, on that reward's own scale.")
    return MEANINGS[f"face/{key}" if block in judges else name]


def healthy(name: str, judges: Sequence[str]) -> str:
    """Format a figure's healthy range as a remark in brackets; empty without one."""
    low, high = meaning(name, judges)[2:]
    words = f"{low:g} and more" if high == UP else f"{high:g} at most" if low == -UP else f"{low:g} to {high:g}"
    unlimited = low == -UP and high == UP
    return "" if unlimited else f" (healthy: {words}, {'of' if is_ratio(name) else 'from'} the base's)"


def explain(name: str, judges: Sequence[str]) -> tuple[str, str]:
    """Return a figure's label, and its explanation with the healthy range."""
    return meaning(name, judges).label, meaning(name, judges).says + healthy(name, judges)


def describe_unhealthy(name: str, change: Mapping | None, judges: Sequence[str]) -> str:
    """Describe a figure's change from `figures.compare` if its mean is outside the healthy range, else return ""."""
    bounds, key = meaning(name, judges), "ratio" if is_ratio(name) else "difference"
    if not change or not change.get(key):
        return ""
    mean = change[key]["mean"]
    if bounds.low <= round(mean, 6) <= bounds.high:  # float32 has 0.1 above 0.1
        return ""
    text = f"{mean:.3f} of the base's" if key == "ratio" else f"{mean:+.3f} from the base's"
    return f"{bounds.label.capitalize()} is {text}{healthy(name, judges)}"


def remarks(report: Mapping) -> list[str]:
    """Return sentences on rows without a clip, verification, and the scale of photos."""
    lines, checked = [], report["verification"]
    if without := report["clips_without_real"]:
        lines.append(
            f"{without} clips have no real clip: their faces are compared with photos, their motion with the base's, "
            "and figures that need a real clip are left out."
        )
    if checked["missing"]:
        lines.append(f"accepted frames, equal error rate, scale of photos: missing, {checked['missing']}")
    for judge, threshold in checked["thresholds"].items():
        rates = ", ".join(f"{arm} {rate:.3f}" for arm, rate in checked["equal_error_rate"][judge].items())
        line = f"verification ({judge}): accepted above FaceSim {threshold:.3f}; equal error rate: {rates}"
        if ends := report["photo_scale"]["recognisers"].get(judge):
            start, end = (f"{value['mean']:.3f}" for value in ends.values())
            line += f"; identity kept on photos: 0 is FaceSim {start}, 1 is {end}"
            if (rank := report["photo_scale"]["rank_correlation"].get(judge)) is not None:
                line += f"; Spearman's rank correlation with the scale of clips, over the arms: {rank:.2f}"
        elif without:
            line += "; identity kept on photos: missing, it takes photos of 10 other people, two of some, and the VAE"
        lines.append(line)
    return lines


class Verdict(NamedTuple):
    """Verdict on an arm. person: 1 if it is kept more, -1 if less, 0 if that cannot be told. moves: None unmeasured."""

    person: int
    moves: bool | None
    sentences: tuple[str, str]
    warnings: tuple[str, ...]


def compared_arms(report: Mapping) -> list[Mapping]:
    """Return the arms that have a base, in the order of their verdicts: starts last."""
    return sorted((arm for arm in report["arms"] if arm["against"]), key=lambda arm: bool(arm.get("origin")))


def verdict(report: Mapping, arm: Mapping) -> Verdict:
    """Judge an arm that has a base: the person against the start, if any, and motion by each of MOVES."""
    (person, first), (moves, second) = _person(report, arm), _motion(report, arm)
    return Verdict(person, moves, (first, second), tuple(_warnings(report, arm)))


def _person(report: Mapping, arm: Mapping) -> tuple[int, str]:
    judge, name, base = main_judge(report), arm["name"], arm["against"]
    for start in (other for other in report["arms"] if other["name"] == arm.get("start")):
        base = f"the run's start, {start['origin']}"
    change = (arm.get("over_start") or arm["compared"])[f"{judge}/face_sim"]
    if change is None:
        return 0, f"{name} and {base} have no clip in common, so nothing can be said of the person."
    difference = change["difference"]
    person = 1 if difference["low"] > 0 else -1 if difference["high"] < 0 else 0
    begin = f"{name} keeps the person {'less' if person < 0 else 'more'} than {base}"
    begin = begin if person else f"Whether {begin} cannot be told"
    return person, (
        f"{begin}: FaceSim by {judge_words(judge)} changes by {format_interval(difference, '+')} "
        f"(95 % interval over {report['people']} people)."
    )


def _motion(report: Mapping, arm: Mapping) -> tuple[bool | None, str]:
    judge = main_judge(report)
    texts: dict[bool, list[str]] = {True: [], False: []}  # by whether it is kept
    figures = {other["name"]: other["figures"] for other in report["arms"]}[arm["against"]]
    for key in MOVES:
        name = key.replace("face/", f"{judge}/")
        change, before = arm["compared"].get(name), figures.get(name)
        if change and before and before["mean"] > 0:  # a ratio to a base without motion means nothing
            text = f"{MEANINGS[key].label} is {format_interval(change['ratio'])}"
            texts[not describe_unhealthy(name, change, [judge])].append(text)
    if texts[False]:
        return False, f"Motion is lost: {', '.join(texts[False])} of the base's."
    if texts[True]:
        return True, f"The motion is kept: {', '.join(texts[True])} of the base's."
    return None, "Nothing moves in the base's clips, so its motion has no measure."


def _warnings(report: Mapping, arm: Mapping) -> Iterator[str]:
    judges = list(report["real"]["per_frame"])
    changes = arm.get("over_start") or arm["compared"]
    trained, other = changes[f"{judges[0]}/face_sim"], changes[f"{judges[-1]}/face_sim"]
    if len(judges) > 1 and trained and other:
        gain, seen = trained["difference"]["mean"], other["difference"]["mean"]
        if gain > GAIN_GUARD and seen < SHARE_GUARD * gain:
            yield (
                f"The recogniser that was trained against has gained {gain:.3f}, {judge_words(judges[-1])} {seen:.3f}: "
                "the reward may be hacked."
            )
    if judges == ["reward"]:
        yield "There is no held-out judge, only the recogniser that was trained against."
    if report["people"] < FEW:
        yield f"{report['people']} people are few, and intervals over fewer than {FEW} are rough."
