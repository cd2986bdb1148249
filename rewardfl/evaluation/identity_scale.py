"""Identity kept, with intervals, of the records of an evaluation."""

from collections.abc import Mapping, Sequence

import torch

from rewardfl.evaluation.intervals import Interval, ratio_interval
from rewardfl.evaluation.records import Record
from rewardfl.rewards.face import identity_kept
from rewardfl.rewards.face.identity_kept import ThroughVae


class IdentityScale(identity_kept.Scale):
    """Scale with 95 % bootstrap intervals. Resampling a person draws both its distance and its length."""

    def place(self, face_sim: Mapping[str, float]) -> Interval:
        """Return the position of FaceSim, by person, on the scale, with its interval over people."""
        return ratio_interval(self.distances(face_sim), self.lengths(list(face_sim)))

    def change(self, after: Mapping[str, float], before: Mapping[str, float]) -> Interval:
        """Return how far FaceSim moves on the scale. Both arguments hold the same people."""
        return ratio_interval(self.distances(after) - self.distances(before), self.lengths(list(after)))


def find_identity_scale(records: Sequence[Record], recogniser: str) -> IdentityScale | None:
    """Return the scale by records of real clips through the VAE; None where its mean length is not positive."""
    clips = [
        ThroughVae(
            person=record["person"],
            face_sim=record["figures"][f"{recogniser}/face_sim"],
            face=torch.tensor(record["embedding"][recogniser]),
            pool=torch.tensor(record["pool"][recogniser]),
        )
        for record in records
    ]
    scale = identity_kept.find_scale(clips)
    return None if scale is None else IdentityScale(scale.another, scale.through_vae)
