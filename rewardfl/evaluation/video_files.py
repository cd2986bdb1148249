"""Video files of an evaluation: strips of frames for the grid, and the rows of another tool's files."""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from rewardfl import data

PEOPLE, SHOWN, HEIGHT = 8, 4, 96  # rows of the grid, frames of each clip in it, and their height

NAMED = re.compile(r"(.+?)(?:_seed(\d+))?\.mp4")  # NAME.mp4 or NAME_seedN.mp4


def strip_file(out: Path, row: int, arm: str) -> Path:
    """Return the picture that holds a clip's frames until the grid is drawn."""
    return out / "strips" / f"{row:03d}_{arm}.png"


def write_strip(path: Path, video: Tensor) -> None:
    """Write the frames of a clip (3, F, H, W) in [-1, 1] that the grid shows, losslessly."""
    frames = data.to_uint8(video[:, pick_frames(video.shape[1])]).cpu().numpy()
    pictures = [np.asarray(ImageOps.contain(Image.fromarray(frame), (HEIGHT * 4, HEIGHT))) for frame in frames]
    path.parent.mkdir(parents=True, exist_ok=True)
    data.write_picture(path, torch.from_numpy(np.concatenate(pictures, 1))[None])


def pick_frames(count: int) -> list[int]:
    """Return the indices of the frames that are shown, evenly among those after the first."""
    return torch.linspace(1, count - 1, min(SHOWN, count - 1)).round().long().tolist()


def plain(row_id: str) -> str:
    """Return a row's id with all characters replaced that a file name should not have."""
    return re.sub(r"[^\w.-]", "_", row_id)


def find_videos(folder: Path, rows: Sequence[data.Row]) -> dict[tuple[str, int], Path]:
    """Return {(row id, number of the noise): file}. A file's name is the row's index in the table, from 0, or its id.

    007.mp4, 7.mp4 and 007_seed0.mp4 are the first video of row 7, 007_seed1.mp4 the second. Ignore other files. Raise
    ValueError where the folder is missing, has no video of a row, or two for one noise.
    """
    if not folder.is_dir():
        raise ValueError(f"--videos: {folder}: no such folder")
    by_name = {plain(row.id): row.id for row in rows}
    by_index = {row.index: row.id for row in rows}
    files: dict[tuple[str, int], Path] = {}
    for path in sorted(folder.glob("*.mp4")):
        if (match := NAMED.fullmatch(path.name)) is None:
            continue
        name, seed = match.groups()
        row_id = by_name.get(name) or (by_index.get(int(name)) if name.isdecimal() else None)
        if row_id is None:
            continue
        key = (row_id, int(seed or 0))
        if key in files:
            raise ValueError(f"--videos: {path} and {files[key].name} are both noise {key[1]} of one row; remove one")
        files[key] = path
    with_video = {row_id for row_id, _ in files}
    if missing := [row for row in rows if row.id not in with_video]:
        row = missing[0]
        raise ValueError(
            f"--videos: {folder} has no video of {len(missing)} rows, the first is line {row.line}: name it "
            f"{row.index:03d}.mp4 or {plain(row.id)}.mp4, with _seed1, _seed2 before .mp4 for further noises"
        )
    return files
