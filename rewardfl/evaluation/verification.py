"""Verification against other people's real pictures, and identity kept on the scale of photos; docs/evaluate.md."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from rewardfl import data
from rewardfl.rewards.face.identity_kept import Scale, ThroughVae, find_scale

FEWEST_OTHERS = 10  # other people
PASSING = 100  # of so many pictures of other people one may pass


class Faces(NamedTuple):
    """Embeddings of a person's real pictures. through_vae: of the same photos encoded and decoded, 0 for no face."""

    pictures: Tensor  # (n, D) unit vectors
    through_vae: Tensor  # (n, D); (0, D) for the frames of a clip, and without a VAE
    is_evaluated: bool  # else the person is of --others


@dataclass(frozen=True, kw_only=True)
class Verification:
    """By recogniser: cosines of other people's pictures by person, thresholds, and scales of photos."""

    impostors: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    thresholds: Mapping[str, float] = field(default_factory=dict)
    scales: Mapping[str, Scale] = field(default_factory=dict)
    missing: str = ""  # why there are none


UNMEASURED = Verification()


def why_too_few(people: int) -> str:
    """Return why other people are too few, and the remedy; "" for enough. people: of the table and of --others."""
    text = f"{FEWEST_OTHERS} other people are needed, and there are {people - 1}; name pictures of more by --others"
    return "" if people > FEWEST_OTHERS else text


def verify(recognisers: Mapping[str, Mapping[str, Faces]]) -> Verification:
    """Return the verification by recognisers, each with the pictures of the same people by name."""
    if missing := why_too_few(min(map(len, recognisers.values()))):
        return Verification(missing=missing)
    impostors = {name: impostor_cosines(people) for name, people in recognisers.items()}
    thresholds = {name: find_threshold(torch.cat([*cosines.values()])) for name, cosines in impostors.items()}
    scales = {name: scale for name, people in recognisers.items() if (scale := find_photo_scale(people))}
    return Verification(impostors=impostors, thresholds=thresholds, scales=scales)


def impostor_cosines(people: Mapping[str, Faces]) -> dict[str, Tensor]:
    """Return {evaluated person: cosines (n,) of all other people's pictures with the mean of the person's}."""
    return {
        name: torch.cat([other.pictures for other in people.values() if other is not faces]) @ faces.pictures.mean(0)
        for name, faces in people.items()
        if faces.is_evaluated
    }


def find_threshold(cosines: Tensor) -> float:
    """Return the smallest of the (n,) cosines of other people that at most one in PASSING exceeds."""
    return float(cosines.sort(descending=True).values[len(cosines) // PASSING])


def equal_error_rate(own: Tensor, others: Tensor) -> float:
    """Return the mean of the shares of own cosines (n,) rejected and of others' (m,) passed, where they are closest."""
    levels = torch.cat([own, others]).unique()
    below = [torch.searchsorted(part.sort().values, levels, right=True) / len(part) for part in (own, others)]
    rejected, passed = below[0], 1 - below[1]
    nearest = (rejected - passed).abs().argmin()
    return float((rejected + passed)[nearest] / 2)


def find_photo_scale(people: Mapping[str, Faces]) -> Scale | None:
    """Return the scale of people with photos: 0 is other people's photos, 1 each photo against the person's others.

    All have been through the VAE. One photo takes the median upper end of the people with several. None without such
    people, or without length.
    """
    measured = {name: faces for name, faces in people.items() if len(faces.through_vae)}
    ends = dict[str, Tensor]()
    for name, faces in measured.items():
        cosines = (faces.through_vae @ faces.pictures.T).fill_diagonal_(torch.nan)
        ends |= {name: cosines.nanmean()} if faces.is_evaluated else {}
    if not ends or (upper := torch.stack([*ends.values()])).isnan().all():
        return None
    filled = upper.nan_to_num(float(upper.nanquantile(0.5))).tolist()
    means = {name: (faces.through_vae.mean(0), faces.pictures.mean(0)) for name, faces in measured.items()}
    clips = [
        ThroughVae(person=name, face_sim=end, face=means[name][0], pool=means[name][1])
        for name, end in zip(ends, filled, strict=True)
    ]
    return find_scale(clips, [face for name, (face, _) in means.items() if name not in ends])


def load_others(path: Path | None, rows: Sequence[data.Row]) -> list[data.Row]:
    """Return the people of --others: a table, a folder of folders of pictures, or of pictures. None of the rows' files.

    Raise DataError where none is left.
    """
    if path is None:
        return []
    table, known = f"--others ({path})", {file.resolve() for row in rows for file in row.files.values() if file}
    people = [data.photo_files(folder.name, path) for folder in sorted(path.glob("*/"))]
    people = people or [(photo,) for photo in data.photo_files(".", path)]
    others = [
        data.Row(index=i, line=i + 1, id=str(i), video=None, prompt="", photos=photos, table=table)
        for i, photos in enumerate(people)
        if photos
    ]
    others = data.load_metadata(path, "--others") if path.is_file() else others
    others = [row for row in others if known.isdisjoint(file.resolve() for file in row.files.values() if file)]
    if not others:
        raise data.DataError(f"{table}: no pictures of other people; name a folder of them, or of a folder for each")
    return others
