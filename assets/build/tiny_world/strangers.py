"""People drawn by another program than people.py: other shapes, colours, backgrounds and motion. PIL, SIZE x SIZE.

The judge is trained on them, too, so that it does not depend on one program's style. Faces are polygons and strokes,
drawn back to front at OVERSAMPLED times the size and scaled down.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from rewardfl.data import write_video
from tiny_world.people import FPS, NUM_FRAMES, SIZE

OVERSAMPLED = 8
Colour = tuple[int, int, int]
Points = list[tuple[float, float]]

SKINS: tuple[Colour, ...] = (
    (250, 224, 206), (240, 200, 160), (222, 176, 128), (190, 140, 98), (150, 104, 66), (112, 76, 52), (232, 184, 172),
    (214, 172, 140),
)  # fmt: skip

HAIRS: tuple[Colour, ...] = (
    (18, 18, 26), (58, 34, 22), (126, 70, 30), (236, 208, 120), (214, 214, 218), (150, 40, 32), (34, 52, 110),
    (44, 110, 74), (138, 60, 130),
)  # fmt: skip

CLOTHES: tuple[Colour, ...] = (
    (200, 60, 50), (40, 90, 160), (240, 200, 60), (60, 130, 90), (240, 240, 240), (40, 40, 44),
)  # fmt: skip
HEADS = ("egg", "box", "hexagon", "wedge")
CUTS = ("crop", "spikes", "mohawk", "bob", "curls", "cap", "bald")
BEARDS = ("none", "none", "none", "goatee", "moustache", "full")
EYES = ("almond", "round", "box")
BACKGROUNDS = ("stripes", "checks", "dots", "rings", "noise")


@dataclass(frozen=True)
class Stranger:
    """The appearance of a person. Lengths are in half head heights."""

    skin: Colour
    hair: Colour
    cloth: Colour
    head: str
    cut: str
    beard: str
    eyes: str
    iris: Colour
    glasses: bool
    width: float  # of half the head
    eye_distance: float
    eye_size: float
    eye_height: float
    brow_slope: float
    brow_height: float
    brow_thickness: float
    nose_length: float
    nose_width: float
    mouth_width: float
    mouth_height: float
    lip: Colour
    lip_thickness: float
    smile: float


@dataclass(frozen=True)
class Pose:
    """One frame of a motion: centre (px), half head height (px), angles (rad), blink and mouth in [0, 1]."""

    x: float
    y: float
    scale: float
    roll: float
    yaw: float
    nod: float
    blink: float
    mouth: float


def draw_stranger(rng: np.random.Generator) -> Stranger:
    """Draw a person."""

    def choose(options: tuple):
        return options[int(rng.integers(len(options)))]

    hair = choose(HAIRS)
    skin = choose(SKINS)
    return Stranger(
        skin=skin, hair=hair, cloth=choose(CLOTHES), head=choose(HEADS), cut=choose(CUTS), beard=choose(BEARDS),
        eyes=choose(EYES), iris=choose(((40, 26, 18), (30, 90, 50), (40, 90, 170), (110, 80, 30))),
        glasses=bool(rng.random() < 0.3), width=rng.uniform(0.66, 0.84), eye_distance=rng.uniform(0.27, 0.37),
        eye_size=rng.uniform(0.115, 0.165), eye_height=rng.uniform(-0.16, -0.04), brow_slope=rng.uniform(-0.3, 0.3),
        brow_height=rng.uniform(0.18, 0.28), brow_thickness=rng.uniform(0.05, 0.12),
        nose_length=rng.uniform(0.14, 0.30), nose_width=rng.uniform(0.07, 0.15), mouth_width=rng.uniform(0.19, 0.32),
        mouth_height=rng.uniform(0.48, 0.60), lip=choose(((176, 52, 60), (140, 60, 50), (214, 110, 110), (96, 40, 44))),
        lip_thickness=rng.uniform(0.05, 0.11), smile=rng.uniform(-0.06, 0.12),
    )  # fmt: skip


def draw_motion(rng: np.random.Generator, num_frames: int = NUM_FRAMES) -> list[Pose]:
    """Draw a motion: swaying, nodding or turning at an even pace, perhaps with speech and a blink."""
    time = np.linspace(0, 1, num_frames)

    def swing(cycles: float) -> np.ndarray:
        """Draw a triangle wave in [-1, 1], of constant speed; people.py's motions are sines."""
        phase = rng.uniform(0, 1)
        return 4 * np.abs((cycles * time + phase) % 1 - 0.5) - 1

    kind = int(rng.integers(3))
    side = float(rng.choice([-1.0, 1.0]))
    eased = time**2 * (3 - 2 * time)  # a turn with speed 0 at start and end
    sway = (3.0 if kind == 0 else 1.0) * swing(rng.uniform(0.5, 1.0))
    nod = (0.11 if kind == 1 else 0.03) * swing(rng.uniform(0.7, 1.2))
    yaw = side * 0.36 * (eased - 0.5) if kind == 2 else 0.07 * swing(rng.uniform(0.5, 0.9))
    talks, blinks = rng.random() < 0.6, rng.random() < 0.5
    mouth = (talks * np.abs(np.sin(math.pi * (rng.uniform(1.6, 2.6) * time + rng.uniform(0, 1)))) ** 1.5) * 0.9
    blink = np.zeros(num_frames)
    if blinks:
        shut = int(rng.integers(2, num_frames - 2))
        blink[shut : shut + 2] = (1.0, 0.5)
    x, y = SIZE / 2 - 0.5 + rng.uniform(-1.5, 1.5), SIZE / 2 + 2 + rng.uniform(-1.5, 1.5)
    scale = rng.uniform(31, 36) * (1 + rng.uniform(-0.06, 0.06) * time)  # nearer, or further away
    roll = rng.uniform(-0.05, 0.05) + 0.03 * sway
    return [
        Pose(x + sway[i], y + 10 * nod[i], scale[i], roll[i], yaw[i], nod[i], blink[i], mouth[i])
        for i in range(num_frames)
    ]


