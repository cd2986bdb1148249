"""The tiny world's face networks: detectors with SCRFD's signature and recognisers with ArcFace's.

Signatures (input, normalisation, order and meaning of the outputs) are those of insightface's antelopev2 pack, so that
the loading code of real networks serves these, too. Detector: [1, 3, H, W] -> scores, box distances and landmark
offsets at strides 8, 16, 32 with 2 anchors. Recogniser: [N, 3, 112, 112] -> [N, 512], not normalised.
"""

import math
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rewardfl.rewards.face import ARCFACE_TEMPLATE, align, similarity_transform
from tiny_world.people import SIZE, Motion, draw_motion, draw_people, render

Damage = Callable[[Tensor, torch.Generator], Tensor]
STRIDES, ANCHORS = (8, 16, 32), 2
DET_SIZE = 128
ZOOM = DET_SIZE / SIZE  # of a frame that fills the detector's input
NEIGHBOURHOOD = 13  # pixels on a side of the crop's 112: about an eye


def conv_block(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.PReLU(outputs))


class Residual(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.PReLU(width),
            nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class Recogniser(nn.Module):
    """Crops (N, 3, 112, 112), (rgb - 127.5) / 127.5 -> embeddings (N, 512)."""

    def __init__(self, width: int):
        super().__init__()
        w = width
        self.features = nn.Sequential(
            conv_block(3, w, 2), conv_block(w, 2 * w, 2), Residual(2 * w),
            conv_block(2 * w, 4 * w, 2), Residual(4 * w), conv_block(4 * w, 8 * w, 2), Residual(8 * w),
        )  # fmt: skip
        self.pool = nn.Conv2d(8 * w, 8 * w, 7, groups=8 * w)  # a weight per position: faces are aligned (MobileFaceNet)
        self.embed = nn.Linear(8 * w, 512)

    def forward(self, x: Tensor) -> Tensor:
        return self.embed(self.pool(self.features(x)).flatten(1))


def local_contrast(crops: Tensor) -> Tensor:
    """Return crops (N, 3, H, W) as grey (N, 1, H, W), minus the local mean and over the local deviation."""
    grey = crops.mean(1, keepdim=True)

    def blur(x: Tensor) -> Tensor:
        return F.avg_pool2d(x, NEIGHBOURHOOD, 1, NEIGHBOURHOOD // 2, count_include_pad=False)

    details = grey - blur(grey)
    return details / (blur(details * details).sqrt() + 0.05)


def inner_face() -> Tensor:
    """Return a mask (1, 1, 112, 112): 1 from the brows to the chin and from eye to eye, 0 outside."""
    mask = torch.zeros(1, 1, 112, 112)
    mask[..., 32:104, 22:90] = 1
    return mask


class InnerFaceRecogniser(Recogniser):
    """A recogniser of the inner face alone, grey and in local contrast, without the colour of hair and skin."""

    mask: Tensor

    def __init__(self, width: int):
        super().__init__(width)
        self.register_buffer("mask", inner_face())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((local_contrast(x) * self.mask).expand(-1, 3, -1, -1))


class Scrfd(nn.Module):
    """Frames (1, 3, H, W), (rgb - 127.5) / 128 -> 3 scores (h*w*2, 1), 3 boxes (., 4), 3 landmarks (., 10)."""

    heads: nn.ModuleList  # one per stride

    def start_without_faces(self) -> None:
        """Set the biases of the scores low: few anchors have a face."""
        for head in self.heads:
            head.get_parameter("bias").data[:ANCHORS] = -3.0

    def maps(self, x: Tensor) -> list[Tensor]:
        """Return a map (B, h, w, 30) per stride: score logits, box distances, then landmark offsets of both anchors."""
        raise NotImplementedError

    def raw(self, x: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return score logits (B, h, w, 2), box distances (.., 2, 4) and landmark offsets (.., 2, 10) per stride."""
        return [
            (y[..., :2], y[..., 2:10].unflatten(-1, (2, 4)), y[..., 10:].unflatten(-1, (2, 10))) for y in self.maps(x)
        ]

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        maps = self.maps(x)
        scores = [torch.sigmoid(y[..., :2]).reshape(-1, 1) for y in maps]
        boxes = [y[..., 2:10].reshape(-1, 4) for y in maps]
        points = [y[..., 10:].reshape(-1, 10) for y in maps]
        return (*scores, *boxes, *points)


class PyramidDetector(Scrfd):
    """The reward's detector: residual 3 x 3 convolutions, PReLU, a top-down pathway that merges the levels."""

    def __init__(self, width: int = 16):
        super().__init__()
        w = width
        self.stem = nn.Sequential(conv_block(3, w, 2), conv_block(w, 2 * w, 2), Residual(2 * w))
        self.levels = nn.ModuleList(
            nn.Sequential(conv_block(inputs, 4 * w, 2), Residual(4 * w)) for inputs in (2 * w, 4 * w, 4 * w)
        )
        self.lateral = nn.ModuleList(nn.Conv2d(4 * w, 4 * w, 1) for _ in STRIDES)
        self.towers = nn.ModuleList(conv_block(4 * w, 4 * w) for _ in STRIDES)
        self.heads = nn.ModuleList(nn.Conv2d(4 * w, ANCHORS * (1 + 4 + 10), 3, 1, 1) for _ in STRIDES)
        self.start_without_faces()

    def maps(self, x: Tensor) -> list[Tensor]:
        x = self.stem(x)
        features = []
        for level in self.levels:
            x = level(x)
            features.append(x)
        merged = [lateral(f) for lateral, f in zip(self.lateral, features, strict=True)]
        for i in (1, 0):
            merged[i] = merged[i] + F.interpolate(merged[i + 1], scale_factor=2.0, mode="nearest")
        outputs = zip(merged, self.towers, self.heads, strict=True)
        return [head(tower(f)).permute(0, 2, 3, 1) for f, tower, head in outputs]


class Separable(nn.Module):
    """A 5 x 5 depthwise convolution, then a pointwise one; SiLU after both (MobileNet, YuNet)."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, inputs, 5, stride, 2, groups=inputs, bias=False), nn.BatchNorm2d(inputs), nn.SiLU(),
            nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs), nn.SiLU(),
        )  # fmt: skip
        self.skips = inputs == outputs and stride == 1

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.skips else self.body(x)


class SeparableDetector(Scrfd):
    """The judge's detector: patches, separable 5 x 5 convolutions, SiLU, without a top-down pathway.

    It shares no layer, weight or training sample with the reward's, so that a fault of one need not be in the other.
    """

    def __init__(self, width: int = 20):
        super().__init__()
        w = width
        patches = nn.Sequential(nn.Conv2d(3, 2 * w, 7, 4, 3, bias=False), nn.BatchNorm2d(2 * w), nn.SiLU())
        self.stem = nn.Sequential(patches, Separable(2 * w, 2 * w), Separable(2 * w, 2 * w))
        self.levels = nn.ModuleList(
            nn.Sequential(Separable(inputs, 4 * w, 2), Separable(4 * w, 4 * w), Separable(4 * w, 4 * w))
            for inputs in (2 * w, 4 * w, 4 * w)
        )
        self.towers = nn.ModuleList(Separable(4 * w, 4 * w) for _ in STRIDES)
        self.heads = nn.ModuleList(nn.Conv2d(4 * w, ANCHORS * (1 + 4 + 10), 1) for _ in STRIDES)
        self.start_without_faces()

    def maps(self, x: Tensor) -> list[Tensor]:
        x = self.stem(x)
        outputs = []
        for level, tower, head in zip(self.levels, self.towers, self.heads, strict=True):
            x = level(x)
            outputs.append(head(tower(x)).permute(0, 2, 3, 1))
        return outputs


def degrade_as_codec(frames: Tensor, generator: torch.Generator) -> Tensor:
    """Degrade frames (N, 3, H, W) in [-1, 1] like a codec or a weak generator: blurred, noisy, off-colour."""
    count, _, height, width = frames.shape
    small = int(torch.randint(height * 5 // 8, height + 1, (1,), generator=generator))
    blurred = F.interpolate(frames, size=(small, small), mode="bilinear", antialias=True)
    blurred = F.interpolate(blurred, size=(height, width), mode="bilinear")
    mix = torch.rand(count, 1, 1, 1, generator=generator)
    frames = frames + mix * (blurred - frames)
    gain = 1 + 0.1 * torch.randn(count, 3, 1, 1, generator=generator).clamp(-2, 2) * 0.5
    shift = 0.1 * torch.randn(count, 3, 1, 1, generator=generator)
    noise = 0.06 * torch.rand(count, 1, 1, 1, generator=generator) * torch.randn(frames.shape, generator=generator)
    return (frames * gain + shift + noise).clamp(-1, 1)


def degrade_as_camera(frames: Tensor, generator: torch.Generator) -> Tensor:
    """Degrade frames (N, 3, H, W) in [-1, 1] like a camera, for training the judge's detector.

    The damage is other than `degrade_as_codec`'s: exposure, faded colours, a shake along one axis, blocks, a spot on
    the lens.
    """
    count, _, height, width = frames.shape

    def draw(*shape: int) -> Tensor:
        return torch.rand(count, *shape, generator=generator)

    light = ((frames + 1) / 2) ** torch.exp(0.5 * (draw(1, 1, 1) - 0.5))  # a gamma of 0.78 to 1.28
    light = light + 0.5 * draw(1, 1, 1) ** 2 * (light.mean(1, keepdim=True) - light)
    shakes, blocks = bool(draw(1).mean() < 0.5), bool(draw(1)[0] < 0.2)  # for the whole batch
    blurred = (light + light.roll(1, 3) + light.roll(-1, 3)) / 3 if shakes else light
    blurred = F.interpolate(F.avg_pool2d(blurred, 2), size=(height, width), mode="nearest") if blocks else blurred
    light = light + draw(1, 1, 1) * (blurred - light)
    rows, columns = torch.arange(height)[:, None], torch.arange(width)
    y, x = draw(1, 1) * height, draw(1, 1) * width
    spot = torch.exp(-((rows - y) ** 2 + (columns - x) ** 2) / (2 * (3 + 5 * draw(1, 1)) ** 2))[:, None]
    light = light + 0.6 * draw(1, 1, 1) * spot * (draw(3, 1, 1) - light)
    grain = 0.02 * draw(1, 1, 1) * torch.randn(frames.shape, generator=generator)
    return (2 * (light + grain) - 1).clamp(-1, 1)


def _draw_pose(count: int, generator: torch.Generator) -> Motion:
    """Draw motions of one frame, (count, 1)."""
    motion, _ = draw_motion(count, generator, num_frames=9)
    frame = torch.randint(0, 9, (count, 1), generator=generator)
    return Motion(*(value.gather(1, frame) for value in vars(motion).values()))


def draw_views(people: Tensor, views: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw frames (N * views, 3, SIZE, SIZE) and landmarks (N * views, 5, 2) of people (N, K).

    Each view has its own scene and motion.
    """
    pose = _draw_pose(len(people) * views, generator)
    video, landmarks, _ = render(people.repeat_interleave(views, 0), pose, generator)
    return video[:, :, 0], landmarks[:, 0]


def crop_faces(frames: Tensor, landmarks: Tensor, generator: torch.Generator, jitter: float) -> Tensor:
    """Return aligned crops (N, 3, 112, 112). jitter: the landmarks' standard deviation, pixels."""
    points = landmarks + jitter * torch.randn(landmarks.shape, generator=generator)
    return align(frames, similarity_transform(points, ARCFACE_TEMPLATE))


def face_views(people: Tensor, views: int, generator: torch.Generator, jitter: float = 0.5) -> Tensor:
    """Draw degraded, aligned crops (N, views, 3, 112, 112) of people (N, K)."""
    frames, landmarks = draw_views(people, views, generator)
    crops = crop_faces(degrade_as_codec(frames, generator), landmarks, generator, jitter)
    return crops.unflatten(0, (len(people), views))


def train_recogniser(net: Recogniser, pool_seed: int, steps: int, people_per_step: int, log) -> None:
    """Train by contrast (NT-Xent, arXiv 2002.05709 eq. 1) of two views of each of many people.

    The people are those of `pool_seed`, 4000 that no other recogniser is trained on.
    """
    lr = 3e-3
    net.train()
    generator = torch.Generator().manual_seed(pool_seed)
    pool = draw_people(4000, generator)
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        chosen = pool[torch.randperm(len(pool), generator=generator)[:people_per_step]]
        crops = face_views(chosen, 2, generator)
        first, second = F.normalize(net(crops.flatten(0, 1)), dim=-1).unflatten(0, (people_per_step, 2)).unbind(1)
        both = torch.cat([first, second])
        similarity = both @ both.T / 0.1
        similarity.fill_diagonal_(-math.inf)
        target = torch.arange(2 * people_per_step).roll(people_per_step)
        loss = F.cross_entropy(similarity, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 25 == 0:
            same = float((first * second).detach().sum(-1).mean())
            log(f"recogniser {pool_seed} step {step} loss {float(loss.detach()):.3f} same-person cosine {same:.3f}")


def verification(embed, people: Tensor, generator: torch.Generator) -> dict[str, float]:
    """Return AUC and mean cosines of same- and different-person pairs among views of held-out people (N, K)."""
    with torch.no_grad():
        crops = face_views(people, 2, generator, jitter=0.0)
        first, second = F.normalize(embed(crops.flatten(0, 1)), dim=-1).unflatten(0, (len(people), 2)).unbind(1)
    cosines = first @ second.T
    same = cosines.diagonal()
    different = cosines[~torch.eye(len(people), dtype=torch.bool)]
    auc = float((same[:, None] > different[None]).float().mean())
    return {"auc": auc, "same": float(same.mean()), "different": float(different.mean())}


def detector_batch(count: int, generator: torch.Generator, damage: Damage) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw frames (N, 3, 128, 128) with one or no face, boxes (N, 4), landmarks (N, 5, 2), has_face (N,).

    damage: degrades the frames before they are zoomed and shifted.
    """
    people = draw_people(count, generator)
    video, landmarks, boxes = render(people, _draw_pose(count, generator), generator)
    frames = damage(video[:, :, 0], generator)
    # pixel p of the canvas shows pixel (p + 0.5 - shift) / zoom - 0.5 of the frame
    zoom = ZOOM * torch.exp(0.25 * torch.randn(count, generator=generator)).clamp(0.5, 1.6)
    zoom[: count // 2] = ZOOM  # half as in most use: the frame fills the detector's input
    shift = (torch.rand(count, 2, generator=generator) - 0.5) * 40
    shift[: count // 2] = 0
    centre = (torch.arange(DET_SIZE) + 0.5)[None]
    gx = ((centre - shift[:, :1]) / zoom[:, None]) / SIZE * 2 - 1
    gy = ((centre - shift[:, 1:]) / zoom[:, None]) / SIZE * 2 - 1
    grid = torch.stack([gx[:, None, :].expand(-1, DET_SIZE, -1), gy[:, :, None].expand(-1, -1, DET_SIZE)], -1)
    canvas = F.grid_sample(frames + 1, grid, mode="bilinear", align_corners=False) - 1
    landmarks = (landmarks[:, 0] + 0.5) * zoom[:, None, None] + shift[:, None] - 0.5
    boxes = (boxes[:, 0] + 0.5) * zoom[:, None] + shift.repeat(1, 2) - 0.5
    inside = ((landmarks > 4) & (landmarks < DET_SIZE - 4)).all(-1).all(-1)
    # every tenth frame has its face scrambled away
    blank = torch.rand(count, generator=generator) < 0.1
    noise = F.interpolate(torch.randn(count, 3, 6, 6, generator=generator), size=DET_SIZE, mode="bilinear") * 0.6
    canvas[blank] = noise[blank].clamp(-1, 1)
    return canvas, boxes, landmarks, inside & ~blank


def detector_loss(outputs: list, boxes: Tensor, landmarks: Tensor, has_face: Tensor) -> Tensor:
    """Return the BCE of all scores plus, near a face's centre at its size's strides, the L1 of box and landmarks."""
    total = torch.zeros(())
    centre = (boxes[:, :2] + boxes[:, 2:]) / 2
    side = (boxes[:, 2:] - boxes[:, :2]).amax(-1)
    for stride, (score, box, points) in zip(STRIDES, outputs, strict=True):
        rows, columns = score.shape[1:3]
        y, x = torch.meshgrid(torch.arange(rows) * stride, torch.arange(columns) * stride, indexing="ij")
        anchors = torch.stack([x, y], -1).float()[None]  # (1, h, w, 2)
        near = (anchors - centre[:, None, None]).abs().amax(-1) < (0.22 * side[:, None, None]).clamp(min=0.75 * stride)
        low, high = {8: (0, 44), 16: (28, 130), 32: (100, 999)}[stride]
        positive = near & (has_face & (side >= low) & (side < high))[:, None, None]
        target = positive.float()[..., None].expand_as(score)
        # no loss for detections of a face by another stride
        ignore = (near & has_face[:, None, None] & ~positive)[..., None].expand_as(score)
        bce = F.binary_cross_entropy_with_logits(score, target, reduction="none", pos_weight=torch.tensor(3.0))
        total = total + bce[~ignore].mean()
        if positive.any():
            left_top, right_bottom = anchors - boxes[:, None, None, :2], boxes[:, None, None, 2:] - anchors
            box_target = torch.cat([left_top, right_bottom], -1) / stride
            offset = (landmarks[:, None, None] - anchors[..., None, :]).flatten(-2) / stride
            unit = (side / stride)[:, None, None, None].expand_as(box_target[..., :1])[positive]  # the face's size
            total = total + 2.0 * ((box[positive] - box_target[positive][:, None]).abs() / unit[:, None]).mean()
            total = total + 10.0 * ((points[positive] - offset[positive][:, None]).abs() / unit[:, None]).mean()
    return total


def train_detector(net: Scrfd, seed: int, steps: int, log, damage: Damage = degrade_as_codec) -> None:
    lr, batch = 3e-3, 32
    net.train()
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        frames, boxes, landmarks, has_face = detector_batch(batch, generator, damage)
        # channels last: the backward pass of separable convolutions is twice as fast on a CPU
        frames = (frames * (127.5 / 128)).contiguous(memory_format=torch.channels_last)
        loss = detector_loss(net.raw(frames), boxes, landmarks, has_face)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 5.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            log(f"detector step {step} loss {float(loss.detach()):.4f}")


def export(net: nn.Module, path: Path) -> None:
    """Write the network as ONNX (opset 13) with the input name and dynamic axes of insightface's files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(net, Scrfd):
        example, axes = torch.zeros(1, 3, DET_SIZE, DET_SIZE), {"input.1": {2: "height", 3: "width"}}
    else:
        example, axes = torch.zeros(1, 3, 112, 112), {"input.1": {0: "batch"}}
    torch.onnx.export(
        net, (example,), str(path), input_names=["input.1"], dynamic_axes=axes, opset_version=13, dynamo=False
    )  # fmt: skip
