"""Looking at clips before they are trained on: the work of tools/check_dataset.py."""

import argparse
import io
import math
import textwrap
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from matplotlib import get_data_path
from matplotlib.ft2font import FT2Font
from PIL import Image, ImageDraw, ImageFont, ImageOps
from torch import Tensor
from tqdm import tqdm

from rewardfl import backbones, command_line, config, data
from rewardfl.backbones.protocol import Backbone, Source
from rewardfl.files import printable
from rewardfl.merging import output
from rewardfl.rewards import face
from rewardfl.rewards.face import pack as face_pack
from rewardfl.training import plan

USABLE, UNUSABLE = 0, 2  # exit codes

ENLARGED, CROPPED = 1.05, 0.75  # warnings: enlarged more than this many times; less than this share of a picture left

THUMBNAIL, LINE, LINES = (160, 112), 14, 3  # width and height; height of a line of text, and how many a row has

FONT = f"{get_data_path()}/fonts/ttf/DejaVuSans.ttf"  # Latin, Greek, Cyrillic, Arabic and more

# what --data leaves unsaid of a configuration that would be trained with
UNSAID = {"run": {"output_dir": "-"}, "model": {"model_paths": "-"}, "reward": {"reward_model_path": "-"}}


@dataclass
class DatasetReport:
    """What was found of a row; no size where its clip cannot be read."""

    row: data.Row
    look: data.Look
    problems: list[str]
    warnings: list[str] = field(default_factory=list)
    source: tuple[int, int] | None = None  # (height, width) as stored
    size: tuple[int, int] | None = None  # as trained on
    pictures: list[Image.Image] = field(default_factory=list)  # thumbnails


def run(args: argparse.Namespace) -> int:
    """Looking at clips before they are trained on: the exit code."""
    args.device = command_line.device(args.device)
    cfg, backbone = resolve_settings(args)
    rows = data.load_metadata(cfg.data.file_name, "--data" if args.data else "data.file_name")
    sheet = sheet_file(args, rows, cfg.data.file_name) if args.sheet else None
    detector = None
    if args.faces:
        detector = face.FaceDetector(face_pack.pack_files(args.faces)[0], cfg.reward.det_size).to(args.device)
    check = partial(inspect, settings=cfg.data, detector=detector, device=args.device, takes_image=backbone.takes_image)
    with ThreadPoolExecutor(4) as pool:
        reports = list(tqdm(pool.map(check, rows), total=len(rows), desc="checking", disable=None))
    for report in reports:
        if said := plan.size_problem(cfg, backbone, report.row.size):
            report.problems.append(said)
    warn_of_repeats(reports)
    print(printable("\n".join([*listing(reports), *list_notes(rows, reports, cfg.data), *summary(reports)])))
    if sheet:
        content = io.BytesIO()
        contact_sheet(reports).save(content, Image.registered_extensions()[args.sheet.suffix.lower()])
        sheet.write(content.getvalue())
        print(f"sheet: {args.sheet}")
    return UNUSABLE if any(report.problems for report in reports) else USABLE


def sheet_file(args: argparse.Namespace, rows: Sequence[data.Row], table: str) -> output.File:
    """Return the place of the contact sheet. Raise Refused for one that may not be written, before anything is read."""
    if Image.registered_extensions().get(args.sheet.suffix.lower()) not in Image.SAVE:
        raise ValueError(f"--sheet {args.sheet}: no picture is called so; give NAME.png")
    inputs = [Path(table), *([Path(args.config)] if args.config else []), *([args.faces] if args.faces else [])]
    inputs += [Path(path) for row in rows for path in row.files.values() if path]
    file = output.File(option="--sheet", path=args.sheet, tool="rewardfl check_dataset", inputs=tuple(inputs))
    file.check()
    return file


def resolve_settings(args: argparse.Namespace) -> tuple[config.AnyConfig, Backbone]:
    """(the configuration, or its defaults for --data, with the flags as overrides; the model as its headers have it).

    ConfigError names what is wrong.
    """
    if bool(args.config) == bool(args.data):
        raise config.ConfigError(f"give --config or --data, got {'both' if args.config else 'neither'}")
    flags = {
        "data.height": args.height,
        "data.width": args.width,
        "data.max_pixels": args.max_pixels,
        "data.num_frames": args.num_frames,
        "data.fps": args.fps,
        "reward.det_size": args.det_size,
    }
    overrides = [f"{key}={value}" for key, value in flags.items() if value is not None]
    if args.config:
        cfg = config.load(args.config, overrides)
    else:
        cfg = config.parse(
            {name: dict(keys) for name, keys in UNSAID.items()} | {"data": {"file_name": args.data}}, overrides
        )
    backbone = backbones.describe(cfg.model.model_name, Source(model_paths=cfg.model.model_paths))
    backbone.check_clips(cfg.data.height, cfg.data.width, cfg.data.num_frames, cfg.data.max_pixels)
    return cfg, backbone


