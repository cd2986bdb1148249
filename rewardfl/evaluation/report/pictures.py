"""Pictures of an evaluation: FaceSim along the clip, gain against motion, and a grid of frames."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image, ImageDraw

from rewardfl.evaluation.arms import Arm
from rewardfl.evaluation.records import REAL, Record
from rewardfl.evaluation.report.charts import STYLE, arm_curves, draw_curves, draw_front, make_markers, real_curve
from rewardfl.evaluation.report.meanings import judge_words, main_judge
from rewardfl.evaluation.video_files import HEIGHT, pick_frames, strip_file

GAP, HEAD, FOOT = 10, 16, 14  # pixels between clips, above all, and below each row


@STYLE
def save_curves(report: dict, path: Path) -> None:
    """Draw FaceSim along the clip of all arms and the real clips, by each recogniser; of two arms clip by clip."""
    judges, pairs = list(report["real"]["per_frame"]), "compared" in report
    count = len(judges) + pairs
    figure = Figure(figsize=(5 * count, 4), layout="constrained")
    axes = figure.subplots(1, count, squeeze=False)[0]
    for axis, judge in zip(axes, judges, strict=False):
        curves = [*arm_curves(report, judge), real_curve(report, judge)]
        draw_curves(axis, curves)
        axis.set_title(f"By {judge_words(judge)}")
        axis.legend(axis.lines, [curve.name for curve in curves], fontsize="small")
    if pairs:
        _draw_clips(report, judges, axes[-1])
    figure.savefig(path, dpi=110)


def _draw_clips(report: dict, judges: Sequence[str], axis: Axes) -> None:
    lowest = 0.0  # a cosine may be below 0
    for judge, colour in zip(judges, ("tab:orange", "tab:green"), strict=False):
        pairs = [(clip[f"{judge}/before"], clip[f"{judge}/after"]) for clip in report["per_clip"]]
        before, after = zip(*(pair for pair in pairs if None not in pair), strict=True)
        axis.scatter(before, after, s=12, color=colour, label=judge)
        lowest = min([lowest, *before, *after])
    axis.plot([-1, 1], [-1, 1], color="grey", linewidth=0.8)
    names = report["compared"]
    axis.set(title="every clip", xlabel=names["before"], ylabel=names["after"], xlim=(lowest, 1), ylim=(lowest, 1))
    axis.legend()


@STYLE
def save_front(report: dict, path: Path) -> None:
    """Draw gain in FaceSim against the face's own motion, both over the base's, by the main judge."""
    figure, markers = Figure(figsize=(7, 5), layout="constrained"), make_markers(report)
    axis = figure.subplots()
    draw_front(axis, markers, judge_words(main_judge(report)))
    for marker in markers:
        point = (marker.gain["mean"], marker.motion["mean"])
        axis.annotate(marker.name, point, xytext=(4, 4), textcoords="offset points")
    axis.annotate("base", (0, 1), xytext=(4, -12), textcoords="offset points")
    figure.savefig(path, dpi=110)


def draw_grid(out: Path, rows: Sequence[int], arms: Sequence[Arm], records: Sequence[Record], judge: str) -> None:
    """Draw out/grid.png: a row per clip, a column for the real clip and each arm, the judge's score below a frame."""
    names = [REAL, *(arm.name for arm in arms)]
    curves = {(record["index"], record["arm"]): record["curves"][judge] for record in records if not record["seed"]}
    files = {(row, name): strip_file(out, row, name) for row in rows for name in names}
    # another tool may lack a row's first video
    strips = {key: Image.open(file).convert("RGB") for key, file in files.items() if file.is_file()}
    width = max(strip.width for strip in strips.values()) + GAP
    height = HEIGHT + FOOT
    sheet = Image.new("RGB", (len(names) * width, HEAD + len(rows) * height), "white")
    pen = ImageDraw.Draw(sheet)
    for c, name in enumerate(names):
        pen.text((c * width + 4, 2), name, fill="black")
        for r, row in enumerate(rows):
            if strip := strips.get((row, name)):
                left, top = c * width, HEAD + r * height
                sheet.paste(strip, (left, top))
                if name != REAL:
                    _write_scores(pen, left, top + HEIGHT, strip.width, curves[(row, name)])
    sheet.save(out / "grid.png")


def _write_scores(pen: ImageDraw.ImageDraw, left: int, top: int, width: int, curve: Sequence[float]) -> None:
    frames = pick_frames(len(curve) + 1)
    for k, frame in enumerate(frames):
        pen.text((left + k * width // len(frames) + 4, top), f"{curve[frame - 1]:.2f}", fill="black")


def draw_pictures(
    report: Mapping, out: Path, arms: Sequence[Arm], records: Sequence[Record], rows: Sequence[int]
) -> list[Path]:
    """Draw all pictures of an evaluation and return their files."""
    pictures = [out / "grid.png", out / "curves.png"]
    save_curves(dict(report), out / "curves.png")
    draw_grid(out, rows, arms, records, list(report["real"]["per_frame"])[-1])
    if sum(arm["against"] is not None for arm in report["arms"]) > 1:
        save_front(dict(report), out / "front.png")
        pictures.append(out / "front.png")
    return pictures
