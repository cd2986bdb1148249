"""Read clips once: hashes, references of the rewards, problems by row."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from rewardfl import data, files
from rewardfl.config import AnyConfig
from rewardfl.data import cache
from rewardfl.data.cache import Cache, Key
from rewardfl.rewards import Reward
from rewardfl.training.samples import Sample
from rewardfl.training.shard import Gather, Shard, map_shared, read_entry

# Clips and rewards


def load_sized_example(cfg: AnyConfig, row: data.Row) -> data.Example:
    """The row's clips, at the configured size."""
    size = (cfg.data.height, cfg.data.width, cfg.data.num_frames)
    return data.load_example(row, *size, max_pixels=cfg.data.max_pixels, fps=cfg.data.fps)


Number = int | float | None


def hash_files(rows: Sequence[data.Row], share: Shard, gather: Gather) -> tuple[dict[Path, str], dict[Path, str]]:
    """({file that the rows name: sha256}, {file that cannot be read: why}) on every process, each file read by one."""
    paths = list(dict.fromkeys(path for row in rows for path in row.files.values() if path is not None))
    found = dict(zip(paths, map_shared(_hash_file, paths, share, gather, "files"), strict=True))
    return {p: hashed for p, (hashed, _) in found.items() if hashed}, {p: why for p, (_, why) in found.items() if why}


def _hash_file(path: Path) -> tuple[str, str]:
    """(sha256, "") or ("", why there is none)."""
    try:
        return files.sha256(path), ""
    except OSError as error:
        return "", f"{path}: cannot be read ({error.strerror})"


def clip_key(row: data.Row, hashes: Mapping[Path, str], size: Mapping[str, Number]) -> Key:
    """The key of the row's clip as load_example reads it.

    hashes: of the row's files. size: height, width, num_frames, max_pixels, fps; the row's own height and width count
    instead.
    """
    own = {} if row.size is None else {"height": row.size[0], "width": row.size[1]}
    return {"kind": "clip", **{name: hashes[path] if path else None for name, path in row.files.items()}, **size, **own}


def reference_key(clip: Key, reward: Reward, prompt: str) -> Key:
    key = {"kind": "reference", "clip": cache.digest(clip), "reward": reward.fingerprint()}
    return key | {"prompt": prompt} if reward.uses_prompt else key


@dataclass(frozen=True)
class ClipScan:
    """What reading a row's files has shown; every process is told of every row's."""

    line: int  # the row's
    problem: str = ""  # that keeps it from being trained on
    size: tuple[int, int] | None = None  # height and width that it is generated at; None with a problem


def scan_clips(
    store: Cache,
    rows: Sequence[data.Row],
    keys: Mapping[int, Key],
    load: Callable[[data.Row], data.Example],
    rewards: Sequence[Reward],
    device: torch.device,
    share: Shard,
) -> list[ClipScan]:
    """Read this process's share of the clips, keep what the rewards need of them.

    keys: clip_key by the row's line. load: data.load_example. A row with a problem cannot be trained on: a file cannot
    be used, or the first of the rewards finds nothing to compare with in its clip.
    """
    clips: dict[tuple, list[data.Row]] = {}
    for row in rows:  # several may be of the same clip, under other prompts
        clips.setdefault((*row.files.values(), row.size), []).append(row)
    return [
        found
        for alike in tqdm(share.of(clips.values()), desc="clips", disable=share.quiet)
        for found in _read_clip(store, alike, keys[alike[0].line], load, rewards, device)
    ]


def _read_clip(
    store: Cache,
    rows: Sequence[data.Row],
    clip: Key,
    load: Callable[[data.Row], data.Example],
    rewards: Sequence[Reward],
    device: torch.device,
) -> list[ClipScan]:
    """What is found of rows of one clip, which is decoded once, and only where the cache lacks something."""
    keys = {row.line: [reference_key(clip, reward, row.prompt) for reward in rewards] for row in rows}
    wanted = [
        (row, key, reward)
        for row in rows
        for key, reward in zip(keys[row.line], rewards, strict=True)
        if reward.compares_with in row.offers
    ]
    kept = store.get(clip)
    if kept is None or any(store.get(key) is None for _, key, _ in wanted):
        try:
            example = load(rows[0])
        except data.DataError as error:
            return [ClipScan(row.line, str(error)) for row in rows]
        video = example.reference.to(device)
        for row, key, reward in wanted:
            if store.get(key) is None:
                reference = reward.reference(video, row.prompt)
                usable = {"usable": torch.tensor(reference is not None)}
                store.put(key, usable | {f"reference.{name}": value for name, value in (reference or {}).items()})
        kept = {"size": torch.tensor(example.size)} if example.image is None else {"image": example.image}
        store.put(clip, kept)
    height, width = kept["image"].shape[1:] if "image" in kept else kept["size"].tolist()
    return [
        ClipScan(row.line, size=(height, width))
        if not rewards or read_entry(store, keys[row.line][0])["usable"]
        else ClipScan(row.line, f"{rewards[0].nothing_found} {row.reference}")
        for row in rows
    ]


def load_samples(
    store: Cache,
    rows: Sequence[data.Row],
    keys: Mapping[int, Key],
    found: Sequence[ClipScan],
    rewards: Sequence[Reward],
) -> list[Sample]:
    """The rows, which `references` found usable, as samples. found: of all processes."""
    sizes = {one.line: one.size for one in found}
    samples = []
    for row in rows:
        kept: list[Mapping[str, Tensor] | None] = []
        for reward in rewards:
            if reward.compares_with not in row.offers:
                kept.append(None)
                continue
            entry = read_entry(store, reference_key(keys[row.line], reward, row.prompt))
            usable = bool(entry.pop("usable"))
            kept.append({name.removeprefix("reference."): value for name, value in entry.items()} if usable else None)
        samples.append(Sample(row, keys[row.line], sizes[row.line], tuple(kept)))
    return samples