def inspect(
    row: data.Row, settings: config.DataConfig, detector: face.FaceDetector | None, device: str, takes_image: bool
) -> DatasetReport:
    """The row's report, without regard to other rows."""
    look = data.look_at(row, settings.num_frames, settings.fps, takes_image)
    report = DatasetReport(row, look, data.row_problems(row, settings.num_frames, settings.fps, takes_image))
    if row.problem:
        return report
    # what is there of a clip that is too short or too slow can still be shown
    fps = None if report.problems else settings.fps
    read = partial(
        data.read_clip, height=settings.height, width=settings.width, num_frames=settings.num_frames,
        max_pixels=settings.max_pixels, fps=fps, at_least=1,
    )  # fmt: skip
    try:
        shown: list[Tensor] = []
        pooled = None
        if row.video is not None:
            report.source = source_size(row.video)
            pooled = read(row.video)
            report.size = size_of(pooled)
            report.warnings += size_warnings("clip", report.source, report.size)
            shown += sample_frames(pooled)
        if row.image is not None:
            image = data.read_picture(row.image)
            if report.size is None:
                report.source = size_of(image)
                report.size = data.clip_size(report.source, settings.height, settings.width, settings.max_pixels)
            report.warnings += size_warnings("image", size_of(image), report.size)
            shown.insert(0, data.fit(image[None], *report.size)[0])
        if row.reference_video is not None:
            pooled = read(row.reference_video)
            report.warnings += size_warnings("reference", source_size(row.reference_video), size_of(pooled))
            shown += sample_frames(pooled)
        if report.size is None and settings.max_pixels is None:
            report.size = row.size or (settings.height, settings.width)
    except data.DataError:  # is among the problems
        return report
    boxes = [None] * len(shown)
    if detector is not None and shown:
        boxes = [largest_face(frame, detector, device) for frame in shown]
        problem, warning = face_remarks(row, pooled, boxes, detector, device)
        report.problems += problem
        report.warnings += warning
    report.pictures = [thumbnail(frame, box) for frame, box in zip(shown, boxes, strict=True)]
    return report


def source_size(path: Path) -> tuple[int, int]:
    """(height, width) of the clip's upright frames."""
    frame = next(data.iter_frames(path, 1))
    return (frame.width, frame.height) if frame.rotation % 180 else (frame.height, frame.width)


def size_of(pixels: Tensor) -> tuple[int, int]:
    """(height, width) of (..., H, W, 3)."""
    return pixels.shape[-3], pixels.shape[-2]


