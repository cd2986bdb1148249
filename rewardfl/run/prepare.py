"""Everything that training reads of the data, computed once, shared out among the processes, and kept in the cache.

Each kind of entry is keyed by all that it depends on, so a changed clip, prompt, size, model or reward is a new entry,
and a run whose entries are all there loads neither text encoder, VAE encoder, nor what made the boundary latents.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from rewardfl import data, files, groups, reward_flow, sde
from rewardfl.backbones import protocol
from rewardfl.backbones.protocol import Backbone, Conditioning, Experts, Schedule, Shape, Velocity
from rewardfl.data import cache
from rewardfl.data.cache import Cache, CacheError, Key
from rewardfl.rewards import Reward

Number = int | float | None
T = TypeVar("T")
U = TypeVar("U")
Schedules = Callable[[Shape], Schedule]  # the denoising steps of latents of a shape
READERS = 4  # files that a process hashes, or whose headers it reads, at a time
Gather = Callable[[list], list]  # collects a list over all processes, as accelerate.utils.gather_object does


@dataclass(frozen=True)
class Sample:
    """What training needs of one clip; the clip itself is not kept."""

    row: data.Row
    clip: Key  # identifies the clip as it was read
    size: tuple[int, int]  # height and width that it is generated at
    references: tuple[Mapping[str, Tensor], ...]  # what each reward keeps of the real clip


@dataclass(frozen=True)
class Share:
    """The part of the work that this process does."""

    rank: int
    processes: int
    quiet: bool = False  # no progress bar

    def of(self, items: Iterable) -> list:
        # by position among all items, not among those that are missing: others write while we look
        return list(items)[self.rank :: self.processes]

    def rounds(self, items: Iterable) -> list[tuple[Any, bool]]:
        """`of(items)`, each with True, and on a process with fewer another one's, with False.

        So every process has as many: a forward pass under FSDP needs them all.
        """
        items = list(items)
        own = [(item, True) for item in self.of(items)]
        return own + [(item, False) for item in items[:1]] * (math.ceil(len(items) / self.processes) - len(own))


def fill(
    store: Cache,
    wanted: Iterable[tuple[Key, T]],
    ready: Callable[[], Callable[[T], Mapping[str, Tensor]]],
    share: Share,
    what: str,
) -> None:
    """Compute the entries of this process's share of `wanted` that the cache lacks.

    wanted: keys, each with what its entry is computed of, the same on all processes. ready: loads what computing
    takes, and returns the function; it is called only if something is missing.
    """
    distinct = {cache.digest(key): (key, item) for key, item in wanted}.values()
    missing = [(key, item) for key, item in share.of(distinct) if store.get(key) is None]
    if not missing:
        return
    compute = ready()
    for key, item in tqdm(missing, desc=what, disable=share.quiet):
        store.put(key, compute(item))


def read(store: Cache, key: Key) -> dict[str, Tensor]:
    """An entry that `fill` has seen to; CacheError when it is not there."""
    entry = store.get(key)
    if entry is None:
        raise CacheError(
            f"{store.path(key)} is missing or damaged although it was prepared; data.cache_dir must be on a disk that "
            "all processes share, and is not to be emptied during a run; the same command computes it anew and goes on "
            "from the last checkpoint (data.skip_bad_rows: true would go on without the clip)"
        )
    return entry


def readable(samples: Sequence["Sample"], row: int, read_of: Callable[[int], T], skip: bool) -> tuple[int, T]:
    """(row, read_of(row)); where that is a CacheError and `skip`, the next row of the same size that can be read."""
    after = [other % len(samples) for other in range(row + 1, row + len(samples))]
    candidates = [row, *(other for other in after if samples[other].size == samples[row].size)]
    for other in candidates:
        try:
            return other, read_of(other)
        except CacheError as error:
            if not skip:
                raise
            tqdm.write(f"skipped: {samples[other].row.id}: {error}")
    raise CacheError(f"no clip of the size of {samples[row].row.id} can be read from the cache any more")


# Clips and what the rewards keep of them


def read_all(look: Callable[[T], U], items: Sequence[T], share: Share, gather: Gather, what: str) -> list[U]:
    """[look(item)] on every process; each looks at its share."""
    mine = share.of(range(len(items)))
    with ThreadPoolExecutor(READERS) as pool:
        seen = tqdm(pool.map(look, share.of(items)), total=len(mine), desc=what, disable=share.quiet)
        found = dict(gather(list(zip(mine, seen, strict=True))))
    return [found[i] for i in range(len(items))]


def hash_files(rows: Sequence[data.Row], share: Share, gather: Gather) -> tuple[dict[Path, str], dict[Path, str]]:
    """({file that the rows name: sha256}, {file that cannot be read: why}) on every process, each file read by one."""
    paths = list(dict.fromkeys(path for row in rows for path in row.files.values() if path is not None))
    found = dict(zip(paths, read_all(_hash_file, paths, share, gather, "files"), strict=True))
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
class Found:
    """What reading a row's files has shown; every process is told of every row's."""

    line: int  # the row's
    problem: str = ""  # that keeps it from being trained on
    size: tuple[int, int] | None = None  # height and width that it is generated at; None with a problem


def references(
    store: Cache,
    rows: Sequence[data.Row],
    keys: Mapping[int, Key],
    load: Callable[[data.Row], data.Example],
    rewards: Sequence[Reward],
    device: torch.device,
    share: Share,
) -> list[Found]:
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
) -> list[Found]:
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
            return [Found(row.line, str(error)) for row in rows]
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
        Found(row.line, size=(height, width))
        if not rewards or read(store, keys[row.line][0])["usable"]
        else Found(row.line, f"{rewards[0].nothing_found} {row.reference}")
        for row in rows
    ]


def samples(
    store: Cache, rows: Sequence[data.Row], keys: Mapping[int, Key], found: Sequence[Found], rewards: Sequence[Reward]
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
            entry = read(store, reference_key(keys[row.line], reward, row.prompt))
            usable = bool(entry.pop("usable"))
            kept.append({name.removeprefix("reference."): value for name, value in entry.items()} if usable else None)
        samples.append(Sample(row, keys[row.line], sizes[row.line], tuple(kept)))
    return samples


# Conditioning and boundary latents


@dataclass(frozen=True)
class Conditions:
    """The conditioning of samples, and the latents that the first expert hands over to the second, in the cache.

    text, image, untrained: what the entries are computed with, by digests; untrained is the first expert. dtype: what
    these compute in. num_frames: of every clip.
    """

    store: Cache
    backbone: Backbone
    text: str
    image: str
    untrained: str
    dtype: str
    num_frames: int

    def fill(self, samples: Sequence[Sample], device: torch.device, share: Share, prompts: Sequence[str] = ()) -> None:
        """Compute on `device` the conditioning that is missing. The encoders are loaded only for that, and then go.

        prompts: others than the samples', such as a negative one.
        """

        def image_encoder() -> Callable[[Sample], Conditioning]:
            encode = self.backbone.image_encoder(device)
            return lambda sample: encode(read(self.store, sample.clip).get("image"), self.num_frames)

        texts = [(self._text_key(prompt), prompt) for prompt in [*(sample.row.prompt for sample in samples), *prompts]]
        fill(self.store, texts, partial(self.backbone.text_encoder, device), share, "prompts")
        fill(self.store, [(self._image_key(sample), sample) for sample in samples], image_encoder, share, "images")

    def fill_latents(
        self, samples: Sequence[Sample], clip_of: Callable[[Sample], Tensor], device: torch.device, share: Share
    ) -> None:
        """Encode the samples' clips (3, F, H, W) that the cache lacks. The encoder is loaded only for that."""

        def video_encoder() -> Callable[[Sample], Mapping[str, Tensor]]:
            encode = self.backbone.video_encoder(device)
            return lambda sample: {"latents": encode(clip_of(sample)[None].to(device))}

        fill(self.store, [(self._latents_key(sample), sample) for sample in samples], video_encoder, share, "latents")

    def fill_boundary(
        self, noises: Sequence[tuple[Sample, int]], schedules: Schedules, device: torch.device, share: Share
    ) -> None:
        """Compute, on `device`, the boundary latents that are missing for samples with noise seeds.

        The first expert is loaded only for that, and gone afterwards.
        """

        def first_expert() -> Callable[[tuple[Sample, int]], Mapping[str, Tensor]]:
            first = self.backbone.experts[0]
            experts = Experts({first: self.backbone.load_expert(first).to(device)})

            def run(item: tuple[Sample, int]) -> Mapping[str, Tensor]:
                sample, seed = item
                schedule = schedules(self.shape_of(sample))
                conditioning = protocol.move_to(self.conditioning(sample), device)
                velocity = Velocity(self.backbone, experts, conditioning, schedule)
                x = groups.noise((1, *self.shape_of(sample)), seed, device)
                return {"x": reward_flow.rollout(velocity, x, schedule.sigmas[: schedule.handover + 1], keep=()).x0}

            return run

        wanted = [
            (self._boundary_key(sample, seed, schedules(self.shape_of(sample))), (sample, seed))
            for sample, seed in noises
        ]
        fill(self.store, wanted, first_expert, share, "boundary latents")

    def shape_of(self, sample: Sample) -> Shape:
        """(C, T, h, w) of the sample's latents."""
        return self.backbone.latent_shape(*sample.size, self.num_frames)

    def conditioning(self, sample: Sample) -> Conditioning:
        """What the networks are told of one sample, on the CPU."""
        return self.text_of(sample.row.prompt) | read(self.store, self._image_key(sample))

    def readable(self, samples: Sequence[Sample], row: int, skip: bool) -> tuple[int, Conditioning]:
        """(row, its conditioning), of another row where the cache lost it and `skip`: see `readable`."""
        return readable(samples, row, lambda other: self.conditioning(samples[other]), skip)

    def batch(self, samples: Sequence[Sample], rows: Sequence[int], skip: bool) -> tuple[Conditioning, Tensor]:
        """(the conditioning of a forward pass of these rows, (B,) bool: it is their own and not another clip's)."""
        taken = [self.readable(samples, row, skip) for row in rows]
        own = [found == row for (found, _), row in zip(taken, rows, strict=True)]
        return self.backbone.collate([conditioning for _, conditioning in taken]), torch.tensor(own)

    def text_of(self, prompt: str) -> Conditioning:
        """The part of the conditioning that a prompt makes, on the CPU."""
        return read(self.store, self._text_key(prompt))

    def latents_of(self, sample: Sample) -> Tensor:
        """Return the latents (1, C, T, h, w) of the sample's clip, float32 on the CPU, which `fill_latents` made."""
        return read(self.store, self._latents_key(sample))["latents"]

    def boundary_latents(self, sample: Sample, noise_seed: int, schedule: Schedule) -> Tensor:
        """(1, C, T, h, w) float32, on the CPU, that the second expert's first step starts from."""
        return read(self.store, self._boundary_key(sample, noise_seed, schedule))["x"]

    def _text_key(self, prompt: str) -> Key:
        return {"kind": "text", "model": self.text, "dtype": self.dtype, "prompt": prompt}

    def _image_key(self, sample: Sample) -> Key:
        return {"kind": "image", "model": self.image, "dtype": self.dtype, "clip": cache.digest(sample.clip)}

    def _latents_key(self, sample: Sample) -> Key:
        return {"kind": "latents", "model": self.image, "clip": cache.digest(sample.clip)}

    def _boundary_key(self, sample: Sample, noise_seed: int, schedule: Schedule) -> Key:
        return {
            "kind": "boundary",
            "model": self.untrained,
            "dtype": self.dtype,
            "seed": noise_seed,
            "text": cache.digest(self._text_key(sample.row.prompt)),
            "image": cache.digest(self._image_key(sample)),
            "sigmas": schedule.sigmas[: schedule.handover + 1].tolist(),
        }


