"""Pictures of an evaluation: FaceSim along the clip, and a grid of frames."""

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image, ImageDraw, ImageOps
from torch import Tensor

from rewardfl import data
from rewardfl.evaluation import records
from rewardfl.evaluation.records import Record
from rewardfl.evaluation.report.verdicts import judge_words, main_judge

PEOPLE, SHOWN, HEIGHT = 8, 4, 96  # rows of the grid, frames of each clip in it, and their height


@matplotlib.rc_context({"text.parse_math": False, "axes.grid": True, "grid.alpha": 0.3})  # a name may hold a $
def draw_face_sim(report: Mapping, judge: str) -> bytes:
    """Draw FaceSim along the clip of every arm and of the real clips, as a PNG. Arms with equal curves are one line."""
    names: dict[tuple[float, ...], list[str]] = {}
    for arm in report["arms"]:
        names.setdefault(tuple(arm["per_frame"][judge]), []).append(arm["name"])
    figure = Figure(figsize=(5, 4), layout="constrained")
    axis = figure.subplots()
    for points in names:
        axis.plot(range(1, len(points) + 1), points, marker="." if len(points) < 20 else "")
    if real := report["real"]["per_frame"][judge]:
        axis.plot(range(1, len(real) + 1), real, color="#7f7f7f", linestyle="--")
        names[tuple(real)] = ["real clips"]
    axis.set_title(f"FaceSim by {judge_words(judge)}")
    axis.set_xlabel("frame")
    low, high = axis.get_ylim()
    axis.set_ylim(min(low, 0), max(high, 1))
    # names may begin with _, which a legend by labels leaves out
    axis.legend(axis.lines, ["\n".join(arms) for arms in names.values()], fontsize="small")
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110)
    return content.getvalue()


def draw_grid(report: Mapping, out: Path, videos: Sequence[Record], read: Callable[[Path], Tensor]) -> None:
    """Draw out/grid.png: a row per clip of the records, and a column per arm. read: of another tool's video."""
    names = [*([records.REAL] if report["real"]["figures"] else []), *(arm["name"] for arm in report["arms"])]
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
