"""Inspection of clips before training: the work of tools/check_dataset.py."""

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
from rewardfl.files import escape_control
from rewardfl.merging import output
from rewardfl.rewards import face
from rewardfl.rewards.face import pack as face_pack
from rewardfl.training import plan

USABLE, UNUSABLE = 0, 2  # exit codes
ENLARGED, CROPPED = 1.05, 0.75  # warnings: enlarged more than this many times; less than this share of a picture left
THUMBNAIL, LINE, LINES = (160, 112), 14, 3  # width and height; height of a line of text, and lines of a row
FONT = f"{get_data_path()}/fonts/ttf/DejaVuSans.ttf"  # Latin, Greek, Cyrillic, Arabic and more
# required keys of a configuration for --data, which has none
REQUIRED = {"run": {"output_dir": "-"}, "model": {"model_paths": "-"}, "reward": {"reward_model_path": "-"}}


@dataclass(kw_only=True)
class DatasetReport:
    """The problems, warnings, sizes and thumbnails of a row; no size where its clip cannot be read."""

    row: data.Row
    header: data.HeaderInfo
    problems: list[str]
    warnings: list[str] = field(default_factory=list)
    source: tuple[int, int] | None = None  # (height, width) as stored
    size: tuple[int, int] | None = None  # as trained on
    pictures: list[Image.Image] = field(default_factory=list)  # thumbnails


def run(args: argparse.Namespace) -> int:
    """Inspect clips before training, and return the exit code."""
    args.device = command_line.resolve_device(args.device)
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
        if problem := plan.size_problem(cfg.data, backbone, report.row.size):
            report.problems.append(problem)
    warn_of_repeats(reports)
    print(escape_control("\n".join([*listing(reports), *list_notes(rows, reports, cfg.data), *summary(reports)])))
    if sheet:
        content = io.BytesIO()
        contact_sheet(reports).save(content, Image.registered_extensions()[args.sheet.suffix.lower()])
        sheet.write(content.getvalue())
        print(f"sheet: {args.sheet}")
    return UNUSABLE if any(report.problems for report in reports) else USABLE


def sheet_file(args: argparse.Namespace, rows: Sequence[data.Row], table: str) -> output.File:
    """Return the file of the contact sheet. Raise InputError where it may not be written, before any clip is read."""
    if Image.registered_extensions().get(args.sheet.suffix.lower()) not in Image.SAVE:
        raise ValueError(f"--sheet {args.sheet}: no picture is called so; give NAME.png")
    inputs = [Path(table), *([Path(args.config)] if args.config else []), *([args.faces] if args.faces else [])]
    inputs += [Path(path) for row in rows for path in row.files.values() if path]
    file = output.File(option="--sheet", path=args.sheet, tool="rewardfl check_dataset", inputs=tuple(inputs))
    file.check()
    return file


def resolve_settings(args: argparse.Namespace) -> tuple[config.AnyConfig, Backbone]:
    """Return the configuration, or its defaults for --data, with the flags as overrides, and the model by its headers.

    Raise ConfigError for values that the schema or the model does not allow.
    """
    if bool(args.config) == bool(args.data):
        raise config.ConfigError(f"give --config or --data, got {'both' if args.config else 'neither'}")
    keys = ("data.height", "data.width", "data.max_pixels", "data.num_frames", "data.fps", "reward.det_size")
    flags = {key: getattr(args, key.partition(".")[2]) for key in keys}
    overrides = [f"{key}={value}" for key, value in flags.items() if value is not None]
    if args.config:
        cfg = config.load(args.config, overrides)
    else:
        raw = {name: dict(keys) for name, keys in REQUIRED.items()} | {"data": {"file_name": args.data}}
        cfg = config.parse(raw, overrides)
    backbone = backbones.describe(cfg.model.model_name, Source(model_paths=cfg.model.model_paths))
    backbone.check_clips(cfg.data.height, cfg.data.width, cfg.data.num_frames, cfg.data.max_pixels)
    return cfg, backbone


def inspect(
    row: data.Row, settings: config.DataConfig, detector: face.FaceDetector | None, device: str, takes_image: bool
) -> DatasetReport:
    """Return the row's report, without regard to other rows."""
    header = data.inspect_row(row, settings.num_frames, settings.fps, takes_image)
    problems = data.row_problems(row, settings.num_frames, settings.fps, takes_image)
    report = DatasetReport(row=row, header=header, problems=problems)
    if row.problem:
        return report
    # a clip that is too short or too slow can still be shown
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
    except data.DataError:  # row_problems has it already
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
    """Return (height, width) of the clip's upright frames."""
    frame = next(data.iter_frames(path, 1))
    return (frame.width, frame.height) if frame.rotation % 180 else (frame.height, frame.width)


