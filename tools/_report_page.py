"""report.html: an evaluation in one page that opens from the disk, without a network. From report.json's content."""

import base64
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from urllib.parse import quote

from rewardfl_tools import _page, _svg
from rewardfl_tools._evaluate_pictures import front
from rewardfl_tools._evaluate_table import STILL
from rewardfl_tools._figures import FROZEN
from rewardfl_tools._meanings import healthy, judge_words, main_judge, meaning, outside
from rewardfl_tools._records import REAL
from rewardfl_tools._verdict import Verdict, frozen, verdict

PAGE = 40_000_000  # bytes of a page at most, the videos in it included
OPEN = 4  # of the worst clips are open at first


def report_page(report: Mapping, folder: Path, most: int = PAGE) -> str:
    """The page of an evaluation whose videos lie in `folder`, of at most so many bytes.

    The worst clips' videos are in it as long as there is room, at least as links to the files beside it.
    """
    parts = [*_head(report), *_figures(report), *_pictures(report)]
    tail = [*_tail(report)]
    empty = len(_page.page(_title(report), [*parts, *tail]).encode())
    return _page.page(_title(report), [*parts, *players(report, folder, most - empty), *tail])


def _title(report: Mapping) -> str:
    return f"Evaluation of {', '.join(arm['name'] for arm in report['arms'] if arm['against']) or 'one arm'}"


# --------------------------------------------------------------------------------------------------------------------
# The verdict


def _head(report: Mapping) -> Iterator[str]:
    against = [arm for arm in report["arms"] if arm["against"]]
    yield f"<h1>{escape(_title(report))}</h1>"
    yield (
        f'<p class="soft">{report["people"]} people, {report["clips"]} clips of each arm. An interval [low, high] is a '
        "95 % bootstrap interval over people. Below a figure stands what has become of it: base × a ratio, or base + a "
        f"difference; ⚠ where that is not healthy. rewardfl {escape(report['version'])}.</p>"
    )
    if not against:
        yield '<div class="verdict"><p>There is one arm, so there is nothing to compare it with.</p></div>'
    else:
        yield said(verdict(report, against[0]))
    if more := against[1:]:
        rest = "".join(said(verdict(report, arm)) for arm in more)
        names = escape(", ".join(arm["name"] for arm in more))
        yield f"<details><summary>The same of {names}</summary>{rest}</details>"


def said(found: Verdict) -> str:
    """The two sentences and the warnings."""
    bad = found.warnings or found.person < 0 or found.moves is False
    colour = "bad" if bad else "good" if found.person > 0 and found.moves else ""
    warned = "".join(f"<li>{escape(line)}</li>" for line in found.warnings)
    sentences = "".join(f"<p>{escape(line)}</p>" for line in found.sentences)
    return f'<div class="verdict {colour}">{sentences}{f"<ul>{warned}</ul>" if warned else ""}</div>'


# --------------------------------------------------------------------------------------------------------------------
# The tables


def _figures(report: Mapping) -> Iterator[str]:
    """A table for each question; a row per figure, a column per arm, and the real clips first."""
    judges = list(report["real"]["per_frame"])
    names = list(dict.fromkeys(name for arm in report["arms"] for name in arm["figures"]))
    faces = {judge: [name for name in names if name.startswith(f"{judge}/")] for judge in judges}
    moves = [f"{judges[-1]}/{key}" for key in ("speed", "nonrigid")]
    motion = [name for name in names if name.startswith("motion/") and name != "motion/sharpness"]
    blocks = ("motion", "still", "canary", *judges)
    yield "<h2>Is the person kept?</h2>"
    for judge in reversed(judges):
        yield f"<h3>By {judge_words(judge)}</h3>"
        yield figures_table(report, [name for name in faces[judge] if name not in moves])
    yield "<h2>Does it still move?</h2>" + figures_table(report, [*moves, *motion, "frozen_share"])
    yield f"<h2>T{STILL[1:]}</h2>" + figures_table(report, [name for name in names if name.startswith("still/")])
    yield "<h2>Canaries: was the reward hacked?</h2>"
    canaries = [name for name in names if name.startswith("canary/")]
    yield figures_table(report, ["motion/sharpness", *canaries, "colour_shift"])
    if others := [name for name in names if name.partition("/")[0] not in blocks]:
        yield "<h2>Published protocols and other rewards</h2>" + figures_table(report, others)
    yield "<h2>By the size of the face</h2>" + _strata(report)


