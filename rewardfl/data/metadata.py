"""The rows of metadata.csv: reading, checking and loading."""

import csv
import difflib
import hashlib
import itertools
import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rewardfl.data import clips
from rewardfl.data.clips import SAME_RATE, DataError
from rewardfl.file_kinds import foreign_path_hint, wrong_kind
from rewardfl.files import is_control

SIZE = ("height", "width")  # the columns of a row's own size
PAIR = ("chosen", "rejected")  # the columns of a pair of clips
# the columns of metadata.csv; prompt is required
COLUMNS = ("video", "prompt", "image", "negative_prompt", "reference_video", *SIZE, "person", "photos", *PAIR)
ALIASES = {"input_image": "image"}  # other names of columns
PICTURES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")  # suffixes of photos in a folder
PATHS = ("video", "image", "reference_video")  # the columns that name files
REFERENCE_FRAMES = 2  # smallest number in a reference video: a face pool leaves out the first
SAME_PICTURE = 16.0  # levels of 255, root mean square: VAE and compression move less (tiny world: 3, others 38)
LONGEST_SIDE = 16_384  # in pixels, as data.height
LONGEST_PHOTO = 2_048  # pixels on a side of a photo: more would cost memory, and no recogniser sees it
CLIP_NOTES = {  # {key of Header.oddities: the oddity and its remedy}
    "hdr": "are HDR, and are read as the 8 bits of SDR, grey: turn them into SDR before (ffmpeg's zscale and tonemap)",
    "interlaced": "are interlaced and stay combed: turn fields into frames before (ffmpeg -i IN -vf bwdif OUT)",
    "untagged": "do not name the matrix of their colours: they are read by BT.601, as by ffmpeg, and shown by BT.709; "
    "name it (ffmpeg -i IN -c copy -bsf:v h264_metadata=matrix_coefficients=1 OUT), or know that they are BT.601",
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of metadata.csv. `id` does not depend on the line's position or on the other lines."""

    index: int  # from 0, among the rows of the file
    line: int  # in the file, from 1
    id: str
    video: Path | None  # the real clip, or the chosen one; None: the row has a prompt, and perhaps an image
    prompt: str
    problem: str = ""  # a problem of the line itself
    image: Path | None = None  # the model's input; None: the clip's first frame
    rejected: Path | None = None  # the worse clip of a pair, whose better one is `video`
    photos: tuple[Path, ...] = ()  # pictures of the person to preserve, instead of the clip's frames
    negative_prompt: str = ""  # see notes
    reference_video: Path | None = None  # with the face to preserve; None: the clip
    size: tuple[int, int] | None = None  # (height, width) of the generated clip; None: data.height and data.width
    person: str = ""  # name of the clip's person, shared by several rows; empty: a different person
    table: str = "data.file_name"  # the setting and its file, for messages

    @property
    def who(self) -> str:
        """Return the name of the row's person: rows without one share a person if they share their photos."""
        return self.person or ";".join(map(str, self.photos)) or self.id

    @property
    def reference(self) -> Path | None:
        """Return the clip that rewards compare with, else the row's picture, else None."""
        return self.reference_video or self.video or self.image

    @property
    def offers(self) -> tuple[str, ...]:
        """Return the types of reference that the row has (Reward.compares_with)."""
        pictures = ("nothing", "picture") if self.pictures or self.reference else ("nothing",)
        return pictures if self.reference_video is None and self.video is None else (*pictures, "clip", "motion")

    @property
    def pictures(self) -> tuple[Path, ...]:
        """Return the pictures that show the person: the photos, or the image of a row without photos and clips.

        The model's input is left out if two other photos are there: a clip that does not move would copy it.
        """
        others = tuple(photo for photo in self.photos if photo != self.image)
        if self.photos:
            return others if len(others) >= 2 else self.photos
        return (self.image,) if self.image and not (self.video or self.reference_video) else ()

    @property
    def checked_pictures(self) -> tuple[Path, ...]:
        """Return the pictures, and last the photo that is the model's input, if it is left out of them."""
        return (*self.pictures, *(photo for photo in self.photos if photo not in self.pictures))

    @property
    def files(self) -> dict[str, Path | None]:
        """Return the row's file by column, None for an empty cell; a photo by its column and place."""
        photos = {f"photos/{i}": path for i, path in enumerate(self.photos)}
        pair = {"rejected": self.rejected} if self.rejected else {}
        return {"video": self.video, "image": self.image, "reference_video": self.reference_video, **photos, **pair}


@dataclass(frozen=True, kw_only=True)
class HeaderInfo:
    """The result of inspect_row: the problems of a row and the header of its clip."""

    problems: tuple[str, ...] = ()
    header: clips.Header | None = None  # None without a clip, or where it cannot be used


@dataclass(frozen=True, kw_only=True)
class Example:
    """The content of a row: videos and images in [-1, 1]."""

    size: tuple[int, int]  # (H, W) of the generated clip
    video: Tensor | None  # (3, F, H, W), the real clip
    image: Tensor | None  # (3, H, W), the model's input
    # (3, F', H', W'), for rewards: reference_video, else `video`, else `image` as a still clip of REFERENCE_FRAMES
    # frames; F' = 0 if the row lacks all of them
    reference: Tensor


def load_metadata(file_name: str | Path, key: str = "data.file_name") -> list[Row]:
    """Load all rows of metadata.csv, usable or not, at least one, in the order of the file.

    It has the COLUMNS; an empty cell means none. Paths are absolute or relative to the file's folder, and may name a
    member of a zip archive (pictures.zip/1.png). photos: a folder, or pictures between semicolons. Any other column is
    ignored, unless its name is nearly one of these. A .txt file has a prompt on each line. Empty lines are left out.
    key: the setting that names the file, for messages. Raise DataError for a file that cannot be read so.
    """
    path = Path(file_name)
    if not path.is_file():
        reason = "is a folder, not a file of rows" if path.is_dir() else "no such file"
        raise DataError(f"{key}: {reason}: {path.absolute()}{foreign_path_hint(path)}")
    if path.stat().st_size and (words := wrong_kind(path, "text")):
        raise DataError(f"{key}: {path} {words}")
    (_, names), *records = _read_table(path)
    header = [ALIASES.get(name, name) for name in names]
    for name in header:
        close = difflib.get_close_matches(name.casefold(), COLUMNS, 1, cutoff=0.8)
        is_typo = close and name[0].casefold() == close[0][0] and not name.startswith(f"{close[0]}_")
        if name not in COLUMNS and is_typo:  # not weight, nor video_id
            raise DataError(f"{path}: unknown column {name!r}, did you mean {close[0]!r}? Rename another column")
        if name in COLUMNS and header.count(name) > 1:
            raise DataError(f"{path}: the first line names the column {name!r} twice; remove one")
    if "prompt" not in header:
        listed = ", ".join(header) or "nothing"
        raise DataError(f"{path}: the first line must name the column 'prompt', it names {listed}")
    table = f"{key} ({path})"
    if not records:
        raise DataError(f"{table}: no usable row: the file holds none")
    seen = Counter[str]()
    return [_row(i, line, header, cells, path.parent, seen, table) for i, (line, cells) in enumerate(records)]


def _read_table(path: Path) -> list[tuple[int, list[str]]]:
    """Return the lines' numbers and cells, first the columns' names."""
    with path.open(newline="", encoding="utf-8-sig") as file:  # -sig: spreadsheets write a byte order mark
        reader = csv.reader(file, strict=True)  # without strict, a quote that is never closed swallows later rows
        if path.suffix == ".txt":
            lines = ((line, [text]) for line, text in enumerate(itertools.chain(["prompt"], file)))
        else:
            lines = ((reader.line_num, cells) for cells in reader)
        try:
            stripped = [(line, [cell.strip() for cell in cells]) for line, cells in lines]
        except (csv.Error, UnicodeDecodeError) as error:
            reason = f"line {reader.line_num}: {error}; save it as UTF-8, and close every double quote up to there"
            raise DataError(f"{path}: {reason}") from error
    return [(line, cells) for line, cells in stripped if any(cells)] or [(1, [])]  # spreadsheets write empty rows


def _row(index: int, line: int, header: list[str], cells: list[str], folder: Path, seen: Counter, table: str) -> Row:
    cell = dict.fromkeys(COLUMNS, "") | dict(zip(header, cells, strict=False))
    if len(cells) > len(header):
        problem = "more cells than columns; put a prompt that holds commas in double quotes"
    else:
        named = (*PATHS, *PAIR, "photos")
        odd = [name for name in named if any(map(is_control, cell[name]))]  # paths are printed, logged and drawn
        words = _size_problem(cell) or _pair_problem(cell)
        problem = f"{odd[0]}: holds a control character; rename the file" if odd else words
    # only cells with text: an id does not change when the file gets another column, or a person gets a name
    texts = [cell["prompt"], *(f"{name}={cell[name]}" for name in COLUMNS[2:] if cell[name] and name != "person")]
    cell["video"] = cell["chosen"] or cell["video"]
    clip = cell["video"].split(".zip/")[-1] or "prompt"  # a packed data set keeps its noise
    row_id = f"{clip}#{hashlib.blake2b(chr(10).join(texts).encode(), digest_size=4).hexdigest()}"
    seen[row_id] += 1  # a repeated line is a separate sample with its own noise
    suffix = f"-{seen[row_id]}" if seen[row_id] > 1 else ""
    video, image, reference, rejected = (folder / cell[name] if cell[name] else None for name in (*PATHS, "rejected"))
    photos = () if problem else photo_files(cell["photos"], folder)
    if cell["photos"] and not photos and not problem:
        problem = f"photos: no picture in {folder / cell['photos']} ({', '.join(PICTURES)})"
    size = (int(cell["height"]), int(cell["width"])) if cell["height"] and not problem else None
    return Row(
        index=index, line=line, id=row_id + suffix, video=video, prompt=cell["prompt"], problem=problem, image=image,
        photos=photos, negative_prompt=cell["negative_prompt"], reference_video=reference, size=size,
        person=cell["person"], table=table, rejected=rejected,
    )  # fmt: skip


def photo_files(cell: str, folder: Path) -> tuple[Path, ...]:
    """Return the pictures that a cell names, each once, a folder's in the order of their names."""
    names = [cell] if (folder / cell).exists() else [name.strip() for name in cell.split(";")]
    paths: list[Path] = []
    for path in [folder / name for name in names if name]:
        inside = sorted(path.iterdir()) if path.is_dir() else [path]
        paths += [file for file in inside if file == path or file.suffix.lower() in PICTURES]
    return tuple(dict.fromkeys(paths))


def assign_images(rows: Sequence[Row], seed: int) -> list[Row]:
    """Return the rows; those with photos, and neither a clip nor an image, start from their person's photos in turn."""
    turns = Counter[str]()  # {person: rows}
    assigned = []
    for row in rows:
        if row.photos and row.video is None and row.image is None:
            first = random.Random(f"{seed}/{row.person}").randrange(len(row.photos))
            photo = row.photos[(first + turns[row.who]) % len(row.photos)]
            turns[row.who] += 1
            row = replace(row, image=photo)
        assigned.append(row)
    return assigned


def _size_problem(cell: Mapping[str, str]) -> str:
    """Return why a row's height and width cannot be used; empty for a valid size, or without one."""
    values = [cell[name] for name in SIZE]
    if any(values) and (shaped := [name for name in (*PATHS, *PAIR) if cell[name]]):
        return (
            f"height and width next to {shaped[0]}: only rows of just a prompt have their size; empty the cells, or "
            "rename the columns; data.max_pixels keeps the shape of each clip"
        )
    is_size = all(re.fullmatch("[1-9][0-9]{0,4}", value) and int(value) <= LONGEST_SIDE for value in values)
    if any(values) and not is_size:
        shown = " and ".join(repr(value[:40]) for value in values)
        return f"height and width must be whole numbers of pixels from 1 to {LONGEST_SIDE}, got {shown}"
    return ""


def _pair_problem(cell: Mapping[str, str]) -> str:
    """Return why a row's cells do not make a pair; empty for a pair, or without one."""
    if bool(cell["chosen"]) != bool(cell["rejected"]):
        return "chosen and rejected are the two clips of a pair, and one is missing; fill both cells, or empty both"
    others = [name for name in ("video", "reference_video", "photos") if cell[name]]
    return f"{others[0]} has no effect next to chosen and rejected; empty the cell" if cell["chosen"] and others else ""


def notes(rows: Sequence[Row]) -> list[str]:
    """Return a message for each column of the rows that has no effect."""
    count = sum(row.negative_prompt != "" for row in rows)
    words = "have a negative_prompt, which has no effect: sample.negative_prompt is used for all rows"
    return [f"{count} of {len(rows)} rows {words}"] if count else []


def inspect_row(row: Row, num_frames: int, fps: float | None = None, *, takes_image: bool = True) -> HeaderInfo:
    """Inspect a row's line and its files' headers. takes_image: whether the model starts from an image."""
    if row.problem:
        return HeaderInfo(problems=(row.problem,))
    read = partial(clips.read_video_header, num_frames=num_frames, fps=fps)
    headers, problems = _read_files(row.files, num_frames, read, clips.open_picture)
    if takes_image and row.video is None and row.image is None:
        problems.insert(0, "no video, and no image that this model could start from")
    if row.rejected and not problems:
        problems += _pair_differences(row, headers, compare_first=takes_image and row.image is None and num_frames > 1)
    if not row.prompt:
        problems.insert(0, f"empty prompt for {row.video.name if row.video else 'a row without a video'}")
    return HeaderInfo(problems=tuple(problems), header=headers.get("video"))


def _pair_differences(row: Row, headers: Mapping[str, clips.Header], *, compare_first: bool) -> list[str]:
    """Return how the clips of a pair differ in what they must share. compare_first: their first frames, too."""
    pair = [headers["video"], headers["rejected"]]
    shapes = [f"{each.size[0]} x {each.size[1]} (height x width) with {each.frames} frames" for each in pair]
    if shapes[0] != shapes[1]:
        return [f"chosen is {shapes[0]}, and rejected {shapes[1]}; make pairs of equal clips"]
    first = [clips.read_video(path, 1).float() for path in (row.video, row.rejected) if path and compare_first]
    apart = float((first[0] - first[1]).square().mean().sqrt()) if first else 0.0
    words = f"the first frames of chosen and rejected are {apart:.0f} levels of 255 apart, so not of one input"
    return [f"{words}; name it in the column image, or leave the pair out"] if apart > SAME_PICTURE else []


def _read_files(
    files: Mapping[str, Path | None], num_frames: int, read: Callable[..., Any], read_image: Callable[[Path], Any]
) -> tuple[dict[str, Any], list[str]]:
    """Read each of a row's files once; return {column: content} and the problems of the files that failed.

    read: takes a video, and `at_least`: its smallest number of frames. read_image: takes a picture.
    """
    contents: dict[str, Any] = {}
    problems = []
    for column, path in files.items():
        if path is None or (column == "reference_video" and path == files["video"]):
            continue
        try:
            if column == "image" or column.startswith("photos/"):
                contents[column] = read_image(path)
            else:
                contents[column] = read(path, at_least=REFERENCE_FRAMES if column == "reference_video" else num_frames)
        except DataError as error:
            problems.append(str(error))
    return contents, problems


def clip_notes(
    rows: Sequence[Row],
    infos: Sequence[HeaderInfo],
    height: int,
    width: int,
    max_pixels: int | None,
    fps: float | None,
    model_rate: float,
) -> list[str]:
    """Return messages about usable clips: enlarged ones, frame rates that are not the model's, and CLIP_NOTES.

    model_rate: frames per second of the model's videos; 1 for a model of images.
    """
    headers = {
        f"line {row.line}, {row.video.name}": info.header
        for row, info in zip(rows, infos, strict=True)
        if row.video and info.header
    }
    places = {
        words: [place for place, header in headers.items() if key in header.oddities]
        for key, words in CLIP_NOTES.items()
    }
    if max_pixels is None:
        words = f"have less than half of the pixels of {height} x {width} (height x width), and are enlarged"
        places[words] = [place for place, header in headers.items() if math.prod(header.size) < height * width / 2]
    rates = {place: fps or header.rate or model_rate for place, header in headers.items()}
    other = [place for place, rate in rates.items() if not SAME_RATE <= rate / model_rate <= 1 / SAME_RATE]
    if other and model_rate > 1:
        words = (
            f"are trained on at {rates[other[0]]:.4g} frames per second, or not at the model's {model_rate:g}, "
            f"which teaches another speed; data.fps: {model_rate:g} takes frames at that rate, and refuses slower clips"
        )
        places[words] = other
    return [f"{len(odd)} of {len(rows)} clips {words} (first {odd[0]})" for words, odd in places.items() if odd]


def usable_rows(
    rows: Sequence[Row], problems: Sequence[tuple[int, str]], *, skip_bad_rows: bool
) -> tuple[list[Row], list[str]]:
    """Return the usable rows and a line about each of the others. problems: pairs (line, problem).

    Raise DataError with these lines unless `skip_bad_rows`, and when no row is left.
    """
    texts: dict[int, list[str]] = defaultdict(list)  # problems by line
    for line, problem in sorted(problems, key=lambda line_and_problem: line_and_problem[0]):
        texts[line].append(problem)
    lines: dict[str, list[int]] = defaultdict(list)  # lines by problem
    for line, line_texts in texts.items():
        lines["; ".join(line_texts)].append(line)
    bad = []
    for text, numbers in lines.items():
        shown = ", ".join(map(str, numbers[:5])) + ", ..." * (len(numbers) > 5)
        bad.append(f"line {shown}: {text}" if len(numbers) == 1 else f"lines {shown} ({len(numbers)} rows): {text}")
    good = [row for row in rows if row.line not in texts]
    table = rows[0].table
    if bad and not skip_bad_rows:
        count = f"{len(texts)} of {len(rows)} rows cannot be used"
        raise DataError("\n".join([f"{table}: {count}; mend them or set data.skip_bad_rows: true", *bad]))
    if not good:
        raise DataError("\n".join([f"{table}: no usable row", *bad]))
    return good, bad


def load_example(
    row: Row, height: int, width: int, num_frames: int, max_pixels: int | None = None, fps: float | None = None
) -> Example:
    """Load the row's files except its photos, each decoded once by read_clip or read_picture.

    The image is fitted to the clip's size; without a clip, max_pixels applies to the image's shape. A reference video
    has its own size under max_pixels, and REFERENCE_FRAMES to num_frames frames. A row of a prompt only has the row's
    size, if any. Raise DataError with the problems of all files.
    """
    read = partial(clips.read_clip, height=height, width=width, num_frames=num_frames, max_pixels=max_pixels, fps=fps)
    files = {column: path for column, path in row.files.items() if column in (*PATHS, *PAIR)}
    contents, problems = _read_files(files, num_frames, read, clips.read_picture)
    if problems:
        raise DataError("; ".join(problems))
    picture, _ = contents.pop("image", None), contents.pop("rejected", None)  # only checked here
    videos = {column: clips.to_float(frames) for column, frames in contents.items()}
    video = videos.get("video")
    if video is not None:
        size = (video.shape[2], video.shape[3])
    elif picture is not None:
        size = clips.clip_size((picture.shape[0], picture.shape[1]), height, width, max_pixels)
    elif max_pixels is None:
        size = row.size or (height, width)
    else:
        raise DataError(
            "has neither a video nor an image whose shape data.max_pixels could keep; set data.height and data.width, "
            "and remove data.max_pixels"
        )
    image = None if video is None else video[:, 0]
    if picture is not None:
        image = clips.to_float(clips.fit(picture[None], *size))[:, 0]
    reference = videos.get("reference_video", video)
    if reference is None and image is not None:
        reference = image[:, None].repeat(1, REFERENCE_FRAMES, 1, 1)
    elif reference is None:
        reference = torch.zeros(3, 0, *size)
    return Example(size=size, video=video, image=image, reference=reference)


def load_pictures(row: Row) -> list[Tensor]:
    """Load Row.checked_pictures, (3, H, W) in [-1, 1], each at its size, or shrunk to LONGEST_PHOTO pixels a side."""
    photos = []
    for path in row.checked_pictures:
        photo = clips.read_picture(path)
        scale = LONGEST_PHOTO / max(photo.shape[:2])
        if scale < 1:
            photo = clips.fit(photo[None], *(max(1, round(side * scale)) for side in photo.shape[:2]))[0]
        photos.append(clips.to_float(photo[None])[:, 0])
    return photos