def size_of(pixels: Tensor) -> tuple[int, int]:
    """Return (height, width) of (..., H, W, 3)."""
    return pixels.shape[-3], pixels.shape[-2]


def sample_frames(frames: Tensor) -> Tensor:
    """Return the first, middle and last of (F, H, W, 3) frames."""
    return frames[[0, len(frames) // 2, len(frames) - 1]]


def size_warnings(kind: str, source: tuple[int, int], size: tuple[int, int]) -> list[str]:
    """Return warnings where a picture of `source` (height, width) is much enlarged or cropped to get `size`."""
    scales = [new / old for new, old in zip(size, source, strict=True)]
    left = min(scales) / max(scales)  # the larger scale is applied, and the longer side is cropped
    stored, trained, warnings = in_pixels(source), in_pixels(size), []
    if max(scales) > ENLARGED:
        warnings.append(f"{kind}: {stored} (height x width) is enlarged {max(scales):.2f} times to {trained}")
    if left < CROPPED:
        warnings.append(f"{kind}: {trained} leaves {left:.0%} of {stored} (height x width)")
    return warnings


def largest_face(frame: Tensor, detector: face.FaceDetector, device: str) -> list[float] | None:
    """Return left, top, right and bottom of the largest face in a (H, W, 3) uint8 frame; None without one."""
    (detections,) = detector.detect(data.to_float(frame[None]).transpose(0, 1).to(device))
    return detections.boxes[0].tolist() if len(detections.boxes) else None


def face_remarks(
    row: data.Row, pooled: Tensor | None, boxes: Sequence[list[float] | None], detector: face.FaceDetector, device: str
) -> tuple[list[str], list[str]]:
    """Return (problems, warnings). pooled: (F, H, W, 3) clip of the face's identity; boxes: of all shown frames."""
    if pooled is None:  # a picture alone
        return ([] if any(boxes) else [f"no face was found in {row.reference}"]), []
    clip_boxes = boxes[-3:]  # of the clip, or of its reference, which comes last
    # the first frame is not pooled: it is the model's input
    if not any(clip_boxes[1:]) and not any(largest_face(frame, detector, device) for frame in pooled[1:]):
        return [f"no face was found in {row.reference}"], []
    missing = [name for name, box in zip(("first", "middle", "last"), clip_boxes, strict=True) if box is None]
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
    """Return a line for each problem and each warning, in the order of the file."""
    lines = []
    for report in reports:
        lines += [f"line {report.row.line}: problem: {problem}" for problem in report.problems]
        lines += [f"line {report.row.line}: warning: {warning}" for warning in report.warnings]
    return lines


def list_notes(rows: Sequence[data.Row], reports: Sequence[DatasetReport], settings: config.DataConfig) -> list[str]:
    """Return the notes that training prints on the rows, and on the usable clips."""
    usable = [report for report in reports if not report.problems]
    sizes = (settings.height, settings.width, settings.max_pixels, settings.fps)
    clip_notes = data.clip_notes([report.row for report in usable], [report.header for report in usable], *sizes)
    return [f"note: {note}" for note in [*data.notes(rows), *clip_notes]]


def summary(reports: Sequence[DatasetReport]) -> list[str]:
    """Return the number of usable rows, and the number of each size."""
    usable = [report for report in reports if not report.problems]
    sizes = Counter(report.size for report in usable)
    return [
        f"{len(reports)} rows: {len(usable)} can be used, {len(reports) - len(usable)} cannot",
        *(f"{in_pixels(size)} (height x width): {count} rows" for size, count in sizes.most_common() if size),
    ]


def in_pixels(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]}"


def thumbnail(frame: Tensor, box: list[float] | None) -> Image.Image:
    """Return a (H, W, 3) uint8 frame within THUMBNAIL, with the face's box in green."""
    picture = ImageOps.contain(Image.fromarray(frame.numpy()), THUMBNAIL)
    if box is not None:
        scale = picture.width / frame.shape[1]
        ImageDraw.Draw(picture).rectangle([side * scale for side in box], outline=(0, 220, 0), width=2)
    return picture


def drawable(text: str) -> str:
    """Return the text on one line, with characters that FONT lacks (Chinese, say) as escapes."""
    glyphs = FT2Font(FONT).get_charmap()
    return "".join(c if ord(c) in glyphs else c.encode("unicode_escape").decode() for c in command_line.one_line(text))


def contact_sheet(reports: Sequence[DatasetReport]) -> Image.Image:
    """Draw every row's thumbnails over its line, id and size, with problems in red and warnings in grey."""
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
        remarks, colour = "; ".join(report.problems + report.warnings), "red" if report.problems else "dimgrey"
        for j, words in enumerate(textwrap.wrap(drawable(remarks), width // 6)[: LINES - 1]):
            pen.text((left, top + THUMBNAIL[1] + 2 + (j + 1) * LINE), words, colour, font)
    return sheet