def figures_table(report: Mapping, names: Sequence[str]) -> str:
    """The figures of the real clips and of every arm, and below each what has become of it against the arm's base."""
    judges = list(report["real"]["per_frame"])
    head = ["figure", *(escape(arm["name"]) for arm in report["arms"]), "real clips"]
    rows = []
    for name in names:
        known = meaning(name, judges)
        says = known.says + healthy(known)
        real = _page.figure(report["real"]["figures"].get(name))
        rows.append([_page.explained(known.label, says), *(_cell(arm, name, judges) for arm in report["arms"]), real])
    return _page.table(head, rows)


def _cell(arm: Mapping, name: str, judges: Sequence[str]) -> str:
    if name in ("frozen_share", "colour_shift"):  # of an arm and its base together
        if not arm["against"]:
            return _page.figure(None)
        return frozen_cell(arm) if name == "frozen_share" else _page.figure(arm[name])
    found = (arm.get("compared") or {}).get(name)
    return _page.figure(arm["figures"].get(name)) + change(found, outside(found, meaning(name, judges)))


def frozen_cell(arm: Mapping) -> str:
    """The share of an arm's frozen clips, marked where it is not healthy."""
    text = _page.figure(arm["frozen_share"])
    return f'<span class="out">⚠ {text}</span>' if frozen(arm) else text


def change(found: Mapping | None, problem: str) -> str:
    """What has become of a figure, as a line of its own, marked where it is not healthy."""
    return f"<small>base {against_base(found, problem)}</small>" if found else ""


def against_base(found: Mapping, problem: str) -> str:
    """× the ratio where that means something, else + the difference; marked where that is not healthy."""
    text = f"× {_page.figure(found['ratio'])}" if "ratio" in found else _page.figure(found["difference"], signed=True)
    return f'<span class="out" title="{escape(problem)}">⚠ {text}</span>' if problem else text


def _strata(report: Mapping) -> str:
    judge = main_judge(report)
    (least, small), *larger = report["face_sizes"].items()
    rows = [[escape(least), str(small), *("too small to be scored here" for _ in report["arms"])]]
    for name, count in larger:
        cells = []
        for arm in report["arms"]:
            own = arm["strata"][name]
            found = (own.get("compared") or {}).get(f"{judge}/face_sim")
            figure = own["figures"][f"{judge}/face_sim"]
            cells.append(_page.figure(figure) + change(found, ""))
        rows.append([escape(name), str(count), *cells])
    head = ["face's width in the real clip", "people", *(f"FaceSim of {escape(arm['name'])}" for arm in report["arms"])]
    return _page.table(head, rows)


# --------------------------------------------------------------------------------------------------------------------
# The pictures


def _pictures(report: Mapping) -> Iterator[str]:
    judges = list(report["real"]["per_frame"])
    yield "<h2>FaceSim along the clip</h2>" + CURVES_SAY + '<div class="pictures">'
    for judge in reversed(judges):
        lines = [*arm_curves(report, judge), real_curve(report, judge)]
        yield f"<div><h3>By {judge_words(judge)}</h3>{_svg.curves(lines, ('frame', 'FaceSim'), (0, 1))}</div>"
    yield "</div>"
    if sum(arm["against"] is not None for arm in report["arms"]) > 1:
        yield "<h2>What likeness costs in motion</h2>" + FRONT_SAYS
        yield f'<div class="pictures"><div>{front_of(places_of(report), judge_words(judges[-1]))}</div></div>'


