"""Inspection of clips before training: the work of tools/check_dataset.py."""

import argparse
import io
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from matplotlib import get_data_path
from PIL import Image, ImageDraw, ImageFont, ImageOps
from torch import Tensor
from tqdm import tqdm

from rewardfl import backbones, command_line, config, data, outputs
from rewardfl.backbones.protocol import Backbone, Source
from rewardfl.files import escape_control
from rewardfl.rewards import face
from rewardfl.rewards.face.track import SAME_PERSON
from rewardfl.training import plan

USABLE, UNUSABLE = 0, 2  # exit codes
BLOCK, STILL = 8, 4.0  # the side of a block in pixels; a still's blocks change by fewer levels of 255
REPEATED = 0.25  # a repeated frame changes less than this share of what frames that move do
COMPARED_FRAMES = 16  # frames of a clip whose faces are compared
STRANGE = 0.25  # a warning from this share of them with another face than the first's
ENLARGED, CROPPED = 1.05, 0.75  # warnings: enlarged more than this many times; less than this share of a picture left
THUMBNAIL = (160, 112)  # width and height
FONT = f"{get_data_path()}/fonts/ttf/DejaVuSans.ttf"  # Latin, Greek, Cyrillic, Arabic and more
# required keys of a configuration for --data, which has none
REQUIRED = {"run": {"output_dir": "-"}, "model": {"model_paths": "-"}, "reward": {"reward_model_path": "-"}}


Box = list[float]
FindFace = Callable[[Tensor], Box | None]  # of a (H, W, 3) uint8 frame; None without a face


@dataclass(kw_only=True)
class DatasetReport:
    """The problems, warnings, sizes and thumbnails of a row; no size and no thumbnails with a problem of a file."""

    row: data.Row
    header: data.HeaderInfo
    problems: list[str]
    warnings: list[str] = field(default_factory=list)
    size: tuple[int, int] | None = None  # (height, width) as trained on
    pictures: list[Image.Image] = field(default_factory=list)  # thumbnails


def run(args: argparse.Namespace) -> int:
    """Inspect clips before training, and return the exit code."""
    args.device = command_line.resolve_device(args.device)
    cfg, backbone = resolve_settings(args)
    rows = data.load_metadata(cfg.data.file_name, "--data" if args.data else "data.file_name")
    sheet = sheet_file(args, rows, cfg.data.file_name) if args.sheet else None
    faces = face.FaceIdentity(args.faces, cfg.reward.det_size).to(args.device) if args.faces else None
    check = partial(inspect, settings=cfg.data, faces=faces, device=args.device, takes_image=backbone.takes_image)
    with ThreadPoolExecutor(4) as pool:
        reports = list(tqdm(pool.map(check, rows), total=len(rows), desc="checking", disable=None))
    for report in reports:
        if problem := plan.size_problem(cfg.data, backbone, report.row.size):
            report.problems.append(problem)
    print(escape_control("\n".join(listing(rows, reports, cfg.data, backbone.frame_rate))))
    if sheet:
        content = io.BytesIO()
        contact_sheet(reports).save(content, Image.registered_extensions()[args.sheet.suffix.lower()])
        sheet.write(content.getvalue())
        print(f"sheet: {args.sheet}")
    return UNUSABLE if any(report.problems for report in reports) else USABLE


