"""Small ONNX detectors and recognisers with the signatures of insightface's, for the face tests."""

import itertools
import warnings
from pathlib import Path

import onnx
import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZE = 64  # side of the test frames and of the detector


def export(net: nn.Module, example: Tensor, path: Path, opset: int = 11, dynamic=None, names=("x", None)) -> Path:
    """The TorchScript exporter, which wrote the published packs. names: of the input, and of the outputs."""
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


class TiedAnchors(nn.Module):
    """Gives both anchors of every cell of stride 8 one score, and boxes and landmarks that differ."""

    def forward(self, x):
        outputs = [[], [], []]
        for stride in (8, 16, 32):
            level = F.avg_pool2d(x, stride).mean(1) * 0
            score = level + (0.75 if stride == 8 else 0.0)
            for output, first, second in (
                (outputs[0], [0.0], [0.0]),
                (outputs[1], [1.5] * 4, [1.0, 2.0, 1.7, 1.4]),
                (outputs[2], MagentaDetector.LANDMARKS.flatten() / 8, MagentaDetector.LANDMARKS.flatten() / 12),
            ):
                base = score if output is outputs[0] else level
                anchors = [base[..., None] + torch.as_tensor(values) for values in (first, second)]
                output.append(torch.stack(anchors, -2).reshape(-1, len(first)))
        return tuple(outputs[0] + outputs[1] + outputs[2])


