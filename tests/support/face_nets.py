"""Small ONNX detectors and recognisers with the signatures of insightface's, for the face tests."""

import itertools
import warnings
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rewardfl import data
from rewardfl.rewards.face import ARCFACE_TEMPLATE

ROOT = Path(__file__).parents[2]

SIZE = 64  # side of the test frames and of the detector


def export(net: nn.Module, example: Tensor, path: Path, opset: int = 11, dynamic=None, names=("x", None)) -> Path:
    """Export by the TorchScript exporter, which wrote the published packs. names: of the input, and of the outputs."""
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            net.eval(), (example,), str(path), dynamo=False, opset_version=opset, input_names=[names[0]],
            output_names=names[1], dynamic_axes=dynamic,
        )  # fmt: skip
    return path


class MagentaDetector(nn.Module):
    """Finds 8 x 8 cells that are magenta: box 24 pixels wide around the cell's corner, landmarks inside it.

    A brightness of blue below 1 moves the mouth corners apart, so that a test can open a mouth.
    """

    LANDMARKS = torch.tensor([[-5.0, -4.0], [5.0, -4.0], [0.0, 0.0], [-4.0, 5.0], [4.0, 5.0]]).flatten()
    MOUTH = torch.tensor([0.0] * 6 + [-1.0, 0.0, 1.0, 0.0])
    # the second anchor's score over the first's, distances to the sides, and size of its landmarks over the first's
    SECOND = (0.0, (12.0, 12.0, 12.0, 12.0), 1.0)

    def score(self, red, green):
        return torch.sigmoid(20 * (red - 2 * green - 2.5))

    def forward(self, x):
        ratio, sides, size = self.SECOND
        outputs = []
        for stride in (8, 16, 32):
            mean = F.avg_pool2d(x, stride)[..., None]
            red, green, blue = mean[:, 0], mean[:, 1], mean[:, 2]  # (B, h, w, 1)
            score = self.score(red, green) if stride == 8 else red * 0
            landmarks = [scale * self.LANDMARKS / stride + (1 - blue) * self.MOUTH for scale in (1.0, size)]
            boxes = [red * 0 + torch.tensor(distances) / stride for distances in ((12.0,) * 4, sides)]
            anchors = ((score, score * ratio), boxes, landmarks)
            outputs.append([torch.stack(tuple(pair), -2).reshape(-1, pair[0].shape[-1]) for pair in anchors])
        return tuple(output for of_stride in zip(*outputs, strict=True) for output in of_stride)


class TiedAnchors(MagentaDetector):
    """Gives both anchors of every cell of stride 8 one score, and boxes and landmarks that differ."""

    SECOND = (1.0, (8.0, 16.0, 13.6, 11.2), 2 / 3)

    def score(self, red, green):
        return red * 0 + 0.75


