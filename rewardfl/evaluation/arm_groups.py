"""Two groups of arms of one evaluation, person by person, such as two trainings with several seeds each."""

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from rewardfl.evaluation.arms import BASE
from rewardfl.evaluation.figures import (
    Interval,
    Table,
    interval,
    is_ratio,
    make_table,
    pair_people,
    place_on_scale,
    ratio_interval,
)
from rewardfl.evaluation.records import read_records

FIGURES = ("look/face", "motion/flow", "motion/face_flow", "motion/sharpness", "motion/reversals")


def compare_groups(folder: Path, first: Sequence[str], second: Sequence[str]) -> str:
    """Return a Markdown table of both groups and their paired difference, with 95 % intervals over people.

    Of each person the mean over a group's arms counts. Identity kept is on its scale, motion over the base's. The lines
    below the table name the people that some arm lacks. Raise ValueError for a missing arm or no common person.
    """
    records = list(read_records(folder).values())
    arms = [BASE, *first, *second]
    if missing := sorted({*arms} - {record["arm"] for record in records}):
        raise ValueError(f"--first, --second: {folder} has no arm {', '.join(missing)}; its records.jsonl names them")
    table = make_table(records, arms, threshold=0.4)
    rows, left_out = ["| figure | first | second | first - second |", "|---|---|---|---|"], []
    for name in listed_figures(table):
        pairs = pair_people(*(table.values(arm, name) for arm in arms))
        if not pairs.people:
            raise ValueError(f"--first, --second: {name} has no person in common; name arms of the same people")
        means = [values.mean(0) for values in pairs.values.split([1, len(first), len(second)])]
        label, sides, change = compare_sides(table, name, pairs.people, *means)
        rows.append(f"| {label} | {sides[0]:.3f} | {sides[1]:.3f} | {show(change)} |")
        left_out += [f"left out, for lack of a clip in some arm: {', '.join(pairs.left_out)} ({label})"] * bool(
            pairs.left_out
        )
    return "\n".join([*rows, *left_out])


def listed_figures(table: Table) -> list[str]:
    """Return the figures that are compared, of those that the base has."""
    names = table.names(BASE)
    judges = [name.removesuffix("/face_sim") for name in names if name.endswith("/face_sim")]
    chosen = {
        *FIGURES,
        *(f"{judge}/face_sim" for judge in table.scales),
        *(f"{judge}/nonrigid" for judge in judges[-1:]),
    }
    return [name for name in names if name in chosen or name.startswith("rewards/")]


def compare_sides(
    table: Table, name: str, people: Sequence[str], base: Tensor, first: Tensor, second: Tensor
) -> tuple[str, list[float], Interval]:
    """Return label, both sides' means and the interval of their difference. base, first, second: (people,)."""
    judge, _, key = name.partition("/")
    if key == "face_sim":
        sides = [dict(zip(people, side.tolist(), strict=True)) for side in (first, second)]
        places = [place_on_scale(table.scales[judge], side)["mean"] for side in sides]
        return f"identity kept ({judge})", places, place_on_scale(table.scales[judge], *sides)
    if is_ratio(name):
        ratios = [ratio_interval(side, base)["mean"] for side in (first, second)]
        return f"{name} over the base's", ratios, ratio_interval(first - second, base)
    return name, [float(side.mean()) for side in (first, second)], interval(first - second)


def show(change: Interval) -> str:
    return f"{change['mean']:+.3f} [{change['low']:+.3f}, {change['high']:+.3f}]"
