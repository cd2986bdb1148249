"""Conditioning, clip latents and boundary latents of samples, in the cache."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from tqdm import tqdm

from rewardfl import reward_flow
from rewardfl.backbones.protocol import Backbone, Conditioning, Experts, Schedule, Shape, Velocity, move_to
from rewardfl.data.cache import Cache, CacheError, Key, digest
from rewardfl.noise import draw_noise
from rewardfl.training.samples import Sample
from rewardfl.training.shard import Shard, T, fill_missing, read_entry

Schedules = Callable[[Shape], Schedule]  # the denoising steps by the shape of latents


def read_or_substitute(
    samples: Sequence["Sample"], row: int, read_of: Callable[[int], T], *, skip: bool
) -> tuple[int, T]:
    """Return (row, read_of(row)). With `skip`, the next row of the same size replaces one with a CacheError."""
    after = [i % len(samples) for i in range(row + 1, row + len(samples))]
    for candidate in [row, *(i for i in after if samples[i].size == samples[row].size)]:
        try:
            return candidate, read_of(candidate)
        except CacheError as error:
            if not skip:
                raise
            tqdm.write(f"skipped: {samples[candidate].row.id}: {error}")
    raise CacheError(f"no clip of the size of {samples[row].row.id} can be read from the cache any more")


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Cached conditioning, clip latents and boundary latents (the first expert's output) of samples."""

    store: Cache
    backbone: Backbone
    text: str  # digests of the networks that compute the entries
    image: str
    untrained: str  # the first expert
    dtype: str  # the networks run in it
    num_frames: int

    def fill(self, samples: Sequence[Sample], device: torch.device, share: Shard, prompts: Sequence[str] = ()) -> None:
        """Compute the missing conditioning on `device`, of additional `prompts`, too. Encoders are freed afterwards."""

        def image_encoder() -> Callable[[Sample], Conditioning]:
            encode = self.backbone.image_encoder(device)
            return lambda sample: encode(read_entry(self.store, sample.clip).get("image"), self.num_frames)

        texts = [(self._text_key(prompt), prompt) for prompt in [*(sample.row.prompt for sample in samples), *prompts]]
        fill_missing(self.store, texts, partial(self.backbone.text_encoder, device), share, "prompts")
        images = [(self._image_key(sample), sample) for sample in samples]
        fill_missing(self.store, images, image_encoder, share, "images")

    def fill_latents(
        self, samples: Sequence[Sample], clip_of: Callable[[Sample], Tensor], device: torch.device, share: Shard
    ) -> None:
        """Encode the samples' clips (3, F, H, W) whose latents are missing. The encoder is loaded only for that."""

        def video_encoder() -> Callable[[Sample], Mapping[str, Tensor]]:
            encode = self.backbone.video_encoder(device)
            return lambda sample: {"latents": encode(clip_of(sample)[None].to(device))}

        clips = [(self._latents_key(sample), sample) for sample in samples]
        fill_missing(self.store, clips, video_encoder, share, "latents")

    def fill_boundary(
        self, noises: Sequence[tuple[Sample, int]], schedules: Schedules, device: torch.device, share: Shard
    ) -> None:
        """Compute the missing boundary latents of (sample, noise seed) on `device`. The first expert is then freed."""

        def first_expert() -> Callable[[tuple[Sample, int, Schedule]], Mapping[str, Tensor]]:
            first = self.backbone.experts[0]
            experts = Experts({first: self.backbone.load_expert(first).to(device)})

            def run(item: tuple[Sample, int, Schedule]) -> Mapping[str, Tensor]:
                sample, seed, schedule = item
                conditioning = move_to(self.conditioning(sample), device)
                velocity = Velocity(backbone=self.backbone, model=experts, conditioning=conditioning, schedule=schedule)
                x = draw_noise((1, *self.latent_shape(sample)), seed, device)
                return {"x": reward_flow.rollout(velocity, x, schedule.sigmas[: schedule.handover + 1], keep=()).x0}

            return run

        items = [(sample, seed, schedules(self.latent_shape(sample))) for sample, seed in noises]
        entries = [(self._boundary_key(*item), item) for item in items]
        fill_missing(self.store, entries, first_expert, share, "boundary latents")

    def latent_shape(self, sample: Sample) -> Shape:
        """Return the shape (C, T, h, w) of the sample's latents."""
        return self.backbone.latent_shape(*sample.size, self.num_frames)

    def conditioning(self, sample: Sample) -> Conditioning:
        """Return the text and image conditioning of one sample, on the CPU."""
        return self.text_conditioning(sample.row.prompt) | read_entry(self.store, self._image_key(sample))

    def read_or_substitute(self, samples: Sequence[Sample], row: int, *, skip: bool) -> tuple[int, Conditioning]:
        """Return (row, its conditioning). With `skip`, another row replaces a row that the cache lost."""
        return read_or_substitute(samples, row, lambda i: self.conditioning(samples[i]), skip=skip)

    def pair(self, sample: Sample) -> tuple[Conditioning, tuple[Tensor, Tensor]]:
        """Return the conditioning of a sample, and the latents of its chosen and of its rejected clip, on the CPU."""
        return self.conditioning(sample), (self.clip_latents(sample), self.clip_latents(sample.rejected))

    def batch(self, samples: Sequence[Sample], rows: Sequence[int], *, skip: bool) -> tuple[Conditioning, Tensor]:
        """Return (conditioning of a forward pass of the rows, (B,) bool: False where another clip replaces the row)."""
        taken = [self.read_or_substitute(samples, row, skip=skip) for row in rows]
        is_requested = [used == row for (used, _), row in zip(taken, rows, strict=True)]
        return self.backbone.collate([conditioning for _, conditioning in taken]), torch.tensor(is_requested)

    def text_conditioning(self, prompt: str) -> Conditioning:
        """Return the text conditioning of a prompt, on the CPU."""
        return read_entry(self.store, self._text_key(prompt))

    def clip_latents(self, sample: Sample) -> Tensor:
        """Return the latents (1, C, T, h, w) of the clip (see `fill_latents`) or base video, float32 on the CPU."""
        return read_entry(self.store, sample.base_latents or self._latents_key(sample))["latents"]

    def boundary_latents(self, sample: Sample, noise_seed: int, schedule: Schedule) -> Tensor:
        """Return the input (1, C, T, h, w) of the second expert's first step, float32 on the CPU."""
        return read_entry(self.store, self._boundary_key(sample, noise_seed, schedule))["x"]

    def _text_key(self, prompt: str) -> Key:
        return {"kind": "text", "model": self.text, "dtype": self.dtype, "prompt": prompt}

    def _image_key(self, sample: Sample) -> Key:
        return {"kind": "image", "model": self.image, "dtype": self.dtype, "clip": digest(sample.clip)}

    def _latents_key(self, sample: Sample) -> Key:
        return {"kind": "latents", "model": self.image, "clip": digest(sample.clip)}

    def _boundary_key(self, sample: Sample, noise_seed: int, schedule: Schedule) -> Key:
        text, image = digest(self._text_key(sample.row.prompt)), digest(self._image_key(sample))
        sigmas = schedule.sigmas[: schedule.handover + 1].tolist()
        network = {"kind": "boundary", "model": self.untrained, "dtype": self.dtype}
        return network | {"seed": noise_seed, "text": text, "image": image, "sigmas": sigmas}
