"""Figures of a report, from records of judged videos: means over people (or prompts) with bootstrap intervals.

Two arms are compared on the clips (person and noise) that both have with the figure.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import scipy.stats
import torch
from torch import Tensor

from rewardfl.evaluation.arms import Arm
from rewardfl.evaluation.records import REAL, VAE, Record
from rewardfl.evaluation.verification import UNMEASURED, Verification, equal_error_rate
from rewardfl.rewards.face import identity_kept
from rewardfl.rewards.face.identity_kept import Scale, ThroughVae

Interval = dict[str, float]  # mean, low, high: the ends of the 95 % interval

RESAMPLES = 10_000

_LEAST = 1e-9  # smallest denominator of a ratio


class ClipKey(NamedTuple):
    """A video of an arm."""

    row: str
    seed: int
    person: str


Values = dict[ClipKey, float]  # values of one figure of one arm, without clips that lack it

# compared by their ratio: motion of pixels, of a recogniser's landmarks, and canaries
RATIOS = {"flow", "face_flow", "pixel_change", "sharpness", "speed", "nonrigid", "grid", "saturation"}
RATIOS |= {"displacement", "lk_flow", "mouth"}

FROZEN = 0.5  # a clip is frozen below this share of the base's non-rigid motion

THRESHOLD = 0.4  # a limit of FaceSim, for the share of frames above it


def is_ratio(name: str) -> bool:
    """Return whether two arms' figures are compared by their ratio. A reward's name and zero are arbitrary."""
    return not name.startswith("rewards/") and name.rpartition("/")[2] in RATIOS


def format_interval(value: Interval, sign: str = "") -> str:
    """Format an interval as mean [low, high], with the digits that the largest needs. sign: + to write it."""
    largest = max(map(abs, value.values()))
    count = 1 if largest >= 100 else 4 if 0 < largest < 0.1 else 3
    mean, low, high = (f"{value[key]:{sign}.{count}f}" for key in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]"


@functools.lru_cache(maxsize=4)
def resampled(count: int) -> Tensor:
    """Draw (RESAMPLES, count) indices with replacement, always the same."""
    return torch.randint(0, count, (RESAMPLES, count), generator=torch.Generator().manual_seed(0))


def interval(values: Tensor) -> Interval:
    """Return the mean of (n,) values and the ends of its 95 % bootstrap interval."""
    return ratio_interval(values, torch.ones_like(values))


def ratio_interval(numerator: Tensor, denominator: Tensor) -> Interval:
    """Return the ratio of two means of (n,) values with its interval."""
    rows = resampled(len(numerator))
    ratios = numerator[rows].mean(1) / denominator[rows].mean(1).clamp(min=_LEAST)
    low, high = ratios.quantile(torch.tensor([0.025, 0.975])).tolist()
    mean = numerator.mean() / denominator.mean().clamp(min=_LEAST)
    return {"mean": float(mean), "low": low, "high": high}


def record_figures(record: Record, verified: Verification = UNMEASURED) -> dict[str, float]:
    """Return the figures of a record and of its curves, without missing ones. drift: the slope of FaceSim per frame."""
    figures = {name: value for name, value in record["figures"].items() if value is not None}
    for judge, points in record["curves"].items():
        curve, count = np.asarray(points), len(points)
        if count > 1:
            time = np.arange(count) - (count - 1) / 2
            figures[f"{judge}/drift"] = float(time @ curve / (time @ time))
        figures[f"{judge}/worst_tenth"] = float(np.sort(curve)[: max(1, count // 10)].mean())
        figures[f"{judge}/last_quarter"] = float(curve[-max(1, count // 4) :].mean())
        figures[f"{judge}/above_threshold"] = float((curve > THRESHOLD).mean())
        if judge in verified.thresholds:
            figures[f"{judge}/accepted"] = float((curve > verified.thresholds[judge]).mean())
    return figures


@dataclass(frozen=True, kw_only=True)
class Table:
    """Figures by arm, clip and name, and records by arm and clip. Arm REAL repeats a row's real clip for each noise.

    scales: by recogniser; empty where there is none. no_scale: the reason.
    """

    figures: Mapping[str, Mapping[ClipKey, Mapping[str, float]]]
    records: Mapping[str, Mapping[ClipKey, Record]]
    scales: Mapping[str, Scale]
    no_scale: str
    verified: Verification = UNMEASURED

    def values(self, arm: str, name: str) -> Values:
        return {clip: figures[name] for clip, figures in self.figures[arm].items() if name in figures}

    def names(self, arm: str) -> list[str]:
        """Return all figures of the arm's clips, in the order of measurement."""
        return list(dict.fromkeys(name for figures in self.figures[arm].values() for name in figures))

    def place(self, judge: str, *arms: str) -> dict[str, Interval]:
        """Return the place of an arm, or its change from a second one, on the scales of clips and of photos."""
        scales, places = {"": self.scales.get(judge), "_photos": self.verified.scales.get(judge)}, {}
        name = f"{judge}/face_sim"  # with the photos of a person who also has a clip: face_sim_photos
        for end, scale in ((end, scale) for end, scale in scales.items() if scale is not None):
            face_sim = [self.values(arm, name) | self.values(arm, name + end) for arm in arms]
            pairs = pair_people(*({c: x for c, x in arm.items() if c.person in scale.another} for arm in face_sim))
            if pairs.people:
                by_name = [dict(zip(pairs.people, values.tolist(), strict=True)) for values in pairs.values]
                places[f"{judge}/identity_kept{end}"] = place_on_scale(scale, *by_name)
        return places

    def frames(self, arm: str, judge: str) -> Tensor:
        """Return FaceSim of frames 1 .. F - 1 of the arm's clips, (clips, F - 1)."""
        return torch.tensor([record["curves"][judge] for record in self.records[arm].values()], dtype=torch.float64)


