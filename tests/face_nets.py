"""Small ONNX detectors and recognisers with the signatures of insightface's, for the face tests."""

import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZE = 64  # side of the test frames and of the detector


def export(net: nn.Module, example: Tensor, path: Path, opset: int = 11, dynamic: dict | None = None) -> Path:
    """The TorchScript exporter, which wrote the published packs; input `x`."""
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            net.eval(), (example,), str(path), dynamo=False, opset_version=opset, input_names=["x"],
            dynamic_axes=dynamic,
        )  # fmt: skip
    return path


def _spread_statistics(net: nn.Module) -> None:
    """BatchNorm with statistics and slopes away from 0 and 1, so that leaving one out shows."""
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.normal_(module.running_mean, std=0.3)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.3)
        if isinstance(module, nn.PReLU):
            nn.init.uniform_(module.weight, 0.1, 0.6)


class MiniArcFace(nn.Module):
    """The blocks of IR-ResNet (R100): pre-activation BN, PReLU, a strided shortcut, BN1d after the Gemm."""

    def __init__(self, size: int = 112, width: int = 4, dimension: int = 16, stride: int = 4):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, stride, 1)
        self.act = nn.PReLU(width)
        self.block = nn.Sequential(
            nn.BatchNorm2d(width), nn.Conv2d(width, width, 3, 1, 1), nn.PReLU(width),
            nn.Conv2d(width, 2 * width, 3, 2, 1), nn.BatchNorm2d(2 * width),
        )  # fmt: skip
        self.shortcut = nn.Sequential(nn.Conv2d(width, 2 * width, 1, 2), nn.BatchNorm2d(2 * width))
        side = size // stride // 2
        self.head = nn.Sequential(
            nn.BatchNorm2d(2 * width), nn.Dropout(0.4), nn.Flatten(),
            nn.Linear(2 * width * side**2, dimension), nn.BatchNorm1d(dimension),
        )  # fmt: skip
        _spread_statistics(self)

    def forward(self, x):
        x = self.act(self.stem(x))
        return self.head(self.block(x) + self.shortcut(x))


class MiniSCRFD(nn.Module):
    """SCRFD's graph: max and average pooling, an FPN with Resize by Shape, nine outputs."""

    def __init__(self, width: int = 8, batched: bool = False):
        super().__init__()
        self.batched = batched
        first = nn.Conv2d(3, width, 3, 2, 1)
        self.stem = nn.Sequential(first, nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2))
        self.down = nn.ModuleList(
            nn.Sequential(nn.AvgPool2d(2, 2, ceil_mode=True, count_include_pad=False), nn.Conv2d(width, width, 1))
            for _ in range(3)
        )
        self.heads = nn.ModuleList(nn.Conv2d(width, 2 * c, 3, 1, 1) for c in (1, 4, 10))
        self.scales = nn.Parameter(torch.tensor([0.8, 1.0, 1.2]))
        _spread_statistics(self)

    def forward(self, x):
        x = self.stem(x)
        levels = []
        for down in self.down:
            x = torch.relu(down(x))
            levels.append(x)
        for i in (1, 0):
            levels[i] = levels[i] + F.interpolate(levels[i + 1], size=levels[i].shape[2:], mode="nearest")
        outputs = []
        for head, channels in zip(self.heads, (1, 4, 10), strict=True):
            for i, level in enumerate(levels):
                out = head(level * 3)
                out = torch.sigmoid(out) if channels == 1 else out * self.scales[i] + 1.5
                if self.batched:
                    outputs.append(out.permute(0, 2, 3, 1).reshape(out.shape[0], -1, channels))
                else:
                    outputs.append(out.permute(2, 3, 0, 1).reshape(-1, channels))
        return tuple(outputs)


class MagentaDetector(nn.Module):
    """Finds 8 x 8 cells that are magenta: box 24 pixels wide around the cell's corner, landmarks inside it.

    A brightness of blue below 1 moves the mouth corners apart, so that a test can open a mouth.
    """

    LANDMARKS = torch.tensor([[-5.0, -4.0], [5.0, -4.0], [0.0, 0.0], [-4.0, 5.0], [4.0, 5.0]])

    def forward(self, x):
        mean = F.avg_pool2d(x, 8)  # (B, 3, h, w)
        red, green, blue = mean[:, 0], mean[:, 1], mean[:, 2]
        score = torch.sigmoid(20 * (red - 2 * green - 2.5))
        mouth = (1 - blue)[..., None] * torch.tensor([0.0] * 6 + [-1.0, 0.0, 1.0, 0.0])
        outputs = [[], [], []]
        for stride in (8, 16, 32):
            cells = score if stride == 8 else F.avg_pool2d(score[:, None], stride // 8)[:, 0] * 0
            shape = cells[..., None]
            distances = shape * 0 + torch.full((4,), 12.0 / stride)
            offsets = shape * 0 + self.LANDMARKS.flatten() / stride
            if stride == 8:
                offsets = offsets + mouth
            second = shape * 0  # the second anchor never fires
            outputs[0].append(torch.stack([shape, second], -2).reshape(-1, 1))
            outputs[1].append(torch.stack([distances, distances], -2).reshape(-1, 4))
            outputs[2].append(torch.stack([offsets, offsets], -2).reshape(-1, 10))
        return tuple(outputs[0] + outputs[1] + outputs[2])


def magenta_pack(folder: Path) -> Path:
    """A pack whose detector finds magenta cells in frames of 64 x 64, with a small random recogniser."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    export(MagentaDetector(), torch.zeros(1, 3, SIZE, SIZE), folder / "det.onnx")
    export(MiniArcFace(), torch.zeros(1, 3, 112, 112), folder / "rec.onnx", dynamic={"x": {0: "batch"}})
    return folder


def clip(cells: list[tuple[int, int] | None], seed: int = 0, mouth: list[float] | None = None) -> Tensor:
    """(3, F, 64, 64): still smooth background, in frame j a magenta 8 x 8 face at cell (column, row) or none.

    mouth[j] is how far that frame's mouth corners are pulled apart, in strides.
    """
    noise = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(seed)) * 0.3
    background = F.interpolate(noise.transpose(0, 1), (SIZE, SIZE), mode="bicubic").transpose(0, 1).clamp(-0.5, 0.5)
    video = background.repeat(1, len(cells), 1, 1)
    for j, cell in enumerate(cells):
        if cell is not None:
            x, y = 8 * cell[0], 8 * cell[1]
            opened = mouth[j] if mouth else 0.0
            colour = torch.tensor([1.0, -1.0, 1.0 - opened])
            video[:, j, y : y + 8, x : x + 8] = colour[:, None, None]
    return video