def render(person: Stranger, poses: list[Pose], rng: np.random.Generator) -> Tensor:
    """Draw frames (F, SIZE, SIZE, 3) uint8 with one background, which `rng` draws."""
    background = draw_background(rng)
    frames = [_frame(person, pose, background) for pose in poses]
    return torch.stack([torch.from_numpy(np.array(frame)) for frame in frames])


def draw_background(rng: np.random.Generator) -> Image.Image:
    """Draw a pattern in two similar colours, darker towards one side, OVERSAMPLED times SIZE."""
    kind, side = BACKGROUNDS[int(rng.integers(len(BACKGROUNDS)))], SIZE * OVERSAMPLED
    first = rng.uniform(50, 220, 3)
    second = np.clip(first + rng.uniform(-55, 55, 3), 20, 240)
    y, x = np.mgrid[0:side, 0:side] / OVERSAMPLED
    period = rng.uniform(8, 18)
    if kind == "stripes":
        angle = rng.uniform(0, math.pi)
        mask = (x * math.cos(angle) + y * math.sin(angle)) % period < period / 2
    elif kind == "checks":
        mask = (x // period + y // period) % 2 == 0
    elif kind == "dots":
        mask = (x % period - period / 2) ** 2 + (y % period - period / 2) ** 2 < (period / 3.5) ** 2
    elif kind == "rings":
        mask = np.hypot(x - rng.uniform(0, SIZE), y - rng.uniform(0, SIZE)) % period < period / 2
    else:
        coarse = Image.fromarray(rng.integers(0, 256, (12, 12)).astype(np.uint8))
        mask = np.asarray(coarse.resize((side, side), Image.Resampling.BICUBIC)) / 255
    mixed = first + (second - first) * np.asarray(mask, dtype=float)[..., None]
    shade = 1 - 0.3 * (x if rng.random() < 0.5 else y)[..., None] / SIZE
    return Image.fromarray((mixed * shade).clip(0, 255).astype(np.uint8))


def _frame(person: Stranger, pose: Pose, background: Image.Image) -> Image.Image:
    canvas = background.copy()
    brush = _Brush(ImageDraw.Draw(canvas), pose)
    _body(person, brush)
    _head(person, brush)
    _eyes(person, brush, pose)
    _mouth(person, brush, pose)
    return canvas.resize((SIZE, SIZE), Image.Resampling.BOX)


class _Brush:
    """Draws in head coordinates: 1 is half the head's height, y down, depth towards the viewer."""

    def __init__(self, draw: ImageDraw.ImageDraw, pose: Pose):
        self.draw, self.pose = draw, pose

    def project(self, x: float, y: float, depth: float) -> tuple[float, float]:
        pose = self.pose
        u, v = x * math.cos(pose.yaw) + depth * math.sin(pose.yaw), y + depth * pose.nod
        cos, sin = math.cos(pose.roll), math.sin(pose.roll)
        px, py = pose.x + pose.scale * (u * cos - v * sin), pose.y + pose.scale * (u * sin + v * cos)
        return (px + 0.5) * OVERSAMPLED, (py + 0.5) * OVERSAMPLED

    def polygon(self, points: Points, colour: Colour, depth: float = 0.3) -> None:
        self.draw.polygon([self.project(x, y, depth) for x, y in points], fill=colour)

    def oval(self, x: float, y: float, rx: float, ry: float, colour: Colour, depth: float = 0.3) -> None:
        self.polygon(oval(x, y, rx, ry), colour, depth)

    def line(self, points: Points, colour: Colour, width: float, depth: float = 0.3) -> None:
        pixels = max(1, round(width * self.pose.scale * OVERSAMPLED))
        self.draw.line([self.project(x, y, depth) for x, y in points], fill=colour, width=pixels, joint="curve")


def find_landmarks(person: Stranger, pose: Pose) -> Tensor:
    """Return the landmarks (5, 2) px in people.render's order: eyes, the nose's tip, the mouth's corners."""
    brush = _Brush(ImageDraw.Draw(Image.new("RGB", (1, 1))), pose)
    eye, mouth = person.eye_distance, person.mouth_width
    corner = person.mouth_height - person.smile
    points = (
        (-eye, person.eye_height, 0.3), (eye, person.eye_height, 0.3), (0.0, 0.06 + person.nose_length, 0.44),
        (-mouth, corner, 0.3), (mouth, corner, 0.3),
    )  # fmt: skip
    return torch.tensor([brush.project(*point) for point in points]) / OVERSAMPLED - 0.5


def describe(person: Stranger, poses: list[Pose]) -> str:
    """Describe a clip by a prompt in the words of people.py, the only words of the tiny models' tokenizer."""
    light = sum(person.hair) / 3
    hair = "blond" if light > 150 else "brown" if light > 80 else "dark"
    length = "long" if person.cut in ("bob", "curls") else "short"
    first, last = poses[0], poses[-1]
    turn, shift = last.yaw - first.yaw, last.x - first.x
    traits = {"beard": person.beard == "full", "glasses": person.glasses}
    talks = max(pose.mouth for pose in poses) > 0.3
    actions = {
        "turning left": turn < -0.2, "facing the camera": abs(turn) <= 0.2, "turning right": turn > 0.2,
        "talking": talks, "silent": not talks, "nodding": max(abs(pose.nod) for pose in poses) > 0.05,
        "blinking": max(pose.blink for pose in poses) > 0.5, "moving left": shift < -1.5, "moving right": shift > 1.5,
    }  # fmt: skip
    looks = " and ".join([f"{length} {hair} hair", *(word for word in traits if traits[word])])
    return f"a person with {looks}, {', '.join(word for word in actions if actions[word])}"


def write_clips(folder: Path, count: int, seed: int) -> None:
    """Write a data set with one clip of each of `count` strangers."""

    def draw(i: int) -> tuple[Tensor, str]:
        rng = np.random.default_rng([seed, i])
        person, poses = draw_stranger(rng), draw_motion(rng)
        return render(person, poses, rng).permute(3, 0, 1, 2).float() / 127.5 - 1, describe(person, poses)

    write_data_set(folder, map(draw, range(count)))


def write_data_set(folder: Path, clips: Iterable[tuple[Tensor, str]]) -> None:
    """Write clips (3, F, H, W) and their prompts to folder/videos/*.mp4 and folder/metadata.csv."""
    (folder / "videos").mkdir(parents=True, exist_ok=True)
    lines = ["video,prompt"]
    for i, (clip, prompt) in enumerate(clips):
        write_video(folder / "videos" / f"{i:03d}.mp4", clip, FPS)
        lines.append(f'videos/{i:03d}.mp4,"{prompt}"')
    (folder / "metadata.csv").write_text("\n".join(lines) + "\n")


def oval(x: float, y: float, rx: float, ry: float, power: float = 2.0, corners: int = 40) -> Points:
    """Return the outline of a superellipse: power 2 is an ellipse, a larger power is nearer to a box."""
    angles = [2 * math.pi * i / corners for i in range(corners)]
    bent = [(math.copysign(abs(math.cos(a)) ** (2 / power), math.cos(a)),
             math.copysign(abs(math.sin(a)) ** (2 / power), math.sin(a))) for a in angles]  # fmt: skip
    return [(x + rx * cos, y + ry * sin) for cos, sin in bent]


def shaded(colour: Colour, factor: float) -> Colour:
    red, green, blue = (round(min(255, channel * factor)) for channel in colour)
    return red, green, blue


def _outline(person: Stranger) -> Points:
    """Return the head's outline from the front: an egg, a rounded box, a hexagon, or a wedge with a pointed chin."""
    w = person.width
    if person.head == "hexagon":
        return [(-0.6 * w, -0.95), (0.6 * w, -0.95), (w, -0.2), (0.85 * w, 0.55), (0.45 * w, 1.0), (-0.45 * w, 1.0),
                (-0.85 * w, 0.55), (-w, -0.2)]  # fmt: skip
    if person.head == "wedge":
        return [(-0.85 * w, -0.9), (0.85 * w, -0.9), (w, -0.1), (0.7 * w, 0.6), (0.2 * w, 1.05), (-0.2 * w, 1.05),
                (-0.7 * w, 0.6), (-w, -0.1)]  # fmt: skip
    if person.head == "box":
        return oval(0, 0, w, 1.0, power=3.6)
    return [(x * (1 - 0.16 * y), y) for x, y in oval(0, 0, w, 1.0)]


def _body(person: Stranger, brush: _Brush) -> None:
    """Draw shoulders, neck, and the hair behind the head."""
    w, back = person.width, -0.3
    if person.cut == "bob":
        brush.polygon([(-w - 0.2, -0.6), (w + 0.2, -0.6), (w + 0.26, 0.85), (-w - 0.26, 0.85)],
                      shaded(person.hair, 0.8), back)  # fmt: skip
    brush.polygon([(-1.5, 2.4), (-1.25, 1.35), (-0.4, 1.15), (0.4, 1.15), (1.25, 1.35), (1.5, 2.4)], person.cloth, back)
    brush.polygon([(-0.33, 0.7), (0.33, 0.7), (0.36, 1.28), (0, 1.45), (-0.36, 1.28)], shaded(person.skin, 0.78), 0.0)
    if person.cut == "curls":
        for i in range(11):
            angle = math.pi * (0.95 + 1.1 * i / 10)
            brush.oval((w + 0.08) * math.cos(angle), 0.95 * math.sin(angle), 0.30, 0.30, person.hair, back)


def _head(person: Stranger, brush: _Brush) -> None:
    """Draw ears, head, hair or cap, beard and nose."""
    w, hair = person.width, person.hair
    for side in (-1, 1):
        brush.polygon([(side * (w - 0.05), -0.15), (side * (w + 0.13), -0.08), (side * (w + 0.08), 0.22),
                       (side * (w - 0.05), 0.25)], shaded(person.skin, 0.86), -0.05)  # fmt: skip
    outline = _outline(person)
    brush.polygon(outline, person.skin, 0.0)
    brush.polygon([(x, y) for x, y in outline if x * w > -0.1 * w] + [(0.35 * w, 0.9), (0.45 * w, -0.7)],
                  shaded(person.skin, 0.94), 0.0)  # fmt: skip
    _hair(person, brush)
    if person.beard == "full":
        chin = [(x * 1.02, y * 1.03) for x, y in outline if y > 0.3]
        brush.polygon(sorted(chin, key=lambda p: math.atan2(p[1] - 0.3, p[0])), shaded(hair, 0.9), 0.05)
    if person.beard == "goatee":
        y = person.mouth_height
        brush.polygon([(-0.24, y - 0.08), (0.24, y - 0.08), (0.14, 1.06), (-0.14, 1.06)], shaded(hair, 0.9), 0.2)
    nose, half = 0.06 + person.nose_length, person.nose_width
    brush.polygon([(0.0, nose - 0.30), (half, nose), (-half, nose)], shaded(person.skin, 0.76), 0.42)
    brush.line([(-half, nose + 0.01), (half, nose + 0.01)], shaded(person.skin, 0.55), 0.05, 0.44)
    if person.beard in ("moustache", "full"):
        y = person.mouth_height - 0.12
        brush.polygon([(-0.3, y + 0.07), (0, y - 0.05), (0.3, y + 0.07), (0, y + 0.05)], shaded(hair, 0.8), 0.34)


def _hair(person: Stranger, brush: _Brush) -> None:
    w, hair = person.width, person.hair
    top: Points = [(-w - 0.06, -0.35), (-0.95 * w, -0.85), (-0.5 * w, -1.12), (0.5 * w, -1.12), (0.95 * w, -0.85),
                   (w + 0.06, -0.35)]  # fmt: skip
    if person.cut in ("crop", "curls"):
        brush.polygon([*top, (0.75 * w, -0.55), (-0.75 * w, -0.55)], hair, 0.05)
    elif person.cut == "bob":
        brush.polygon([*top, (w + 0.12, 0.5), (w - 0.1, 0.4), (0.78 * w, -0.42), (-0.78 * w, -0.42), (0.1 - w, 0.4),
                       (-w - 0.12, 0.5)], hair, 0.05)  # fmt: skip
    elif person.cut == "spikes":
        teeth = [((-1 + i / 4.5) * w, -0.86 if i % 2 == 0 else -1.38) for i in range(10)]
        brush.polygon([(-w, -0.4), *teeth, (w, -0.4), (0.7 * w, -0.6), (-0.7 * w, -0.6)], hair, 0.05)
    elif person.cut == "mohawk":
        brush.polygon([(-0.2, -0.62), (-0.28, -1.35), (0.28, -1.35), (0.2, -0.62)], hair, 0.1)
    elif person.cut == "cap":
        brush.polygon([*top, (w, -0.5), (-w, -0.5)], person.cloth, 0.05)
        brush.polygon([(-w - 0.1, -0.6), (w + 0.1, -0.6), (w + 0.02, -0.44), (-w - 0.02, -0.44)],
                      shaded(person.cloth, 0.7), 0.35)  # fmt: skip


def _eyes(person: Stranger, brush: _Brush, pose: Pose) -> None:
    size, ink = person.eye_size, (22, 20, 24)
    openness = max(0.12, 1 - pose.blink)
    for side in (-1, 1):
        x, y = side * person.eye_distance, person.eye_height
        if person.eyes == "almond":
            lid, wide, narrow = size * openness, 1.5 * size, 0.5 * size
            white = [(x - wide, y), (x - narrow, y - lid), (x + narrow, y - lid), (x + wide, y), (x, y + lid)]
        else:
            white = oval(x, y, 1.25 * size, size * openness, power=2.0 if person.eyes == "round" else 5.0)
        brush.polygon([(x + 1.25 * (u - x), y + 1.35 * (v - y)) for u, v in white], shaded(person.skin, 0.4), 0.3)
        brush.polygon(white, (246, 246, 242), 0.3)
        if openness > 0.4:
            gaze = x + 0.06 * math.sin(pose.yaw)
            brush.oval(gaze, y, 0.68 * size, min(0.68, openness) * size, person.iris, 0.31)
            brush.oval(gaze, y, 0.34 * size, 0.34 * size, ink, 0.31)
        brow, slope = y - person.brow_height, 0.19 * side * person.brow_slope
        ends = [(x - 0.19, brow + slope), (x + 0.19, brow - slope)]
        brush.line(ends, shaded(person.hair, 0.75), person.brow_thickness, 0.32)
        if person.glasses:
            frame = oval(x, y, 0.26, 0.20, power=5.0)
            brush.line([*frame, frame[0]], ink, 0.05, 0.36)
    if person.glasses:
        gap = person.eye_distance - 0.26
        brush.line([(-gap, person.eye_height), (gap, person.eye_height)], ink, 0.05, 0.36)


def _mouth(person: Stranger, brush: _Brush, pose: Pose) -> None:
    """Draw lips as a bent stroke, and a hexagon between them that speech opens."""
    half, y, smile = person.mouth_width - 0.03 * pose.mouth, person.mouth_height, person.smile
    gap = 0.13 * pose.mouth
    ends: Points = [(-half, y - smile), (half, y - smile)]
    upper, lower = y - gap - 0.5 * person.lip_thickness, y + gap + 0.8 * person.lip_thickness
    above, below = [(-0.45 * half, upper), (0.45 * half, upper)], [(0.4 * half, lower), (-0.4 * half, lower)]
    brush.polygon([ends[0], *above, ends[1], *below], person.lip, 0.3)
    if gap > 0.02:
        wide, narrow = 0.7 * half, 0.3 * half
        above, below = [(-narrow, y - gap), (narrow, y - gap)], [(narrow, y + gap), (-narrow, y + gap)]
        brush.polygon([(-wide, y), *above, (wide, y), *below], (52, 16, 22), 0.3)
    else:
        brush.line([ends[0], (0, y + 0.2 * smile), ends[1]], shaded(person.lip, 0.5), 0.035, 0.3)
