"""The committed judge: a recogniser that shares neither architecture, loss nor data with the reward's.

It learns from people of both drawing programs, by a margin softmax (CosFace, arXiv 1801.09414 eq. 4), on frames that
are damaged as generators damage them. Half of the crops are grey and the colours of the others shift, so that it
looks at the shape of eyes, nose and mouth, as recognisers of real faces do.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rewardfl_tools.tiny_world import strangers
from rewardfl_tools.tiny_world.faces import Separable, crop_faces, draw_views
from rewardfl_tools.tiny_world.people import draw_people
from rewardfl_tools.tiny_world.video import Log

SCALE, MARGIN = 24.0, 0.3
FRAMES_OF_A_STRANGER = 6


class SeparableRecogniser(nn.Module):
    """Crops (N, 3, 112, 112), (rgb - 127.5) / 127.5 -> embeddings (N, 512). Patches, separable convolutions, SiLU."""

    def __init__(self, width: int = 40):
        super().__init__()
        w = width
        self.features = nn.Sequential(
            nn.Conv2d(3, w, 7, 4, 3, bias=False), nn.BatchNorm2d(w), nn.SiLU(), Separable(w, w), Separable(w, w),
            Separable(w, 2 * w, 2), Separable(2 * w, 2 * w), Separable(2 * w, 2 * w),
            Separable(2 * w, 4 * w, 2), Separable(4 * w, 4 * w),
        )  # fmt: skip
        self.pool = nn.Conv2d(4 * w, 4 * w, 7, groups=4 * w)
        self.embed = nn.Linear(4 * w, 512)

    def forward(self, x: Tensor) -> Tensor:
        return self.embed(self.pool(self.features(x)).flatten(1))


def draw_strangers(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return frames (N, FRAMES_OF_A_STRANGER, 3, SIZE, SIZE) in [-1, 1] of strangers and landmarks (N, ., 5, 2)."""
    frames, landmarks = [], []
    for i in range(count):
        rng = np.random.default_rng([seed, i])
        person = strangers.draw_stranger(rng)
        poses = [strangers.draw_motion(rng)[int(rng.integers(9))] for _ in range(FRAMES_OF_A_STRANGER)]
        clips = [strangers.render(person, [pose], rng) for pose in poses]  # each before another background
        frames.append(torch.cat(clips).permute(0, 3, 1, 2))
        landmarks.append(torch.stack([strangers.find_landmarks(person, pose) for pose in poses]))
    return torch.stack(frames).float() / 127.5 - 1, torch.stack(landmarks)


def damage(frames: Tensor, generator: torch.Generator) -> Tensor:
    """Return frames (N, 3, H, W) as a weak generator draws them: warped, smeared, mottled, blurred, off-colour."""
    count, _, height, width = frames.shape

    def draw(*shape: int) -> Tensor:
        return torch.rand(count, *shape, generator=generator)

    def field(channels: int, cells: int) -> Tensor:
        """A smooth random field (N, channels, H, W) of standard deviation near 1."""
        coarse = torch.randn(count, channels, cells, cells, generator=generator)
        return F.interpolate(coarse, size=(height, width), mode="bicubic")

    def sample(image: Tensor, offset: Tensor) -> Tensor:
        """The image with each pixel taken from `offset` (N, 2, H, W) pixels away."""
        grid = F.affine_grid(torch.eye(2, 3).expand(count, 2, 3), [count, 3, height, width], align_corners=False)
        shift = 2 * offset.permute(0, 2, 3, 1) / torch.tensor([width, height])
        return F.grid_sample(image, grid + shift, mode="bilinear", padding_mode="border", align_corners=False)

    frames = sample(frames, 1.0 * draw(1, 1, 1) ** 2 * field(2, 10))
    direction = 1.2 * draw(1, 1, 1) ** 2 * field(2, 6)
    frames = (frames + sample(frames, direction) + sample(frames, -direction)) / 3  # smeared along a field
    frames = frames + 0.12 * draw(1, 1, 1) ** 2 * field(3, 20)
    small = int(torch.randint(height // 2, height + 1, (1,), generator=generator))
    blurred = F.interpolate(frames, size=(small, small), mode="bilinear", antialias=True)
    frames = frames + draw(1, 1, 1) * (F.interpolate(blurred, size=(height, width), mode="bilinear") - frames)
    gain, shift = 1 + 0.25 * (draw(3, 1, 1) - 0.5), 0.5 * (draw(3, 1, 1) - 0.5)
    frames = frames * gain + shift + 0.05 * draw(1, 1, 1) * torch.randn(frames.shape, generator=generator)
    grey = frames.mean(1, keepdim=True).expand_as(frames)
    return torch.where(draw(1, 1, 1) < 0.5, grey, frames).clamp(-1, 1)


def train_judge(net: SeparableRecogniser, seed: int, steps: int, batch: int, people: int, log: Log) -> None:
    """Train on `people` people of people.py and a quarter as many strangers; half of a batch are views of each."""
    lr = 3e-3
    net.train()
    generator = torch.Generator().manual_seed(seed)
    pool = draw_people(people, generator)
    frames, landmarks = draw_strangers(max(people // 4, 2), seed)
    classes = nn.Parameter(torch.randn(len(pool) + len(frames), 512, generator=generator) / 512**0.5)
    trained = [*net.parameters(), classes]
    optimizer = torch.optim.AdamW(trained, lr=lr, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        drawn = torch.randint(0, len(pool), (batch // 2,), generator=generator)
        strange = torch.randint(0, len(frames), (batch // 2,), generator=generator)
        moment = torch.randint(0, FRAMES_OF_A_STRANGER, (batch // 2,), generator=generator)
        views, points = draw_views(pool[drawn], 1, generator)
        views = torch.cat([views, frames[strange, moment]])
        points = torch.cat([points, landmarks[strange, moment]])
        crops = crop_faces(damage(views, generator), points, generator, jitter=0.7)
        cosines = F.normalize(net(crops), dim=-1) @ F.normalize(classes, dim=-1).T
        target = torch.cat([drawn, len(pool) + strange])
        margins = MARGIN * F.one_hot(target, cosines.shape[1])
        loss = F.cross_entropy(SCALE * (cosines - margins), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            right = float((cosines.argmax(1) == target).float().mean())
            log(f"judge step {step} loss {float(loss.detach()):.3f} right {right:.2f}")
