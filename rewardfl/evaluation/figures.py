"""The figures of a report, from records of judged videos (_records): pure functions, no pixels.

People are resampled, not clips: two noises of one person are not two people. Two arms are compared on the clips (person
and noise) that both have, and a clip that lacks a figure in one of them is left out of that figure alone.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rewardfl.evaluation.arms import Arm
from rewardfl.evaluation.identity_scale import IdentityScale, find_identity_scale
from rewardfl.evaluation.intervals import Interval, interval, ratio_interval
from rewardfl.evaluation.records import REAL, VAE, Record
from rewardfl.rewards.face.identity_kept import why_no_scale


class ClipKey(NamedTuple):
    """A video of an arm."""

    row: str
    seed: int
    person: str


Values = dict[ClipKey, float]  # of one figure of one arm, where it is known

AMOUNTS = ("flow", "face_flow", "pixel_change", "sharpness")  # of the block motion: those compared by their ratio

MOVES = ("speed", "nonrigid")  # of a recogniser's figures: likewise

RATIOS = {*AMOUNTS, *MOVES, "grid", "saturation"}

COLOURS = ("canary/red", "canary/green", "canary/blue")

FROZEN = 0.5  # of the base's non-rigid motion, below which a clip is frozen

IN_STRATA = ("face_sim", "drift", "coverage", "nonrigid")


@dataclass(frozen=True)
class Reading:
    """How figures are to be read. edges: ascending widths of the face in the real clip, in pixels; below the first
    it is too small to be scored. threshold: of FaceSim, for the share of frames above it."""

    edges: Sequence[float] = (40.0, 80.0)
    threshold: float = 0.4


def drift(curve: Sequence[float]) -> float:
    """Slope of the least-squares line through FaceSim of frames 1 .. F - 1, per frame; NaN for fewer than two."""
    if len(curve) < 2:
        return math.nan
    time = np.arange(len(curve)) - (len(curve) - 1) / 2
    return float(time @ np.asarray(curve) / (time @ time))


def worst_tenth(curve: Sequence[float]) -> float:
    """Mean of the lowest tenth of the frames, at least one."""
    return float(np.sort(curve)[: max(1, len(curve) // 10)].mean())


def above(curve: Sequence[float], threshold: float) -> float:
    """Share of the frames above the threshold."""
    return float((np.asarray(curve) > threshold).mean())


def last_quarter(curve: Sequence[float]) -> float:
    """Mean of the last quarter of the frames, at least one."""
    return float(np.mean(curve[-max(1, len(curve) // 4) :]))


def figures_of(record: Record, threshold: float) -> dict[str, float]:
    """A record's figures, and those of its curves; without those that are not known."""
    found = {name: value for name, value in record["figures"].items() if value is not None}
    for judge, curve in record["curves"].items():
        shapes = {"drift": drift(curve), "worst_tenth": worst_tenth(curve), "last_quarter": last_quarter(curve)}
        shapes["above_threshold"] = above(curve, threshold)
        found |= {f"{judge}/{name}": value for name, value in shapes.items() if not math.isnan(value)}
    return found


@dataclass(frozen=True)
class Table:
    """Figures by arm, clip and name, and the records; the real clips' by arm REAL, the same for each of their clips.

    scales: by recogniser; empty where there is none. no_scale: why, in words.
    """

    figures: Mapping[str, Mapping[ClipKey, Mapping[str, float]]]
    records: Mapping[str, Mapping[ClipKey, Record]]
    scales: Mapping[str, IdentityScale]
    no_scale: str

    @property
    def widths(self) -> dict[str, float]:
        """The mean width of a person's face in the real clips, in pixels."""
        return per_person({clip: record["face_width"] for clip, record in self.records[REAL].items()})

    def values(self, arm: str, name: str) -> Values:
        return {clip: found[name] for clip, found in self.figures[arm].items() if name in found}

    def names(self, arm: str) -> list[str]:
        """All figures that some clip of the arm has, in the order in which they were measured."""
        return list(dict.fromkeys(name for found in self.figures[arm].values() for name in found))

    def curve(self, arm: str, judge: str) -> list[float]:
        """Mean FaceSim of frames 1 .. F - 1 over the arm's clips."""
        rows = [record["curves"][judge] for record in self.records[arm].values()]
        return [round(float(value), 4) for value in np.mean(rows, 0)]


