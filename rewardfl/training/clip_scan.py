"""Read clips once: hashes, references of the rewards, problems by row."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from rewardfl import data, files
from rewardfl.config import DataConfig
from rewardfl.data.cache import Cache, Key, digest
from rewardfl.rewards import Reward
from rewardfl.rewards.base import PhotoError, Reference
from rewardfl.training.samples import Sample
from rewardfl.training.shard import Gather, Shard, map_shared, read_entry


def load_video(settings: DataConfig, row: data.Row) -> Tensor:
    """Read the row's clip (3, F, H, W) at the configured size. The row must name a video."""
    video = load_sized_example(settings, row).video
    assert video is not None, f"{row.id} has no video"
    return video


def load_sized_example(settings: DataConfig, row: data.Row) -> data.Example:
    """Read the row's clips at the configured size."""
    size = (settings.height, settings.width, settings.num_frames)
    return data.load_example(row, *size, max_pixels=settings.max_pixels, fps=settings.fps)


def hash_files(rows: Sequence[data.Row], share: Shard, gather: Gather) -> dict[Path, str]:
    """Return {file of the rows: sha256} on every process. One process reads each file."""
    paths = list(dict.fromkeys(path for row in rows for path in row.files.values() if path is not None))
    return dict(zip(paths, map_shared(files.sha256, paths, share, gather, "files"), strict=True))


def clip_key(row: data.Row, hashes: Mapping[Path, str], size: Mapping[str, float | None]) -> Key:
    """Return the cache key of the row's clip as load_example reads it.

    hashes: sha256 by file. size: height, width, num_frames, max_pixels, fps; the row's own height and width win.
    """
    row_size = {} if row.size is None else {"height": row.size[0], "width": row.size[1]}
    contents = {name: hashes[path] if path else None for name, path in row.files.items()}
    return {"kind": "clip", **contents, **size, **row_size}


def reference_key(clip: Key, reward: Reward, prompt: str) -> Key:
    key = {"kind": "checked_reference", "clip": digest(clip), "reward": reward.fingerprint()}
    return key | {"prompt": prompt} if reward.uses_prompt else key


@dataclass(frozen=True)
class ClipScan:
    """Result of reading one row's files, gathered on all processes."""

    line: int  # line of the row
    problem: str = ""  # why the row cannot be trained on
    skipped: str = ""  # photos that are left out, and why
    size: tuple[int, int] | None = None  # height and width of the generated video; None with a problem


def scan_clips(
    store: Cache,
    rows: Sequence[data.Row],
    keys: Mapping[int, Key],
    load: Callable[[data.Row], data.Example],
    rewards: Sequence[Reward],
    device: torch.device,
    share: Shard,
    *,
    skip_photos: bool,
) -> list[ClipScan]:
    """Read this process's shard of the clips, and store their references of the rewards.

    keys: clip_key by the row's line. A row has a problem if a file cannot be used, or if the first reward finds no
    reference in its clip. skip_photos: leave out unusable photos. A clip is decoded only if the cache lacks an entry.
    """
    clips: dict[tuple, list[data.Row]] = defaultdict(list)
    for row in rows:  # several prompts may share a clip
        clips[(*row.files.values(), row.size)].append(row)
    scans = []
    for same_clip in tqdm(share.take(clips.values()), desc="clips", disable=share.quiet):
        clip = keys[same_clip[0].line]
        try:
            _store_references(store, same_clip, clip, load, rewards, device)
        except data.DataError as error:
            scans += [ClipScan(row.line, str(error)) for row in same_clip]
        else:
            scans += [_scan_row(store, row, clip, rewards, skip_photos=skip_photos) for row in same_clip]
    return scans


