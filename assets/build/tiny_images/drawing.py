"""Pictures of the scenes: coloured shapes on a light ground."""

import zlib
from itertools import combinations

import torch
from torch import Tensor

from rewardfl.rewards.scenes.checker import APART, COLOURS, SCENES, Scene, Thing, holds

SIZE = 32  # pixels on a side
RADII = (0.125, 0.175)  # of the side
SHARES = {"one": 0.1, "number": 0.25, "two": 0.15, "relation": 0.5}  # of the pictures drawn, by the kind of prompt


def form(scene: Scene) -> str:
    """Return the kind of prompt, a key of SHARES."""
    if scene.relation:
        return "relation"
    if len(scene.objects) == 2:
        return "two"
    return "one" if sum(scene.objects.values()) == 1 else "number"


def is_held_out(prompt: str) -> bool:
    """Return whether training excludes the prompt: one in five, never a single object, which teaches the words."""
    return form(SCENES[prompt]) != "one" and zlib.crc32(prompt.encode()) % 5 == 0


def _uniform(low: float, high: float, generator: torch.Generator) -> float:
    return low + (high - low) * torch.rand((), generator=generator).item()


def _is_valid(things: list[Thing], relation: str) -> bool:
    """Return whether no objects overlap, and the relation holds with a margin."""
    for a, b in combinations(things, 2):
        if max(abs(a.x - b.x), abs(a.y - b.y)) < 2.2 * RADII[1]:
            return False
    return not relation or holds(relation, things[0], things[1], 1.5 * APART)


def place_things(scene: Scene, generator: torch.Generator) -> list[Thing]:
    """Draw random positions of the scene's objects until they fit it."""
    kinds = [kind for kind, count in scene.objects.items() for _ in range(count)]
    low, high = RADII[1] + 0.02, 1 - (RADII[1] + 0.02)
    while True:
        things = [
            Thing(colour=colour, shape=shape, x=_uniform(low, high, generator), y=_uniform(low, high, generator))
            for colour, shape in kinds
        ]
        if _is_valid(things, scene.relation):
            return things


def draw_scene(things: list[Thing], generator: torch.Generator) -> Tensor:
    """Return a picture (3, SIZE, SIZE) in [-1, 1] with random sizes, shades and ground."""
    fine = 4 * SIZE  # four samples per pixel and axis, for smooth edges
    grid = (torch.arange(fine) + 0.5) / fine
    y, x = grid[:, None], grid[None, :]
    image = torch.full((3, fine, fine), _uniform(0.86, 1.0, generator))
    for thing in things:
        radius = _uniform(*RADII, generator)
        dx, dy = (x - thing.x) / radius, (y - thing.y) / radius
        if thing.shape == "circle":
            inside = dx**2 + dy**2 < 1
        elif thing.shape == "square":
            inside = torch.maximum(dx.abs(), dy.abs()) < 0.88
        else:  # a triangle on its base
            inside = (dy < 0.85) & (dx.abs() < (dy + 1.0) * 0.58)
        shade = torch.tensor(COLOURS[thing.colour]) + 0.05 * (torch.rand(3, generator=generator) - 0.5)
        image = torch.where(inside, shade[:, None, None], image)
    small = torch.nn.functional.avg_pool2d(image[None], 4)[0]
    return small.clamp(0, 1) * 2 - 1


def draw_scenes(count: int, generator: torch.Generator, *, held_out: bool = False) -> tuple[list[Scene], Tensor]:
    """Return random scenes, to train on or held out, and their pictures (count, 3, SIZE, SIZE)."""
    scenes, places = draw_places(count, generator, held_out=held_out)
    return scenes, torch.stack([draw_scene(things, generator) for things in places])


def draw_places(
    count: int, generator: torch.Generator, *, held_out: bool = False
) -> tuple[list[Scene], list[list[Thing]]]:
    """Return random scenes in the shares of SHARES, and the objects of each."""
    pools: dict[str, list[Scene]] = {kind: [] for kind in SHARES}
    for scene in SCENES.values():
        if is_held_out(scene.prompt) == held_out:
            pools[form(scene)].append(scene)
    kinds = [kind for kind in SHARES if pools[kind]]
    drawn = torch.multinomial(
        torch.tensor([SHARES[kind] for kind in kinds]), count, replacement=True, generator=generator
    )
    scenes = []
    for i in drawn.tolist():
        pool = pools[kinds[i]]
        scenes.append(pool[int(torch.randint(len(pool), (), generator=generator))])
    return scenes, [place_things(scene, generator) for scene in scenes]
