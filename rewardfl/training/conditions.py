"""The conditioning, clip latents and boundary latents of samples, in the cache."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from tqdm import tqdm

from rewardfl import reward_flow
from rewardfl.backbones import protocol
from rewardfl.backbones.protocol import Backbone, Conditioning, Experts, Schedule, Shape, Velocity
from rewardfl.data import cache
from rewardfl.data.cache import Cache, CacheError, Key
from rewardfl.noise import draw_noise
from rewardfl.training.samples import Sample
from rewardfl.training.shard import Shard, T, fill_missing, read_entry

Schedules = Callable[[Shape], Schedule]  # the denoising steps of latents of a shape


def read_or_substitute(samples: Sequence["Sample"], row: int, read_of: Callable[[int], T], skip: bool) -> tuple[int, T]:
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

    def fill(self, samples: Sequence[Sample], device: torch.device, share: Shard, prompts: Sequence[str] = ()) -> None:
        """Compute on `device` the conditioning that is missing. The encoders are loaded only for that, and then go.

        prompts: others than the samples', such as a negative one.
        """

        def image_encoder() -> Callable[[Sample], Conditioning]:
            encode = self.backbone.image_encoder(device)
            return lambda sample: encode(read_entry(self.store, sample.clip).get("image"), self.num_frames)

        texts = [(self._text_key(prompt), prompt) for prompt in [*(sample.row.prompt for sample in samples), *prompts]]
        fill_missing(self.store, texts, partial(self.backbone.text_encoder, device), share, "prompts")
        fill_missing(
            self.store, [(self._image_key(sample), sample) for sample in samples], image_encoder, share, "images"
        )

    def fill_latents(
        self, samples: Sequence[Sample], clip_of: Callable[[Sample], Tensor], device: torch.device, share: Shard
    ) -> None:
        """Encode the samples' clips (3, F, H, W) that the cache lacks. The encoder is loaded only for that."""

        def video_encoder() -> Callable[[Sample], Mapping[str, Tensor]]:
            encode = self.backbone.video_encoder(device)
            return lambda sample: {"latents": encode(clip_of(sample)[None].to(device))}

        fill_missing(
            self.store, [(self._latents_key(sample), sample) for sample in samples], video_encoder, share, "latents"
        )

    def fill_boundary(
        self, noises: Sequence[tuple[Sample, int]], schedules: Schedules, device: torch.device, share: Shard
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
                x = draw_noise((1, *self.shape_of(sample)), seed, device)
                return {"x": reward_flow.rollout(velocity, x, schedule.sigmas[: schedule.handover + 1], keep=()).x0}

            return run

        wanted = [
            (self._boundary_key(sample, seed, schedules(self.shape_of(sample))), (sample, seed))
            for sample, seed in noises
        ]
        fill_missing(self.store, wanted, first_expert, share, "boundary latents")

    def shape_of(self, sample: Sample) -> Shape:
        """(C, T, h, w) of the sample's latents."""
        return self.backbone.latent_shape(*sample.size, self.num_frames)

    def conditioning(self, sample: Sample) -> Conditioning:
        """What the networks are told of one sample, on the CPU."""
        return self.text_of(sample.row.prompt) | read_entry(self.store, self._image_key(sample))

    def readable(self, samples: Sequence[Sample], row: int, skip: bool) -> tuple[int, Conditioning]:
        """(row, its conditioning), of another row where the cache lost it and `skip`: see `readable`."""
        return read_or_substitute(samples, row, lambda other: self.conditioning(samples[other]), skip)

    def batch(self, samples: Sequence[Sample], rows: Sequence[int], skip: bool) -> tuple[Conditioning, Tensor]:
        """(the conditioning of a forward pass of these rows, (B,) bool: it is their own and not another clip's)."""
        taken = [self.readable(samples, row, skip) for row in rows]
        own = [found == row for (found, _), row in zip(taken, rows, strict=True)]
        return self.backbone.collate([conditioning for _, conditioning in taken]), torch.tensor(own)

    def text_of(self, prompt: str) -> Conditioning:
        """The part of the conditioning that a prompt makes, on the CPU."""
        return read_entry(self.store, self._text_key(prompt))

    def latents_of(self, sample: Sample) -> Tensor:
        """Return the latents (1, C, T, h, w) of the sample's clip, float32 on the CPU, which `fill_latents` made."""
        return read_entry(self.store, self._latents_key(sample))["latents"]

    def boundary_latents(self, sample: Sample, noise_seed: int, schedule: Schedule) -> Tensor:
        """(1, C, T, h, w) float32, on the CPU, that the second expert's first step starts from."""
        return read_entry(self.store, self._boundary_key(sample, noise_seed, schedule))["x"]

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
