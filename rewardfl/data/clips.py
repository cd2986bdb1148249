"""Clips and pictures: reading for training, resizing, and writing for viewing."""

import io
import itertools
import logging
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import av
import numpy as np
import torch
from av.stream import Disposition
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn import functional

from rewardfl.file_kinds import foreign_path_hint, open_file, wrong_kind
from rewardfl.files import atomic_write

STEP = 16  # diffusers' Wan pipeline takes heights and widths in multiples of it
SHEET_PIXELS = 2**26  # largest number in a sheet of pictures
# The bits depend on the number of threads. With an odd number of macroblocks libx264's macroblock tree reads
# uninitialised memory (core 165).
X264: dict[str, object] = {"crf": "18", "threads": "1", "x264-params": "mbtree=0"}
SAME_RATE = 0.99  # 23.976 frames per second pass for 24
SLACK = 1e-3  # seconds: containers round times to milliseconds, and halfway between two frames is the earlier
TRANSPARENT = "has transparent pixels; save it without an alpha channel"

Timed = tuple[float | None, Any]  # a frame's time in seconds, and the frame

# libav conceals damage. Some decoders (ffv1's) report it only in libav's log, which _decode_frames reads. PyAV would
# skip a message that equals the last one, even another clip's.
av.logging.set_level(av.logging.ERROR)
av.logging.set_skip_repeated(False)
logging.getLogger("libav").addHandler(logging.NullHandler())  # else Python prints messages outside of _decode_frames


class DataError(ValueError):
    """Training data that cannot be used. The message names the file, the line and the way out."""


class Header(NamedTuple):
    """Size, frame rate and oddities of a clip by its file's header."""

    size: tuple[int, int]  # (height, width) as stored
    rate: float | None  # frames per second; None if the header has no rate
    oddities: tuple[str, ...]  # keys of metadata.CLIP_NOTES
    frames: int = 0  # stored ones


def read_video(path: str | Path, num_frames: int | None = None, fps: float | None = None) -> Tensor:
    """Return the frames of _select_frames as (F, H, W, 3) uint8 RGB, upright."""
    with _open_video(path) as (container, stream):
        frames = _select_frames(_decode_frames(container, stream), num_frames, fps)
        return torch.stack([_pixels(frame) for frame in frames])


def read_clip(
    path: str | Path, height: int, width: int, num_frames: int, max_pixels: int | None = None,
    fps: float | None = None, at_least: int | None = None,
) -> Tensor:  # fmt: skip
    """Return the frames of _select_frames, (F, H, W, 3) uint8, fitted to clip_size one at a time to save memory."""
    fitted, size = [], None
    with _open_video(path) as (container, stream):
        for frame in _select_frames(_decode_frames(container, stream), num_frames, fps, at_least):
            pixels = _pixels(frame)
            size = size or clip_size((pixels.shape[0], pixels.shape[1]), height, width, max_pixels)
            fitted.append(fit(pixels[None], *size))
    return torch.cat(fitted)


def read_video_header(
    path: str | Path, num_frames: int, fps: float | None = None, at_least: int | None = None
) -> Header:
    """Read the Header of a clip, without decoding a frame. Raise the DataErrors of read_clip that packets show."""
    with _open_video(path) as (container, stream):
        # the header's number of frames may be wrong; packets are never fewer than frames
        stamps = [packet.pts for packet in container.demux(stream) if packet.size and not packet.is_discard]
        if None not in stamps:
            times = sorted({float(stamp * (stream.time_base or 0)) for stamp in stamps if stamp is not None})
            for _ in _select_frames(((time, None) for time in times), num_frames, fps, at_least):
                pass
        codec = stream.codec_context
        is_yuv = codec.format is not None and not codec.format.is_rgb
        oddities = {
            "hdr": codec.color_trc in (16, 18),  # PQ and HLG in ITU-T H.273
            "interlaced": codec.field_order in (2, 3, 4, 5),  # values of AVFieldOrder
            # 2 is the unknown matrix; from 720 lines on players take it for BT.709
            "untagged": codec.height >= 720 and codec.colorspace == 2 and is_yuv,
        }
        rate = float(stream.average_rate) if stream.average_rate else None
        return Header((stream.height, stream.width), rate, tuple(key for key in oddities if oddities[key]), len(stamps))


