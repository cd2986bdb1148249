"""Two groups of arms of one evaluation, person by person, such as two trainings with several seeds each."""

from collections.abc import Sequence
from pathlib import Path

import torch

from rewardfl.evaluation.arms import BASE
from rewardfl.evaluation.figures import format_interval, is_ratio, make_table, pair_people, ratio_interval
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
    table = make_table(records, arms)
    names = table.names(BASE)
    judges = [name.removesuffix("/face_sim") for name in names if name.endswith("/face_sim")]
    chosen = {*FIGURES, *(f"{judge}/face_sim" for judge in table.scales)}
    chosen |= {f"{judge}/nonrigid" for judge in judges[-1:]}
    rows, left_out = ["| figure | first | second | first - second |", "|---|---|---|---|"], []
    for name in (name for name in names if name in chosen or name.startswith("rewards/")):
        pairs = pair_people(*(table.values(arm, name) for arm in arms))
        if not pairs.people:
            raise ValueError(f"--first, --second: {name} has no person in common; name arms of the same people")
        base, left, right = (values.mean(0) for values in pairs.values.split([1, len(first), len(second)]))
        label, start, unit = name, torch.zeros_like(base), torch.ones_like(base)
        if name.endswith("/face_sim"):
            label, scale = f"identity kept ({name.removesuffix('/face_sim')})", table.scales[name.partition("/")[0]]
            start, unit = torch.tensor([scale.another[person] for person in pairs.people]), scale.lengths(pairs.people)
        elif is_ratio(name):
            label, unit = f"{name} over the base's", base
        means = [f"{ratio_interval(side - start, unit)['mean']:.3f}" for side in (left, right)]
        rows.append(f"| {label} | {' | '.join(means)} | {format_interval(ratio_interval(left - right, unit), '+')} |")
        if pairs.left_out:
            left_out.append(f"left out, for lack of a clip in some arm: {', '.join(pairs.left_out)} ({label})")
    return "\n".join([*rows, *left_out])
