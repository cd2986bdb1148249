"""Clips from metadata.csv, the order in which they are trained on, and the noise each of them gets.

Order and noise are pure functions of the seed, the epoch and the clip: the number of processes, the batch
size and the accumulation change neither which clips make up a step nor the noise they start from (with clips
of several shapes the batch size does change which clips make up a step: see micro_batch).
"""

import csv
import hashlib
import io
import itertools
import math
import os
import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import av
import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn import functional

from rewardfl.files import atomic_directory, atomic_write

COLUMNS = (
    "video",
    "prompt",
    "image",
    "negative_prompt",
    "reference_video",
)  # of metadata.csv; the first two are a must
PATHS = ("video", "image", "reference_video")  # the columns that name files
STEP = 16  # diffusers' Wan pipeline takes heights and widths in multiples of it
REFERENCE_FRAMES = 2  # at least, of a reference video: a face pool leaves out the first
PICTURE_PIXELS = 2**26  # at most, of a picture (8192 x 8192): reading and fitting it takes 1.1 GB
NAME_BYTES = 255  # of a file's name, on the file systems there are
# The bits depend on the number of threads, and, where macroblocks are an odd number, libx264's macroblock tree reads
# memory that nobody has written (core 165).
X264 = {"crf": "18", "threads": "1", "x264-params": "mbtree=0"}
SAME_RATE = 0.99  # 23.976 frames per second pass for 24


class DataError(ValueError):
    """Training data that cannot be used. The message names the file, the line and the way out."""


# ------------------------------------------------------------------------------------------------------------
# Video files


class Instant(NamedTuple):
    """When a frame is shown, in seconds: what is known of it before it is decoded."""

    time: float


Timed = av.VideoFrame | Instant


def read_video(path: str | Path, num_frames: int | None = None, fps: float | None = None) -> Tensor:
    """The frames of iter_frames as (F, H, W, 3) uint8 RGB, upright as the file's rotation says."""
    return torch.from_numpy(np.stack([_pixels(frame) for frame in iter_frames(path, num_frames, fps)]))


def iter_frames(
    path: str | Path, num_frames: int | None = None, fps: float | None = None, at_least: int | None = None
) -> Iterator[av.VideoFrame]:
    """The first `num_frames` frames of a clip (None: all), one at a time, not yet turned upright.

    fps None: as they are stored. A number: for k = 0, 1, ... the frame whose time is nearest to start + k / fps,
    whatever times the frames have (variable frame rates). Raises DataError for a file that is missing or cannot
    be decoded, where it ends before `at_least` frames (None: num_frames), and for frames that follow each other
    more slowly than fps: frames that were never filmed would have to be made up.
    """
    return _chosen(path, _decoded(path), num_frames, fps, at_least)


def _chosen(
    path: str | Path, frames: Iterable[Timed], num_frames: int | None, fps: float | None, at_least: int | None
) -> Iterator[Timed]:
    """Those of a file's frames, or of their times, that iter_frames takes."""
    found, needed = 0, (num_frames or 1) if at_least is None else at_least
    for frame in itertools.islice(frames, num_frames) if fps is None else _at_rate(path, frames, fps, num_frames):
        found += 1
        yield frame
    if found < needed:
        rate = "" if fps is None else f" at {fps:g} fps"
        raise DataError(f"{path}: holds {found} frames{rate}, {needed} are needed")


@contextmanager
def _opened(path: str | Path) -> Iterator[tuple[av.container.InputContainer, av.VideoStream]]:
    """A file and its video. DataError for what its header, or reading on, shows to be of no use to training."""
    if not os.path.isfile(path):  # Path.is_file raises for names that no file system takes
        raise DataError(f"{path}: no such file")
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise DataError(f"{path}: holds no video")
            stream = container.streams.video[0]
            stream.thread_type = "AUTO"
            if abs((stream.sample_aspect_ratio or 1) - 1) > 0.02:  # players stretch it; a face would be squeezed
                raise DataError(
                    f"{path}: pixels are {stream.sample_aspect_ratio} as wide as high; make them square with "
                    "ffmpeg -i IN -vf scale=iw*sar:ih,setsar=1 OUT"
                )
            yield container, stream
    except av.FFmpegError as error:
        raise DataError(f"{path}: cannot be decoded ({error.strerror})") from error


