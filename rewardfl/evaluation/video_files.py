"""Videos that another tool has made of the rows of a table: which file is of which row."""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from rewardfl import data

PEOPLE, SHOWN, HEIGHT = 8, 4, 96  # rows of the grid, frames of each clip in it, and their height


def strip_file(out: Path, row: int, arm: str) -> Path:
    """Return the place of a clip's frames, a picture of their own until all of them are there."""
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


# NAME.mp4 or NAME_seedN.mp4
NAMED = re.compile(r"(.+?)(?:_seed(\d+))?\.mp4")


def plain(row_id: str) -> str:
    """A row's id as a file may be called."""
    return re.sub(r"[^\w.-]", "_", row_id)


def files_of(folder: Path, rows: Sequence[data.Row]) -> dict[tuple[str, int], Path]:
    """{(row id, number of the noise): file}. A file is named by the row's place in the table, from 0, or by its id.

    007.mp4, 7.mp4 and 007_seed0.mp4 are the first video of row 7, 007_seed1.mp4 the second. Other files are passed
    over. ValueError where the folder is missing, has no video of a row, or two for one noise.
    """
    if not folder.is_dir():
        raise ValueError(f"--videos: {folder}: no such folder")
    by_name = {plain(row.id): row.id for row in rows}
    by_place = {row.index: row.id for row in rows}
    found: dict[tuple[str, int], Path] = {}
    for path in sorted(folder.glob("*.mp4")):
        if (match := NAMED.fullmatch(path.name)) is None:
            continue
        name, seed = match.groups()
        row = by_name.get(name) or (by_place.get(int(name)) if name.isdecimal() else None)
        if row is None:
            continue
        key = (row, int(seed or 0))
        if key in found:
            raise ValueError(f"--videos: {path} and {found[key].name} are both noise {key[1]} of one row; remove one")
        found[key] = path
    if lacking := [row for row in rows if all(key[0] != row.id for key in found)]:
        row = lacking[0]
        raise ValueError(
            f"--videos: {folder} has no video of {len(lacking)} rows, the first is line {row.line}: name it "
            f"{row.index:03d}.mp4 or {plain(row.id)}.mp4, with _seed1, _seed2 before .mp4 for further noises"
        )
    return found