def table_of(records: Sequence[Record], arms: Sequence[str], reading: Reading) -> Table:
    """The records of these arms, and of the real clips that belong to them."""
    made: dict[str, dict[ClipKey, Record]] = {arm: {} for arm in arms}
    real = {record["row"]: record for record in records if record["arm"] == REAL}
    for record in records:
        if record["arm"] in made:
            made[record["arm"]][ClipKey(record["row"], record["seed"], record["person"])] = record
    clips = sorted({clip for of_arm in made.values() for clip in of_arm})
    made[REAL] = {clip: real[clip.row] for clip in clips}
    read = {id(record): figures_of(record, reading.threshold) for of_arm in made.values() for record in of_arm.values()}
    figures = {arm: {clip: read[id(record)] for clip, record in found.items()} for arm, found in made.items()}
    rows = {clip.row for clip in clips}
    through_vae = [record for record in records if record["arm"] == VAE and record["row"] in rows]
    is_whole = {record["row"] for record in through_vae} == rows
    missing = "" if is_whole else "there is no model whose VAE the real clips could go through"
    no_scale = why_no_scale(len({clip.person for clip in clips}), missing)
    names = [] if no_scale else through_vae[0]["embedding"]
    scales = {name: scale for name in names if (scale := find_identity_scale(through_vae, name)) is not None}
    if names and not scales:
        no_scale = "real clips through the VAE are no more like their own people than like others"
    return Table(figures, made, scales, no_scale)


def per_person(values: Values, clips: Iterable[ClipKey] | None = None) -> dict[str, float]:
    """Return the mean over each person's clips, in the order of the rows' ids. clips: those that count; None: all."""
    people: dict[str, list[float]] = {}
    for clip in sorted(values if clips is None else clips):
        people.setdefault(clip.person, []).append(values[clip])
    return {person: sum(numbers) / len(numbers) for person, numbers in people.items()}


def by_person(values: Values, clips: Iterable[ClipKey] | None = None) -> Tensor:
    """Return `per_person` as (people,)."""
    return torch.tensor(list(per_person(values, clips).values()))


def both(mine: Values, theirs: Values) -> tuple[Tensor, Tensor]:
    """Two (people,) means over the clips that both have."""
    clips = mine.keys() & theirs.keys()
    return by_person(mine, clips), by_person(theirs, clips)


def known(values: Tensor) -> Interval | None:
    """The interval; None where nobody has the figure."""
    return interval(values) if len(values) else None


def frozen_share(mine: Values, theirs: Values) -> Interval | None:
    """Share of clips whose non-rigid motion is below FROZEN of the base's of the same person and noise.

    Clips whose base does not move are left out.
    """
    clips = [clip for clip in mine.keys() & theirs.keys() if theirs[clip] > 0]
    return known(by_person({clip: float(mine[clip] < FROZEN * theirs[clip]) for clip in clips}))


def colour_shift(table: Table, arm: str, base: str) -> Interval | None:
    """Distance of the clip's mean colour from the base's of the same person and noise, in RGB of [0, 1]."""
    mine, theirs = ([table.values(one, name) for name in COLOURS] for one in (arm, base))
    clips = set.intersection(*(set(values) for values in (*mine, *theirs)))
    pairs = list(zip(mine, theirs, strict=True))
    return known(by_person({clip: math.hypot(*(a[clip] - b[clip] for a, b in pairs)) for clip in clips}))


def compared(mine: Values, theirs: Values, by_ratio: bool) -> dict | None:
    """mine - theirs, the share of people with more, and their ratio where that means something; None for no clip."""
    left, right = both(mine, theirs)
    if not len(left):
        return None
    found = {"difference": interval(left - right), "people_with_more": float((left > right).float().mean())}
    if by_ratio:
        found["ratio"] = ratio_interval(left, right)
    found["left_out"] = len(mine.keys() | theirs.keys()) - len(mine.keys() & theirs.keys())
    return found


