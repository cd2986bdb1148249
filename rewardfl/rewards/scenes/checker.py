"""A rule-based check of a picture against its prompt, after GenEval (Ghosh et al. 2023, arXiv 2310.11513).

GenEval detects and counts objects, and compares their colours and positions with the prompt. Here, objects are
connected patches of a colour, and the share of its box that a patch fills gives its shape.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations, product
from math import hypot

import cv2
import torch
from torch import Tensor

from rewardfl.rewards import Reward, RewardOutput
from rewardfl.rewards.base import score_clips

COLOURS = {"red": (0.85, 0.12, 0.12), "green": (0.1, 0.62, 0.2), "blue": (0.15, 0.25, 0.85), "yellow": (0.95, 0.8, 0.1)}
SHAPES = ("circle", "square", "triangle")
_NUMBERS = {"a": 1, "two": 2, "three": 3}
# of the first object to the second: the axis, and the sign of the difference of their coordinates
RELATIONS = {"left of": ("x", -1), "right of": ("x", 1), "above": ("y", -1), "below": ("y", 1)}
APART = 0.2  # of the side: minimum distance of two related objects along the relation's axis

SMALLEST = 0.015  # of the picture's area; smaller patches are specks

# share of its box that a shape fills, and the offset of its centre below the box's, in heights of the box
LOOKS = {"triangle": (0.55, 0.12), "circle": (0.8, 0.0), "square": (1.0, 0.0)}

NEAR = 0.35  # distance in RGB to a colour; a pixel with no colour this near is ground


@dataclass(frozen=True, kw_only=True)
class Thing:
    """An object: its colour and shape, and its centre from (0, 0), top left, to (1, 1)."""

    colour: str
    shape: str
    x: float = 0.0
    y: float = 0.0

    @property
    def kind(self) -> tuple[str, str]:
        return self.colour, self.shape


@dataclass(frozen=True)
class Scene:
    """The scene of a prompt: the number of objects of each kind, and the relation of the first to the second."""

    prompt: str
    objects: dict[tuple[str, str], int]
    relation: str = ""


def all_scenes() -> list[Scene]:
    """Return every scene that has a prompt, in a fixed order."""
    kinds = list(product(COLOURS, SHAPES))
    pairs = list(permutations(kinds, 2))
    scenes = [
        Scene(f"{word} {colour} {shape}{'s' if count > 1 else ''}", {(colour, shape): count})
        for (word, count), (colour, shape) in product(_NUMBERS.items(), kinds)
    ]
    scenes += [Scene(f"a {' '.join(a)} and a {' '.join(b)}", {a: 1, b: 1}) for a, b in pairs]
    scenes += [
        Scene(f"a {' '.join(a)} {relation} a {' '.join(b)}", {a: 1, b: 1}, relation)
        for (a, b), relation in product(pairs, RELATIONS)
    ]
    return scenes


SCENES = {scene.prompt: scene for scene in all_scenes()}


def holds(relation: str, first: Thing, second: Thing, apart: float = APART) -> bool:
    """Return whether the relation holds: at least `apart` along its axis, and more than across it."""
    axis, sign = RELATIONS[relation]
    along, across = first.x - second.x, first.y - second.y
    if axis == "y":
        along, across = across, along
    return sign * along >= apart and abs(along) > abs(across)


class SceneChecker(Reward):
    """The share of the prompt that the picture shows, from 0 to 1.

    Points: 1 for each object of the prompt in the picture, 1/2 where only its colour or only its shape matches, 1 for
    the relation. They are divided by the larger number of objects, of prompt or picture, plus 1 for a relation. The
    score is graded like the reward in Flow-GRPO (arXiv 2505.05470, 4.1). GenEval's is the part `right`, 0 or 1: the
    picture shows the prompt exactly, and nothing else.
    """

    name = "scene_checker"
    uses_prompt = True
    licence = "this project's"
    range = "[0, 1]"
    compares_with = "nothing"  # but the prompt

    def reference(self, video: Tensor, prompt: str = "") -> dict[str, Tensor] | None:
        if prompt not in SCENES:
            raise ValueError(f"reward {self.name!r} knows the prompts of assets/tiny_images alone, got {prompt!r}")
        return {"prompt": torch.tensor(list(prompt.encode()), dtype=torch.uint8)}

    def forward(self, video: Tensor, batch: Sequence[Mapping[str, Tensor] | None]) -> RewardOutput:
        return score_clips(video.detach(), batch, self._judge, ("right",))

    def _judge(self, video: Tensor, reference: Mapping[str, Tensor]) -> tuple[Tensor | None, dict[str, float]]:
        if not video.isfinite().all():
            return None, {}
        scene = SCENES[bytes(reference["prompt"].tolist()).decode()]
        score, right = score_scene(scene, self.things_in(video[:, 0]))
        return video.new_tensor(score, dtype=torch.float32), {"right": float(right)}

    def things_in(self, image: Tensor) -> list[Thing]:
        """Return the patches of a colour in a picture (3, H, W) in [-1, 1] as objects."""
        pixels = ((image.float().clamp(-1, 1) + 1) / 2).permute(1, 2, 0).cpu()
        colours = torch.tensor(list(COLOURS.values()))
        distance = (pixels[:, :, None] - colours).norm(dim=-1)  # (H, W, colours)
        nearest = torch.where(distance.min(-1).values < NEAR, distance.argmin(-1), -1)
        height, width = nearest.shape
        things = []
        for i, colour in enumerate(COLOURS):
            mask = (nearest == i).to(torch.uint8).numpy()
            _, _, boxes, centres = cv2.connectedComponentsWithStats(mask, connectivity=4)
            for (_, top, box_width, box_height, area), (x, y) in zip(boxes[1:], centres[1:], strict=True):
                if area < SMALLEST * height * width:
                    continue
                filled, low = area / (box_width * box_height), (y + 0.5 - top) / box_height - 0.5
                shape = min(LOOKS, key=lambda name: hypot(LOOKS[name][0] - filled, 2 * (LOOKS[name][1] - low)))
                things.append(Thing(colour=colour, shape=shape, x=(x + 0.5) / width, y=(y + 0.5) / height))
        return things


def score_scene(scene: Scene, things: Sequence[Thing]) -> tuple[float, bool]:
    """Return SceneChecker's score of these objects, and whether they match the scene exactly."""
    expected, shown = Counter(scene.objects), Counter(thing.kind for thing in things)
    size, points = max(expected.total(), shown.total()), float((expected & shown).total())
    missing, extra = list((expected - shown).elements()), list((shown - expected).elements())
    extra += [("", "")] * len(missing)  # a missing object may have no similar one
    points += 0.5 * max(
        sum(a[0] == b[0] or a[1] == b[1] for a, b in zip(missing, similar, strict=True))
        for similar in permutations(extra, len(missing))
    )
    if scene.relation:
        first, second = ([thing for thing in things if thing.kind == kind] for kind in scene.objects)
        points += any(holds(scene.relation, a, b) for a in first for b in second)
        size += 1
    return points / size, points == size