def sample_frames(frames: Tensor) -> Tensor:
    """The first, middle and last of (F, H, W, 3) frames."""
    return frames[[0, len(frames) // 2, len(frames) - 1]]


def size_warnings(what: str, source: tuple[int, int], size: tuple[int, int]) -> list[str]:
    """What bringing a picture of `source` (height, width) to `size` does to it, where that is much."""
    scales = [new / old for new, old in zip(size, source, strict=True)]
    left = min(scales) / max(scales)  # the larger scale is taken; what then sticks out of the other side is cropped
    found = []
    if max(scales) > ENLARGED:
        found.append(
            f"{what}: {in_pixels(source)} (height x width) is enlarged {max(scales):.2f} times to {in_pixels(size)}"
        )
    if left < CROPPED:
        found.append(f"{what}: {in_pixels(size)} leaves {left:.0%} of {in_pixels(source)} (height x width)")
    return found


def largest_face(frame: Tensor, detector: face.FaceDetector, device: str) -> list[float] | None:
    """Left, top, right and bottom of the largest face in a (H, W, 3) uint8 frame."""
    (found,) = detector.detect(data.to_float(frame[None]).transpose(0, 1).to(device))
    return found.boxes[0].tolist() if len(found.boxes) else None


def face_remarks(
    row: data.Row, pooled: Tensor | None, boxes: Sequence[list[float] | None], detector: face.FaceDetector, device: str
) -> tuple[list[str], list[str]]:
    """(problems, warnings). pooled: (F, H, W, 3) clip that the face is taken from; boxes: of all that is shown."""
    if pooled is None:  # a picture alone
        return ([] if any(boxes) else [f"no face was found in {row.reference}"]), []
    seen = boxes[-3:]  # of the clip, or of its reference, which comes last
    # the first frame is not pooled: it is the model's input
    if not any(seen[1:]) and not any(largest_face(frame, detector, device) for frame in pooled[1:]):
        return [f"no face was found in {row.reference}"], []
    missing = [name for name, box in zip(("first", "middle", "last"), seen, strict=True) if box is None]
    warnings = [f"no face in the {', '.join(missing)} frame of {row.reference.name}"] if missing else []
    if row.image is not None and boxes[0] is None:
        warnings.append(f"no face in the image {row.image.name}")
    return [], warnings


def warn_of_repeats(reports: Sequence[DatasetReport]) -> None:
    first: dict[tuple, int] = {}
    for report in reports:
        row = report.row
        content = (row.prompt, row.negative_prompt, row.size, *row.files.values())
        line = first.setdefault(content, row.line)
        if line != row.line:
            report.warnings.append(f"the same as line {line}: the clip weighs more")


def listing(reports: Sequence[DatasetReport]) -> list[str]:
    """A line for each problem and each warning, in the order of the file."""
    return [
        f"line {report.row.line}: {kind}: {text}"
        for report in reports
        for kind, texts in (("problem", report.problems), ("warning", report.warnings))
        for text in texts
    ]


def list_notes(rows: Sequence[data.Row], reports: Sequence[DatasetReport], settings: config.DataConfig) -> list[str]:
    """What training says of the rows, and of the clips that it takes."""
    usable = [report for report in reports if not report.problems]
    sizes = (settings.height, settings.width, settings.max_pixels, settings.fps)
    of_clips = data.clip_notes([report.row for report in usable], [report.look for report in usable], *sizes)
    return [f"note: {note}" for note in [*data.notes(rows), *of_clips]]


def summary(reports: Sequence[DatasetReport]) -> list[str]:
    """How many rows can be used, and how many of them have which size."""
    usable = [report for report in reports if not report.problems]
    sizes = Counter(report.size for report in usable)
    return [
        f"{len(reports)} rows: {len(usable)} can be used, {len(reports) - len(usable)} cannot",
        *(f"{in_pixels(size)} (height x width): {count} rows" for size, count in sizes.most_common() if size),
    ]


def in_pixels(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]}"


def thumbnail(frame: Tensor, box: list[float] | None) -> Image.Image:
    """A (H, W, 3) uint8 frame within THUMBNAIL, the face's box drawn in green."""
    picture = ImageOps.contain(Image.fromarray(frame.numpy()), THUMBNAIL)
    if box is not None:
        scale = picture.width / frame.shape[1]
        ImageDraw.Draw(picture).rectangle([side * scale for side in box], outline=(0, 220, 0), width=2)
    return picture


def drawable(text: str) -> str:
    """The text on one line; what FONT has no letters for (Chinese, say) as escapes, where it would draw boxes."""
    known = FT2Font(FONT).get_charmap()
    return "".join(c if ord(c) in known else c.encode("unicode_escape").decode() for c in command_line.one_line(text))


def contact_sheet(reports: Sequence[DatasetReport]) -> Image.Image:
    """Every row's thumbnails over its line, id and size; problems in red, warnings in grey."""
    font = ImageFont.truetype(FONT, 10)  # Pillow's own has the letters of English alone
    slots = max(3, *(len(report.pictures) for report in reports))
    width, height = slots * (THUMBNAIL[0] + 4) + 12, THUMBNAIL[1] + LINES * LINE + 12
    columns = max(1, round(math.sqrt(len(reports) * height / width)))  # a sheet that is about square
    sheet = Image.new("RGB", (columns * width, math.ceil(len(reports) / columns) * height), "white")
    pen = ImageDraw.Draw(sheet)
    for i, report in enumerate(reports):
        left, top = i % columns * width + 6, i // columns * height + 6
        for slot, picture in enumerate(report.pictures):
            sheet.paste(picture, (left + slot * (THUMBNAIL[0] + 4), top))
        if not report.pictures:
            pen.rectangle((left, top, left + THUMBNAIL[0], top + THUMBNAIL[1]), outline="red")
        sizes = f"  {in_pixels(report.source)} to {in_pixels(report.size)}" if report.source and report.size else ""
        title = drawable(f"line {report.row.line}  {report.row.id}{sizes}")
        pen.text((left, top + THUMBNAIL[1] + 2), title, "black", font)
        said, colour = drawable("; ".join(report.problems + report.warnings)), "red" if report.problems else "dimgrey"
        for j, words in enumerate(textwrap.wrap(said, width // 6)[: LINES - 1]):
            pen.text((left, top + THUMBNAIL[1] + 2 + (j + 1) * LINE), words, colour, font)
    return sheet