def _require_file(path: str | Path) -> None:
    if os.path.isdir(path):  # Path.is_dir raises for names that no file system takes
        raise DataError(f"{path}: is a folder; name a file, make one clip of a folder's frames")
    try:
        words = wrong_kind(Path(path), "picture", "text")
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise DataError(f"{Path(path).absolute()}: {reason}{foreign_path_hint(path)}") from error
    if words:
        raise DataError(f"{path}: {words}")


@contextmanager
def _open_video(path: str | Path) -> Iterator[tuple[av.container.InputContainer, av.VideoStream]]:
    """Open a file and its video: ffmpeg's choice, the largest, the default before others, no cover picture.

    Raise a DataError that names the file for a fault that the header shows, and for errors of the block.
    """
    _require_file(path)
    try:
        # titles may be in any encoding
        with open_file(path) as file, av.open(file, "r", metadata_errors="ignore") as container:
            videos = [video for video in container.streams.video if video.codec_context is not None]
            streams = [video for video in videos if not video.disposition & Disposition.attached_pic]
            if not streams:
                raise DataError("holds no video that can be decoded")
            default = Disposition.default
            stream = max(streams, key=lambda each: each.width * each.height + 5e6 * bool(each.disposition & default))
            stream.thread_type = "NONE"  # _decode_frames cannot read the log of libav's threads
            stream.codec_context.thread_count = 1
            if abs(Fraction(stream.sample_aspect_ratio or 1) - 1) > 0.02:  # players stretch such pixels
                words = f"pixels are {stream.sample_aspect_ratio} as wide as high; make them square"
                raise DataError(f"{words} with ffmpeg -i IN -vf scale=iw*sar:ih,setsar=1 OUT")
            if stream.metadata.get("alpha_mode") == "1":  # VP8 and VP9, whose decoders here drop the alpha channel
                raise DataError(TRANSPARENT)
            yield container, stream
    except av.FFmpegError as error:
        reason = "" if isinstance(error, OSError) else "; it is damaged, or no video"
        raise DataError(f"{path}: cannot be decoded ({error.strerror}){reason}") from error
    except ValueError as error:  # also PyAV's, for side data that it does not know
        raise DataError(f"{path}: {error}") from error


def _decode_frames(container: av.container.InputContainer, stream: av.VideoStream) -> Iterator[Timed]:
    """Decode all frames in display order. Raise DataError for damage and a new size."""
    size, marks = None, []

    def decode(packet: av.Packet) -> list[av.VideoFrame]:
        marks.extend(["a packet is marked as corrupt"] * packet.is_corrupt)
        return packet.decode()

    frames = itertools.chain.from_iterable(map(decode, container.demux(stream)))
    for i in itertools.count():
        with av.logging.Capture() as log:  # the log of this thread
            frame = next(frames, None)
        errors = [text.strip() for level, _, text in log if level <= av.logging.ERROR] + marks
        errors += ["a frame is marked as corrupt"] * (frame is not None and frame.is_corrupt)
        if errors:
            raise DataError(f"is damaged at frame {i} ({errors[0]}); copy it again, or leave it out")
        if frame is None:
            return
        size = size or (frame.height, frame.width)
        if (frame.height, frame.width) != size:
            change = f"{size[0]} x {size[1]} to {frame.height} x {frame.width}"
            raise DataError(f"goes from {change} (height x width) at frame {i}; re-encode it at one size")
        yield frame.time, frame


def _pixels(frame: av.VideoFrame) -> Tensor:
    """Return a frame as (H, W, 3) uint8 RGB, turned and mirrored by its display matrix."""
    has_alpha = frame.format.has_palette or any(part.is_alpha for part in frame.format.components)
    if has_alpha and frame.to_ndarray(format="rgba")[..., 3].min() < 255:
        raise DataError(TRANSPARENT)
    pixels = frame.to_ndarray(format="rgb24")
    side_data: Any = frame.side_data.get("DISPLAYMATRIX")
    if side_data is not None:
        matrix = np.frombuffer(bytes(side_data), np.int32)[:9].reshape(3, 3)[:2] / 65536  # stored (x, y) to shown
        turn = matrix[:, :2].round().astype(int)
        if not np.array_equal(turn @ turn.T, np.eye(2)) or np.abs(matrix - np.c_[turn, [0, 0]]).max() > 0.01:
            numbers = ", ".join(f"{number:.3g}" for number in matrix[:, :2].flatten())
            raise DataError(f"is shown turned, skewed or scaled, by the matrix {numbers}; re-encode it upright")
        columns, rows = turn.sum(0)  # directions, each 1 or -1
        pixels = (pixels if turn[0, 0] else pixels.swapaxes(0, 1))[::rows, ::columns]
    return torch.from_numpy(np.ascontiguousarray(pixels))


