"""Before and after an adapter, from the same noise: how both are sampled, and the statistics of pairs."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rewardfl import config, data, groups, offload, reward_flow
from rewardfl.backbones.seam import Backbone, Conditioning, Decoder, Experts, Velocity
from rewardfl.run import work

ARMS = ("before", "after")
RESAMPLES = 10_000
Job = tuple[data.Row, int]  # of a row of the table the noise of this number


def run_config(run: Path, overrides: list[str]) -> config.AnyConfig:
    path = run / "run.json"
    if not path.is_file():
        raise FileNotFoundError(f"--run: {path} is missing; name the output_dir of a training run")
    return config.parse(json.loads(path.read_text())["config"], overrides)


@dataclass(frozen=True)
class Sampler:
    """A model with an adapter that may be off, and what it is told of each row, by the row's id. sizes: likewise."""

    cfg: config.AnyConfig
    backbone: Backbone
    experts: Experts
    decoder: Decoder
    told: Mapping[str, Conditioning]
    sizes: Mapping[str, tuple[int, int]]
    negative: Conditioning | None
    device: torch.device

    def both(self, batch: Sequence[Job]) -> dict[str, Tensor]:
        """{arm: (B, 3, F, H, W) in [-1, 1]} of jobs of one size, by the ODE."""
        conditioning = self.backbone.collate([self.told[row.id] for row, _ in batch])
        shape = self.backbone.latent_shape(*self.sizes[batch[0][0].id], self.cfg.data.num_frames)
        schedule = work.schedule_of(self.cfg, self.backbone, shape)
        guidance = self.cfg.sample.guidance_scale  # as it was trained
        velocity = Velocity(self.backbone, self.experts, conditioning, schedule, self.negative, guidance)
        seeds = [groups.noise_seed(seed, 0, row.id) for row, seed in batch]
        noise = torch.cat([groups.noise((1, *shape), seed, self.device) for seed in seeds])
        samplers: dict[str, Callable[[Tensor, int], Tensor]] = {"before": velocity.reference, "after": velocity}
        return {
            arm: self.decoder.decode(
                reward_flow.rollout(samplers[arm], noise, schedule.sigmas, keep=()).x0, conditioning
            ).float()
            for arm in ARMS
        }


def sampler(
    cfg: config.AnyConfig,
    backbone: Backbone,
    examples: Mapping[str, tuple[data.Row, data.Example]],
    adapter: Path,
    experts: str,
    device: torch.device,
) -> Sampler:
    """The run's model with the checkpoint's adapter. examples: by the row's id. experts: as offload.place takes it.

    FileNotFoundError where there is no adapter.
    """
    if not adapter.is_dir():  # said before anything loads
        raise FileNotFoundError(f"{adapter}: no such folder; name a checkpoint with --adapter")
    encode_text, encode_image = backbone.text_encoder(device), backbone.image_encoder(device)
    told = {
        key: encode_text(row.prompt) | encode_image(example.image, cfg.data.num_frames)
        for key, (row, example) in examples.items()
    }
    negative = encode_text(cfg.sample.negative_prompt) if cfg.sample.guidance_scale != 1 else None
    del encode_text, encode_image  # the text encoder alone is 11 GB
    decoder = backbone.load_decoder(device)
    loaded = {name: backbone.load_expert(name) for name in backbone.experts}
    backbone.attach_adapters(loaded, adapter)
    placed = {name: offload.place(expert, experts, device, backbone.block_classes) for name, expert in loaded.items()}
    model = Experts(placed)
    sizes = {key: example.size for key, (_, example) in examples.items()}
    return Sampler(cfg, backbone, model, decoder, told, sizes, negative, device)


def batches(jobs: Sequence[Job], sizes: Mapping[str, tuple[int, int]], count: int) -> list[list[Job]]:
    """The jobs, each once, in lists of at most `count` whose videos have one size; sizes: by row id."""
    alike: dict[tuple[int, int], list[Job]] = {}
    for row, seed in jobs:
        alike.setdefault(sizes[row.id], []).append((row, seed))
    return [group[i : i + count] for group in alike.values() for i in range(0, len(group), count)]


def resampled(count: int) -> Tensor:
    """(RESAMPLES, count) indices drawn with replacement, always the same."""
    return torch.randint(0, count, (RESAMPLES, count), generator=torch.Generator().manual_seed(0))


def interval(values: Tensor) -> dict[str, float]:
    """Mean of (n,) values and the ends of its 95 % bootstrap interval."""
    means = values[resampled(len(values))].mean(1)
    return {
        "mean": float(values.mean()),
        "low": float(means.quantile(0.025)),
        "high": float(means.quantile(0.975)),
    }