# What a forward pass starts from


@dataclass(frozen=True)
class Batch:
    """What one forward pass of reward feedback learning starts from: B clips of one size, on the device."""

    rows: list[int]  # of the samples
    replaced: list[bool]  # whether the clip stands in for one whose cache entries are lost
    conditioning: Conditioning
    x: Tensor  # (B, C, T, h, w) float32
    schedule: Schedule
    start: int  # the denoising step that x is given to

    @property
    def members(self) -> list[groups.Member]:
        """The samples as groups of one."""
        return [groups.Member(row, group_id, 0, 0, 0) for group_id, row in enumerate(self.rows)]


@dataclass(frozen=True)
class Starts:
    """Where the rollouts of reward feedback learning start: at each clip's noise, or at what is cached of it.

    schedules: the denoising steps by the shape of latents. noises: sample.noises_per_sample. cached: the first expert's
    steps are in the cache. skip: take another clip where the cache has lost one.
    """

    samples: Sequence[Sample]
    conditions: Conditions
    schedules: Schedules
    seed: int
    noises: str | int
    cached: bool
    skip: bool
    device: torch.device

    def batch(self, visits: Sequence[tuple[int, int]]) -> Batch:
        """The samples (epoch, row); epoch -1 is that of the sample videos. CacheError where an entry is lost."""
        taken = [readable(self.samples, row, partial(self._read, epoch), self.skip) for epoch, row in visits]
        rows = [row for row, _ in taken]
        conditioning = self.conditions.backbone.collate([conditioning for _, (conditioning, _) in taken])
        schedule = self.schedules(self.conditions.shape_of(self.samples[rows[0]]))
        return Batch(
            rows=rows,
            replaced=[row != wanted for row, (_, wanted) in zip(rows, visits, strict=True)],
            conditioning=protocol.move_to(conditioning, self.device),
            x=torch.cat([x for _, (_, x) in taken]).to(self.device),
            schedule=schedule,
            start=schedule.handover if self.cached else 0,
        )

    def fill(self, sample_videos: int, share: Share) -> None:
        """Compute what the cache lacks of the noises of the samples, and of the first ones' sample videos."""
        epochs = range(self.noises) if isinstance(self.noises, int) else range(0)
        noises = [(sample, self._noise_seed(sample, epoch)) for sample in self.samples for epoch in epochs]
        noises += [(sample, self._noise_seed(sample, -1)) for sample in self.samples[:sample_videos]]
        self.conditions.fill_boundary(noises, self.schedules, self.device, share)

    def _noise_seed(self, sample: Sample, epoch: int) -> int:
        return groups.training_noise_seed(self.seed, epoch, sample.row.id, self.noises)

    def _read(self, epoch: int, row: int) -> tuple[Conditioning, Tensor]:
        sample = self.samples[row]
        seed, shape = self._noise_seed(sample, epoch), self.conditions.shape_of(sample)
        if self.cached:
            x = self.conditions.boundary_latents(sample, seed, self.schedules(shape))
        else:
            x = groups.noise((1, *shape), seed)
        return self.conditions.conditioning(sample), x


@dataclass(frozen=True)
class Rollout:
    """One forward pass of Flow-GRPO's members, and what scoring them again takes."""

    members: list[groups.Member]
    own: Tensor  # (B,) bool: the conditioning is the member's; another clip's stands in for one that is lost
    conditioning: Conditioning
    schedule: Schedule
    kernel: sde.Kernel
    steps: dict[int, sde.Step]  # of the window