def sheet_file(args: argparse.Namespace, rows: Sequence[data.Row], table: str) -> outputs.Target:
    """Return the file of the contact sheet. Raise InputError where it may not be written, before any clip is read."""
    if Image.registered_extensions().get(args.sheet.suffix.lower()) not in Image.SAVE:
        raise ValueError(f"--sheet {args.sheet}: no picture is called so; give NAME.png")
    inputs = [Path(table), *([Path(args.config)] if args.config else []), *([args.faces] if args.faces else [])]
    inputs += [Path(path) for row in rows for path in row.files.values() if path]
    file = outputs.Target(option="--sheet", path=args.sheet, overwrite=args.overwrite, inputs=inputs)
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
    row: data.Row,
    settings: config.DataConfig,
    faces: face.FaceIdentity | None = None,
    device: str = "cpu",
    *,
    takes_image: bool,
) -> DatasetReport:
    """Return the row's report, without regard to other rows. faces: on the device; None does not look for faces."""
    find_face = partial(largest_face, faces.detector, device) if faces else None
    header = data.inspect_row(row, settings.num_frames, settings.fps, takes_image=takes_image)
    report = DatasetReport(row=row, header=header, problems=[*header.problems])
    if report.problems:
        return report
    size = (settings.height, settings.width)
    try:
        contents = data.read_files(row, *size, settings.num_frames, settings.max_pixels, settings.fps)
    except data.DataError as error:
        report.problems.append(str(error))
        return report
    if "video" in contents:
        report.size = size_of(contents["video"])
    elif "image" in contents:
        report.size = data.clip_size(size_of(contents["image"]), *size, settings.max_pixels)
    elif settings.max_pixels is None:
        report.size = row.size or size
    boxes: dict[str, list[Box | None]] = {}
    for column, content in contents.items():
        if column == "image":
            source, shown = size_of(content), data.fit(content[None], *(report.size or size))
        else:
            source, shown = size_of(data.read_video(row.files[column] or "", 1)), content[[0, len(content) // 2, -1]]
        report.warnings += size_warnings(column, source, size_of(shown))
        boxes[column] = [find_face(frame) if find_face else None for frame in shown]
        report.pictures += map(thumbnail, shown, boxes[column])
    report.warnings += motion_warnings(contents["video"]) if "video" in contents else []
    if faces is not None and find_face is not None:
        report_faces(report, contents, boxes, find_face)
        report_cuts(report, contents, faces, device)
    return report


def size_of(pixels: Tensor) -> tuple[int, int]:
    """Return (height, width) of (..., H, W, 3)."""
    return pixels.shape[-3], pixels.shape[-2]


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


def largest_face(detector: face.FaceDetector, device: str, frame: Tensor) -> Box | None:
    """Return left, top, right and bottom of the largest face in a (H, W, 3) uint8 frame; None without one."""
    (detections,) = detector.detect(data.to_float(frame[None]).transpose(0, 1).to(device))
    return detections.boxes[0].tolist() if len(detections.boxes) else None


def report_faces(
    report: DatasetReport, contents: Mapping[str, Tensor], boxes: Mapping[str, Sequence[Box | None]], find: FindFace
) -> None:
    """Add to the report that the clip, or its reference, shows no face, or not in all frames. boxes: by column."""
    pooled = next((column for column in ("reference_video", "video", "image") if column in boxes), None)
    if pooled is None:
        return
    # the first frame of a clip is not pooled: it is the model's input
    frames = contents[pooled][None] if pooled == "image" else contents[pooled][1:]
    if not any(map(find, frames)):
        report.problems.append(f"no face was found in {report.row.reference}")
        return
    for column in (column for column in boxes if column in ("image", pooled)):
        names = ("the picture",) if column == "image" else ("the first frame", "the middle frame", "the last frame")
        if missing := [name for name, box in zip(names, boxes[column], strict=True) if box is None]:
            report.warnings.append(f"{column}: no face in {', '.join(missing)}")


def report_cuts(report: DatasetReport, contents: Mapping[str, Tensor], faces: face.FaceIdentity, device: str) -> None:
    """Add a warning for each video that goes over to another person."""
    for column in contents.keys() & {"video", "reference_video"}:
        frames = contents[column]
        shown = frames[torch.linspace(0, len(frames) - 1, min(COMPARED_FRAMES, len(frames))).round().long()]
        cosines = faces.similarity_to_first(data.to_float(shown).to(device))
        others = cosines[cosines < SAME_PERSON]
        if len(others) > 1 and len(others) >= STRANGE * len(cosines):
            report.warnings.append(
                f"{column}: {len(others)} of {len(cosines)} later frames show another person than the first with a "
                f"face (cosines {others.min():.2f} to {others.max():.2f}, one person has {SAME_PERSON:g} or more)"
            )


def motion_warnings(frames: Tensor) -> list[str]:
    """Return warnings about a clip (F, H, W, 3) that does not move, or whose frames repeat at a regular interval."""
    blocks = torch.stack([torch.nn.functional.avg_pool2d(frame.movedim(2, 0).float(), BLOCK) for frame in frames])
    if len(blocks) > 1 and bool((blocks - blocks[0]).abs().max() < STILL):
        return [f"video: nothing moves in its {len(blocks)} frames"]
    changes = blocks.diff(dim=0).abs().flatten(1).amax(1)
    moves = changes > REPEATED * changes.quantile(0.9) if len(changes) else changes.bool()
    if repeats_regularly(moves) or repeats_regularly(~moves):
        return [f"video: {int((~moves).sum())} of {len(blocks)} frames repeat the one before; leave them out"]
    return []


def repeats_regularly(events: Tensor) -> bool:
    """Return whether at least four events (n,) bool come at one interval of two or more, or that and one more."""
    gaps = Counter(events.nonzero().flatten().diff().tolist())
    most = max((gaps[gap] + gaps[gap + 1] for gap in gaps if gap > 1), default=0)
    return most >= 3 and most >= 0.8 * gaps.total() and 2 * int(events.sum()) * max(gaps) >= len(events)


def listing(
    rows: Sequence[data.Row], reports: Sequence[DatasetReport], settings: config.DataConfig, model_rate: float
) -> list[str]:
    """Return a line for each problem and warning, training's notes on the usable rows, and the number of each size."""
    lines = []
    for report in reports:
        lines += [f"line {report.row.line}: problem: {problem}" for problem in report.problems]
        lines += [f"line {report.row.line}: warning: {warning}" for warning in report.warnings]
    usable = [report for report in reports if not report.problems]
    sizes = (settings.height, settings.width, settings.max_pixels, settings.fps, model_rate)
    notes = data.clip_notes([report.row for report in usable], [report.header for report in usable], *sizes)
    lines += [f"note: {note}" for note in [*data.notes(rows), *notes]]
    lines.append(f"{len(reports)} rows: {len(usable)} can be used, {len(reports) - len(usable)} cannot")
    counts = Counter(report.size for report in usable).most_common()
    return lines + [f"{in_pixels(size)} (height x width): {count} rows" for size, count in counts if size]


def in_pixels(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]}"


def thumbnail(frame: Tensor, box: list[float] | None) -> Image.Image:
    """Return a (H, W, 3) uint8 frame within THUMBNAIL, with the face's box in green."""
    picture = Image.fromarray(frame.numpy())
    if box is not None:
        ImageDraw.Draw(picture).rectangle(box, outline=(0, 220, 0), width=max(2, picture.width // 80))
    return ImageOps.contain(picture, THUMBNAIL)


def contact_sheet(reports: Sequence[DatasetReport]) -> Image.Image:
    """Draw every row's thumbnails over its line and id, in red for a row with a problem."""
    font = ImageFont.truetype(FONT, 10)  # Pillow's own has the letters of English alone
    slots = max(3, *(len(report.pictures) for report in reports))
    width, height = slots * (THUMBNAIL[0] + 4) + 12, THUMBNAIL[1] + 24
    columns = max(1, round(math.sqrt(len(reports) * height / width)))  # a sheet that is about square
    sheet = Image.new("RGB", (columns * width, math.ceil(len(reports) / columns) * height), "white")
    pen = ImageDraw.Draw(sheet)
    for i, report in enumerate(reports):
        left, top = i % columns * width, i // columns * height
        for slot, picture in enumerate(report.pictures):
            sheet.paste(picture, (left + slot * (THUMBNAIL[0] + 4), top))
        label = f"line {report.row.line}  {report.row.id}"
        pen.text((left, top + THUMBNAIL[1] + 2), label, "red" if report.problems else "black", font)
    return sheet
