"""Charts by matplotlib, for pages and for files: curves over each other, and gain against motion."""

import base64
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rewardfl.evaluation.intervals import Interval
from rewardfl.evaluation.report.meanings import judge_words, main_judge

COLOURS = ("#0068b5", "#c75300", "#00805b", "#a83f83", "#8a6d00", "#1f8fbf", "#7b4fb5", "#8b4a2b")

REAL, BASE = "#7f7f7f", "#000000"

STYLE = matplotlib.rc_context(
    {
        "svg.hashsalt": "rewardfl",  # the same figures give the same bytes
        "text.parse_math": False,  # a dollar sign in a name begins no formula
        "axes.grid": True,
        "grid.alpha": 0.3,
    }
)


@dataclass(frozen=True)
class Curve:
    """(x, y) by rising x, under a name."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str


@dataclass(frozen=True)
class Marker:
    """An arm's gain in FaceSim and its motion over the base's, under a name."""

    name: str
    gain: Interval
    motion: Interval
    colour: str


@dataclass(frozen=True)
class Chart:
    """A picture of a page: its address, which holds all of it, and the names of its colours."""

    title: str
    image: str
    names: Sequence[tuple[str, str]]


def arm_colour(number: int) -> str:
    """Return the colour of the arm with this number."""
    return COLOURS[number % len(COLOURS)]


def arm_curves(report: Mapping, judge: str, before: str = "", first: int = 0) -> list[Curve]:
    """Return FaceSim along the clip of every arm, under its name after `before`, coloured from number `first` on."""
    return [
        Curve(before + arm["name"], list(enumerate(arm["per_frame"][judge], 1)), arm_colour(i))
        for i, arm in enumerate(report["arms"], first)
    ]


def real_curve(report: Mapping, judge: str) -> Curve:
    """Return FaceSim along the clip of the real clips with themselves."""
    return Curve("real clips", list(enumerate(report["real"]["per_frame"][judge], 1)), REAL)


def make_markers(report: Mapping, before: str = "", first: int = 0) -> list[Marker]:
    """Return gain and non-rigid motion, by the main judge, of every arm that has a base and both."""
    judge, found = main_judge(report), []
    for i, arm in enumerate(report["arms"], first):
        gain, motion = ((arm.get("compared") or {}).get(f"{judge}/{key}") for key in ("face_sim", "nonrigid"))
        if gain and motion:
            found.append(Marker(before + arm["name"], gain["difference"], motion["ratio"], arm_colour(i)))
    return found


def front(found: Sequence[tuple[float, float]]) -> list[int]:
    """Return which of (gain, motion) no other one beats, by rising gain.

    One is beaten by what has at least as much of both and more of one. More motion than before is worth no more: it may
    be trembling. A place with a NaN is on no front.
    """
    worth = [(gain, min(motion, 1.0)) for gain, motion in found]
    known = [i for i, place in enumerate(worth) if not any(map(math.isnan, place))]

    def beaten(i: int) -> bool:
        return any(worth[j] != worth[i] and all(a >= b for a, b in zip(worth[j], worth[i], strict=True)) for j in known)

    return sorted((i for i in known if not beaten(i)), key=lambda i: worth[i])


@STYLE
def curves_chart(title: str, found: Sequence[Curve], labels: tuple[str, str] = ("frame", "FaceSim")) -> Chart:
    """Return the curves over each other as a page shows them."""
    figure = Figure(figsize=(5.6, 3.5), layout="constrained")
    draw_curves(figure.subplots(), found, labels)
    return Chart(title, _address(figure), [(one.colour, one.name) for one in found])


@STYLE
def front_chart(found: Sequence[Marker], judge: str) -> Chart:
    """Return gain against motion as a page shows it."""
    figure = Figure(figsize=(5.6, 3.5), layout="constrained")
    draw_front(figure.subplots(), found, judge_words(judge))
    return Chart("", _address(figure), [*((one.colour, one.name) for one in found), (BASE, "base")])


def draw_curves(axis: Axes, found: Sequence[Curve], labels: tuple[str, str] = ("frame", "FaceSim")) -> None:
    """Draw the curves over each other; those of the real clips are dashed, and FaceSim is shown from 0 to 1."""
    for one in found:
        style = "--" if one.colour == REAL else "-"
        marker = "o" if len(one.points) < 20 else ""
        axis.plot(*zip(*one.points, strict=True), color=one.colour, linestyle=style, marker=marker, markersize=3)
    axis.set(xlabel=labels[0], ylabel=labels[1])
    if labels[1] == "FaceSim":
        low, high = axis.get_ylim()
        axis.set_ylim(min(low, 0), max(high, 1))


def draw_front(axis: Axes, found: Sequence[Marker], judge: str) -> None:
    """Draw places with their intervals; a line joins those that no other one beats, and a cross is the base."""
    best = [found[i] for i in front([(one.gain["mean"], one.motion["mean"]) for one in found])]
    axis.plot([one.gain["mean"] for one in best], [one.motion["mean"] for one in best], color=REAL, linestyle="--")
    for one in found:
        axis.plot(one.gain["mean"], one.motion["mean"], "o", color=one.colour)
        axis.hlines(one.motion["mean"], one.gain["low"], one.gain["high"], color=one.colour)
        axis.vlines(one.gain["mean"], one.motion["low"], one.motion["high"], color=one.colour)
    axis.plot(0, 1, "+", color=BASE, markersize=10)
    axis.set(xlabel=f"gain in FaceSim by {judge}", ylabel="non-rigid motion / base's")


def _address(figure: Figure) -> str:
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(file.getvalue()).decode()