def magenta_pack(folder: Path) -> Path:
    """Write a pack whose detector finds magenta cells in frames of 64 x 64, with a small random recogniser."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    export(MagentaDetector(), torch.zeros(1, 3, SIZE, SIZE), folder / "det.onnx")
    export(MiniArcFace(), torch.zeros(1, 3, 112, 112), folder / "rec.onnx", dynamic={"x": {0: "batch"}})
    return folder


def clip(cells: list[tuple[int, int] | None], seed: int = 0, mouth: list[float] | None = None) -> Tensor:
    """Return (3, F, 64, 64): still smooth background, in frame j a magenta 8 x 8 face at cell (column, row) or none.

    mouth[j] is how far that frame's mouth corners are pulled apart, in strides.
    """
    noise = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(seed)) * 0.3
    background = F.interpolate(noise.transpose(0, 1), (SIZE, SIZE), mode="bicubic").transpose(0, 1).clamp(-0.5, 0.5)
    video = background.repeat(1, len(cells), 1, 1)
    for j, cell in enumerate(cells):
        if cell is not None:
            x, y = 8 * cell[0], 8 * cell[1]
            colour = torch.tensor([1.0, -1.0, 1.0 - (mouth[j] if mouth else 0.0)])
            video[:, j, y : y + 8, x : x + 8] = colour[:, None, None]
    return video


MOUTH = [0.0, 0.1, 0.3, 0.2]
REAL = clip([(2, 2), (2, 2), (3, 2), (3, 3)], seed=1, mouth=MOUTH)
GENERATED = clip([(2, 2), (3, 2), None, (4, 2)], seed=2, mouth=MOUTH)
EMPTY = clip([None] * 4, seed=3)


def load_person(index: int) -> Tensor:
    """Return (3, 9, 64, 64): a held-out person of the tiny world, with room around the face."""
    rows = data.load_metadata(ROOT / "assets" / "tiny_world" / "eval" / "metadata.csv")
    frames = data.to_float(data.read_video(rows[index].video)).transpose(0, 1)
    small = F.interpolate(frames, size=(48, 48), mode="bilinear", antialias=True)
    return F.pad(small, (8, 8, 16, 0), mode="replicate").transpose(0, 1)


def add_noise(video: Tensor, noise: float = 0.15) -> Tensor:
    """Return a clip such as a generated one: noise from frame 1 on."""
    other = video + noise * torch.randn(video.shape, generator=torch.Generator().manual_seed(1))
    return torch.cat([video[:, :1], other[:, 1:]], 1).clamp(-1, 1)


def picture(height, width, seed=0, rough=12):
    """Return (H, W, 3) uint8 RGB, nowhere black, with detail of about `rough` pixels in three different channels."""
    noise = torch.rand(1, 3, height // rough + 2, width // rough + 2, generator=torch.Generator().manual_seed(seed))
    smooth = F.interpolate(noise, (height, width), mode="bicubic").clamp(0, 1)
    return (40 + smooth[0] * 215).byte().permute(1, 2, 0).numpy()


def tensor(*pictures):
    """Return uint8 (H, W, 3) RGB pictures as (N, 3, H, W) in [-1, 1]."""
    return torch.stack([torch.from_numpy(p.copy()).permute(2, 0, 1) for p in pictures]) / 127.5 - 1


def bgr(picture):
    """Return an RGB picture as OpenCV has it."""
    return np.ascontiguousarray(picture[..., ::-1])


def placed(scale, angle, x, y):
    """Return the template's landmarks shrunk, rotated and moved: (5, 2) in frame pixels."""
    cos, sin = scale * np.cos(angle), scale * np.sin(angle)
    rotation = torch.tensor([[cos, -sin], [sin, cos]], dtype=torch.float32)
    return (ARCFACE_TEMPLATE - 56) @ rotation.T + torch.tensor([x, y])


def _randomise(net: nn.Module) -> None:
    """Draw affine parameters away from 0 and 1, and statistics, so that leaving one out shows."""
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.normal_(module.running_mean, std=0.3)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.3)
        if isinstance(module, nn.PReLU):
            nn.init.uniform_(module.weight, 0.1, 0.6)


def _conv_bn(inside: int, outside: int, kernel: int = 3, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inside, outside, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outside))


class _ResidualBlock(nn.Module):
    """IBasicBlock of insightface's arcface_torch/backbones/iresnet.py, with stride 2."""

    def __init__(self, inside: int, outside: int):
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inside)
        self.conv1 = _conv_bn(inside, outside)
        self.act = nn.PReLU(outside)
        self.conv2 = _conv_bn(outside, outside, 3, 2)
        self.shortcut = _conv_bn(inside, outside, 1, 2)

    def forward(self, x):
        return self.conv2(self.act(self.conv1(self.bn1(x)))) + self.shortcut(x)