def summarise(records: Sequence[Record], arms: Sequence[Arm], reading: Reading) -> dict:
    """All figures of the report; means over people, and 95 % bootstrap intervals over them.

    arms: the first is what is before, the second what is after; each is compared with the first of its step count.
    """
    table = table_of(records, [arm.name for arm in arms], reading)
    judges = list(next(iter(table.records[REAL].values()))["curves"])
    widths = table.widths
    people = sorted(widths)
    report: dict = {"people": len(people), "clips": len(table.figures[arms[0].name])}
    report |= {"reading": {"face_sizes": list(reading.edges), "threshold": reading.threshold}}
    report |= {"recognisers": {}, "motion": {}, "per_clip": per_clip(table, arms, judges)}
    if len(arms) > 1:
        report["compared"] = {"before": arms[0].name, "after": arms[1].name}
        names = {"before": arms[0].name, "after": arms[1].name, "real": REAL}
        report["recognisers"] = {judge: recogniser_report(table, judge, names) for judge in judges}
        report["motion"] = motion_report(table, names)
    first, *others = reading.edges  # a face on an edge is between
    places = {one: 0 if width < first else 1 + sum(width > edge for edge in others) for one, width in widths.items()}
    between = [f"{low:g}-{high:g} px" for low, high in itertools.pairwise(reading.edges)]
    sizes = [f"< {first:g} px", *between, f"> {reading.edges[-1]:g} px"]
    strata = {name: [p for p in people if places[p] == i] for i, name in enumerate(sizes)}
    report["face_sizes"] = {name: len(found) for name, found in strata.items()}
    report["identity_scale"] = scale_report(table)
    report["real"] = own_figures(table, REAL, judges)
    bases = {arm.steps: arm for arm in reversed(arms)}
    report["arms"] = [arm_report(table, arm, bases[arm.steps], judges, strata) for arm in arms]
    return report


def own_figures(table: Table, arm: str, judges: Sequence[str]) -> dict:
    figures: dict[str, Interval | None] = {}
    for name in table.names(arm):
        figures[name] = known(by_person(table.values(arm, name)))
        judge = name.removesuffix("/face_sim")
        if judge in table.scales and name.endswith("/face_sim"):
            figures[f"{judge}/identity_kept"] = table.scales[judge].place(per_person(table.values(arm, name)))
    return {"figures": figures, "per_frame": {judge: table.curve(arm, judge) for judge in judges}}


def scale_report(table: Table) -> dict:
    """Return the ends of identity kept by recogniser as FaceSim, and why there is no scale where there is none."""
    ends = {
        judge: {
            "another_person": interval(torch.tensor(list(scale.another.values()))),
            "real_through_vae": interval(torch.tensor(list(scale.through_vae.values()))),
        }
        for judge, scale in table.scales.items()
    }
    return {"missing": table.no_scale, "recognisers": ends}


def identity_change(scale: IdentityScale, after: Values, before: Values, face_sim: dict) -> dict:
    """Return the change of identity kept on the clips that both arms have. face_sim: as `compared` has its change."""
    clips = after.keys() & before.keys()
    return face_sim | {"difference": scale.change(per_person(after, clips), per_person(before, clips))}


def arm_report(table: Table, arm: Arm, base: Arm, judges: Sequence[str], strata: Mapping[str, Sequence[str]]) -> dict:
    """One arm: its own figures, and unless it is the base, what became of each, and the strata of face sizes."""
    found = {
        "name": arm.name, "steps": arm.steps, "adapter": None if arm.adapter is None else str(arm.adapter),
        "strength": arm.strength, "videos": None if arm.videos is None else str(arm.videos),
        "decoded": arm.videos is not None, "clips": len(table.figures[arm.name]),
        **own_figures(table, arm.name, judges),
    }  # fmt: skip
    against = None if arm is base else base.name
    found["against"] = against
    if against:
        changes: dict[str, dict | None] = {}
        for name in table.names(arm.name):
            block, _, key = name.rpartition("/")
            by_ratio = block != "rewards" and key in RATIOS  # a reward may have any name, and its scale any zero
            changes[name] = compared(table.values(arm.name, name), table.values(against, name), by_ratio)
            if key == "face_sim" and block in table.scales and changes[name]:
                changes[f"{block}/identity_kept"] = identity_change(
                    table.scales[block], table.values(arm.name, name), table.values(against, name), changes[name]
                )
        found["compared"] = changes
        nonrigid = [table.values(one, f"{judges[-1]}/nonrigid") for one in (arm.name, against)]
        found |= {"frozen_share": frozen_share(*nonrigid), "colour_shift": colour_shift(table, arm.name, against)}
    # a face below the first edge is too small to be scored: it is counted, and not among these
    found["strata"] = {
        name: stratum_report(table, arm.name, against, judges, people) for name, people in list(strata.items())[1:]
    }
    return found