def _decoded(path: str | Path) -> Iterator[av.VideoFrame]:
    """All frames in the order in which they are shown. DataError for what training could not use as it is."""
    size = None
    with _opened(path) as (container, stream):
        for i, frame in enumerate(container.decode(stream)):
            size = size or (frame.height, frame.width)
            if (frame.height, frame.width) != size:
                change = f"{size[0]} x {size[1]} to {frame.height} x {frame.width}"
                raise DataError(f"{path}: goes from {change} pixels at frame {i}; re-encode it at one size")
            if frame.rotation % 90:
                raise DataError(f"{path}: is turned by {frame.rotation} degrees; re-encode it upright")
            yield frame


def read_header(
    path: str | Path, num_frames: int, fps: float | None = None, at_least: int | None = None
) -> tuple[tuple[int, int], float | None]:
    """((height, width) as stored, frames per second where it says so) of a clip, without decoding a frame.

    Raises iter_frames' DataError as far as that can be told. A header may lie: where it promises too few frames, or too
    slow ones, the times of the file's packets decide, which are never fewer than its frames; where it promises
    enough, reading the frames may still find less.
    """
    with _opened(path) as (container, stream):
        rate = float(stream.average_rate) if stream.average_rate else None
        needed = num_frames if at_least is None else at_least
        if _promises_too_little(stream.frames, rate, needed, fps):
            packets = [packet for packet in container.demux(stream) if packet.size and not packet.is_discard]
            if all(packet.pts is not None for packet in packets):
                times = sorted({packet.pts * packet.time_base for packet in packets})
                for _ in _chosen(path, (Instant(float(time)) for time in times), num_frames, fps, at_least):
                    pass
        return (stream.height, stream.width), rate


def _promises_too_little(count: int, rate: float | None, needed: int, fps: float | None) -> bool:
    """count: 0 where the header does not say."""
    if fps is None or rate is None:
        return 0 < count < needed
    return rate < SAME_RATE * fps or 0 < count < (needed - 1) * rate / fps + 1


def _at_rate(path: str | Path, frames: Iterable[Timed], fps: float, num_frames: int | None) -> Iterator[Timed]:
    """The frames nearest to every 1 / fps seconds, in one pass; the last frame stands as long as the one before it."""
    slack = 1e-3  # seconds: containers round times to milliseconds, and halfway between two frames is the earlier
    start, before, shown, gap, seen, k = 0.0, -math.inf, None, 0.0, 0, 0
    for frame in frames:
        if frame.time is None or frame.time <= before:
            raise DataError(f"{path}: frame {seen} has no time of its own; re-encode it, or set data.fps: null")
        if shown is None:
            start = frame.time
        else:
            gap = frame.time - before
        while shown is not None and k != num_frames and start + k / fps <= before + gap / 2 + slack:
            yield shown
            k += 1
        before, shown, seen = frame.time, frame, seen + 1
        if k == num_frames:
            break
    while shown is not None and k != num_frames and start + k / fps <= before + max(0.0, gap - slack):
        yield shown
        k += 1
    rate = (seen - 1) / (before - start) if seen > 1 else math.inf  # one frame has none: too few frames says enough
    if rate < SAME_RATE * fps:
        raise DataError(
            f"{path}: has {rate:.4g} frames per second, data.fps is {fps:g}; lower it or leave the clip out"
        )


