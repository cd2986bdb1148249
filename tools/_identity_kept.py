"""Identity kept: FaceSim on a scale that means the same for every recogniser (docs/evaluate.md)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from rewardfl_tools._intervals import Interval, ratio
from rewardfl_tools._records import Record

FEWEST = 8  # people that the scale takes: the lower end is a mean over the others


@dataclass(frozen=True)
class Scale:
    """The ends of a recogniser's scale, FaceSim by person.

    another: of the other people's real clips through the VAE, 0 on the scale. through_vae: of the person's own, 1.
    """

    another: Mapping[str, float]
    through_vae: Mapping[str, float]

    def place(self, face_sim: Mapping[str, float]) -> Interval:
        """Return the place of FaceSim, by person, on the scale, with its 95 % bootstrap interval over people.

        It is the mean distance from another person over the mean length of the scale. A person is drawn for both.
        """
        lengths = self._lengths(list(face_sim))
        distances = torch.tensor([value - self.another[person] for person, value in face_sim.items()])
        return ratio(distances, lengths)

    def change(self, after: Mapping[str, float], before: Mapping[str, float]) -> Interval:
        """Return how far FaceSim moves on the scale. after, before: of the same people."""
        return ratio(torch.tensor([after[person] - before[person] for person in after]), self._lengths(list(after)))

    def _lengths(self, people: Sequence[str]) -> torch.Tensor:
        return torch.tensor([self.through_vae[person] - self.another[person] for person in people])


def find_scale(records: Sequence[Record], recogniser: str) -> Scale | None:
    """Return the scale by records of real clips through the VAE; None where it has no length in the mean.

    A person's clips count as one: their mean embedding is what the others' pools are compared with.
    """
    people: dict[str, list[Record]] = {}
    for record in records:
        people.setdefault(record["person"], []).append(record)
    faces, pools = (
        torch.stack([torch.tensor([record[key][recogniser] for record in clips]).mean(0) for clips in people.values()])
        for key in ("embedding", "pool")
    )
    similarities = pools @ faces.T  # (people, people): of a row's pool and a column's clip
    others = (similarities.sum(1) - similarities.diagonal()) / (len(people) - 1)
    ceilings = [
        sum(record["figures"][f"{recogniser}/face_sim"] for record in clips) / len(clips) for clips in people.values()
    ]
    if torch.tensor(ceilings).mean() <= others.mean():
        return None
    return Scale(dict(zip(people, others.tolist(), strict=True)), dict(zip(people, ceilings, strict=True)))


def why_no_scale(people: int, is_whole: bool) -> str:
    """Return why no recogniser can have a scale, empty where each may.

    is_whole: whether each real clip has been through the VAE.
    """
    if people < FEWEST:
        return f"it takes {FEWEST} people, and there are {people}"
    return "" if is_whole else "there is no model whose VAE the real clips could go through"
