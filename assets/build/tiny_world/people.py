"""Procedurally drawn people: identity parameters x motion -> short clips with exact landmarks. torch only.

A person is a vector of TRAITS in [0, 1]; a drift from one person to another is a straight line between two vectors. A
clip is a person, a scene (background, clothes, light) and a motion (pan, scale, roll, yaw, nod, blink, speech), which
the prompt names. Soft-edged shapes are drawn back to front, all frames of a batch at once. Pixel coordinates have x to
the right, y down, pixel centres at integers (as in OpenCV).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

SIZE = 80  # frames are SIZE x SIZE; the face fills them
NUM_FRAMES = 9
FPS = 8
EDGE = 1.2  # px, width of edges
PHOTOS = 5  # per person
PHOTO_SIDES = (104, 128)  # px, smallest and largest
STOCK_FACES, STOCK_SEED = 2, 10  # a dark and a light face
TRAITS = (
    "skin", "skin_tint", "hair_light", "hair_hue", "hair_volume", "hair_length", "hairline", "parting", "eye_hue",
    "eye_light", "eye_distance", "eye_size", "eye_height", "brow_thickness", "brow_angle", "brow_height",
    "nose_length", "nose_width", "mouth_width", "mouth_height", "lip_thickness", "lip_red", "smile",
    "head_width", "jaw", "beard", "glasses", "glasses_size", "blush", "ears",
)  # fmt: skip
# traits that do not drift: the outline of head and hair, which a small model cannot redraw within a few frames
HELD = (
    "hair_volume", "hair_length", "hairline", "parting", "head_width", "jaw", "ears", "beard", "glasses",
    "glasses_size",
)  # fmt: skip


@dataclass(frozen=True)
class Motion:
    """Pose per frame, each (N, F): centre (px), scale (px per half head), angles (rad), blink and mouth in [0, 1]."""

    x: Tensor
    y: Tensor
    scale: Tensor
    roll: Tensor
    yaw: Tensor
    nod: Tensor
    blink: Tensor
    mouth: Tensor


def draw_people(count: int, generator: torch.Generator) -> Tensor:
    """Draw traits (count, len(TRAITS)) in [0, 1]; beard and glasses are 0 or 1."""
    traits = torch.rand(count, len(TRAITS), generator=generator)
    for name, share in (("beard", 0.3), ("glasses", 0.35)):
        value = traits[:, TRAITS.index(name)]
        traits[:, TRAITS.index(name)] = (value < share).float()
    return traits


def draw_stock_faces() -> Tensor:
    """Draw the traits (STOCK_FACES, len(TRAITS)) of the faces that people turn into: 0.1 or 0.9 each."""
    generator = torch.Generator().manual_seed(STOCK_SEED)
    return 0.1 + 0.8 * (torch.rand(STOCK_FACES, len(TRAITS), generator=generator) < 0.5).float()


def drift(traits: Tensor, generator: torch.Generator, num_frames: int = NUM_FRAMES) -> Tensor:
    """Return traits (N, F, K) of people (N, K) who turn into a stock face within the first third of the clip.

    It is the face with the nearest skin: a model that must guess the face draws both at once, and smears. One clip in
    eight does not drift; the others go 60 to 70 % of the way. The traits of HELD stay.
    """
    stock, skin = draw_stock_faces(), TRAITS.index("skin")
    target = stock[(traits[:, skin, None] - stock[:, skin]).abs().argmin(1)]
    held = [TRAITS.index(name) for name in HELD]
    target[:, held] = traits[:, held]
    drifts = torch.rand(len(traits), 1, 1, generator=generator) < 7 / 8
    amount = drifts * (0.6 + 0.05 * torch.rand(2, len(traits), 1, 1, generator=generator).sum(0))
    path = (3 * torch.linspace(0, 1, num_frames)).clamp(max=1)[None, :, None] * amount
    return traits[:, None] + path * (target - traits)[:, None]


def draw_motion(count: int, generator: torch.Generator, num_frames: int = NUM_FRAMES) -> tuple[Motion, list[str]]:
    """Draw a motion per clip, and words that determine it nearly, together with the first frame."""
    time = torch.linspace(0, 1, num_frames)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(count, 1, generator=generator)

    def choose(*shares: float) -> Tensor:
        """Draw the index of a choice for each clip, (count, 1)."""
        weights = torch.tensor(shares, dtype=torch.float32)
        return torch.multinomial(weights, count, replacement=True, generator=generator)[:, None]

    def wobble(amplitude: float) -> Tensor:
        return amplitude * torch.sin(2 * math.pi * (uniform(0.5, 1.0) * time + uniform(0, 1)))

    turn, shift = choose(1, 1, 1) - 1, choose(1, 2, 1) - 1  # -1: to the image's left, 0: not, 1: to its right
    nods, talks, blinks = choose(2, 1), choose(2, 3), choose(1, 1)
    motion = Motion(
        x=SIZE / 2 - 0.5 + uniform(-1.5, 1.5) + 5 * shift * (time - 0.5) + wobble(0.3),
        y=SIZE / 2 + 2 + uniform(-1.5, 1.5) + wobble(0.3),
        scale=uniform(34, 37.5) * torch.exp(wobble(0.01)),
        roll=uniform(-0.08, 0.08) + wobble(0.015),
        yaw=uniform(-0.06, 0.06) + 0.4 * turn * (time - 0.5) + wobble(0.015),
        nod=uniform(-0.02, 0.02) + 0.12 * nods * torch.sin(2 * math.pi * time) + wobble(0.01),
        blink=blinks * torch.exp(-(((time - 0.5) / 0.12) ** 2)),
        mouth=talks * uniform(0.8, 1.0) * (0.5 - 0.5 * torch.cos(4 * math.pi * time)),
    )
    words = []
    for i in range(count):
        action = [("turning left", "facing the camera", "turning right")[int(turn[i]) + 1]]
        action += ["talking" if talks[i] else "silent"]
        action += ["nodding"] * int(nods[i]) + ["blinking"] * int(blinks[i])
        action += [("moving left", "", "moving right")[int(shift[i]) + 1]] * int(shift[i].abs())
        words.append(", ".join(action))
    return motion, words


def describe(traits: Tensor) -> list[str]:
    """Describe each person by a caption, from traits (N, len(TRAITS))."""
    captions = []
    for person in traits.tolist():
        value = dict(zip(TRAITS, person, strict=True))
        hair = "blond" if value["hair_light"] > 0.66 else "brown" if value["hair_light"] > 0.33 else "dark"
        length = "long" if value["hair_length"] > 0.5 else "short"
        extras = [word for word in ("beard", "glasses") if value[word] > 0.5]
        captions.append(f"a person with {length} {hair} hair" + "".join(f" and {word}" for word in extras))
    return captions


def draw_clips(count: int, seed: int) -> tuple[Tensor, Tensor, list[str]]:
    """Draw clips (N, 3, F, SIZE, SIZE) of people, the same clips with drift, and the prompts of both."""
    generator = torch.Generator().manual_seed(seed)
    traits = draw_people(count, generator)
    motion, actions = draw_motion(count, generator)
    drifting_traits = drift(traits, generator)
    scenes = generator.get_state()
    clips = render(traits, motion, generator)[0]
    drifting = render(drifting_traits, motion, generator.set_state(scenes))[0]
    prompts = [f"{person}, {action}" for person, action in zip(describe(traits), actions, strict=True)]
    return clips, drifting, prompts


def draw_photos(traits: Tensor, generator: torch.Generator) -> tuple[list[Tensor], Tensor]:
    """Draw PHOTOS pictures (3, H, W) in [-1, 1] of a person (len(TRAITS),), and how far their mouths are open.

    Mouths are (PHOTOS,) from 0, shut, to 1, in any order. Size, pose, scene and light are drawn for each photo.
    """
    mouths = torch.randperm(PHOTOS, generator=generator) / (PHOTOS - 1)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(1, 1, generator=generator)

    photos = []
    for mouth in mouths:
        height, width = torch.randint(PHOTO_SIDES[0], PHOTO_SIDES[1] + 1, (2,), generator=generator).tolist()
        short, side = sorted((height, width))
        pose = Motion(
            x=side / 2 - 0.5 + short * uniform(-0.04, 0.04),
            y=side / 2 + short * uniform(0.0, 0.05),
            scale=short * uniform(0.41, 0.46),
            roll=uniform(-0.1, 0.1),
            yaw=uniform(-0.3, 0.3),
            nod=uniform(-0.08, 0.08),
            blink=uniform(0.0, 1.0) ** 12,  # eyes are shut in one photo of twenty
            mouth=mouth.view(1, 1),
        )
        picture = render(traits[None], pose, generator, side)[0][0, :, 0]
        angle, place = uniform(0.0, 2 * math.pi), torch.linspace(-0.2, 0.2, side)
        brightness = 2 ** uniform(-0.4, 0.2) * (1 + angle.cos() * place + angle.sin() * place[:, None])
        warmth = 1 + uniform(-0.1, 0.1) * torch.tensor([[1.0], [0.0], [-1.0]])[..., None]
        top, left = (side - height) // 2, (side - width) // 2
        lit = ((picture + 1) * brightness * warmth - 1).clamp(-1, 1)
        photos.append(lit[:, top : top + height, left : left + width])
    return photos, mouths


def _mix(value: Tensor, *colours: tuple[float, float, float]) -> Tensor:
    """Interpolate in a palette: value (...,) in [0, 1] -> (..., 3)."""
    palette = torch.tensor(colours)
    position = value.clamp(0, 1) * (len(colours) - 1)
    low = position.floor().long().clamp(max=len(colours) - 2)
    weight = (position - low)[..., None]
    return palette[low] * (1 - weight) + palette[low + 1] * weight


def render(
    traits: Tensor, motion: Motion, generator: torch.Generator, pixels: int = SIZE
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw clips: video (N, 3, F, pixels, pixels) in [-1, 1], landmarks (N, F, 5, 2) px, boxes (N, F, 4) px.

    traits: (N, len(TRAITS)), or (N, F, len(TRAITS)) for a person who changes along the clip. The generator draws
    scenes. Landmarks are the eyes' centres, the nose's tip and the mouth's corners, image left before image right.
    """
    count, frames = motion.x.shape
    if traits.ndim == 2:
        traits = traits[:, None].expand(count, frames, -1)
    scene = torch.rand(count, 16, generator=generator)[:, None].expand(count, frames, 16).reshape(count * frames, 16)
    trait = {name: traits[..., i].reshape(-1) for i, name in enumerate(TRAITS)}
    pose = {name: value.reshape(-1) for name, value in vars(motion).items()}
    canvas, landmarks, boxes = _draw(trait, pose, scene, pixels)
    video = canvas.reshape(count, frames, 3, pixels, pixels).transpose(1, 2)
    return video.clamp(0, 1) * 2 - 1, landmarks.reshape(count, frames, 5, 2), boxes.reshape(count, frames, 4)