def _pixels(frame: av.VideoFrame) -> np.ndarray:
    """(H, W, 3) uint8 RGB, upright."""
    return np.ascontiguousarray(np.rot90(frame.to_ndarray(format="rgb24"), k=frame.rotation // 90))


def frame_rate(path: str | Path) -> float:
    """Average frames per second of a video file. DataError where it cannot be read, or does not say."""
    with _opened(path) as (_, stream):
        if not stream.average_rate:
            raise DataError(f"{path}: does not say how many frames it has per second; re-encode it, or set data.fps")
        return float(stream.average_rate)


def write_video(path: str | Path, video: Tensor, fps: float) -> None:
    """Write `video`, uint8 (F, H, W, 3) or float (3, F, H, W) in [-1, 1], as H.264 mp4, atomically.

    The same video gives the same bytes. The file is for looking at: 4:2:0 colour and compression change pixels, so no
    reward is computed from it.
    """
    frames = _frames(video)
    _, height, width, _ = frames.shape
    if height % 2 or width % 2:
        raise ValueError(f"{path}: H.264 needs an even height and width, got {height} x {width}")
    path = Path(path)
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        with av.open(str(temporary), "w", format="mp4") as container:
            stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001))
            stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
            stream.options = X264
            for frame in frames:
                container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
            container.mux(stream.encode())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_npy(path: str | Path, video: Tensor) -> None:
    """Write a video, as write_video takes it, as numpy's uint8 array (F, H, W, 3) in RGB, atomically and losslessly."""
    content = io.BytesIO()
    np.save(content, _frames(video))
    atomic_write(path, content.getvalue())


def write_pngs(folder: str | Path, video: Tensor) -> None:
    """Write a video, as write_video takes it, as `folder`/0000.png, 0001.png, ...: all of them or none, losslessly.

    Raises FileExistsError where there is something at `folder`, which is never replaced.
    """
    if Path(folder).exists():
        raise FileExistsError(f"{folder} is there already")
    with atomic_directory(folder) as new:
        for i, frame in enumerate(_frames(video)):
            Image.fromarray(frame).save(new / f"{i:04d}.png")


def _frames(video: Tensor) -> np.ndarray:
    """(F, H, W, 3) uint8 of a video as write_video takes it."""
    return (video if video.dtype == torch.uint8 else to_uint8(video)).cpu().numpy()


def draw_boxes(video: Tensor, boxes: Tensor) -> Tensor:
    """A copy of a video (3, F, H, W) in [-1, 1] with a green frame around boxes (F, 4): left, top, right, bottom."""
    marked, (height, width) = video.clone(), video.shape[2:]
    green = torch.tensor([-1.0, 1.0, -1.0], dtype=video.dtype, device=video.device)[:, None]
    limits = torch.tensor([width - 1, height - 1] * 2)
    for frame, box in zip(marked.unbind(1), boxes.cpu().round().long(), strict=True):
        left, top, right, bottom = box.clamp(min=0).minimum(limits).tolist()
        for line in (frame[:, top, left : right + 1], frame[:, bottom, left : right + 1]):
            line[:] = green
        for line in (frame[:, top : bottom + 1, left], frame[:, top : bottom + 1, right]):
            line[:] = green
    return marked


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


