"""Pictures of an evaluation: FaceSim along the clip, curves of the training, and a grid of frames."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageOps
from torch import Tensor

from rewardfl import data
from rewardfl.evaluation import records
from rewardfl.evaluation.metric_curves import Curve, Lines, draw_curves, metric_curve
from rewardfl.evaluation.records import Record
from rewardfl.evaluation.report.verdicts import judge_words, main_judge

PEOPLE, SHOWN, HEIGHT = 8, 4, 96  # rows of the grid, frames of each clip in it, and their height

# trained terms, then judges
TRAINING = (
    "actor/loss", "reward/mean", "reward/face_motion", "reward/flow", "actor/data_loss", "actor/kl_loss",
    "reward/held_out", "reward/held_out/flow", "grad_norm",
)  # fmt: skip


def face_sim_curves(report: Mapping, judge: str) -> list[Curve]:
    """Return FaceSim along the clip of every arm, and of the real clips by their own pools."""
    curves = [(arm["name"], arm["per_frame"][judge], f"C{i}", "-") for i, arm in enumerate(report["arms"])]
    real = report["real"]["per_frame"][judge]
    curves += [("real clips", real, "#7f7f7f", "--")] if real else []
    return [Curve(name, list(enumerate(points, 1)), colour, style) for name, points, colour, style in curves]


def draw_face_sim(curves: Mapping[str, Sequence[Curve]]) -> bytes:
    """Draw FaceSim along the clip, a panel for each recogniser, as a PNG."""
    panels = {f"FaceSim by {judge_words(judge)}": judge_curves for judge, judge_curves in curves.items()}
    return draw_curves(panels, "frame", limits=(0, 1))


def draw_training(runs: Mapping[str, Lines]) -> bytes:
    """Draw the metrics TRAINING of runs by name, a panel each, as a PNG; empty without any. Leave out zeros."""
    panels = {key: [metric_curve(name, lines, key) for name, lines in runs.items()] for key in TRAINING}
    panels = {key: curves for key, curves in panels.items() if any(y for curve in curves for _, y in curve.points)}
    return draw_curves(panels, "step") if panels else b""


def draw_grid(report: Mapping, out: Path, videos: Sequence[Record], read: Callable[[Path], Tensor]) -> None:
    """Draw out/grid.png: a row per clip, a column for the real clip and each arm, the judge's scores below.

    videos: records of the clips that are shown. read: returns the frames of another tool's video.
    """
    names = [arm["name"] for arm in report["arms"]]
    names = [records.REAL, *names] if report["real"]["figures"] else names
    rows, judge = sorted({record["index"] for record in videos}), main_judge(report)
    strips: dict[tuple[int, int], Tensor] = {}
    for record in videos:
        path, is_real = out / record["file"], record["arm"] == records.REAL
        if not record["seed"] and record["arm"] in names and path.is_file():
            frames = (read(path) if record["decoded"] and not is_real else data.read_video(path)).numpy()
            shown = np.linspace(1, len(frames) - 1, min(SHOWN, len(frames) - 1)).round().astype(int)
            images = [ImageOps.contain(Image.fromarray(frames[i]), (4 * HEIGHT, HEIGHT)) for i in shown]
            strip = Image.fromarray(np.concatenate([np.array(image) for image in images], 1))
            scores = [] if is_real else [f"{record['curves'][judge][i - 1]:.2f}" for i in shown]
            place = rows.index(record["index"]), names.index(record["arm"])
            strips[place] = draw_cell(strip, record["arm"], "   ".join(scores))
    height, width = (max(strip.shape[axis] for strip in strips.values()) for axis in (0, 1))
    sheet = torch.full((len(rows), height, len(names), width, 3), 255, dtype=torch.uint8)
    for (row, column), strip in strips.items():
        sheet[row, : strip.shape[0], column, : strip.shape[1]] = strip
    data.write_picture(out / "grid.png", sheet.flatten(2, 3).flatten(0, 1)[None])


def draw_cell(image: Image.Image, above: str, below: str) -> Tensor:
    """Draw an image between two lines of text: (H, W, 3) uint8."""
    cell = ImageOps.expand(image, (4, 16, 4, 18), "white")
    ImageDraw.Draw(cell).text((4, 2), above[: image.width // 6], fill="black")
    ImageDraw.Draw(cell).text((4, 17 + image.height), below, fill="black")
    return torch.from_numpy(np.array(cell))
