"""Verification against other people's real pictures, and identity kept on the scale of photos; docs/evaluate.md."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from rewardfl import data
from rewardfl.rewards.face.identity_kept import Scale, ThroughVae, find_scale

FEWEST_OTHERS = 10  # other people
PASSING = 100  # one in so many pictures of other people may pass


class PersonFaces(NamedTuple):
    """Embeddings of a person's real pictures. through_vae: of the same photos encoded and decoded, 0 for no face."""

    pictures: Tensor  # (n, D) unit vectors
    through_vae: Tensor = torch.zeros(0, 1)  # (n, D); empty for the frames of a clip, and without a VAE


People = dict[str, dict[str, PersonFaces]]  # by recogniser and person


@dataclass(frozen=True, kw_only=True)
class Verification:
    """By recogniser: cosines (n,) of other people's pictures with all pools, their threshold, the scale of photos."""

    impostors: Mapping[str, Tensor] = field(default_factory=dict)
    thresholds: Mapping[str, float] = field(default_factory=dict)
    scales: Mapping[str, Scale] = field(default_factory=dict)
    missing: str = ""  # why there are none


UNMEASURED = Verification()


def verify_arms(people: People, evaluated: Collection[str]) -> Verification:
    """Return the verification of the evaluated people, by each recogniser."""
    if (others := min(map(len, people.values())) - 1) < FEWEST_OTHERS:
        text = f"{FEWEST_OTHERS} other people are needed, and there are {others}; name pictures of more by --others"
        return Verification(missing=text)
    evaluated = [name for name in evaluated if all(name in faces for faces in people.values())]
    impostors = {name: impostor_cosines(faces, evaluated) for name, faces in people.items()}
    scales = {name: find_photo_scale(faces, evaluated) for name, faces in people.items()}
    return Verification(
        impostors=impostors,
        thresholds={name: find_threshold(cosines) for name, cosines in impostors.items()},
        scales={name: scale for name, scale in scales.items() if scale is not None},
    )


def impostor_cosines(people: Mapping[str, PersonFaces], evaluated: Collection[str]) -> Tensor:
    """Return the cosines (n,) of each evaluated person's mean picture with all other people's pictures."""
    means = {name: people[name].pictures.mean(0) for name in evaluated}
    return torch.cat([people[n].pictures @ mean for name, mean in means.items() for n in people if n != name])


def find_threshold(cosines: Tensor) -> float:
    """Return the smallest of the (n,) cosines of other people that at most one in PASSING exceeds."""
    return float(cosines.sort(descending=True).values[len(cosines) // PASSING])


def equal_error_rate(genuine: Tensor, impostors: Tensor) -> float:
    """Return the mean of the shares of genuine cosines (n,) rejected and of impostors' (m,) passed, when closest."""
    parts = [cosines.double().sort().values for cosines in (genuine, impostors)]
    levels = torch.cat(parts).unique()
    rejected, missed = (torch.searchsorted(part, levels, right=True) / len(part) for part in parts)
    return float((rejected + 1 - missed)[(rejected - 1 + missed).abs().argmin()] / 2)


def find_photo_scale(people: Mapping[str, PersonFaces], evaluated: Collection[str]) -> Scale | None:
    """Return the scale of people with photos, all through the VAE; None without people with several, or length.

    0 is other people's photos, 1 each photo against the person's others; one photo takes the median of these ends.
    """
    photos = {name: faces for name, faces in people.items() if len(faces.through_vae)}
    names, drawn = [name for name in photos if name in evaluated], {n: photos[n].through_vae.mean(0) for n in photos}
    cosines = [(photos[n].through_vae @ photos[n].pictures.T).fill_diagonal_(torch.nan).nanmean() for n in names]
    if not names or (ends := torch.stack(cosines)).isnan().all():
        return None
    clips = [
        ThroughVae(person=name, face_sim=end, face=drawn[name], pool=photos[name].pictures.mean(0))
        for name, end in zip(names, ends.nan_to_num(float(ends.nanquantile(0.5))).tolist(), strict=True)
    ]
    return find_scale(clips, [drawn[name] for name in photos if name not in evaluated])


def load_others(path: Path | None, rows: Sequence[data.Row]) -> list[data.Row]:
    """Return the people of --others, a table or a folder, but not the rows' people. Raise DataError without any."""
    if path is None:
        return []
    folders = [photos for folder in sorted(path.glob("*/")) if (photos := data.photo_files(folder.name, path))]
    pictures = folders or [(photo,) for photo in data.photo_files(".", path)]
    row = data.Row(index=0, line=1, id="", video=None, prompt="", table="--others")
    people = [replace(row, line=i, photos=photos) for i, photos in enumerate(pictures, 1)]
    people = data.load_metadata(path, "--others") if path.is_file() else people
    files = {file.resolve() for row in rows for file in row.files.values() if file}
    others = [row for row in people if files.isdisjoint(file.resolve() for file in row.files.values() if file)]
    if not others:
        raise data.DataError(f"--others: {path} shows no other people; name a folder of pictures, or of folders")
    return [replace(row, person=f"--others: {row.who}") for row in others]
