"""Compare two groups of arms of one evaluation person by person, seeds averaged: is one training better than another?

    python benchmarks/paired_arms.py outputs/compared --first demo_s42,demo_s1,demo_s2 --second sft_s42,sft_s1,sft_s2

Each group is a list of the evaluation's arms, usually one training with several seeds. Of each person the mean over a
group's arms counts. Identity kept is on its scale; motion and sharpness are over the base's. Brackets are 95 %
bootstrap intervals over people.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor

from rewardfl.evaluation.figures import (
    Interval,
    Table,
    interval,
    make_table,
    per_person,
    place_on_scale,
    ratio_interval,
)
from rewardfl.evaluation.records import read_records

BASE = "base"
SIGNED = ("look/face", "motion/reversals")  # compared by their difference
AMOUNTS = ("motion/flow", "motion/face_flow", "motion/sharpness")  # over the base's


def mean_of_arms(table: Table, arms: list[str], name: str) -> Tensor:
    """Return the mean of a figure over arms, (people,)."""
    people = [list(per_person(table.values(arm, name)).values()) for arm in arms]
    return torch.tensor(people).mean(0)


def show(change: Interval) -> str:
    return f"{change['mean']:+.3f} [{change['low']:+.3f}, {change['high']:+.3f}]"


def lines(table: Table, first: list[str], second: list[str]) -> list[str]:
    """Return a Markdown row per figure: both groups, and the paired difference."""
    rows = ["| figure | first | second | first - second |", "|---|---|---|---|"]
    for judge, scale in table.scales.items():
        name = f"{judge}/face_sim"
        people = list(per_person(table.values(first[0], name)))
        sides = [dict(zip(people, mean_of_arms(table, arms, name).tolist(), strict=True)) for arms in (first, second)]
        places = [f"{place_on_scale(scale, side)['mean']:.3f}" for side in sides]
        rows.append(f"| identity kept ({judge}) | {' | '.join(places)} | {show(place_on_scale(scale, *sides))} |")
    for name in SIGNED:
        a, b = (mean_of_arms(table, arms, name) for arms in (first, second))
        rows.append(f"| {name} | {a.mean():.3f} | {b.mean():.3f} | {show(interval(a - b))} |")
    last_judge = list(table.scales)[-1]
    for name in (*AMOUNTS, f"{last_judge}/nonrigid"):
        a, b, base = (mean_of_arms(table, arms, name) for arms in (first, second, [BASE]))
        over = [f"{float(side.mean() / base.mean()):.3f}" for side in (a, b)]
        rows.append(f"| {name} over the base's | {' | '.join(over)} | {show(ratio_interval(a - b, base))} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("evaluation", type=Path, help="the --out of tools/evaluate.py")
    parser.add_argument("--first", required=True, help="names of arms, comma separated")
    parser.add_argument("--second", required=True)
    args = parser.parse_args()
    groups = [args.first.split(","), args.second.split(",")]
    records = list(read_records(args.evaluation).values())
    if missing := {*groups[0], *groups[1]} - {record["arm"] for record in records}:
        parser.error(f"{args.evaluation} has no arm {', '.join(sorted(missing))}; its videos/ has a folder of each")
    print("\n".join(lines(make_table(records, [BASE, *groups[0], *groups[1]], threshold=0.4), *groups)))


if __name__ == "__main__":
    main()