CURVES_SAY = (
    '<p class="soft">Means over all clips. The dashed line is the ceiling: the real clips\' own, each frame left out '
    "of what it is compared with.</p>"
)
FRONT_SAYS = (
    '<p class="soft">To the right the gain in FaceSim, upwards the non-rigid motion over the base\'s, with intervals '
    "over people. The dashed line joins the arms that no other one beats; more motion than the base's is no better.</p>"
)


def arm_curves(report: Mapping, judge: str, before: str = "", colour: int = 0) -> list[_svg.Curve]:
    """FaceSim along the clip of every arm, under its name after `before`, in the colours from `colour` on."""
    return [
        _svg.Curve(before + arm["name"], list(enumerate(arm["per_frame"][judge], 1)), i)
        for i, arm in enumerate(report["arms"], colour)
    ]


def real_curve(report: Mapping, judge: str) -> _svg.Curve:
    return _svg.Curve("real clips", list(enumerate(report["real"]["per_frame"][judge], 1)), None)


def places_of(report: Mapping, before: str = "", colour: int = 0) -> list[_svg.Place]:
    """Gain and non-rigid motion, by the main judge, of every arm that has a base and both; coloured as its curve."""
    judge, found = main_judge(report), []
    for i, arm in enumerate(report["arms"], colour):
        gain, moved = ((arm.get("compared") or {}).get(f"{judge}/{key}") for key in ("face_sim", "nonrigid"))
        if gain and moved:
            found.append(_svg.Place(before + arm["name"], gain["difference"], moved["ratio"], i))
    return found


def front_of(places: Sequence[_svg.Place], judge: str) -> str:
    """The picture of gain against motion; the base is at (0, 1)."""
    best = front([(one.x["mean"], one.y["mean"]) for one in places])
    return _svg.front_picture(places, best, (0, 1), (f"gain in FaceSim by {judge}", "non-rigid motion / base's"))


# --------------------------------------------------------------------------------------------------------------------
# The players