def fit_size(height: int, width: int, max_pixels: int) -> tuple[int, int]:
    """(height, width) for a clip of that size: multiples of STEP with at most max_pixels, and the clip's own shape.

    Of all such sizes with no more pixels than the clip has, those at which it is scaled down least (by the side
    that is scaled down more), and of these the one that crops least. max_pixels: at least STEP * STEP.
    """
    pixels = max(STEP**2, min(max_pixels, height * width))
    heights = range(STEP, pixels // STEP + 1, STEP)
    # the width that shows all of the clip at that height, or what the pixels allow
    sizes = [(h, STEP * min(-(-h * width // (height * STEP)), pixels // (h * STEP))) for h in heights]
    # of equals the first: where the width decides, more height would only be cropped
    return max(sizes, key=lambda size: min(size[0] / height, size[1] / width))


def clip_size(source: tuple[int, int], height: int, width: int, max_pixels: int | None) -> tuple[int, int]:
    """(height, width) that a clip of `source` (height, width) pixels is brought to."""
    return (height, width) if max_pixels is None else fit_size(*source, max_pixels)


def read_clip(
    path: str | Path, height: int, width: int, num_frames: int, max_pixels: int | None = None,
    fps: float | None = None, at_least: int | None = None,
) -> Tensor:  # fmt: skip
    """The frames of iter_frames fitted to clip_size, (F, H, W, 3) uint8.

    They are fitted one at a time: what is held is the result and a frame, however large the file's frames are.
    """
    fitted, size = [], None
    for frame in iter_frames(path, num_frames, fps, at_least):
        pixels = torch.from_numpy(_pixels(frame))
        size = size or clip_size(tuple(pixels.shape[:2]), height, width, max_pixels)
        fitted.append(fit(pixels[None], *size))
    return torch.cat(fitted)


def read_picture(path: str | Path) -> Tensor:
    """(H, W, 3) uint8 RGB of a picture file, upright as its EXIF orientation says.

    Raises DataError for a file that is missing or cannot be decoded, for more than PICTURE_PIXELS, for transparent
    pixels, whose colour would have to be made up, and for pixels of more than 8 bits, which Pillow would clip.
    """
    with _opened_picture(path) as picture:
        picture.load()
        ImageOps.exif_transpose(picture, in_place=True)
    if picture.has_transparency_data and picture.convert("RGBA").getextrema()[3][0] < 255:
        raise DataError(f"{path}: has transparent pixels; save it without an alpha channel")
    return torch.from_numpy(np.array(picture if picture.mode == "RGB" else picture.convert("RGB")))


def _check_picture(path: Path) -> None:
    """DataError as read_picture, as far as the picture's header tells."""
    with _opened_picture(path):
        pass


@contextmanager
def _opened_picture(path: str | Path) -> Iterator[Image.Image]:
    """A picture, of which only the header is read yet. DataError as read_picture's, also for what is read within."""
    if not os.path.isfile(path):
        raise DataError(f"{path}: no such file")
    too_large = f"{path}: has more than {PICTURE_PIXELS} pixels; scale it down"
    try:
        with Image.open(path) as picture:
            if math.prod(picture.size) > PICTURE_PIXELS:
                raise DataError(too_large)
            if picture.mode.startswith(("I", "F")):
                raise DataError(f"{path}: has pixels of Pillow's mode {picture.mode}; save it with 8 bits per channel")
            yield picture
    except Image.DecompressionBombError as error:  # Pillow's own limit, which lies above
        raise DataError(too_large) from error
    except DataError:  # is a ValueError
        raise
    except (OSError, SyntaxError, ValueError) as error:  # SyntaxError: a broken PNG
        raise DataError(f"{path}: cannot be decoded as a picture; save it as JPEG or PNG") from error


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
    image: Path | None = None  # the model's input; None: the clip's first frame
    negative_prompt: str = ""  # see notes
    reference_video: Path | None = None  # whose face is to be kept; None: the clip's
    table: str = "data.file_name"  # what lists the row, as messages call it: the setting and its file

    @property
    def face_video(self) -> Path:
        """The clip that the face to be kept is taken from."""
        return self.reference_video or self.video

    @property
    def files(self) -> dict[str, Path | None]:
        """What the row names, by the column; None where it names nothing."""
        return {"video": self.video, "image": self.image, "reference_video": self.reference_video}


@dataclass(frozen=True)
class Look:
    """What was seen of a row without decoding a frame: look_at."""

    problems: tuple[str, ...] = ()
    size: tuple[int, int] | None = None  # (height, width) of its clip as stored; None where it cannot be opened
    rate: float | None = None  # of its clip, in frames per second; None where the file does not say


@dataclass(frozen=True)
class Example:
    id: str
    prompt: str
    video: Tensor  # (3, F, H, W) in [-1, 1], the real clip
    image: Tensor  # (3, H, W) in [-1, 1], the model's input
    reference: Tensor  # (3, F', H', W') in [-1, 1], the clip whose face is to be kept: `video` unless the row says


def load_metadata(file_name: str | Path, key: str = "data.file_name") -> list[Row]:
    """All rows of metadata.csv, usable or not (see check_rows), at least one, in the order of the file.

    Columns `video` and `prompt`, optional `image`, `negative_prompt` and `reference_video`, where an empty cell
    means none; paths are absolute or relative to the file's folder. Any other column is the user's own (split,
    person, ...) and ignored. key: the setting that names the file, for messages. Raises DataError for a file that is
    missing, no UTF-8 or no CSV, lacks a column, or has no row.
    """
    path = Path(file_name)
    if not path.is_file():
        what = "is a folder, not a file of rows" if path.is_dir() else "no such file"
        raise DataError(f"{key}: {what}: {path}")
    with path.open(newline="", encoding="utf-8-sig") as file:  # -sig: spreadsheets write a byte order mark
        reader = csv.reader(file, strict=True)  # else a quote that is never closed swallows the rows after it
        try:
            records = [(reader.line_num, [cell.strip() for cell in cells]) for cells in reader if cells]
        except csv.Error as error:
            raise DataError(f"{path}: line {reader.line_num}: {error}; check the double quotes up to it") from error
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: is not UTF-8 ({error.reason}); save it as 'CSV UTF-8'") from error
    header = records[0][1] if records else []
    for name in COLUMNS:
        if name not in header and name in COLUMNS[:2]:
            found = ", ".join(header) or "nothing"
            raise DataError(f"{path}: the first line must name the column {name!r}, it names {found}")
        if header.count(name) > 1:
            raise DataError(f"{path}: the first line names the column {name!r} twice; remove one")
    seen = Counter()
    table = f"{key} ({path})"
    if len(records) == 1:
        raise DataError(f"{table}: no usable row: there is none after the first line, which names the columns")
    return [_row(i, line, header, cells, path.parent, seen, table) for i, (line, cells) in enumerate(records[1:])]


def _row(index: int, line: int, header: list[str], cells: list[str], folder: Path, seen: Counter, table: str) -> Row:
    cell = dict.fromkeys(COLUMNS, "") | dict(zip(header, cells, strict=False))
    problem = ""
    if len(cells) > len(header):
        problem = "more cells than columns; put a prompt that holds commas in double quotes"
    elif not cell["video"]:
        problem = "no video"
    else:
        problem = next((_unlike_a_name(name, cell[name]) for name in PATHS if _is_too_long(cell[name])), "")
    # only the cells that are given: an id stays what it was when a column comes to the file
    given = [cell["prompt"], *(f"{name}={cell[name]}" for name in COLUMNS[2:] if cell[name])]
    row_id = f"{cell['video']}#{hashlib.blake2b(chr(10).join(given).encode(), digest_size=4).hexdigest()}"
    seen[row_id] += 1  # a line repeated to weigh more is a sample of its own, with noise of its own
    suffix = f"-{seen[row_id]}" if seen[row_id] > 1 else ""
    image, reference = (folder / cell[name] if cell[name] else None for name in PATHS[1:])
    return Row(
        index, line, row_id + suffix, folder / cell["video"], cell["prompt"], problem,
        image, cell["negative_prompt"], reference, table,
    )  # fmt: skip


def _is_too_long(cell: str) -> bool:
    return any(len(os.fsencode(part)) > NAME_BYTES for part in Path(cell).parts)


def _unlike_a_name(column: str, cell: str) -> str:
    return f"{column}: {cell[:40]!r}... ({len(cell)} characters) is too long for a file's name; are columns swapped?"


def notes(rows: Sequence[Row]) -> list[str]:
    """What is read from the rows and has no effect, in words."""
    count = sum(row.negative_prompt != "" for row in rows)
    words = "have a negative_prompt, which has no effect: clips are sampled without guidance"
    return [f"{count} of {len(rows)} rows {words}"] if count else []


def look_at(row: Row, num_frames: int, fps: float | None = None) -> Look:
    """What keeps a row from being trained on, as far as its line and its files' headers tell, in milliseconds."""
    if row.problem:
        return Look((row.problem,))

    def read(path: Path, at_least: int) -> tuple[tuple[int, int], float | None]:
        return read_header(path, num_frames, fps, at_least)

    found, problems = _read_files(row, num_frames, read, _check_picture)
    size, rate = found.get("video", (None, None))
    return Look((*_said_of(row), *problems), size, rate)


def _said_of(row: Row) -> list[str]:
    """What is wrong with what the row says, whatever its files hold."""
    return [] if row.prompt else [f"empty prompt for {row.video.name}"]


def _read_files(
    row: Row, num_frames: int, read: Callable[[Path, int], Any], read_image: Callable[[Path], Any]
) -> tuple[dict[str, Any], list[str]]:
    """({column: what was read of the row's file}, what is wrong with the files that could not be); each is read once.

    read: video, frames that are needed of it -> anything; read_image: the same of a picture. DataError where they fail.
    """
    readers = {"video": partial(read, row.video, num_frames)}
    if row.reference_video not in (None, row.video):
        readers["reference_video"] = partial(read, row.reference_video, REFERENCE_FRAMES)
    if row.image is not None:
        readers["image"] = partial(read_image, row.image)
    found, problems = {}, []
    for column, reader in readers.items():
        try:
            found[column] = reader()
        except DataError as error:
            problems.append(str(error))
    return found, problems


def clip_notes(
    rows: Sequence[Row], looks: Sequence[Look], height: int, width: int, max_pixels: int | None, fps: float | None
) -> list[str]:
    """What is odd about clips that can be trained on, in words: much smaller ones, and several rates that are mixed."""
    seen = [(row, look) for row, look in zip(rows, looks, strict=True) if look.size is not None]
    wanted, what = height * width, f"of {height} x {width}, and are enlarged"
    if max_pixels is not None and seen:
        wanted = min(max_pixels, statistics.median(math.prod(look.size) for _, look in seen))
        what = "that is usual here, and are generated as small as they are"
    small = [(row, look) for row, look in seen if math.prod(look.size) < wanted / 2]
    found = []
    if small:
        row, look = min(small, key=lambda one: math.prod(one[1].size))
        found.append(
            f"{len(small)} of {len(rows)} clips have less than half of the pixels {what}; the smallest is line "
            f"{row.line}, {row.video.name}: {look.size[0]} x {look.size[1]} (height x width)"
        )
    rates = sorted((look.rate, row.line) for row, look in seen if look.rate is not None)
    if fps is None and rates and rates[0][0] < SAME_RATE * rates[-1][0]:
        (slow, slow_line), (fast, fast_line) = rates[0], rates[-1]
        found.append(
            f"data.fps is null, and clips have from {slow:.4g} (line {slow_line}) to {fast:.4g} (line {fast_line}) "
            "frames per second, which are trained on as if they had one rate; set data.fps to take frames at one"
        )
    return found


def check_rows(
    rows: Sequence[Row], num_frames: int, skip_bad_rows: bool, fps: float | None = None
) -> tuple[list[Row], list[str]]:
    """(rows that can be trained on, one line about each that cannot).

    Decodes the frames that would be trained on. Raises DataError with all the lines unless `skip_bad_rows`,
    and when no row is left.
    """
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda row: row_problems(row, num_frames, fps), rows))
    listed = [(row.line, problem) for row, problems in zip(rows, found, strict=True) for problem in problems]
    return usable_rows(rows, listed, skip_bad_rows)


def usable_rows(
    rows: Sequence[Row], problems: Sequence[tuple[int, str]], skip_bad_rows: bool
) -> tuple[list[Row], list[str]]:
    """As check_rows, of (line, problem) pairs that were found before."""
    by_line: dict[int, list[str]] = {}
    for line, problem in problems:
        by_line.setdefault(line, []).append(problem)
    good = [row for row in rows if row.line not in by_line]
    bad = [f"line {line}: {'; '.join(found)}" for line, found in sorted(by_line.items())]
    table = rows[0].table
    if bad and not skip_bad_rows:
        listing = "\n".join(bad)
        raise DataError(
            f"{table}: {len(bad)} of {len(rows)} rows cannot be used; mend them or set "
            f"data.skip_bad_rows: true\n{listing}"
        )
    if not good:
        raise DataError("\n".join([f"{table}: no usable row", *bad]))
    return good, bad


def row_problems(row: Row, num_frames: int, fps: float | None = None) -> list[str]:
    """Everything that keeps a row from being trained on. Decodes its files, a frame at a time."""
    if row.problem:
        return [row.problem]

    def decode(path: Path, at_least: int) -> None:
        for _ in iter_frames(path, num_frames, fps, at_least):
            pass

    return _said_of(row) + _read_files(row, num_frames, decode, read_picture)[1]


def read_example(
    row: Row, height: int, width: int, num_frames: int, max_pixels: int | None = None, fps: float | None = None
) -> tuple[Example | None, list[str]]:
    """(the row's clip and what else it names, []), or (None, what keeps these files from being used).

    Each file is decoded once, as read_clip and read_picture do. The image is fitted to the clip's size. A reference
    video has its own size under max_pixels, and may be shorter than the clip: up to num_frames of its frames are
    taken, at least REFERENCE_FRAMES.
    """

    def read(path: Path, at_least: int) -> Tensor:
        return read_clip(path, height, width, num_frames, max_pixels, fps, at_least)

    found, problems = _read_files(row, num_frames, read, read_picture)
    if problems:
        return None, problems
    video = reference = to_float(found["video"])
    image = video[:, 0]
    if "image" in found:
        image = to_float(fit(found["image"][None], *video.shape[2:]))[:, 0]
    if "reference_video" in found:
        reference = to_float(found["reference_video"])
    return Example(row.id, row.prompt, video, image, reference), []


def load_example(
    row: Row, height: int, width: int, num_frames: int, max_pixels: int | None = None, fps: float | None = None
) -> Example:
    """As read_example; DataError for files that cannot be used."""
    example, problems = read_example(row, height, width, num_frames, max_pixels, fps)
    if example is None:
        raise DataError("; ".join(problems))
    return example


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
    shapes: Sequence[Hashable] | None = None,
) -> list[tuple[int, int]]:
    """The `batch_size` samples (epoch, row) that process `rank` takes in forward pass `micro` of `step`.

    A step takes the next batch_size * accumulation * processes positions of the stream, whatever the three
    factors are. Where the data run out in the middle of a step it goes on with the next epoch, so every step
    is full and no row is left out.

    `shapes`, each row's (None: all are equal): the samples of one forward pass then have one shape. A step takes
    the next accumulation * processes batches of one_shape_batch, so it still depends on the product of these two
    alone; on batch_size it depends as soon as there are several shapes.
    """
    index = (step * accumulation + micro) * processes + rank
    if shapes is not None:
        return one_shape_batch(index, batch_size, shapes, seed)
    return [sample_at(index * batch_size + i, num_rows, seed) for i in range(batch_size)]


def one_shape_batch(index: int, batch_size: int, shapes: Sequence[Hashable], seed: int) -> list[tuple[int, int]]:
    """Batch `index` (from 0) of the run: `batch_size` samples (epoch, row) of one shape.

    The samples of the stream gather with those of their shape, and each `batch_size` of a shape leave together
    as soon as they are complete. Nothing is padded, repeated or left out: each sample of each epoch leaves once,
    with that epoch's noise. Up to batch_size - 1 samples of each shape wait at any moment, possibly into later
    epochs; those that wait when the run ends are not trained on. With one shape, or one sample a batch, this is
    the stream itself.
    """
    sizes = Counter(shapes)

    def leaving_before(epoch: int) -> int:
        return sum(epoch * size // batch_size for size in sizes.values())

    epoch = index * batch_size // len(shapes)  # as if none were waiting; later than that if some are
    while leaving_before(epoch + 1) <= index:
        epoch += 1
    arrived, leaving = Counter({shape: epoch * size for shape, size in sizes.items()}), []
    for row in epoch_order(len(shapes), seed, epoch):
        arrived[shapes[row]] += 1
        if arrived[shapes[row]] % batch_size == 0:
            leaving.append((shapes[row], arrived[shapes[row]]))
    shape, end = leaving[index - leaving_before(epoch)]
    visits = [divmod(position, sizes[shape]) for position in range(end - batch_size, end)]  # among its own shape
    return [(visit, _rows_of_shape(shapes, shape, seed, visit)[k]) for visit, k in visits]


def _rows_of_shape(shapes: Sequence[Hashable], shape: Hashable, seed: int, epoch: int) -> list[int]:
    """The rows of one shape in the order in which the epoch visits them."""
    return [row for row in epoch_order(len(shapes), seed, epoch) if shapes[row] == shape]


def total_steps(num_rows: int, global_batch: int, num_train_epochs: int, max_steps: int | None) -> int:
    """Steps of a run: max_steps, or as many as visit every row at least num_train_epochs times.

    With clips of several shapes the last few may still wait for company then (one_shape_batch).
    """
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