def stratum_report(table: Table, arm: str, base: str | None, judges: Sequence[str], people: Sequence[str]) -> dict:
    """What is told of people whose faces are of one size."""

    def of_these(one: str, name: str) -> Values:
        return {clip: value for clip, value in table.values(one, name).items() if clip.person in people}

    names = [f"{judge}/{key}" for judge in judges for key in IN_STRATA]
    found: dict = {"people": len(people), "figures": {name: known(by_person(of_these(arm, name))) for name in names}}
    if base:
        found["compared"] = {
            name: compared(of_these(arm, name), of_these(base, name), name.endswith("nonrigid")) for name in names
        }
    return found


def recogniser_report(table: Table, judge: str, names: Mapping[str, str]) -> dict:
    """Return a recogniser's figures. names: before | after | real -> arm."""
    values = {
        which: {key: table.values(arm, f"{judge}/{key}") for key in ("face_sim", "coverage", "last_quarter", *MOVES)}
        for which, arm in names.items()
    }
    figures: dict = {"cap": float(by_person(table.values(names["real"], f"{judge}/cap")).mean())}
    for which in ("before", "after"):
        figures[which] = {key: interval(by_person(values[which][key])) for key in ("face_sim", "coverage", *MOVES)}
        figures[which]["per_frame"] = table.curve(names[which], judge)
        figures[which]["last_quarter"] = float(np.mean(list(values[which]["last_quarter"].values())))
    before, after = values["before"]["face_sim"], values["after"]["face_sim"]
    both_means = both(after, before)
    rise = {key: value - 1 for key, value in ratio_interval(*both_means, -math.inf).items()}
    figures["gain"] = {
        "absolute": interval(both_means[0] - both_means[1]), "relative": rise,
        "people_improved": float((both_means[0] > both_means[1]).float().mean()),
    }  # fmt: skip
    for to in ("before", "real"):
        figures[f"motion_after_to_{to}"] = {key: motion_ratio(values["after"][key], values[to][key]) for key in MOVES}
    return figures


def motion_ratio(mine: Values, theirs: Values) -> dict:
    """The ratio of the means over people, and the median ratio of a clip."""
    clips = [clip for clip in mine if clip in theirs]
    return ratio_interval(*both(mine, theirs)) | {
        "median_per_clip": float(np.median([mine[clip] / max(theirs[clip], 1e-9) for clip in clips]))
    }


def motion_report(table: Table, names: Mapping[str, str]) -> dict:
    """What no network measures of the real clips and both arms: means, and what became of them.

    A figure that some arm's clip does not have (no face, no motion) leaves that clip out of that figure; None where
    nothing is left.
    """
    figures: dict = {which: {} for which in names} | {"after_to_before": {}}
    for key in (*AMOUNTS, "reversals"):
        values = {which: table.values(arm, f"motion/{key}") for which, arm in names.items()}
        clips = set.intersection(*map(set, values.values()))
        people = {which: by_person(found, clips) for which, found in values.items()}
        means = {which: float(found.mean()) if clips else None for which, found in people.items()}
        if key in AMOUNTS:
            for which, mean in means.items():
                figures[which][key] = mean
            figures["after_to_before"][key] = ratio_interval(people["after"], people["before"]) if clips else None
        else:
            figures[key] = means | {"after_minus_before": known(people["after"] - people["before"])}
    return figures


def per_clip(table: Table, arms: Sequence[Arm], judges: Sequence[str]) -> list[dict]:
    """Every clip by arm, per frame, too; `before` and `after` beside them are the first two arms."""
    found = []
    names = dict(zip(("before", "after"), (arm.name for arm in arms), strict=False))
    for clip in table.figures[REAL]:
        line: dict = {"id": clip.row, "seed": clip.seed, "motion": {}}
        for which, arm in (names | {"real": REAL}).items():
            figures = table.figures[arm].get(clip, {})
            line["motion"][which] = {key: figures.get(f"motion/{key}") for key in (*AMOUNTS, "reversals")}
            if which != "real":
                line |= {f"{judge}/{which}": figures.get(f"{judge}/face_sim") for judge in judges}
        line["real"] = clip_report(table, REAL, clip) | {"face_width": table.records[REAL][clip]["face_width"]}
        line["arms"] = {arm.name: clip_report(table, arm.name, clip) for arm in arms if clip in table.figures[arm.name]}
        found.append(line)
    return found


def clip_report(table: Table, arm: str, clip: ClipKey) -> dict:
    """All that is known of one video, and where it is: below the evaluation's folder, else by its whole path."""
    record = table.records[arm][clip]
    return {"figures": table.figures[arm][clip]} | {key: record[key] for key in ("curves", "detected", "file")}