def _store_references(
    store: Cache,
    rows: Sequence[data.Row],
    clip: Key,
    load: Callable[[data.Row], data.Example],
    rewards: Sequence[Reward],
    device: torch.device,
) -> None:
    """Store the entries of a clip that the cache lacks: its image or size, and its rows' references of the rewards."""
    references = {
        digest(key): (row, key, reward)  # rows with one prompt share it
        for row in rows
        for reward in rewards
        if reward.compares_with in row.offers and store.get(key := reference_key(clip, reward, row.prompt)) is None
    }
    if not references and store.get(clip) is not None:
        return
    example, photos = load(rows[0]), [photo.to(device) for photo in data.load_pictures(rows[0])]
    video = example.reference.to(device)
    for row, key, reward in references.values():
        reference, problems = make_reference(reward, row, video, photos)
        bad = "; ".join(f"{row.checked_pictures[i]}: {why}" for i, why in sorted(problems.items()))
        values = {f"reference.{name}": value for name, value in (reference or {}).items()}
        values["usable"] = torch.tensor(reference is not None)
        values["input_usable"] = torch.tensor(max(problems, default=-1) < len(row.pictures))
        values["skipped"] = torch.tensor(list(bad.encode()), dtype=torch.uint8)
        store.put(key, values)
    store.put(clip, {"size": torch.tensor(example.size)} if example.image is None else {"image": example.image})


def _scan_row(store: Cache, row: data.Row, clip: Key, rewards: Sequence[Reward], *, skip_photos: bool) -> ClipScan:
    """Return a row's result from the cache. It must have a reference of the first reward, if that compares with it."""
    entry, skipped = read_entry(store, clip), ""
    height, width = entry["image"].shape[1:] if "image" in entry else entry["size"].tolist()
    if rewards and rewards[0].compares_with in row.offers:
        entry = read_entry(store, reference_key(clip, rewards[0], row.prompt))
        skipped = bytes(entry["skipped"].tolist()).decode()
        if not (entry["usable"] and entry["input_usable"]) or (skipped and not skip_photos):
            return ClipScan(row.line, problem=skipped or f"{rewards[0].nothing_found} {row.reference}")
    return ClipScan(row.line, skipped=skipped, size=(height, width))


def make_reference(
    reward: Reward, row: data.Row, video: Tensor, photos: Sequence[Tensor]
) -> tuple[Reference, dict[int, str]]:
    """Return the row's reference of a reward, and {place in Row.checked_pictures of an unusable photo: why}.

    video: Example.reference. photos: data.load_pictures; without its last one the model's input is not checked.
    """
    if not photos or reward.compares_with != "picture":
        return reward.reference(video, row.prompt), {}
    reference: Reference = None
    usable, problems, count = dict(enumerate(photos)), dict[int, str](), len(row.pictures)
    while any(i < count for i in usable):
        try:
            for shown in (len(photos), count):  # the model's input is checked, and not compared with
                compared = [photo for i, photo in usable.items() if i < shown]
                reference = reward.reference_from_photos(compared, row.prompt)
            break
        except PhotoError as error:
            places, reference = [*usable], None
            problems |= {places[i]: why for i, why in error.problems.items()}
            usable = {i: photo for i, photo in usable.items() if i not in problems}
    if "clip" in row.offers:
        reference = reward.with_motion(reference, video, row.prompt)
    return reference, problems


def average_motion(
    reward: Reward, reference: Reference, videos: Sequence[Tensor], prompt: str
) -> dict[str, Tensor] | None:
    """Return what Reward.with_motion changes in a reference, means over the videos; None where none can be used."""
    results = [reward.with_motion(reference, video, prompt) for video in videos]
    changes = [
        {name: value for name, value in result.items() if reference is None or value is not reference.get(name)}
        for result in results
        if result is not None
    ]
    names = dict.fromkeys(name for change in changes for name in change)
    means = {name: torch.stack([c[name].float() for c in changes if name in c]).nanmean(0) for name in names}
    return means if changes else None


def load_samples(
    store: Cache,
    rows: Sequence[data.Row],
    keys: Mapping[int, Key],
    scans: Sequence[ClipScan],
    rewards: Sequence[Reward],
) -> list[Sample]:
    """Return the usable rows as samples, with the cached references. scans: of all processes."""

    def read(reward: Reward, row: data.Row) -> Reference:
        if reward.compares_with not in row.offers:
            return None
        entry = read_entry(store, reference_key(keys[row.line], reward, row.prompt))
        values = {name.removeprefix("reference."): value for name, value in entry.items() if "." in name}
        return values if entry["usable"] else None

    sizes = {scan.line: scan.size for scan in scans if scan.size is not None}
    columns = [reward.complete([read(reward, row) for row in rows]) for reward in rewards]
    return [
        Sample(row=row, clip=keys[row.line], size=sizes[row.line], references=tuple(column[i] for column in columns))
        for i, row in enumerate(rows)
    ]
