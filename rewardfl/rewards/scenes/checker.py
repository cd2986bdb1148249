"""Does the picture show what the prompt says? A checker in the manner of GenEval, by rules: colours, shapes, places.

Ghosh et al. 2023, arXiv 2310.11513: objects are found, counted, and their colours and places compared with the prompt.
Here they are found as connected patches of a colour, and told apart by how they fill their box.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import permutations
from math import hypot

import cv2
import torch
from torch import Tensor

from rewardfl.rewards import Reward, RewardOutput
from rewardfl.rewards.base import by_sample
from rewardfl.rewards.scenes.drawing import COLOURS, SCENES, Scene, Thing, holds

SMALLEST = 0.015  # of the picture's area: less is a speck, and no object

# how much of its box a shape fills, and how far below the box's middle its own lies, by the box's height
LOOKS = {"triangle": (0.55, 0.12), "circle": (0.8, 0.0), "square": (1.0, 0.0)}

NEAR = 0.35  # of a colour, as a distance in RGB; beyond it a pixel is ground


class SceneChecker(Reward):
    """The share of what the prompt asks for that the picture shows, from 0 to 1.

    A point for each object that is wanted and found, half of one where only its colour or only its shape is found, one
    for the relation; over the number of objects wanted, or found, whichever is more, and one for the relation. So it is
    graded, as the reward that Flow-GRPO trains on is (arXiv 2505.05470, 4.1), where GenEval says right or wrong, which
    is the part `right`: everything as the prompt says, and nothing else.
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
        return by_sample(video.detach(), batch, self._judge, ("right",))

    def _judge(self, video: Tensor, reference: Mapping[str, Tensor]) -> tuple[Tensor | None, dict[str, float]]:
        if not video.isfinite().all():
            return None, {}
        scene = SCENES[bytes(reference["prompt"].tolist()).decode()]
        score, right = judged(scene, self.things_in(video[:, 0]))
        return video.new_tensor(score, dtype=torch.float32), {"right": float(right)}

    def things_in(self, image: Tensor) -> list[Thing]:
        """The objects of a picture (3, H, W) in [-1, 1]."""
        return find_things(image)


def judged(scene: Scene, things: Sequence[Thing]) -> tuple[float, bool]:
    """SceneChecker's score of these objects, and whether all is right."""
    wanted, found = Counter(scene.wanted), Counter(thing.kind for thing in things)
    size, points = max(wanted.total(), found.total()), float((wanted & found).total())
    missing, others = list((wanted - found).elements()), list((found - wanted).elements())
    nobody = [("", "")] * len(missing)  # some may be left without one that is like them
    points += 0.5 * max(
        sum(a[0] == b[0] or a[1] == b[1] for a, b in zip(missing, chosen, strict=True))
        for chosen in permutations(others + nobody, len(missing))
    )
    if scene.relation:
        first, second = ([thing for thing in things if thing.kind == kind] for kind in scene.wanted)
        points += any(holds(scene.relation, a, b) for a in first for b in second)
        size += 1
    return points / size, points == size


def find_things(image: Tensor) -> list[Thing]:
    """Patches of a colour in a picture (3, H, W) in [-1, 1], the shape by how a patch fills its box."""
    pixels = ((image.float().clamp(-1, 1) + 1) / 2).permute(1, 2, 0).cpu()
    colours = torch.tensor(list(COLOURS.values()))
    distance = (pixels[:, :, None] - colours).norm(dim=-1)  # (H, W, colours)
    nearest = torch.where(distance.min(-1).values < NEAR, distance.argmin(-1), -1)
    height, width = nearest.shape
    found = []
    for i, colour in enumerate(COLOURS):
        mask = (nearest == i).to(torch.uint8).numpy()
        _, _, boxes, middles = cv2.connectedComponentsWithStats(mask, connectivity=4)
        for box, (x, y) in zip(boxes[1:], middles[1:], strict=True):
            _, top, across, down, area = box
            if area < SMALLEST * height * width:
                continue
            filled, low = area / (across * down), (y + 0.5 - top) / down - 0.5
            shape = min(LOOKS, key=lambda one: hypot(LOOKS[one][0] - filled, 2 * (LOOKS[one][1] - low)))
            found.append(Thing(colour, shape, (x + 0.5) / width, (y + 0.5) / height))
    return found