class MiniArcFace(nn.Module):
    """glintr100's graph, narrow and with few blocks: 64 and (3, 13, 30, 3) in the published file."""

    def __init__(self, size: int = 112, dimension: int = 16):
        super().__init__()
        widths = [4, 4, 8, 16, 32]
        self.stem = nn.Sequential(_conv_bn(3, widths[0]), nn.PReLU(widths[0]))
        self.stages = nn.Sequential(*(_ResidualBlock(a, b) for a, b in itertools.pairwise(widths)))
        self.bn2 = nn.BatchNorm2d(widths[-1])
        self.dropout = nn.Dropout(0.4)
        self.fc = nn.Linear(widths[-1] * (size // 16) ** 2, dimension)
        self.features = nn.BatchNorm1d(dimension)
        _randomise(self)
        self.stem[0][0].weight.data *= 4  # so that the picture counts for more than the biases

    def forward(self, x):
        x = self.bn2(self.stages(self.stem(x)))
        return self.features(self.fc(self.dropout(torch.flatten(x, 1))))


class _BasicBlock(nn.Module):
    """ResNetV1e of insightface's detection/scrfd: average pooling in the shortcut."""

    def __init__(self, width: int):
        super().__init__()
        self.conv1, self.conv2 = _conv_bn(width, width, 3, 2), _conv_bn(width, width)
        self.shortcut = nn.AvgPool2d(2, 2, ceil_mode=True, count_include_pad=False)

    def forward(self, x):
        return torch.relu(self.conv2(torch.relu(self.conv1(x))) + self.shortcut(x))


class MiniSCRFD(nn.Module):
    """scrfd_10g_bnkps' operators in few layers: a residual block and three heads per stride, and a neck.

    batched: whether the outputs keep the pictures apart.
    """

    def __init__(self, *, batched: bool = False):
        super().__init__()
        self.batched = batched
        self.stem = nn.Sequential(_conv_bn(3, 8, 3, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.stages = nn.ModuleList(_BasicBlock(8) for _ in range(3))
        self.lateral = nn.ModuleList(nn.Conv2d(8, 8, 1) for _ in range(3))
        self.heads = nn.ModuleList(
            nn.ModuleList(nn.Conv2d(8, 2 * channels, 3, 1, 1) for channels in (1, 4, 10)) for _ in range(3)
        )
        self.scales = nn.ParameterList(torch.ones(()) for _ in range(3))
        _randomise(self)
        for scores, *others in self.heads:  # apart, so that rounding changes no order
            nn.init.normal_(scores.weight, std=0.3)
            for head in others:
                nn.init.constant_(head.bias, 1.5)

    def levels(self, x):
        """Return the heads' inputs at strides 8, 16 and 32."""
        x, levels = self.stem(x), []
        for stage, lateral in zip(self.stages, self.lateral, strict=True):
            x = stage(x)
            levels.append(lateral(x))
        for i in (1, 0):
            levels[i] = levels[i] + F.interpolate(levels[i + 1], size=levels[i].shape[2:], mode="nearest")
        return levels

    def forward(self, x):
        outputs = [[], [], []]
        for heads, scale, level in zip(self.heads, self.scales, self.levels(x), strict=True):
            score, box, landmarks = (head(level) for head in heads)
            for rows, out, channels in zip(outputs, (score, box * scale, landmarks), (1, 4, 10), strict=True):
                shape = (len(out), -1, channels) if self.batched else (-1, channels)
                out = out.permute(0, 2, 3, 1).reshape(shape)
                rows.append(torch.sigmoid(out) if channels == 1 else out)
        return tuple(row for rows in outputs for row in rows)


class MagentaYuNet(nn.Module):
    """Finds magenta cells, with BGR levels of 0..255 as input and the outputs of face_detection_yunet_2023mar.onnx."""

    ROWS = {  # weights of blue, green and red in [-1, 1], and the bias
        "cls": [[0, -4, 2, -3.0]],
        "obj": [[0, 0, 0, 3.0]],
        "bbox": [[0, 0, 0, 0.2], [0, 0, 0, -0.1], [0.3, 0, 0, 0.9], [0.3, 0, 0, 0.7]],
        "kps": [[-pull, 0, 0, place / 8 + pull] for place, pull in zip(
            MagentaDetector.LANDMARKS.tolist(), MagentaDetector.MOUTH.tolist(), strict=True)],
    }  # fmt: skip

    def forward(self, x):
        outputs = []
        for name, rows in self.ROWS.items():
            table = torch.tensor(rows)
            for stride in (8, 16, 32):
                level = F.avg_pool2d(x / 127.5 - 1, stride)
                out = F.conv2d(level, table[:, :3, None, None], table[:, 3]).permute(0, 2, 3, 1).flatten(1, 2)
                outputs.append(torch.sigmoid(out) if name in ("cls", "obj") else out)
        return tuple(outputs)


def yunet_file(path: Path) -> Path:
    """Write a YuNet that finds magenta cells."""
    names = [f"{name}_{stride}" for name in MagentaYuNet.ROWS for stride in (8, 16, 32)]
    return export(MagentaYuNet(), torch.zeros(1, 3, SIZE, SIZE), path, names=("input", names))