def magenta_pack(folder: Path) -> Path:
    """A pack whose detector finds magenta cells in frames of 64 x 64, with a small random recogniser."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    export(MagentaDetector(), torch.zeros(1, 3, SIZE, SIZE), folder / "det.onnx")
    export(MiniArcFace(), torch.zeros(1, 3, 112, 112), folder / "rec.onnx", dynamic={"x": {0: "batch"}})
    return folder


def marked(path: Path) -> None:
    model = onnx.load(path)
    model.doc_string = "another file"
    onnx.save(model, path)


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
    """glintr100's graph, narrow and with few blocks: theirs are 64 and (3, 13, 30, 3). example: (B, 3, size, size)."""

    def __init__(self, size: int = 112, dimension: int = 16, example: Tensor | None = None):
        super().__init__()
        widths = [4, 4, 8, 16, 32]
        self.stem = nn.Sequential(_conv_bn(3, widths[0]), nn.PReLU(widths[0]))
        self.stages = nn.Sequential(*(_ResidualBlock(a, b) for a, b in itertools.pairwise(widths)))
        self.bn2 = nn.BatchNorm2d(widths[-1])
        self.dropout = nn.Dropout(0.4)
        self.fc = nn.Linear(widths[-1] * (size // 16) ** 2, dimension)
        self.features = nn.BatchNorm1d(dimension)
        _randomise(self, example)
        if example is None:
            self.stem[0][0].weight.data *= 4  # so that the picture counts for more than the biases

    def forward(self, x):
        x = self.bn2(self.stages(self.stem(x)))
        return self.features(self.fc(self.dropout(torch.flatten(x, 1))))


class _BasicBlock(nn.Module):
    """ResNetV1e of insightface's detection/scrfd: average pooling in the shortcut."""

    def __init__(self, inside: int, outside: int, stride: int):
        super().__init__()
        self.conv1, self.conv2 = _conv_bn(inside, outside, 3, stride), _conv_bn(outside, outside)
        pool = nn.AvgPool2d(2, 2, ceil_mode=True, count_include_pad=False)
        self.shortcut = nn.Sequential(pool, _conv_bn(inside, outside, 1)) if stride > 1 else nn.Identity()

    def forward(self, x):
        return torch.relu(self.conv2(torch.relu(self.conv1(x))) + self.shortcut(x))


class MiniSCRFD(nn.Module):
    """scrfd_10g_bnkps, an eighth as wide: ResNetV1e, PAFPN, a head of three convolutions per stride.

    batched: whether the outputs keep the pictures apart. example: (1, 3, H, W) in which it finds about ten faces.
    """

    def __init__(self, *, batched: bool = False, example: Tensor | None = None):
        super().__init__()
        self.batched = batched
        base, planes, neck, head = 7, (7, 11, 11, 28), 7, 10
        stem = [(3, base // 2, 2), (base // 2, base // 2, 1), (base // 2, base, 1)]
        self.stem = nn.Sequential(*(nn.Sequential(_conv_bn(i, o, 3, s), nn.ReLU()) for i, o, s in stem))
        self.pool = nn.MaxPool2d(3, 2, 1)
        inputs, strides = [base, *planes], (1, 2, 2, 2)
        self.stages = nn.ModuleList(
            nn.Sequential(*(_BasicBlock(inputs[k + (i > 0)], planes[k], strides[k] if i == 0 else 1) for i in range(n)))
            for k, n in enumerate((3, 4, 2, 3))
        )
        self.lateral = nn.ModuleList(nn.Conv2d(p, neck, 1) for p in planes[1:])
        self.fpn = nn.ModuleList(nn.Conv2d(neck, neck, 3, 1, 1) for _ in range(3))
        self.down = nn.ModuleList(nn.Conv2d(neck, neck, 3, 2, 1) for _ in range(2))
        self.pafpn = nn.ModuleList(nn.Conv2d(neck, neck, 3, 1, 1) for _ in range(2))
        self.towers = nn.ModuleList(
            nn.Sequential(*(nn.Sequential(_conv_bn(neck if i == 0 else head, head), nn.ReLU()) for i in range(3)))
            for _ in range(3)
        )
        self.heads = nn.ModuleList(
            nn.ModuleList(nn.Conv2d(head, 2 * channels, 3, 1, 1) for channels in (1, 4, 10)) for _ in range(3)
        )
        self.scales = nn.ParameterList(torch.ones(()) for _ in range(3))
        _randomise(self, example)
        if example is not None:
            self._aim(example)
            return
        for scores, *others in self.heads:  # apart, so that rounding changes no order
            nn.init.normal_(scores.weight, std=0.3)
            for head in others:
                nn.init.constant_(head.bias, 1.5)

    def levels(self, x):
        """Return the heads' inputs at strides 8, 16 and 32."""
        x = self.pool(self.stem(x))
        levels = []
        for stage in self.stages:
            x = stage(x)
            levels.append(x)
        levels = [lateral(level) for lateral, level in zip(self.lateral, levels[1:], strict=True)]
        for i in (1, 0):
            levels[i] = levels[i] + F.interpolate(levels[i + 1], size=levels[i].shape[2:], mode="nearest")
        levels = [conv(level) for conv, level in zip(self.fpn, levels, strict=True)]
        for i in (0, 1):
            levels[i + 1] = levels[i + 1] + self.down[i](levels[i])
        levels[1:] = [conv(level) for conv, level in zip(self.pafpn, levels[1:], strict=True)]
        return [tower(level) for tower, level in zip(self.towers, levels, strict=True)]

    def forward(self, x):
        outputs = [[], [], []]
        for heads, scale, level in zip(self.heads, self.scales, self.levels(x), strict=True):
            score, box, landmarks = (head(level) for head in heads)
            for rows, out, channels in zip(outputs, (score, box * scale, landmarks), (1, 4, 10), strict=True):
                if self.batched:
                    out = out.permute(0, 2, 3, 1).reshape(out.shape[0], -1, channels)
                else:
                    out = out.permute(2, 3, 0, 1).reshape(-1, channels)
                rows.append(torch.sigmoid(out) if channels == 1 else out)
        return tuple(row for rows in outputs for row in rows)

    @torch.no_grad()
    def _aim(self, x: Tensor) -> None:
        """Make the heads see about ten faces at every stride, whose boxes are about 2.5 strides to each side."""
        for (score, box, landmarks), level in zip(self.heads, self.levels(x), strict=True):
            _spread(score, level, torch.zeros(2), 1.0)
            _spread(box, level, torch.full((8,), 2.5), 0.2)
            _spread(landmarks, level, LANDMARKS.repeat(2), 0.1)
            score.bias -= _widest_gap(score(level), 4, 20)


LANDMARKS = torch.tensor([[-18, -4], [18, -4], [0, 16], [-14, 36], [14, 36]]).flatten() / 20  # in strides


def _spread(head: nn.Conv2d, level: Tensor, mean: Tensor, std: float) -> None:
    """Give the head's outputs of a level these means, by channel, and this deviation."""
    scale = std / head(level).std()
    head.weight *= scale
    head.bias *= scale
    head.bias += mean - head(level).mean((0, 2, 3))


def _widest_gap(scores: Tensor, first: int, last: int) -> Tensor:
    """Return the middle of the widest gap among the highest scores: what is above it does not hang on rounding."""
    best = scores.flatten().sort(descending=True).values[first:last]
    gap = (best[:-1] - best[1:]).argmax()
    return (best[gap] + best[gap + 1]) / 2


class _DepthwiseUnit(nn.Module):
    """ConvDPUnit of libfacedetection.train: across channels, then each channel alone."""

    def __init__(self, inside: int, outside: int, *, plain: bool = False):
        super().__init__()
        self.across = nn.Conv2d(inside, outside, 1)
        self.alone = nn.Conv2d(outside, outside, 3, 1, 1, groups=outside)
        self.rest = nn.Identity() if plain else nn.Sequential(nn.BatchNorm2d(outside), nn.ReLU())

    def forward(self, x):
        return self.rest(self.alone(self.across(x)))


class YuNet(nn.Module):
    """yunet_n of libfacedetection.train, 75,856 parameters, with the twelve outputs of OpenCV's file of March 2023."""

    CHANNELS = {"cls": 1, "obj": 1, "bbox": 4, "kps": 10}

    def __init__(self):
        super().__init__()
        stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), _DepthwiseUnit(16, 16))
        widths = [(16, 64), *[(64, 64)] * 4]
        blocks = [nn.Sequential(_DepthwiseUnit(a, a), _DepthwiseUnit(a, b)) for a, b in widths]
        self.stages = nn.ModuleList([stem, *blocks])
        self.lateral = nn.ModuleList(_DepthwiseUnit(64, 64) for _ in range(3))
        self.shared = nn.ModuleList(_DepthwiseUnit(64, 64) for _ in range(3))
        self.heads = nn.ModuleDict(
            {
                name: nn.ModuleList(_DepthwiseUnit(64, channels, plain=True) for _ in range(3))
                for name, channels in self.CHANNELS.items()
            }
        )

    def levels(self, x):
        found = []
        for i, stage in enumerate(self.stages):
            x = stage(x)
            if i >= 3:
                found.append(x)
            if i in (0, 2, 3, 4):
                x = F.max_pool2d(x, 2)
        for i in (2, 1, 0):
            found[i] = self.lateral[i](found[i])
            if i > 0:
                found[i - 1] = found[i - 1] + F.interpolate(found[i], scale_factor=2.0, mode="nearest")
        return [unit(level) for unit, level in zip(self.shared, found, strict=True)]

    def forward(self, x):
        levels, outputs = self.levels(x), []
        for name, heads in self.heads.items():
            for head, level in zip(heads, levels, strict=True):
                out = head(level).permute(0, 2, 3, 1).flatten(1, 2)
                outputs.append(torch.sigmoid(out) if name in ("cls", "obj") else out)
        return tuple(outputs)


YUNET_OUTPUTS = [f"{name}_{stride}" for name in YuNet.CHANNELS for stride in (8, 16, 32)]


@torch.no_grad()
def yunet_file(path: Path, levels: Tensor, *, fixed: bool = False) -> Path:
    """A YuNet with random weights that finds some faces in levels (1, 3, H, W) of 0..255, RGB."""
    net, x = YuNet(), levels.flip(1)
    _randomise(net, x)
    means = {"cls": torch.zeros(1), "obj": torch.full((1,), 5.0), "bbox": torch.tensor([0.0, 0, 1.5, 1.5])}
    for name, heads in net.heads.items():
        for head, level in zip(heads, net.levels(x), strict=True):
            level = head.across(level)
            _spread(head.alone, level, means.get(name, LANDMARKS), 1.0 if name == "cls" else 0.1)
            if name == "cls":  # the threshold of 0.9, of a score whose square this is
                head.alone.bias += 1.45 - _widest_gap(head.alone(level), 2, 6)
    free = None if fixed else {"input": {2: "height", 3: "width"}}
    return export(net, x, path, dynamic=free, names=("input", YUNET_OUTPUTS))


def _randomise(net: nn.Module, batch: Tensor | None = None) -> None:
    """Draw affine parameters away from 0 and 1, and statistics, so that leaving one out shows.

    With a batch its own statistics are taken: then activations of deep nets neither die nor explode.
    """
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.normal_(module.running_mean, std=0.3)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.3)
            module.momentum = 1.0
        if isinstance(module, nn.PReLU):
            nn.init.uniform_(module.weight, 0.1, 0.6)
    if batch is not None:
        with torch.no_grad():
            net.train()(batch)
    net.eval()


def published_pack(folder: Path, image: Tensor, det_size: int) -> Path:
    """antelopev2's two files, but for the weights and the widths: graph, axes and file names.

    The weights are random; the detector finds some things in `image` (3, H, W) in [-1, 1] that it calls faces.
    """
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    quarters = [half for row in image.chunk(2, 1) for half in row.chunk(2, 2)]
    crops = F.interpolate(torch.stack(quarters), (112, 112), mode="area")
    export(MiniArcFace(example=crops), crops[:1], folder / "glintr100.onnx", dynamic={"x": {0: "None"}})
    fitted = F.interpolate(image[None], scale_factor=det_size / max(image.shape[1:]), mode="bilinear")
    fitted = F.pad(fitted, (0, det_size - fitted.shape[-1], 0, det_size - fitted.shape[-2]), value=-1.0)
    detector = MiniSCRFD(example=fitted)
    export(detector, fitted, folder / "scrfd_10g_bnkps.onnx", dynamic={"x": {2: "?", 3: "?"}})
    return folder