@dataclass(frozen=True)
class Shot:
    """One video of a clip: its arm, what is known of it, and where the file is."""

    name: str
    known: Mapping
    path: Path

    @property
    def size(self) -> int:
        """Bytes of it in a page, as text."""
        return 4 * -(-self.path.stat().st_size // 3)


def worst_first(report: Mapping) -> list[Mapping]:
    """The clips by the main judge's FaceSim of the arm that is compared first, the lowest first.

    A clip that this arm has no video of comes last. Without a comparison the only arm counts.
    """
    judge, arm = main_judge(report), judged_arm(report)

    def likeness(clip: Mapping) -> float:
        return clip["arms"][arm]["figures"][f"{judge}/face_sim"] if arm in clip["arms"] else float("inf")

    return sorted(report["per_clip"], key=likeness)


def judged_arm(report: Mapping) -> str:
    """The arm by which clips are called worse: the first that is compared with another, else the first."""
    return next((arm["name"] for arm in report["arms"] if arm["against"]), report["arms"][0]["name"])


def players(report: Mapping, folder: Path, room: int) -> Iterator[str]:
    """The clips, the worst first: their videos side by side, in the page while there is room, else beside it.

    room: bytes for all of this.
    """
    clips = [(clip, shots_of(report, clip, folder)) for clip in worst_first(report)]
    linked = [_player(report, i, clip, shots, {}) for i, (clip, shots) in enumerate(clips)]
    room -= sum(len(text.encode()) for text in linked) + 2000  # and for the lines above them
    inside = 0
    for _, shots in clips:
        room -= sum(shot.size for shot in shots if shot.path.is_file())
        if room < 0:
            break
        inside += 1
    yield "<h2>The clips, the worst first</h2>"
    yield (
        f'<p class="soft">Worst is the lowest FaceSim of {escape(judged_arm(report))} by '
        f"{judge_words(main_judge(report))}. Below each video FaceSim of frames 1 .. F - 1 from 0 to 1 as it plays; "
        "red marks are frames without a face, and a strip spans the whole video.</p>"
    )
    if inside < len(clips):
        yield (
            f"<p>The page holds the videos of the worst {inside} of {len(clips)} clips, so that it stays below its "
            "limit of bytes. The others are read from the files beside it, and are seen only while it lies there.</p>"
        )
    for i, (clip, shots) in enumerate(clips):
        sources = {shot.name: _data_uri(shot.path) for shot in shots if shot.path.is_file()} if i < inside else {}
        yield _player(report, i, clip, shots, sources) if sources else linked[i]


def shots_of(report: Mapping, clip: Mapping, folder: Path) -> list[Shot]:
    """The real clip and every arm's video of it."""
    names = [arm["name"] for arm in report["arms"] if arm["name"] in clip["arms"]]
    found = {REAL: clip["real"], **{name: clip["arms"][name] for name in names}}
    return [Shot(name, known, folder / known["file"]) for name, known in found.items()]


def _data_uri(path: Path) -> str:
    return "data:video/mp4;base64," + base64.b64encode(path.read_bytes()).decode()


def _player(report: Mapping, place: int, clip: Mapping, shots: Sequence[Shot], sources: Mapping[str, str]) -> str:
    """sources: the videos that are in the page, by arm; others are links, from the page's folder."""
    judge = main_judge(report)
    told = ", ".join(f"{shot.name} {shot.known['figures'][f'{judge}/face_sim']:.3f}" for shot in shots)
    return (
        f'<details class="clip"{" open" if place < OPEN else ""}><summary>{escape(clip["id"])}, noise {clip["seed"]} '
        f'<small>FaceSim: {escape(told)}</small></summary><div class="shots">'
        + "".join(_figure(shot, judge, sources.get(shot.name)) for shot in shots)
        + '</div><div class="controls" hidden><button type="button">Play</button>'
        '<input type="range" min="0" max="1" step="any" value="0" aria-label="time"></div></details>'
    )


def _figure(shot: Shot, judge: str, source: str | None) -> str:
    figures, scores = shot.known["figures"], shot.known["curves"][judge]
    if source is None and shot.path.is_file():
        source = quote(shot.known["file"]) if not Path(shot.known["file"]).is_absolute() else shot.path.as_uri()
    video = f'<video src="{escape(source)}" muted playsinline controls preload="none"></video>' if source else ""
    moved = f", non-rigid motion {figures[name]:.4f}" if (name := f"{judge}/nonrigid") in figures else ""
    missing = "" if source else '<p class="out">This video is no longer where it was.</p>'
    return (
        f'<figure data-scores="{" ".join(f"{score:.3f}" for score in scores)}">{video}{missing}'
        f"{_svg.strip(scores, shot.known['detected'][judge])}<figcaption><b>{escape(shot.name)}</b> "
        f"<output></output><small>FaceSim {figures[f'{judge}/face_sim']:.3f}{moved}</small></figcaption></figure>"
    )


# --------------------------------------------------------------------------------------------------------------------
# Where it is from


def _tail(report: Mapping) -> Iterator[str]:
    yield "<h2>Where this is from</h2>"
    yield f"<p>rewardfl {escape(report['version'])}, by the command</p>"
    yield f"<pre>{escape(shlex.join(report['command']))}</pre>"
    yield (
        f"<p>A clip is frozen when it has less than {FROZEN:g} of the base's own non-rigid motion. The threshold of "
        f"FaceSim is {report['reading']['threshold']:g}. Every figure's definition is in docs/evaluate.md, the healthy "
        "values are those of docs/motion.md.</p>"
    )
    for block, values in report["settings"].items():
        if values:
            inner = _page.words_table(values, (block, "setting or digest"))
            yield f"<details><summary>Settings and digests: {escape(block)}</summary>{inner}</details>"
