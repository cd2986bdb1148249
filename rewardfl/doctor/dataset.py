"""Inspection of clips before training: the work of tools/check_dataset.py."""

import argparse
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from rewardfl import backbones, command_line, config, data
from rewardfl.backbones.protocol import Backbone, Source
from rewardfl.files import escape_control
from rewardfl.rewards import face
from rewardfl.rewards.face.track import SAME_PERSON
from rewardfl.training import plan
from rewardfl.training.clip_scan import load_sized_example

BLOCK, STILL = 8, 4.0  # the side of a block in pixels; a still's blocks change by fewer levels of 255
REPEATED = 0.25  # a repeated frame changes less than this share of what frames that move do
COMPARED_FRAMES = 16  # frames of a clip whose faces are compared
CUT_FACE = 0.05  # share of a face's width that a crop may cut off
STRANGE = 0.25  # a warning from this share of them with another face than the first's


@dataclass(kw_only=True)
class DatasetReport:
    """The problems, warnings and size of a row; no size with a problem of a file."""

    row: data.Row
    header: data.HeaderInfo
    problems: list[str]
    warnings: list[str] = field(default_factory=list)
    size: tuple[int, int] | None = None  # (height, width) as trained on


def check_dataset(args: argparse.Namespace) -> int:
    """Inspect clips before training, and return the exit code."""
    device = torch.device(command_line.resolve_device(args.device))
    cfg = config.load(args.config, args.overrides)
    backbone = backbones.describe(cfg.model.model_name, Source(model_paths=cfg.model.model_paths))
    backbone.check_clips(cfg.data.height, cfg.data.width, cfg.data.num_frames, cfg.data.max_pixels)
    rows = data.load_metadata(cfg.data.file_name)
    rows = data.assign_images(rows, cfg.run.seed) if backbone.takes_image else rows
    faces = face.FaceIdentity(args.faces, cfg.reward.det_size).to(device) if args.faces else None
    check = partial(inspect, settings=cfg.data, backbone=backbone, faces=faces, device=device)
    with ThreadPoolExecutor(4) as pool:
        reports = list(tqdm(pool.map(check, rows), total=len(rows), desc="checking", disable=None))
    print(escape_control("\n".join(listing(rows, reports, cfg.data, backbone.frame_rate))))
    return 2 if any(report.problems for report in reports) else 0


def inspect(
    row: data.Row,
    settings: config.DataConfig,
    backbone: Backbone,
    faces: face.FaceIdentity | None,
    device: torch.device,
) -> DatasetReport:
    """Return the row's report, without regard to other rows. faces: on the device; None does not look for faces."""
    header = data.inspect_row(row, settings.num_frames, settings.fps, takes_image=backbone.takes_image)
    size_problem = plan.size_problem(settings, backbone, row.size)
    report = DatasetReport(row=row, header=header, problems=[*header.problems, *filter(None, [size_problem])])
    if report.problems:
        return report
    try:
        example = load_sized_example(settings, row)
        report.size = example.size
        if example.video is not None:
            report.warnings += motion_warnings(example.video)
        if faces is not None:
            inspect_faces(report, example, faces, device)
    except data.DataError as error:
        report.problems.append(str(error))
    return report


def inspect_faces(report: DatasetReport, example: data.Example, faces: face.FaceIdentity, device: torch.device) -> None:
    """Add the problems and warnings of the row's faces to its report."""
    row, reference = report.row, example.reference
    photos = [photo.to(device) for photo in data.load_pictures(row)] if row.photos else []
    if photos:
        report.problems += [f"{row.checked_pictures[i]}: {why}" for i, why in faces.photo_pool(photos)[1].items()]
    if row.image is not None and example.image is not None:
        report.warnings += picture_warnings(row.image, example.image, faces, device)
    clips = {"video": example.video, "reference_video": reference if row.reference_video else None}
    for column, clip in clips.items():
        if clip is not None:
            report.warnings += cut_warnings(column, faces.similarity_to_first(pick_frames(clip).to(device)))
    if row.reference is None:
        return
    if (pool := faces.pool(pick_frames(reference).to(device)) or faces.pool(reference.to(device))) is None:
        report.problems.append(f"no face was found in {row.reference}")
    elif missing := int((~pool.detected).sum()):
        report.warnings.append(f"{row.reference.name}: its face is lost in {missing} of {len(pool.detected)} frames")


def picture_warnings(path: Path, image: Tensor, faces: face.FaceIdentity, device: torch.device) -> list[str]:
    """Return warnings if `image`, the crop (3, H, W) of a picture, shows no face, or if it cuts the largest face."""
    picture = data.to_float(data.read_picture(path)[None])
    (shown,), (detections,) = (
        faces.detector.detect(frames.to(device)) for frames in (image[None], picture.transpose(0, 1))
    )
    warnings = [] if len(shown.boxes) else ["image: no face in the picture"]
    if not len(detections.boxes):
        return warnings
    height, width = picture.shape[2:]
    scale = max(image.shape[1] / height, image.shape[2] / width)
    taken = image.shape[2] / scale, image.shape[1] / scale  # width and height in the picture
    left, top, right, bottom = detections.boxes[0].tolist()
    across, down = (width - taken[0]) / 2, (height - taken[1]) / 2  # cut off at each side
    cut = max(across - left, right - width + across, down - top, bottom - height + down)
    if cut > CUT_FACE * (right - left):
        words = f"the middle {taken[0]:.0f} x {taken[1]:.0f} of {width} x {height} pixels (width x height) is taken"
        warnings.append(
            f"image: the crop cuts the face of {path.name}: {words}; crop it yourself, or set data.max_pixels"
        )
    return warnings


def pick_frames(clip: Tensor) -> Tensor:
    """Return up to COMPARED_FRAMES frames of a clip (3, F, H, W), with the first and the last."""
    count = clip.shape[1]
    return clip[:, torch.linspace(0, count - 1, min(COMPARED_FRAMES, count)).round().long()]


def cut_warnings(column: str, cosines: Tensor) -> list[str]:
    """Return a warning if a clip goes over to another person. cosines: as FaceIdentity.similarity_to_first has them."""
    others = cosines[cosines < SAME_PERSON]
    if len(others) < 2 or len(others) < STRANGE * len(cosines):
        return []
    return [
        f"{column}: {len(others)} of {len(cosines)} later frames show another person than the first with a face "
        f"(cosines {others.min():.2f} to {others.max():.2f}, one person has {SAME_PERSON:g} or more)"
    ]


def motion_warnings(video: Tensor) -> list[str]:
    """Return warnings if a clip (3, F, H, W) in [-1, 1] does not move, or repeats frames at a regular interval."""
    blocks = torch.stack([127.5 * torch.nn.functional.avg_pool2d(frame, BLOCK) for frame in video.unbind(1)])
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
    sizes_of_rows = Counter(report.size for report in usable if report.size).most_common()
    return lines + [f"{height} x {width} (height x width): {count} rows" for (height, width), count in sizes_of_rows]
