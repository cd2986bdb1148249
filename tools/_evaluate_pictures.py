"""The pictures of an evaluation: FaceSim along the clip, gain against motion, and frames beside each other."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import numpy as np
import torch
from matplotlib import pyplot as plt
from PIL import Image, ImageDraw, ImageOps
from torch import Tensor

from rewardfl import data
from rewardfl_tools._arms import Arm
from rewardfl_tools._records import REAL, Record

PEOPLE, SHOWN, HEIGHT = 8, 4, 96  # rows of the grid, frames of each clip in it, and their height
GAP, HEAD, FOOT = 10, 16, 14  # pixels between clips, above all, and below each row


def draw_curves(report: dict, path: Path) -> None:
    """FaceSim along the clip of all arms and the real clips, by each recogniser; of the first two arms clip by clip."""
    judges, pairs = list(report["real"]["per_frame"]), "compared" in report
    count = len(judges) + pairs
    figure, axes = plt.subplots(1, count, figsize=(5 * count, 4), squeeze=False)
    for axis, judge in zip(axes[0], judges, strict=False):
        for arm in report["arms"]:
            curve = arm["per_frame"][judge]
            axis.plot(range(1, len(curve) + 1), curve, marker="o", markersize=3, label=arm["name"])
        real = report["real"]["per_frame"][judge]
        axis.plot(range(1, len(real) + 1), real, color="grey", linestyle="--", label="real clips")
        axis.set(title=f"FaceSim by the {judge} recogniser", xlabel="frame", ylabel="cosine", ylim=(0, 1))
        axis.legend(fontsize="small")
    if pairs:
        _draw_clips(report, judges, axes[0][-1])
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_clips(report: dict, judges: Sequence[str], axis: plt.Axes) -> None:
    lowest = 0.0  # a cosine may be below 0
    for judge, colour in zip(judges, ("tab:orange", "tab:green"), strict=False):
        found = [(clip[f"{judge}/before"], clip[f"{judge}/after"]) for clip in report["per_clip"]]
        found = [pair for pair in found if None not in pair]
        before, after = zip(*found, strict=True)
        axis.scatter(before, after, s=12, color=colour, label=judge)
        lowest = min([lowest, *(value for pair in found for value in pair)])
    axis.plot([-1, 1], [-1, 1], color="grey", linewidth=0.8)
    names = report["compared"]
    axis.set(title="every clip", xlabel=names["before"], ylabel=names["after"], xlim=(lowest, 1), ylim=(lowest, 1))
    axis.legend()


def draw_front(report: dict, path: Path) -> None:
    """Gain in FaceSim against the face's own motion, both over the base's, by the held-out judge (or the only one).

    A line joins the arms that no other one beats; more motion than the base counts as no more.
    """
    judge = list(report["real"]["per_frame"])[-1]
    arms = [arm for arm in report["arms"] if arm["against"]]
    gains = [arm["compared"][f"{judge}/face_sim"]["difference"] for arm in arms]
    moves = [arm["compared"][f"{judge}/nonrigid"]["ratio"] for arm in arms]
    figure, axis = plt.subplots(figsize=(7, 5))
    for arm, gain, motion in zip(arms, gains, moves, strict=True):
        reach = [[[one["mean"] - one["low"]], [one["high"] - one["mean"]]] for one in (gain, motion)]
        axis.errorbar(gain["mean"], motion["mean"], xerr=reach[0], yerr=reach[1], fmt="o", capsize=2)
        axis.annotate(arm["name"], (gain["mean"], motion["mean"]), xytext=(4, 4), textcoords="offset points")
    best = front([(gain["mean"], motion["mean"]) for gain, motion in zip(gains, moves, strict=True)])
    axis.plot([gains[i]["mean"] for i in best], [moves[i]["mean"] for i in best], color="grey", linewidth=1)
    axis.plot(0, 1, "k+", markersize=10)
    axis.annotate("base", (0, 1), xytext=(4, -12), textcoords="offset points")
    axis.axhline(1, color="grey", linewidth=0.5)
    axis.axvline(0, color="grey", linewidth=0.5)
    axis.set(xlabel=f"gain in FaceSim ({judge})", ylabel="non-rigid motion over the base's")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def front(places: Sequence[tuple[float, float]]) -> list[int]:
    """Return which of (gain, motion) no other one beats, by rising gain.

    One is beaten by what has at least as much of both and more of one. More motion than before is worth no more: it may
    be trembling. A place with a NaN is on no front.
    """
    worth = [(gain, min(motion, 1.0)) for gain, motion in places]
    known = [i for i, place in enumerate(worth) if not any(map(math.isnan, place))]

    def beaten(i: int) -> bool:
        return any(worth[j] != worth[i] and all(a >= b for a, b in zip(worth[j], worth[i], strict=True)) for j in known)

    return sorted((i for i in known if not beaten(i)), key=lambda i: worth[i])


# --------------------------------------------------------------------------------------------------------------------
# The grid. A clip's frames are kept as a picture of their own, a strip, until all of them are there.


def strip_file(out: Path, row: int, arm: str) -> Path:
    return out / "strips" / f"{row:03d}_{arm}.png"


def write_strip(path: Path, video: Tensor) -> None:
    """Keep what the grid shows of a clip (3, F, H, W) in [-1, 1], losslessly."""
    frames = data.to_uint8(video[:, picked(video.shape[1])]).cpu().numpy()
    pictures = [np.asarray(ImageOps.contain(Image.fromarray(frame), (HEIGHT * 4, HEIGHT))) for frame in frames]
    path.parent.mkdir(parents=True, exist_ok=True)
    data.write_picture(path, torch.from_numpy(np.concatenate(pictures, 1))[None])


def picked(count: int) -> list[int]:
    """The frames of a clip that are shown: of those after the first, evenly."""
    return torch.linspace(1, count - 1, min(SHOWN, count - 1)).round().long().tolist()


def draw_grid(out: Path, rows: Sequence[int], arms: Sequence[Arm], records: Sequence[Record], judge: str) -> None:
    """OUT/grid.png: a row per person, the real clip and each arm; under each frame the judge's score."""
    names = [REAL, *(arm.name for arm in arms)]
    curves = {(one["index"], one["arm"]): one["curves"][judge] for one in records if not one["seed"]}
    strips = {(row, name): _strip(out, row, name) for row in rows for name in names}
    width = max(strip.width for strip in strips.values() if strip) + GAP
    height = HEIGHT + FOOT
    sheet = Image.new("RGB", (len(names) * width, HEAD + len(rows) * height), "white")
    pen = ImageDraw.Draw(sheet)
    for c, name in enumerate(names):
        pen.text((c * width + 4, 2), name, fill="black")
        for r, row in enumerate(rows):
            if strip := strips[(row, name)]:
                left, top = c * width, HEAD + r * height
                sheet.paste(strip, (left, top))
                if name != REAL:
                    _write_scores(pen, left, top + HEIGHT, strip.width, curves[(row, name)])
    sheet.save(out / "grid.png")


def _strip(out: Path, row: int, name: str) -> Image.Image | None:
    """What is shown of a clip; None where there is none (of a tool that made no first video of this row)."""
    path = strip_file(out, row, name)
    return Image.open(path).convert("RGB") if path.is_file() else None


def _write_scores(pen: ImageDraw.ImageDraw, left: int, top: int, width: int, curve: Sequence[float]) -> None:
    frames = picked(len(curve) + 1)
    for k, frame in enumerate(frames):
        pen.text((left + k * width // len(frames) + 4, top), f"{curve[frame - 1]:.2f}", fill="black")


def draw(report: Mapping, out: Path, arms: Sequence[Arm], records: Sequence[Record], rows: Sequence[int]) -> list[Path]:
    """All pictures of an evaluation, and where they are."""
    pictures = [out / "grid.png", out / "curves.png"]
    draw_curves(dict(report), out / "curves.png")
    draw_grid(out, rows, arms, records, list(report["real"]["per_frame"])[-1])
    if sum(arm["against"] is not None for arm in report["arms"]) > 1:
        draw_front(dict(report), out / "front.png")
        pictures.append(out / "front.png")
    return pictures