def _select_frames(
    frames: Iterable[Timed], num_frames: int | None, fps: float | None, at_least: int | None = None
) -> Iterator[Any]:
    """Iterate over the first `num_frames` frames (None: all).

    fps: for k = 0, 1, ... the frame whose time is nearest to start + k / fps; None: the stored frames. Raise DataError
    for fewer than `at_least` frames (None: num_frames), for a frame rate below fps and for pauses without content.
    """
    count, needed = 0, (num_frames or 1) if at_least is None else at_least
    stored = (frame for _, frame in itertools.islice(frames, num_frames))
    for frame in stored if fps is None else _sample_at_rate(frames, fps, num_frames):
        count += 1
        yield frame
    if count < needed:
        rate = "" if fps is None else f" at {fps:g} fps"
        raise DataError(f"holds {count} frames{rate}, {needed} are needed")


def _sample_at_rate(frames: Iterable[Timed], fps: float, num_frames: int | None) -> Iterator[Any]:
    """Yield the frame nearest to every 1 / fps seconds, in one pass. The last frame lasts as long as the one before."""
    start, gap, rate, k = 0.0, 0.0, math.inf, 0
    pause, farthest = None, 0.75 / fps + SLACK  # pause: the first instant without a frame as near as `farthest`
    end = (math.inf, None)
    for i, ((time, frame), (next_time, _)) in enumerate(itertools.pairwise(itertools.chain(frames, [end]))):
        if time is None or next_time is None or next_time <= time:
            count = i if time is None else i + 1
            raise DataError(f"frame {count} has no valid time; re-encode it, or set data.fps: null")
        start, is_last = time if i == 0 else start, next_time == math.inf
        lasts = min(max(0.0, gap - SLACK), 1 / fps)
        if not is_last:
            gap, rate = next_time - time, (i + 1) / (next_time - start)
            lasts = gap / 2 + SLACK
        while k != num_frames and start + k / fps <= time + lasts:
            late = start + k / fps - time
            if pause is None and max(-late, 0 if is_last else late) > farthest:
                pause = k / fps
            yield frame
            k += 1
        if k == num_frames:
            break
    if rate < SAME_RATE * fps:
        raise DataError(f"has {rate:.4g} frames per second, data.fps is {fps:g}; lower it or leave the clip out")
    if pause is not None:
        raise DataError(f"has no frame near {pause:.4g} s, where it pauses; cut it there, or leave it out")


def write_video(path: str | Path, video: Tensor, fps: float) -> None:
    """Write `video`, as encode_video takes it, as H.264 mp4, atomically."""
    atomic_write(path, encode_video(video, fps))


def encode_video(video: Tensor, fps: float) -> bytes:
    """Return `video`, uint8 (F, H, W, 3) or float (3, F, H, W) in [-1, 1], as H.264 mp4.

    The same video gives the same bytes. The file is for viewing only: 4:2:0 colour and compression change pixels.
    """
    frames = to_uint8(video).cpu().numpy()
    _, height, width, _ = frames.shape
    if height % 2 or width % 2:
        raise ValueError(f"H.264 needs an even height and width, got {height} x {width}")
    content = io.BytesIO()
    with av.open(content, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001))
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        stream.options = X264
        stream.codec_context.colorspace = 6  # BT.601 in ITU-T H.273, libav's conversion from RGB
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return content.getvalue()


def write_picture(path: str | Path, image: Tensor) -> None:
    """Write a video of one frame, as write_video takes it, as PNG, atomically and losslessly."""
    (pixels,), content = to_uint8(image).cpu(), io.BytesIO()
    Image.fromarray(pixels.numpy()).save(content, "png")
    atomic_write(path, content.getvalue())


