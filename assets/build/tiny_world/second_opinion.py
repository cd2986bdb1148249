"""The committed judge: a recogniser that shares neither architecture, loss nor data with the reward's.

It is trained on people of both drawing programs, by a margin softmax (CosFace, arXiv 1801.09414 eq. 4). Its input is
the inner face alone, grey and in local contrast, without the colour of hair and skin. With colours, or when trained on
smeared faces, such a judge does not rank runs as recognisers of real faces do (docs/results/tiny_face.md).
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tiny_world import strangers
from tiny_world.faces import Separable, crop_faces, draw_views, inner_face, local_contrast
from tiny_world.people import draw_people
from tiny_world.video import Log

SCALE, MARGIN = 24.0, 0.3
FRAMES_OF_A_STRANGER = 6


class SeparableRecogniser(nn.Module):
    """Crops (N, 3, 112, 112), (rgb - 127.5) / 127.5 -> embeddings (N, 512). Patches, separable convolutions, SiLU."""

    inner_face: Tensor

    def __init__(self, width: int = 40):
        super().__init__()
        w = width
        self.register_buffer("inner_face", inner_face())
        self.features = nn.Sequential(
            nn.Conv2d(1, w, 7, 4, 3, bias=False), nn.BatchNorm2d(w), nn.SiLU(), Separable(w, w), Separable(w, w),
            Separable(w, 2 * w, 2), Separable(2 * w, 2 * w), Separable(2 * w, 2 * w),
            Separable(2 * w, 4 * w, 2), Separable(4 * w, 4 * w),
        )  # fmt: skip
        self.pool = nn.Conv2d(4 * w, 4 * w, 7, groups=4 * w)
        self.embed = nn.Linear(4 * w, 512)

    def forward(self, x: Tensor) -> Tensor:
        return self.embed(self.pool(self.features(local_contrast(x) * self.inner_face)).flatten(1))


def draw_strangers(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return frames (N, FRAMES_OF_A_STRANGER, 3, SIZE, SIZE) in [-1, 1] of strangers and landmarks (N, ., 5, 2)."""
    frames, landmarks = [], []
    for i in range(count):
        rng = np.random.default_rng([seed, i])
        person = strangers.draw_stranger(rng)
        poses = [strangers.draw_motion(rng)[int(rng.integers(9))] for _ in range(FRAMES_OF_A_STRANGER)]
        clips = [strangers.render(person, [pose], rng) for pose in poses]  # each with another background
        frames.append(torch.cat(clips).permute(0, 3, 1, 2))
        landmarks.append(torch.stack([strangers.find_landmarks(person, pose) for pose in poses]))
    return torch.stack(frames).float() / 127.5 - 1, torch.stack(landmarks)


def degrade(frames: Tensor, generator: torch.Generator) -> Tensor:
    """Return frames (N, 3, H, W) slightly blurred, off-colour and noisy, like generated ones."""
    count, _, height, width = frames.shape

    def draw(*shape: int) -> Tensor:
        return torch.rand(count, *shape, generator=generator)

    small = int(torch.randint(3 * height // 4, height + 1, (1,), generator=generator))
    blurred = F.interpolate(frames, size=(small, small), mode="bilinear", antialias=True)
    frames = frames + draw(1, 1, 1) * (F.interpolate(blurred, size=(height, width), mode="bilinear") - frames)
    gain, shift = 1 + 0.4 * (draw(3, 1, 1) - 0.5), 0.6 * (draw(3, 1, 1) - 0.5)
    return (frames * gain + shift + 0.02 * draw(1, 1, 1) * torch.randn(frames.shape, generator=generator)).clamp(-1, 1)


def train_judge(net: SeparableRecogniser, seed: int, steps: int, batch: int, people: int, log: Log) -> None:
    """Train on `people` people of people.py and a quarter as many strangers, each half of a batch."""
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
        crops = crop_faces(degrade(views, generator), points, generator, jitter=0.7)
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
