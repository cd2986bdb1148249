"""Clips from metadata.csv, the order in which they are trained on, and the noise each of them gets.

Order and noise are pure functions of the seed, the epoch and the clip: the number of processes, the batch
size and the accumulation change neither which clips make up a step nor the noise they start from.
"""

import csv
import hashlib
import math
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path

import av
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional


class DataError(ValueError):
    """Training data that cannot be used. The message names the file, the line and the way out."""


# ------------------------------------------------------------------------------------------------------------
# Video files


def read_video(path: str | Path, num_frames: int | None = None) -> Tensor:
    """The first `num_frames` frames (None: all), (F, H, W, 3) uint8 RGB, upright as the file's rotation says.

    Frames come as they are stored: no resampling to another frame rate. Raises DataError for a file that is
    missing or cannot be decoded, or holds fewer frames.
    """
    if not Path(path).is_file():
        raise DataError(f"{path}: no such file")
    frames = []
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise DataError(f"{path}: holds no video")
            container.streams.video[0].thread_type = "AUTO"
            for frame in container.decode(video=0):
                if len(frames) == num_frames:
                    break
                frames.append(np.rot90(frame.to_ndarray(format="rgb24"), k=frame.rotation // 90))
    except av.FFmpegError as error:
        raise DataError(f"{path}: cannot be decoded ({error.strerror})") from error
    if len(frames) < (num_frames or 1):
        raise DataError(f"{path}: holds {len(frames)} frames, {num_frames or 1} are needed")
    return torch.from_numpy(np.stack(frames))


def frame_rate(path: str | Path) -> float:
    """Average frames per second of a video file."""
    with av.open(str(path)) as container:
        return float(container.streams.video[0].average_rate)


def write_video(path: str | Path, video: Tensor, fps: float) -> None:
    """Write `video`, uint8 (F, H, W, 3) or float (3, F, H, W) in [-1, 1], as H.264 mp4, atomically.

    The file is for looking at: 4:2:0 colour and compression change pixels, so no reward is computed from it.
    """
    frames = video if video.dtype == torch.uint8 else to_uint8(video)
    _, height, width, _ = frames.shape
    if height % 2 or width % 2:
        raise ValueError(f"{path}: H.264 needs an even height and width, got {height} x {width}")
    path = Path(path)
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        with av.open(str(temporary), "w", format="mp4") as container:
            stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001))
            stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
            stream.options = {"crf": "18"}
            for frame in frames.cpu().numpy():
                container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
            container.mux(stream.encode())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def to_float(frames: Tensor) -> Tensor:
    """(F, H, W, 3) uint8 frames as (3, F, H, W) float32 video in [-1, 1]."""
    return frames.permute(3, 0, 1, 2).float() / 127.5 - 1


def to_uint8(video: Tensor) -> Tensor:
    """(3, F, H, W) video in [-1, 1] as (F, H, W, 3) uint8 frames, rounded; values outside are clipped."""
    return ((video.detach().float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).permute(1, 2, 3, 0)


def fit(frames: Tensor, height: int, width: int) -> Tensor:
    """(F, H, W, 3) uint8 frames resized, antialiased, to cover height x width and cropped at the centre."""
    old_height, old_width = frames.shape[1:3]
    if (old_height, old_width) == (height, width):
        return frames
    scale = max(height / old_height, width / old_width)
    size = (max(height, round(old_height * scale)), max(width, round(old_width * scale)))
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    fitted = []
    for chunk in frames.split(8):  # 81 frames of 1080p would take 2 GB as float32
        resized = functional.interpolate(
            chunk.permute(0, 3, 1, 2).float(), size, mode="bicubic", antialias=True, align_corners=False
        )
        cropped = resized[:, :, top : top + height, left : left + width]
        fitted.append(cropped.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1))
    return torch.cat(fitted)


# ------------------------------------------------------------------------------------------------------------
# metadata.csv


@dataclass(frozen=True)
class Row:
    """A line of metadata.csv. `id` is the same wherever the line stands and whatever else the file holds."""

    index: int  # from 0, among the rows of the file
    line: int  # in the file, from 1
    id: str
    video: Path
    prompt: str
    problem: str = ""  # what is wrong with the line itself


@dataclass(frozen=True)
class Example:
    id: str
    prompt: str
    video: Tensor  # (3, F, H, W) in [-1, 1], the real clip
    image: Tensor  # (3, H, W) in [-1, 1], its first frame: the model's input


def load_metadata(file_name: str | Path) -> list[Row]:
    """All rows of metadata.csv, usable or not (see check_rows), in the order of the file.

    Columns `video` (path relative to the file's folder, or absolute) and `prompt`; any other column is the
    user's own (split, person, ...) and ignored. Raises DataError for a missing file or column.
    """
    path = Path(file_name)
    if not path.is_file():
        raise DataError(f"data.file_name: no such file: {path}")
    with path.open(newline="", encoding="utf-8-sig") as file:  # -sig: spreadsheets write a byte order mark
        reader = csv.DictReader(file)
        missing = [name for name in ("video", "prompt") if name not in (reader.fieldnames or [])]
        if missing:
            found = ", ".join(reader.fieldnames or []) or "nothing"
            raise DataError(f"{path}: the first line must name the column {missing[0]!r}, it names {found}")
        records = [(reader.line_num, record) for record in reader]
    seen = Counter()
    return [_row(i, line, record, path.parent, seen) for i, (line, record) in enumerate(records)]


