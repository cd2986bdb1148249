"""Everything that training reads of the data, computed once, shared out among the processes, and kept in the cache.

Each kind of entry is keyed by all that it depends on, so a changed clip, prompt, size, model or reward is a new entry,
and a run whose entries are all there loads neither text encoder, VAE encoder, nor what made the boundary latents.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from diffusers import WanImageToVideoPipeline
from torch import Tensor
from tqdm import tqdm

from rewardfl import cache, data, files, reward_flow, wan
from rewardfl.cache import Cache, CacheError, Key
from rewardfl.rewards import Reward

Number = int | float | None
T = TypeVar("T")


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
    wanted: Iterable[tuple[Key, object]],
    ready: Callable[[], Callable[[object], Mapping[str, Tensor]]],
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


def readable(
    samples: Sequence["Sample"], row: int, read_of: Callable[[int], T], skip: bool, say: Callable[[str], None]
) -> tuple[int, T]:
    """(row, read_of(row)); where that is a CacheError and `skip`, the next row of the same size that can be read."""
    after = [other % len(samples) for other in range(row + 1, row + len(samples))]
    candidates = [row, *(other for other in after if samples[other].size == samples[row].size)]
    for other in candidates:
        try:
            return other, read_of(other)
        except CacheError as error:
            if not skip:
                raise
            say(f"skipped: {samples[other].row.id}: {error}")
    raise CacheError(f"no clip of the size of {samples[row].row.id} can be read from the cache any more")


# ------------------------------------------------------------------------------------------------------------
# Clips and what the rewards keep of them


def clip_key(row: data.Row, size: Mapping[str, Number]) -> Key:
    """Of the row's clip as load_example reads it. size: height, width, num_frames, max_pixels, fps."""
    paths = {"video": row.video, "image": row.image, "reference_video": row.reference_video}
    found = {name: files.sha256(path) if path else None for name, path in paths.items()}
    return {"kind": "clip", **found, **size}


def reference_key(clip: Key, reward: Reward, prompt: str) -> Key:
    key = {"kind": "reference", "clip": cache.digest(clip), "reward": reward.fingerprint()}
    return key | {"prompt": prompt} if reward.uses_prompt else key


def references(
    store: Cache,
    rows: Sequence[data.Row],
    size: Mapping[str, Number],
    load: Callable[[data.Row], data.Example],
    rewards: Sequence[Reward],
    device: torch.device,
    share: Share,
) -> list[tuple[int, str]]:
    """Read this process's share of the clips, keep what the rewards need of them.

    (line, problem) for each row that cannot be trained on: a file that cannot be used, or a clip in which the
    first of the rewards finds nothing to compare with.
    """
    return [
        (row.line, problem)
        for row in tqdm(share.of(rows), desc="clips", disable=share.quiet)
        for problem in _read_clip(store, row, size, load, rewards, device)
    ]


def _read_clip(
    store: Cache,
    row: data.Row,
    size: Mapping[str, Number],
    load: Callable[[data.Row], data.Example],
    rewards: Sequence[Reward],
    device: torch.device,
) -> list[str]:
    paths = [path for path in (row.video, row.image, row.reference_video) if path]
    if row.problem or not row.prompt or not all(path.is_file() for path in paths):
        return data.row_problems(row, size["num_frames"], size["fps"])
    clip = clip_key(row, size)
    keys = [reference_key(clip, reward, row.prompt) for reward in rewards]
    entries = [store.get(key) for key in keys]
    if None in entries or store.get(clip) is None:
        problems = data.row_problems(row, size["num_frames"], size["fps"])
        if problems:
            return problems
        example = load(row)
        video = example.reference.to(device)
        entries = [_entry(reward.reference(video, row.prompt)) for reward in rewards]
        for key, entry in zip(keys, entries, strict=True):
            store.put(key, entry)
        store.put(clip, {"image": example.image})
    return [] if entries[0]["usable"] else [f"{rewards[0].nothing_found} {row.face_video}"]


