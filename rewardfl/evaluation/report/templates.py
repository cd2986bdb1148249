"""The pages' templates, filled by jinja2, which escapes whatever comes from files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2

from rewardfl.evaluation.intervals import Interval


@dataclass(frozen=True)
class Cell:
    """A figure and its change against the base. problem: why the change is not healthy; empty where it is."""

    figure: Interval | None
    change: Mapping | None = None
    problem: str = ""


@dataclass(frozen=True)
class TableRow:
    """A row of a table: its name with a line below (empty for none), and its cells, which may be texts."""

    name: tuple[str, str]
    cells: Sequence[Cell | str]


def digits(value: Interval, signed: bool = False) -> list[str]:
    """Format mean, low and high with as many digits as the largest of them needs."""
    largest = max(map(abs, value.values()))
    count = 1 if largest >= 100 else 4 if 0 < largest < 0.1 else 3
    return [f"{value[key]:{'+' if signed else ''}.{count}f}" for key in ("mean", "low", "high")]


ENVIRONMENT = jinja2.Environment(
    loader=jinja2.PackageLoader("rewardfl.evaluation.report", "pages"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
ENVIRONMENT.filters["digits"] = digits


def render(template: str, values: Mapping[str, Any]) -> str:
    """Render a template with these values."""
    return ENVIRONMENT.get_template(template).render(values)
