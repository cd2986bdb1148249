"""Scenes of coloured shapes on a light ground: all prompts, their scenes, and pictures of them."""

import zlib
from dataclasses import dataclass
from itertools import combinations, permutations, product

import torch
from torch import Tensor

SIZE = 32  # pixels on a side
COLOURS = {"red": (0.85, 0.12, 0.12), "green": (0.1, 0.62, 0.2), "blue": (0.15, 0.25, 0.85), "yellow": (0.95, 0.8, 0.1)}
SHAPES = ("circle", "square", "triangle")
NUMBERS = {"a": 1, "two": 2, "three": 3}
# of the first object to the second: the axis, and the sign of the difference of their coordinates
RELATIONS = {"left of": ("x", -1), "right of": ("x", 1), "above": ("y", -1), "below": ("y", 1)}
APART = 0.2  # of the side: minimum distance of two related objects along the relation's axis; drawn ones, half more
RADII = (0.125, 0.175)  # of the side
SHARES = {"one": 0.1, "number": 0.25, "two": 0.15, "relation": 0.5}  # of the pictures drawn, by the kind of prompt


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

    @property
    def form(self) -> str:
        """Return the kind of prompt, a key of SHARES."""
        if self.relation:
            return "relation"
        if len(self.objects) == 2:
            return "two"
        return "one" if sum(self.objects.values()) == 1 else "number"


def all_scenes() -> list[Scene]:
    """Return every scene that has a prompt, in a fixed order."""
    kinds = list(product(COLOURS, SHAPES))
    pairs = list(permutations(kinds, 2))
    scenes = [
        Scene(f"{word} {colour} {shape}{'s' if count > 1 else ''}", {(colour, shape): count})
        for (word, count), (colour, shape) in product(NUMBERS.items(), kinds)
    ]
    scenes += [Scene(f"a {' '.join(a)} and a {' '.join(b)}", {a: 1, b: 1}) for a, b in pairs]
    scenes += [
        Scene(f"a {' '.join(a)} {relation} a {' '.join(b)}", {a: 1, b: 1}, relation)
        for (a, b), relation in product(pairs, RELATIONS)
    ]
    return scenes


SCENES = {scene.prompt: scene for scene in all_scenes()}


def is_held_out(prompt: str) -> bool:
    """Return whether training excludes the prompt: one in five, never a single object, which teaches the words."""
    return SCENES[prompt].form != "one" and zlib.crc32(prompt.encode()) % 5 == 0


def _uniform(low: float, high: float, generator: torch.Generator) -> float:
    return low + (high - low) * torch.rand((), generator=generator).item()


def _is_valid(things: list[Thing], relation: str) -> bool:
    """Return whether no objects overlap, and the relation holds with a margin."""
    for a, b in combinations(things, 2):
        if max(abs(a.x - b.x), abs(a.y - b.y)) < 2.2 * RADII[1]:
            return False
    return not relation or holds(relation, things[0], things[1], 1.5 * APART)


def holds(relation: str, first: Thing, second: Thing, apart: float = APART) -> bool:
    """Return whether the relation holds: at least `apart` along its axis, and more than across it."""
    axis, sign = RELATIONS[relation]
    along, across = first.x - second.x, first.y - second.y
    if axis == "y":
        along, across = across, along
    return sign * along >= apart and abs(along) > abs(across)


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


def draw_scenes(count: int, generator: torch.Generator, held_out: bool = False) -> tuple[list[Scene], Tensor]:
    """Return random scenes, to train on or held out, and their pictures (count, 3, SIZE, SIZE)."""
    scenes, places = draw_places(count, generator, held_out)
    return scenes, torch.stack([draw_scene(things, generator) for things in places])


def draw_places(
    count: int, generator: torch.Generator, held_out: bool = False
) -> tuple[list[Scene], list[list[Thing]]]:
    """Return random scenes in the shares of SHARES, and the objects of each."""
    pools: dict[str, list[Scene]] = {form: [] for form in SHARES}
    for scene in SCENES.values():
        if is_held_out(scene.prompt) == held_out:
            pools[scene.form].append(scene)
    forms = [form for form in SHARES if pools[form]]
    drawn = torch.multinomial(torch.tensor([SHARES[form] for form in forms]), count, True, generator=generator)
    scenes = []
    for i in drawn.tolist():
        pool = pools[forms[i]]
        scenes.append(pool[int(torch.randint(len(pool), (), generator=generator))])
    return scenes, [place_things(scene, generator) for scene in scenes]