def _entry(reference: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    if reference is None:
        return {"usable": torch.tensor(False)}
    return {"usable": torch.tensor(True)} | {f"reference.{name}": value for name, value in reference.items()}


def samples(
    store: Cache, rows: Sequence[data.Row], size: Mapping[str, Number], rewards: Sequence[Reward]
) -> list[Sample]:
    """The rows, which `references` found usable, as samples."""
    found = []
    for row in rows:
        clip = clip_key(row, size)
        kept = []
        for reward in rewards:
            entry = read(store, reference_key(clip, reward, row.prompt))
            usable = bool(entry.pop("usable"))
            kept.append({name.removeprefix("reference."): value for name, value in entry.items()} if usable else None)
        found.append(Sample(row, clip, tuple(read(store, clip)["image"].shape[1:]), tuple(kept)))
    return found


# ------------------------------------------------------------------------------------------------------------
# Conditioning and boundary latents

Load = Callable[[tuple[str, ...]], WanImageToVideoPipeline]  # parts -> a pipeline that has them, where they compute


@dataclass(frozen=True)
class Conditions:
    """The conditioning of samples, and the latents at the boundary between the experts, in the cache.

    text, vae, untrained: cache.model_digest of what the entries are computed with; untrained is the expert that
    answers before the boundary. dtype: what these compute in.
    """

    store: Cache
    text: str
    vae: str
    untrained: str
    dtype: str
    num_frames: int

    def fill(self, samples: Sequence[Sample], load: Load, share: Share, prompts: Sequence[str] = ()) -> None:
        """Compute the conditioning that is missing. The text encoder is loaded only for that, and gone afterwards.

        prompts: others than the samples', such as a negative one.
        """

        def text_encoder() -> Callable[[str], Mapping[str, Tensor]]:
            pipe = load(("text_encoder",))
            return lambda prompt: {"text": wan.encode_text(pipe, prompt)}

        def image_encoder() -> Callable[[Sample], Mapping[str, Tensor]]:
            pipe = load(("vae",))
            return lambda sample: {
                "image": wan.encode_image(pipe, read(self.store, sample.clip)["image"], self.num_frames)
            }

        texts = [(self._text_key(prompt), prompt) for prompt in [*(sample.row.prompt for sample in samples), *prompts]]
        fill(self.store, texts, text_encoder, share, "prompts")
        fill(self.store, [(self._image_key(sample), sample) for sample in samples], image_encoder, share, "images")

    def fill_boundary(
        self,
        noises: Sequence[tuple[Sample, int]],
        sigmas: Tensor,
        boundary: float,
        load: Load,
        share: Share,
    ) -> None:
        """Compute the boundary latents that are missing for samples with noise seeds.

        sigmas: of the steps before the boundary, and the one that they arrive at. The high-noise expert is loaded
        only for that, and gone afterwards.
        """

        def high_noise_expert() -> Callable[[tuple[Sample, int]], Mapping[str, Tensor]]:
            expert = load(("high_noise",)).transformer
            experts = wan.Experts(expert, None, boundary)

            def run(item: tuple[Sample, int]) -> Mapping[str, Tensor]:
                sample, seed = item
                conditioning = self.conditioning(sample).to(expert.device)
                x = data.noise(conditioning.latent_shape(expert.config.out_channels), seed, expert.device)
                return {"x": reward_flow.rollout(wan.Velocity(experts, conditioning), x, sigmas, keep=()).x0}

            return run

        wanted = [(self._boundary_key(sample, seed, sigmas), (sample, seed)) for sample, seed in noises]
        fill(self.store, wanted, high_noise_expert, share, "boundary latents")

    def conditioning(self, sample: Sample) -> wan.Conditioning:
        """Of one sample, on the CPU."""
        return wan.Conditioning(self.text_of(sample.row.prompt), read(self.store, self._image_key(sample))["image"])

    def readable(self, samples: Sequence[Sample], row: int, skip: bool) -> tuple[int, wan.Conditioning]:
        """(row, its conditioning), of another row where the cache lost it and `skip`: see `readable`."""
        return readable(samples, row, lambda other: self.conditioning(samples[other]), skip, tqdm.write)

    def text_of(self, prompt: str) -> Tensor:
        """(1, 512, d), on the CPU."""
        return read(self.store, self._text_key(prompt))["text"]

    def boundary_latents(self, sample: Sample, noise_seed: int, sigmas: Tensor) -> Tensor:
        """(1, C, T, h, w) float32, on the CPU; sigmas as in fill_boundary."""
        return read(self.store, self._boundary_key(sample, noise_seed, sigmas))["x"]

    def _text_key(self, prompt: str) -> Key:
        return {"kind": "text", "model": self.text, "dtype": self.dtype, "prompt": prompt}

    def _image_key(self, sample: Sample) -> Key:
        return {"kind": "image", "model": self.vae, "dtype": self.dtype, "clip": cache.digest(sample.clip)}

    def _boundary_key(self, sample: Sample, noise_seed: int, sigmas: Tensor) -> Key:
        return {
            "kind": "boundary", "model": self.untrained, "dtype": self.dtype, "seed": noise_seed,
            "text": cache.digest(self._text_key(sample.row.prompt)), "image": cache.digest(self._image_key(sample)),
            "sigmas": sigmas.tolist(),
        }  # fmt: skip