def make_table(records: Sequence[Record], arms: Sequence[str], verified: Verification = UNMEASURED) -> Table:
    """Make a table of the records of these arms and of their real clips."""
    by_arm: dict[str, dict[ClipKey, Record]] = {arm: {} for arm in arms}
    real = {record["row"]: record for record in records if record["arm"] == REAL}
    for record in records:
        if record["arm"] in by_arm:
            by_arm[record["arm"]][ClipKey(record["row"], record["seed"], record["person"])] = record
    clips = sorted({clip for arm_records in by_arm.values() for clip in arm_records})
    by_arm[REAL] = {clip: real[clip.row] for clip in clips if clip.row in real}
    figures = {
        arm: {clip: record_figures(record, verified) for clip, record in arm_records.items()}
        for arm, arm_records in by_arm.items()
    }
    rows = {clip.row for clip in by_arm[REAL]}
    through_vae = [record for record in records if record["arm"] == VAE and record["row"] in rows]
    is_complete = {record["row"] for record in through_vae} == rows
    missing = "" if is_complete else "there is no model whose VAE the real clips could go through"
    no_scale = identity_kept.why_no_scale(len({clip.person for clip in by_arm[REAL]}), missing) if rows else ""
    names = [] if no_scale or not rows else through_vae[0]["embedding"]
    scales = {name: scale for name in names if (scale := find_identity_scale(through_vae, name)) is not None}
    if names and not scales:
        no_scale = "real clips through the VAE are no more like their own people than like others"
    return Table(figures=figures, records=by_arm, scales=scales, no_scale=no_scale, verified=verified)


def find_identity_scale(records: Sequence[Record], recogniser: str) -> Scale | None:
    """Return the scale of identity kept by records of real clips through the VAE; None where it has no length."""
    clips = []
    for record in records:
        face, pool = (torch.tensor(record[key][recogniser]) for key in ("embedding", "pool"))
        face_sim = record["figures"][f"{recogniser}/face_sim"]
        clips.append(ThroughVae(person=record["person"], face_sim=face_sim, face=face, pool=pool))
    return identity_kept.find_scale(clips)


def place_on_scale(scale: Scale, face_sim: Mapping[str, float], base: Mapping[str, float] | None = None) -> Interval:
    """Return the place of FaceSim, by person, on the scale; with a base of the same people how far that is from it."""
    distances = scale.distances(face_sim) - (0 if base is None else scale.distances(base))
    return ratio_interval(distances, scale.lengths(list(face_sim)))