def _row(index: int, line: int, record: dict[str | None, str | None], folder: Path, seen: Counter) -> Row:
    video, prompt = ((record[name] or "").strip() for name in ("video", "prompt"))
    problem = ""
    if None in record:  # DictReader's key for cells beyond the last column
        problem = "more cells than columns; put a prompt that holds commas in double quotes"
    elif not video:
        problem = "no video"
    elif not prompt:
        problem = f"empty prompt for {video}"
    row_id = f"{video}#{hashlib.blake2b(prompt.encode(), digest_size=4).hexdigest()}"
    seen[row_id] += 1  # a line repeated to weigh more is a sample of its own, with noise of its own
    suffix = f"-{seen[row_id]}" if seen[row_id] > 1 else ""
    return Row(index, line, row_id + suffix, folder / video, prompt, problem)


def check_rows(rows: Sequence[Row], num_frames: int, skip_bad_rows: bool) -> tuple[list[Row], list[str]]:
    """(rows that can be trained on, one line about each that cannot).

    Decodes the first num_frames frames of every clip. Raises DataError with all the lines unless
    `skip_bad_rows`, and when no row is left.
    """
    with ThreadPoolExecutor(4) as pool:  # each holds a decoded clip, half a GB at 1080p
        found = list(pool.map(lambda row: row.problem or _clip_problem(row.video, num_frames), rows))
    good = [row for row, problem in zip(rows, found, strict=True) if not problem]
    problems = [f"line {row.line}: {problem}" for row, problem in zip(rows, found, strict=True) if problem]
    if problems and not skip_bad_rows:
        listing = "\n".join(problems)
        raise DataError(
            f"data.file_name: {len(problems)} of {len(rows)} rows cannot be used; mend them or set "
            f"data.skip_bad_rows: true\n{listing}"
        )
    if not good:
        raise DataError("\n".join(["data.file_name: no usable row", *problems]))
    return good, problems


def _clip_problem(path: Path, num_frames: int) -> str:
    try:
        read_video(path, num_frames)
    except DataError as error:
        return str(error)
    return ""


def load_example(row: Row, height: int, width: int, num_frames: int) -> Example:
    """The row's clip, its first `num_frames` frames at height x width. DataError as read_video."""
    video = to_float(fit(read_video(row.video, num_frames), height, width))
    return Example(row.id, row.prompt, video, video[:, 0])


# ------------------------------------------------------------------------------------------------------------
# Order: position p of the training stream is sample p % num_rows in the order of epoch p // num_rows


@lru_cache(maxsize=4)
def epoch_order(num_rows: int, seed: int, epoch: int) -> tuple[int, ...]:
    """The order in which an epoch visits the rows 0..num_rows - 1, each once."""
    generator = torch.Generator().manual_seed(_stable_hash(f"order/{seed}/{epoch}"))
    return tuple(torch.randperm(num_rows, generator=generator).tolist())


def sample_at(position: int, num_rows: int, seed: int) -> tuple[int, int]:
    """(epoch, row) at `position` (from 0) of the endless stream of epochs."""
    epoch, offset = divmod(position, num_rows)
    return epoch, epoch_order(num_rows, seed, epoch)[offset]


def micro_batch(
    step: int,
    micro: int,
    rank: int,
    *,
    batch_size: int,
    accumulation: int,
    processes: int,
    num_rows: int,
    seed: int,
) -> list[tuple[int, int]]:
    """The `batch_size` samples (epoch, row) that process `rank` takes in forward pass `micro` of `step`.

    A step takes the next batch_size * accumulation * processes positions of the stream, whatever the three
    factors are. Where the data run out in the middle of a step it goes on with the next epoch, so every step
    is full and no row is left out.
    """
    first = ((step * accumulation + micro) * processes + rank) * batch_size
    return [sample_at(first + i, num_rows, seed) for i in range(batch_size)]


def total_steps(num_rows: int, global_batch: int, num_train_epochs: int, max_steps: int | None) -> int:
    """Steps of a run: max_steps, or as many as visit every row at least num_train_epochs times."""
    return max_steps or math.ceil(num_train_epochs * num_rows / global_batch)


# ------------------------------------------------------------------------------------------------------------
# Noise


def noise_seed(run_seed: int, epoch: int, sample_id: str, member: int = 0) -> int:
    """Seed (63 bits) of the noise of one sample; `member` counts the noises of a sample within an epoch."""
    return _stable_hash(f"noise/{run_seed}/{epoch}/{member}/{sample_id}")


def training_noise_seed(run_seed: int, epoch: int, sample_id: str, noises_per_sample: str | int) -> int:
    """noise_seed for a sample's visit in `epoch`: new in each ("fresh"), or the same n in turn (n)."""
    if noises_per_sample == "fresh":
        return noise_seed(run_seed, epoch, sample_id)
    return noise_seed(run_seed, 0, sample_id, epoch % noises_per_sample)


def noise(shape: Sequence[int], seed: int, device: str | torch.device = "cpu") -> Tensor:
    """Standard normal float32 noise, drawn on the CPU so that every device starts from the same."""
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed)).to(device)


def _stable_hash(text: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # Python's own hash() differs from process to process