def side_by_side(pictures: Sequence[Tensor]) -> Tensor:
    """Tile pictures (h, w, 3) uint8 in a nearly square grid, row by row, up to SHEET_PIXELS; return (H, W, 3) uint8.

    Each is at the upper left of a white cell of the largest height and width.
    """
    height, width = (max(picture.shape[axis] for picture in pictures) for axis in (0, 1))
    shown = pictures[: math.isqrt(SHEET_PIXELS // (height * width)) ** 2]
    columns = math.ceil(math.sqrt(len(shown)))
    sheet = torch.full((math.ceil(len(shown) / columns) * height, columns * width, 3), 255, dtype=torch.uint8)
    for i, picture in enumerate(shown):
        cell = sheet[i // columns * height :, i % columns * width :]
        cell[: picture.shape[0], : picture.shape[1]] = picture
    return sheet


def to_float(frames: Tensor) -> Tensor:
    """Convert (F, H, W, 3) uint8 frames to a (3, F, H, W) float32 video in [-1, 1]."""
    return frames.permute(3, 0, 1, 2).float() / 127.5 - 1


def to_uint8(video: Tensor) -> Tensor:
    """Convert a (3, F, H, W) video in [-1, 1] to (F, H, W, 3) uint8 frames, rounded and clipped; return uint8 as is."""
    if video.dtype == torch.uint8:
        return video
    return ((video.detach().float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).permute(1, 2, 3, 0)


def fit(frames: Tensor, height: int, width: int) -> Tensor:
    """Resize (F, H, W, 3) uint8 frames, antialiased, to cover height x width, and crop them at the centre."""
    old = frames.shape[1:3]
    if old == (height, width):
        return frames
    scale = max(height / old[0], width / old[1])
    size = (max(height, round(old[0] * scale)), max(width, round(old[1] * scale)))
    planes = frames.permute(0, 3, 1, 2).float()
    resized = functional.interpolate(planes, size, mode="bicubic", antialias=True, align_corners=False)
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    cropped = resized[:, :, top : top + height, left : left + width]
    return cropped.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)


def clip_size(source: tuple[int, int], height: int, width: int, max_pixels: int | None) -> tuple[int, int]:
    """Return the (height, width) to which a clip of `source` (height, width) pixels is fitted.

    max_pixels (>= STEP * STEP): multiples of STEP, of at most these pixels and the clip's. Prefer the size at which the
    clip is scaled down least (by its smaller scale), then the size that crops least. None: `height` and `width`.
    """
    if max_pixels is None:
        return height, width
    height, width = source
    pixels = max(STEP**2, min(max_pixels, height * width))
    # for each height the width of the full clip, or what the pixels allow
    sizes = [
        (h, STEP * min(-(-h * width // (height * STEP)), pixels // (h * STEP)))
        for h in range(STEP, pixels // STEP + 1, STEP)
    ]
    # max takes the first of equals: where the width decides, more height would only be cropped
    return max(sizes, key=lambda size: min(size[0] / height, size[1] / width))


def read_picture(path: str | Path) -> Tensor:
    """Read a picture file as (H, W, 3) uint8 RGB, upright by its EXIF orientation. Raise DataError for others."""
    picture = open_picture(path, decode=True)
    if picture.has_transparency_data and np.array(picture.convert("RGBA"))[..., 3].min() < 255:
        raise DataError(f"{path}: {TRANSPARENT}")
    return torch.from_numpy(np.array(picture if picture.mode == "RGB" else picture.convert("RGB")))


def open_picture(path: str | Path, *, decode: bool = False) -> Image.Image:
    """Return a picture: its header, or with `decode` also its pixels, upright. Raise DataError for unusable ones."""
    _require_file(path)
    try:
        # without EPS, which would start Ghostscript on the file's program
        formats = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
        with open_file(path) as file, Image.open(file, formats=formats) as picture:
            if decode:
                picture.load()
                ImageOps.exif_transpose(picture, in_place=True)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # SyntaxError: a broken PNG
        raise DataError(f"{path}: cannot be decoded as a picture ({error}); save it as JPEG or PNG") from error
    if picture.mode.startswith(("I", "F")):
        raise DataError(f"{path}: has pixels of Pillow's mode {picture.mode}; save it with 8 bits per channel")
    return picture
