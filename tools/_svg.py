"""Pictures of a page that the page's own style colours: curves, places with their intervals, scores along a clip."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from matplotlib.ticker import MaxNLocator

from rewardfl_tools._intervals import Interval

WIDTH, HEIGHT, LEFT, BELOW, EDGE = 480, 300, 52, 44, 12  # of a picture, its axes' room, and the room at its other edges
COLOURS = 8  # that the page's style knows, as .c0 to .c7
STRIP = 24  # height of a strip of scores


@dataclass(frozen=True)
class Curve:
    """(x, y) by rising x, under a name. colour: the number of one; None for what the others are held against."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int | None


@dataclass(frozen=True)
class Place:
    """Two figures with their intervals, under a name."""

    name: str
    x: Interval
    y: Interval
    colour: int


@dataclass(frozen=True)
class Axes:
    """What of the two quantities is in the picture, and their names."""

    x: tuple[float, float]
    y: tuple[float, float]
    labels: tuple[str, str]

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Where a point is in the picture, in its units from the upper left."""
        right = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        return (
            round(LEFT + right * (WIDTH - LEFT - EDGE), 1),
            round(HEIGHT - BELOW - up * (HEIGHT - BELOW - EDGE), 1),
        )


def curves(found: Sequence[Curve], labels: tuple[str, str], span: tuple[float, float] | None = None) -> str:
    """Curves over each other, their names below. span: what y holds at least. Empty for no point."""
    xs = [x for one in found for x, _ in one.points]
    ys = [*(y for one in found for _, y in one.points), *(span or ())]
    if not xs:
        return ""
    axes = Axes(wide(xs, 0), wide(ys, 0 if span else 0.05), labels)
    drawn, names = _grid(axes), []
    for one in found:
        colour = "real" if one.colour is None else f"c{one.colour % COLOURS}"
        places = [axes.at(x, y) for x, y in one.points]
        path = " ".join(f"{x},{y}" for x, y in places)
        drawn.append(f'<polyline class="{colour}" points="{path}"><title>{escape(one.name)}</title></polyline>')
        if len(places) < 20:
            drawn += [f'<circle class="{colour}" cx="{x}" cy="{y}" r="2.5"/>' for x, y in places]
        names.append((colour, one.name))
    return _picture(drawn, names)


def front_picture(
    found: Sequence[Place], best: Sequence[int], base: tuple[float, float], labels: tuple[str, str]
) -> str:
    """Places with their intervals as crosses; a line joins those that are `best`, and a cross is the base."""
    xs = [base[0], *(end for one in found for end in one.x.values())]
    ys = [base[1], *(end for one in found for end in one.y.values())]
    axes = Axes(wide(xs, 0.08), wide(ys, 0.08), labels)
    drawn, names = _grid(axes), []
    line = " ".join("{},{}".format(*axes.at(found[i].x["mean"], found[i].y["mean"])) for i in best)
    drawn.append(f'<polyline class="real" points="{line}"/>')
    x, y = axes.at(*base)
    drawn.append(f'<path class="base" d="M{x - 6} {y}h12M{x} {y - 6}v12"><title>base</title></path>')
    for one in found:
        colour = f"c{one.colour % COLOURS}"
        (left, middle), (right, _) = (axes.at(one.x[end], one.y["mean"]) for end in ("low", "high"))
        (centre, low), (_, high) = (axes.at(one.x["mean"], one.y[end]) for end in ("low", "high"))
        drawn.append(f'<path class="{colour} thin" d="M{left} {middle}H{right}M{centre} {low}V{high}"/>')
        spot = f'<circle class="{colour}" cx="{centre}" cy="{middle}" r="4">'
        drawn.append(f"{spot}<title>{escape(one.name)}</title></circle>")
        names.append((colour, one.name))
    return _picture(drawn, [*names, ("base", "base")])


def strip(scores: Sequence[float], detected: Sequence[bool]) -> str:
    """Scores of frames 1 .. F - 1 from 0 to 1 as steps, a mark where no face was found, and a cursor at frame 0."""
    steps = "".join(f"V{STRIP * (1 - min(max(score, 0), 1)):.1f}h1" for score in scores)
    hidden = "".join(f"M{frame} {STRIP - 3}h1v3h-1z" for frame, seen in enumerate(detected) if not seen)
    return (
        f'<svg class="strip" viewBox="0 0 {len(detected)} {STRIP}" preserveAspectRatio="none" aria-hidden="true">'
        f'<path class="score" d="M1 {STRIP}{steps}V{STRIP}z"/><path class="hidden" d="{hidden}"/>'
        f'<rect class="cursor" x="0" y="0" width="1" height="{STRIP}"/></svg>'
    )


def wide(values: Sequence[float], margin: float) -> tuple[float, float]:
    """The span of the values with that much of it on each side, and never none."""
    low, high = min(values), max(values)
    if high == low:
        return low - 0.5, high + 0.5
    return low - margin * (high - low), high + margin * (high - low)


def _ticks(span: tuple[float, float]) -> list[tuple[float, str]]:
    found = MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]).tick_values(*span)
    return [(float(tick), f"{round(float(tick), 6):g}") for tick in found if span[0] <= tick <= span[1]]


def _grid(axes: Axes) -> list[str]:
    drawn = []
    for tick, text in _ticks(axes.y):
        _, y = axes.at(axes.x[0], tick)
        drawn.append(f'<path class="grid" d="M{LEFT} {y}H{WIDTH - EDGE}"/>')
        drawn.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{text}</text>')
    for tick, text in _ticks(axes.x):
        x, _ = axes.at(tick, axes.y[0])
        drawn.append(f'<path class="grid" d="M{x} {EDGE}V{HEIGHT - BELOW}"/>')
        drawn.append(f'<text x="{x}" y="{HEIGHT - BELOW + 16}" text-anchor="middle">{text}</text>')
    x_label, y_label = map(escape, axes.labels)
    drawn.append(f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{x_label}</text>')
    middle = (HEIGHT - BELOW + EDGE) / 2
    drawn.append(f'<text transform="translate(12 {middle}) rotate(-90)" text-anchor="middle">{y_label}</text>')
    return drawn


def _picture(drawn: Sequence[str], names: Sequence[tuple[str, str]]) -> str:
    legend = "".join(f'<span><i class="{colour}"></i>{escape(name)}</span>' for colour, name in names)
    return (
        f'<svg class="picture" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(drawn)}</svg>'
        f'<p class="legend">{legend}</p>'
    )
