"""Identity kept: FaceSim on a scale from another person (0) to the person through the VAE (1); docs/evaluate.md."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FEWEST = 8  # people that the scale needs: its lower end is a mean over the other people


@dataclass(frozen=True)
class Scale:
    """The ends of a recogniser's scale, FaceSim by person.

    another: of the other people's real clips through the VAE, 0 on the scale. through_vae: of the person's, 1.
    """

    another: Mapping[str, float]
    through_vae: Mapping[str, float]

    def place_mean(self, face_sim: Mapping[str, float]) -> float:
        """Return the place of FaceSim, by person, on the scale: mean distance from its start over mean length."""
        return float(self.distances(face_sim).mean() / self.lengths(list(face_sim)).mean())

    def distances(self, face_sim: Mapping[str, float]) -> Tensor:
        """Return how far each person's FaceSim is from the other people's, (people,)."""
        return torch.tensor([value - self.another[person] for person, value in face_sim.items()])

    def lengths(self, people: Sequence[str]) -> Tensor:
        """Return the length of the scale for each person, (people,)."""
        return torch.tensor([self.through_vae[person] - self.another[person] for person in people])


@dataclass(frozen=True, kw_only=True)
class ThroughVae:
    """A real clip through the VAE. face_sim: with the row's own pool; face, pool: mean embeddings (D,)."""

    person: str
    face_sim: float
    face: Tensor
    pool: Tensor


def find_scale(clips: Sequence[ThroughVae], others: Sequence[Tensor] = ()) -> Scale | None:
    """Return the scale of one recogniser; None where it has no length in the mean.

    A person's clips count as one: their mean embedding is what the others' pools are compared with. others: mean
    embeddings (D,) of further people, who have no place on the scale.
    """
    people: dict[str, list[ThroughVae]] = {}
    for clip in clips:
        people.setdefault(clip.person, []).append(clip)
    faces = torch.stack([torch.stack([clip.face for clip in group]).mean(0) for group in people.values()])
    pools = torch.stack([torch.stack([clip.pool for clip in group]).mean(0) for group in people.values()])
    similarities = pools @ torch.stack([*faces, *others]).T  # (people, people and others): pool and face
    floors = (similarities.sum(1) - similarities.diagonal()) / (len(people) + len(others) - 1)
    ceilings = [sum(clip.face_sim for clip in group) / len(group) for group in people.values()]
    if torch.tensor(ceilings).mean() <= floors.mean():
        return None
    return Scale(dict(zip(people, floors.tolist(), strict=True)), dict(zip(people, ceilings, strict=True)))


def why_no_scale(people: int, missing: str) -> str:
    """Return why no recogniser can have a scale, or "". missing: why a clip has not been through the VAE, or ""."""
    return missing if people >= FEWEST else f"it takes {FEWEST} people, and there are {people}"