def _draw(t: dict[str, Tensor], pose: dict[str, Tensor], scene: Tensor, pixels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw frames (M, 3, pixels, pixels) in [0, 1], landmarks (M, 5, 2), boxes (M, 4); all arguments have M rows."""
    grid = torch.arange(pixels, dtype=torch.float32)
    px, py = grid[None, None, :], grid[None, :, None]
    scale = pose["scale"][:, None, None]
    dx, dy = (px - pose["x"][:, None, None]) / scale, (py - pose["y"][:, None, None]) / scale
    cos, sin = pose["roll"].cos()[:, None, None], pose["roll"].sin()[:, None, None]
    u, v = dx * cos + dy * sin, -dx * sin + dy * cos  # head coordinates, 1 = head half-height
    yaw_sin, yaw_cos = pose["yaw"].sin(), pose["yaw"].cos()
    softness = EDGE / scale

    def column(value: Tensor) -> Tensor:
        return value[:, None, None]

    def project(x: Tensor, y: Tensor, depth: float) -> tuple[Tensor, Tensor]:
        """Project a point of the face (front view x, y; depth towards the viewer) under yaw and nod."""
        return x * yaw_cos + depth * yaw_sin, y + depth * pose["nod"]

    def ellipse(cx: Tensor, cy: Tensor, rx: Tensor, ry: Tensor, angle: Tensor | None = None, soft: float = 1) -> Tensor:
        a, b = u - column(cx), v - column(cy)
        if angle is not None:
            ca, sa = column(angle.cos()), column(angle.sin())
            a, b = a * ca + b * sa, -a * sa + b * ca
        rx, ry = column(rx.clamp(min=1e-3)), column(ry.clamp(min=1e-3))
        radius = ((a / rx) ** 2 + (b / ry) ** 2 + 1e-6).sqrt()
        return torch.sigmoid((1 - radius) * torch.minimum(rx, ry) / (softness * soft) * 2)

    def paint(canvas: Tensor, colour: Tensor, alpha: Tensor) -> Tensor:
        return canvas + (colour[:, :, None, None] - canvas) * alpha[:, None]

    ones, zeros = torch.ones_like(pose["x"]), torch.zeros_like(pose["x"])
    skin = _mix(t["skin"], (0.98, 0.86, 0.76), (0.90, 0.70, 0.54), (0.66, 0.45, 0.31), (0.36, 0.23, 0.16))
    skin = skin + (t["skin_tint"][:, None] - 0.5) * torch.tensor([0.06, -0.03, -0.08])
    hair = _mix(t["hair_light"], (0.07, 0.06, 0.07), (0.30, 0.17, 0.09), (0.55, 0.33, 0.15), (0.90, 0.74, 0.42))
    hair = hair + (t["hair_hue"][:, None] - 0.3).clamp(min=0) * torch.tensor([0.25, -0.10, -0.08])
    iris = _mix(t["eye_hue"], (0.25, 0.14, 0.07), (0.20, 0.42, 0.22), (0.22, 0.45, 0.70))
    iris = iris * (0.6 + 0.6 * t["eye_light"][:, None])

    # background: two colours blended along a direction, and one blob
    direction = scene[:, 0] * 2 * math.pi
    ramp = column(direction.cos()) * (px / pixels - 0.5) + column(direction.sin()) * (py / pixels - 0.5)
    colour_a, colour_b = 0.25 + 0.6 * scene[:, 1:4], 0.15 + 0.6 * scene[:, 4:7]
    canvas = colour_a[:, :, None, None] + (colour_b - colour_a)[:, :, None, None] * (ramp[:, None] + 0.5).clamp(0, 1)
    blob = (px / pixels - column(scene[:, 7])) ** 2 + (py / pixels - column(scene[:, 8])) ** 2
    blob = blob / (0.19 + 0.16 * column(scene[:, 9])) ** 2
    canvas = canvas * (1 - 0.35 * torch.exp(-blob)[:, None])

    width = 0.70 + 0.14 * t["head_width"]
    sway = -0.10 * yaw_sin  # the back of the head moves against the face
    # long hair, shoulders, neck, hair behind the head
    volume = 0.06 + 0.16 * t["hair_volume"]
    length = 0.25 + 1.1 * t["hair_length"]
    canvas = paint(canvas, hair * 0.8, ellipse(sway, length * 0.5 - 0.15, width + volume, 0.8 + length * 0.5))
    cloth = 0.15 + 0.7 * scene[:, 10:13]
    canvas = paint(canvas, cloth, ellipse(0.3 * sway, 2.15 * ones, 1.5 * ones, 0.95 * ones))
    canvas = paint(canvas, skin * 0.82, ellipse(0.5 * sway, 1.05 * ones, 0.34 + 0.08 * t["head_width"], 0.45 * ones))
    for side in (-1.0, 1.0):
        ear_x, ear_y = project(side * width, 0.08 * ones, -0.1)
        canvas = paint(canvas, skin * 0.88, ellipse(ear_x, ear_y, 0.08 + 0.09 * t["ears"], 0.14 + 0.07 * t["ears"]))
    canvas = paint(canvas, hair, ellipse(sway, -0.28 * ones, width + volume, 0.72 + volume))

    # the head: an ellipse whose lower half narrows to the jaw
    narrow = 1 - (0.50 - 0.42 * column(t["jaw"])) * (v.clamp(min=0) ** 2)
    outline = ((u / (column(width) * narrow.clamp(min=0.3))) ** 2 + v**2 + 1e-6).sqrt()
    head = torch.sigmoid((1 - outline) * column(width) / softness * 2)
    light = 1 + 0.16 * column((scene[:, 13] - 0.5) * 2 + 0.6 * yaw_sin) * u - 0.06 * v
    canvas = canvas * (1 - head[:, None]) + (skin[:, :, None, None] * light[:, None]) * head[:, None]

    # beard: the lower face, away from the mouth
    mouth_x, mouth_y = project(zeros, 0.50 + 0.10 * t["mouth_height"], 0.30)
    chin_line = column(mouth_y) - 0.14 + 0.1 * (1 - (u / column(width)) ** 2).clamp(min=0)
    beard = head * torch.sigmoid((v - chin_line) / softness / 2) * column(t["beard"]) * 0.85
    canvas = paint(canvas, hair * 0.85, beard)

    # hair on the forehead, with a parting
    hairline = -0.80 + 0.42 * t["hairline"]
    part = (t["parting"] - 0.5) * 1.2 + 0.25 * yaw_sin
    fringe_edge = column(hairline) + 0.05 + 0.30 * (u - column(part)).abs() ** 1.5 - 0.06
    radius = ((u / (column(width) * 1.02)) ** 2 + v**2 + 1e-6).sqrt()
    on_head = torch.sigmoid((1.02 - radius) * column(width) / softness * 2)
    canvas = paint(canvas, hair, on_head * torch.sigmoid((fringe_edge - v) / softness * 2) * (v < 0.45))

    # cheeks
    for side in (-1.0, 1.0):
        cheek_x, cheek_y = project(side * 0.40 * ones, 0.28 * ones, 0.25)
        cheek = ellipse(cheek_x, cheek_y, 0.17 * ones, 0.13 * ones, soft=5.0) * column(0.35 * t["blush"])
        canvas = paint(canvas, skin * torch.tensor([1.0, 0.62, 0.62]), cheek)

    # eyes, brows, glasses
    spread, height = 0.27 + 0.10 * t["eye_distance"], -0.16 + 0.14 * t["eye_height"]
    size = 0.105 + 0.055 * t["eye_size"]
    openness = (1 - 0.92 * pose["blink"]) * 0.72
    eyes = []
    for side in (-1.0, 1.0):
        eye_x, eye_y = project(side * spread, height, 0.32)
        eyes.append((eye_x, eye_y))
        lid = ellipse(eye_x, eye_y, size * 1.35 * yaw_cos, size * openness + 0.035)
        canvas = paint(canvas, skin * 0.45, lid)
        white = lid * ellipse(eye_x, eye_y, size * 1.18 * yaw_cos, size * openness)
        canvas = paint(canvas, torch.full_like(skin, 0.96), white)
        gaze = eye_x + 0.05 * yaw_sin
        canvas = paint(canvas, iris, white * ellipse(gaze, eye_y, size * 0.68, size * 0.68))
        canvas = paint(canvas, torch.full_like(skin, 0.05), white * ellipse(gaze, eye_y, size * 0.32, size * 0.32))
        brow_x, brow_y = project(side * spread, height - 0.20 - 0.12 * t["brow_height"], 0.34)
        tilt = side * (t["brow_angle"] - 0.4) * 0.7
        brow = ellipse(brow_x, brow_y, 0.19 * yaw_cos, 0.022 + 0.048 * t["brow_thickness"], tilt)
        canvas = paint(canvas, hair * 0.7, brow)
    for eye_x, eye_y in eyes:
        outer, rim = 0.19 + 0.07 * t["glasses_size"], 0.045
        hole = ellipse(eye_x, eye_y, (outer - rim) * yaw_cos, outer - rim)
        ring = ellipse(eye_x, eye_y, outer * yaw_cos, outer) - hole
        canvas = paint(canvas, torch.full_like(skin, 0.08), ring.clamp(0, 1) * column(t["glasses"]))
    bridge_x, bridge_y = (eyes[0][0] + eyes[1][0]) / 2, height + 0.32 * pose["nod"]
    bridge = ellipse(bridge_x, bridge_y, (spread - 0.17).clamp(min=0.05), 0.025 * ones)
    canvas = paint(canvas, torch.full_like(skin, 0.08), bridge * column(t["glasses"]))

    # nose: a shaded side, a tip with nostrils
    nose_x, nose_y = project(zeros, 0.16 + 0.16 * t["nose_length"], 0.48)
    ridge_x, ridge_y = project(0.05 * ones, 0.05 * ones, 0.40)
    ridge = ellipse(ridge_x, ridge_y, 0.045 * ones, 0.20 + 0.06 * t["nose_length"], soft=1.5)
    canvas = paint(canvas, skin * 0.86, ridge)
    nostril = 0.07 + 0.07 * t["nose_width"]
    canvas = paint(canvas, skin * 0.74, ellipse(nose_x, nose_y + 0.03, nostril * 1.25, 0.055 * ones))
    canvas = paint(canvas, skin * 1.04, ellipse(nose_x, nose_y - 0.01, nostril * 0.85, 0.055 * ones))

    # mouth: bent by the smile, opened by speech
    half = 0.20 + 0.12 * t["mouth_width"] - 0.04 * pose["mouth"]
    lips = 0.045 + 0.05 * t["lip_thickness"]
    bend = (t["smile"] - 0.35) * 0.9
    bent = v + column(bend) * ((u - column(mouth_x)) ** 2 - 0.02)  # ends go up where the smile is positive
    gap = 0.13 * pose["mouth"]

    def mouth_shape(rx: Tensor, ry: Tensor) -> Tensor:
        across, up = (u - column(mouth_x)) / column(rx * yaw_cos), (bent - column(mouth_y)) / column(ry)
        radius = (across**2 + up**2 + 1e-6).sqrt()
        inside = torch.sigmoid((column(rx) - (u - column(mouth_x)).abs()) / softness * 2)  # no tails past the corners
        return torch.sigmoid((1 - radius) * column(ry) / softness * 2) * inside

    red = t["lip_red"][:, None]
    lip_colour = skin * torch.tensor([0.92, 0.60, 0.58]) * (1 - red) + red * torch.tensor([0.72, 0.16, 0.20])
    canvas = paint(canvas, lip_colour, mouth_shape(half, lips + gap))
    opening = mouth_shape(half * 0.78, (gap + 0.012).clamp(min=0.01))
    canvas = paint(canvas, torch.tensor([0.22, 0.05, 0.06]).expand_as(skin), opening)

    corner = half * 0.95
    corner_y = mouth_y - bend * (corner**2 - 0.02)
    corners = [(mouth_x - corner * yaw_cos, corner_y), (mouth_x + corner * yaw_cos, corner_y)]
    points = [*eyes, (nose_x, nose_y), *corners]
    pu, pv = torch.stack([p[0] for p in points], 1), torch.stack([p[1] for p in points], 1)
    c, s, k = pose["roll"].cos()[:, None], pose["roll"].sin()[:, None], pose["scale"][:, None]
    x, y = pose["x"][:, None] + k * (pu * c - pv * s), pose["y"][:, None] + k * (pu * s + pv * c)
    landmarks = torch.stack([x, y], -1)
    top, bottom = pose["y"] - 0.72 * pose["scale"], pose["y"] + 1.0 * pose["scale"]
    boxes = torch.stack([pose["x"] - width * pose["scale"], top, pose["x"] + width * pose["scale"], bottom], -1)
    return canvas, landmarks, boxes