class Pairs(NamedTuple):
    """A figure of several arms by person. people: of `values`, sorted by row id."""

    people: list[str]
    values: Tensor  # (arms, people)
    left_out: list[str]  # people without a clip that all arms have


def pair_people(*arms: Values) -> Pairs:
    """Pair arms by name: each person's mean over the clips (row and noise) that all arms have."""
    clips: dict[str, list[ClipKey]] = {}
    for clip in sorted(set.intersection(*map(set, arms))):
        clips.setdefault(clip.person, []).append(clip)
    means = [[sum(arm[clip] for clip in same) / len(same) for same in clips.values()] for arm in arms]
    return Pairs(list(clips), torch.tensor(means), sorted({clip.person for arm in arms for clip in arm} - clips.keys()))


def mean_interval(values: Values) -> Interval | None:
    """Return the mean over people with its interval; None for no clips."""
    return interval(pair_people(values).values[0]) if values else None


def frozen_share(values: Values, base: Values) -> Interval | None:
    """Return the share of clips with less than FROZEN of the base's non-rigid motion, where the base moves."""
    clips = [clip for clip in values.keys() & base.keys() if base[clip] > 0]
    return mean_interval({clip: float(values[clip] < FROZEN * base[clip]) for clip in clips})


def colour_shift(table: Table, arm: str, base: str) -> Interval | None:
    """Return the distance of the mean colour from the base's, same person and noise, in RGB of [0, 1]."""
    colours = ("canary/red", "canary/green", "canary/blue")
    pairs = [(table.values(arm, name), table.values(base, name)) for name in colours]
    clips = set.intersection(*(set(values) for pair in pairs for values in pair))
    return mean_interval({clip: math.hypot(*(a[clip] - b[clip] for a, b in pairs)) for clip in clips})


def compare(values: Values, base: Values, *, by_ratio: bool) -> dict | None:
    """Return the difference from the base, the share of people with more, and the ratio; None without common clips."""
    pairs = pair_people(values, base)
    if not pairs.people:
        return None
    left, right = pairs.values
    change = {"difference": interval(left - right), "people_with_more": float((left > right).float().mean())}
    if by_ratio:
        change["ratio"] = ratio_interval(left, right)
    return change | {"left_out": len(values.keys() ^ base.keys())}


def summarise(records: Sequence[Record], arms: Sequence[Arm], verified: Verification = UNMEASURED) -> dict:
    """Return the report. Arms are compared with their base (`find_bases`), adapters also with their steps' start."""
    table = make_table(records, [arm.name for arm in arms], verified)
    clips, judges = {clip for figures in table.figures.values() for clip in figures}, list(records[0]["curves"])
    bases, starts = find_bases(arms), {arm.steps: arm.name for arm in arms if arm.origin}
    summaries = [arm_report(table, arm, bases[arm.steps], judges) for arm in arms]
    for arm, summary in zip(arms, summaries, strict=True):
        if arm.adapter and not arm.origin and (start := starts.get(arm.steps)):
            summary |= {"start": start, "over_start": compare_figures(table, arm.name, start)}
    return {
        "people": len({clip.person for clip in clips}), "clips": len(table.figures[arms[0].name]),
        "per_clip": per_clip(table), "real": arm_figures(table, REAL, judges), "arms": summaries,
        "identity_scale": {"missing": table.no_scale, "recognisers": scale_ends(table.scales)},
        "photo_scale": {
            "missing": verified.missing, "recognisers": scale_ends(verified.scales),
            "rank_correlation": rank_correlations(summaries, judges),
        },
        "verification": {
            "missing": verified.missing, "thresholds": dict(verified.thresholds),
            "equal_error_rate": {
                judge: {arm.name: equal_error_rate(table.frames(arm.name, judge).flatten(), others) for arm in arms}
                for judge, others in verified.impostors.items()
            },
        },
        "clips_without_real": len(clips) - len(table.records[REAL]),
    }  # fmt: skip


def scale_ends(scales: Mapping[str, Scale]) -> dict[str, dict[str, Interval]]:
    """Return the mean ends of each recogniser's scale, in FaceSim."""
    parts = {"another_person": "another", "real_through_vae": "through_vae"}
    return {
        judge: {end: interval(torch.tensor([*vars(scale)[part].values()])) for end, part in parts.items()}
        for judge, scale in scales.items()
    }


def rank_correlations(summaries: Sequence[Mapping], judges: Sequence[str]) -> dict[str, float]:
    """Return Spearman's rank correlation, over three arms or more, of the scales of photos and clips by recogniser."""
    correlations = {}
    for judge in judges:
        names = [f"{judge}/identity_kept{end}" for end in ("", "_photos")]
        pairs = [[s["figures"][name]["mean"] for name in names] for s in summaries if s["figures"].keys() >= {*names}]
        if len(pairs) >= 3:
            correlations[judge] = float(scipy.stats.spearmanr(pairs).statistic)
    return correlations


def find_bases(arms: Sequence[Arm]) -> dict[int, Arm]:
    """Return what each arm is compared with, by step count: the first arm of it, for other tools the first of all."""
    return {arm.steps: arm for arm in reversed(arms)} | ({0: arms[0]} if arms[-1].videos else {})


def arm_figures(table: Table, arm: str, judges: Sequence[str]) -> dict:
    """Return the means of an arm's figures with identity kept, and mean FaceSim of its clips' frames 1 .. F - 1."""
    figures: dict[str, Interval | None] = {}
    for name in table.names(arm):
        figures[name] = mean_interval(table.values(arm, name))
        judge, _, key = name.rpartition("/")
        if key == "face_sim":
            figures |= table.place(judge, arm)
    curves: dict[str, list[float]] = {judge: [] for judge in judges}
    for judge in judges if table.records[arm] else ():
        curves[judge] = [round(x, 4) for x in table.frames(arm, judge).mean(0).tolist()]
    return {"figures": figures, "per_frame": curves}


def compare_figures(table: Table, arm: str, base: str) -> dict[str, dict | None]:
    """Return the changes of an arm's figures against the base, and of identity kept."""
    changes: dict[str, dict | None] = {}
    for name in table.names(arm):
        judge, _, key = name.rpartition("/")
        change = compare(table.values(arm, name), table.values(base, name), by_ratio=is_ratio(name))
        changes[name] = change
        if key == "face_sim" and change:
            changes |= {place: change | {"difference": moved} for place, moved in table.place(judge, arm, base).items()}
    return changes


def arm_report(table: Table, arm: Arm, base: Arm, judges: Sequence[str]) -> dict:
    """Return an arm's figures, and their changes unless it is the base."""
    against = None if arm is base else base.name
    summary = {
        "name": arm.name, "steps": arm.steps, "adapter": arm.adapter and str(arm.adapter), "strength": arm.strength,
        "videos": arm.videos and str(arm.videos), "decoded": arm.videos is not None,
        "clips": len(table.figures[arm.name]), **arm_figures(table, arm.name, judges), "against": against,
        "origin": arm.origin,
    }  # fmt: skip
    if against:
        summary["compared"] = compare_figures(table, arm.name, against)
        nonrigid = [table.values(name, f"{judges[-1]}/nonrigid") for name in (arm.name, against)]
        summary |= {"frozen_share": frozen_share(*nonrigid), "colour_shift": colour_shift(table, arm.name, against)}
    return summary


def per_clip(table: Table) -> list[dict]:
    """Return every clip with its figures by arm and per frame."""
    lines, keys = [], ("curves", "detected", "file")
    for clip in sorted({clip for figures in table.figures.values() for clip in figures}):
        shots = {
            arm: {"figures": table.figures[arm][clip]} | {key: records[clip][key] for key in keys}
            for arm, records in table.records.items()
            if clip in records
        }
        line: dict = {"id": clip.row, "seed": clip.seed}
        if REAL in shots:
            line["real"] = shots.pop(REAL) | {"face_width": table.records[REAL][clip]["face_width"]}
        lines.append(line | {"arms": shots})
    return lines
