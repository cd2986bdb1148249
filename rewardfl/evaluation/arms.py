"""What an evaluation samples from the same noises: the base model, and adapters at strengths and step counts."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from rewardfl import config, data, lora, reward_flow
from rewardfl.backbones.protocol import Backbone, Conditioning, Decoder, Experts, Velocity
from rewardfl.memory import offload
from rewardfl.noise import draw_noise, noise_seed
from rewardfl.training import plan

BASE = "base"

TAKEN = (BASE, "real", "vae")  # reserved names: no adapter's or tool's arm may have them

NEGATIVE = ""  # key of the negative prompt; no row has this id

Job = tuple[data.Row, int]  # a row of the table, and the number of the noise


def run_config(run: Path, overrides: list[str]) -> config.AnyConfig:
    """Return the configuration of a training run with overrides. Raise FileNotFoundError where there is no run."""
    path = run / "run.json"
    if not path.is_file():
        raise FileNotFoundError(f"--run: {path} is missing; name the output_dir of a training run")
    try:
        content = TypeAdapter(dict[str, Any]).validate_json(path.read_bytes())
        sections = TypeAdapter(dict[str, Any]).validate_python(content.get("config"))
    except ValidationError:
        raise ValueError(f"--run: {path} is not as training writes it; name the output_dir of a training run") from None
    return config.parse(sections, overrides)


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to make every row's video. The name must be fit for a file's."""

    name: str
    steps: int = 0  # sampling steps; 0 for another tool's videos
    adapter: Path | None = None  # a checkpoint; None for the base model
    strength: float = 1.0  # of the adapter
    videos: Path | None = None  # another tool's videos, judged as they are


def plan_arms(adapters: Sequence[tuple[Path, float]], steps: Sequence[int], usual: int) -> list[Arm]:
    """Return, for each step count, the base model and every adapter at its strength.

    usual: the step count that names omit. Raise ValueError for an adapter at one strength, or a step count, that is
    named twice.
    """
    for option, values in (("--adapter", adapters), ("--steps", steps)):
        if repeated := [value for i, value in enumerate(values) if value in values[:i]]:
            raise ValueError(f"{option}: {repeated[0]} is named twice; remove one")
    folders = list(dict.fromkeys(folder for folder, _ in adapters))
    names = dict(zip(folders, unique_names(folders), strict=True))
    arms = []
    for count in steps:
        tail = "" if count == usual else f"_{count}steps"
        arms.append(Arm(name=BASE + tail, steps=count))
        for adapter, strength in adapters:
            suffix = "" if strength == 1 else f"_x{strength:g}"
            arms.append(Arm(name=f"{names[adapter]}{suffix}{tail}", steps=count, adapter=adapter, strength=strength))
    return arms


def unique_names(folders: Sequence[Path]) -> list[str]:
    """Return unique names of folders, fit for files: the last parts of each path, as many as tell them apart."""
    paths, names = [folder.absolute() for folder in folders], []
    for count in range(1, max((len(path.parts) for path in paths), default=0) + 1):
        names = [re.sub(r"[^\w.-]", "_", "_".join(path.parts[-count:])) for path in paths]
        if len(set(names)) == len(names) and not {*TAKEN} & {*names}:
            return names
    return [f"{i}_{name}" for i, name in enumerate(names)]


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """A model with an adapter. told: conditioning by row id and by NEGATIVE. sizes: (H, W) by row id."""

    cfg: config.AnyConfig
    backbone: Backbone
    experts: Experts
    decoder: Decoder
    told: Callable[[str], Conditioning]
    sizes: Mapping[str, tuple[int, int]]
    device: torch.device

    def sample(self, batch: Sequence[Job], arm: Arm) -> Tensor:
        """Sample jobs of one size by the ODE: (B, 3, F, H, W) in [-1, 1]. A job has the same noise in every arm."""
        conditioning = self.backbone.collate([self.told(row.id) for row, _ in batch])
        shape = self.backbone.latent_shape(*self.sizes[batch[0][0].id], self.cfg.data.num_frames)
        if arm.steps == self.cfg.sample.num_inference_steps:
            schedule = plan.make_schedule(self.cfg.sample, self.backbone, shape)
        else:
            schedule = self.backbone.schedule(arm.steps, self.cfg.sample.shift, shape)
        guidance = self.cfg.sample.guidance_scale
        negative = self.told(NEGATIVE) if guidance != 1 else None
        velocity = Velocity(
            backbone=self.backbone, model=self.experts, conditioning=conditioning, schedule=schedule, negative=negative,
            guidance=guidance,
        )  # fmt: skip
        seeds = [noise_seed(seed, 0, row.id) for row, seed in batch]
        noise = torch.cat([draw_noise((1, *shape), seed, self.device) for seed in seeds])
        lora.set_strength(self.experts, arm.strength)
        arm_velocity = velocity.reference if arm.adapter is None else velocity
        x0 = reward_flow.rollout(arm_velocity, noise, schedule.sigmas, keep=()).x0
        return self.decoder.decode(x0, conditioning).float()


def encode_inputs(
    cfg: config.AnyConfig, backbone: Backbone, inputs: Iterable[tuple[data.Row, Tensor | None]], device: torch.device
) -> Iterator[tuple[str, Conditioning]]:
    """Yield row id and conditioning of each row and image (3, H, W) in [-1, 1]; before them NEGATIVE where guided."""
    encode_text, encode_image = backbone.text_encoder(device), backbone.image_encoder(device)
    if cfg.sample.guidance_scale != 1:
        yield NEGATIVE, encode_text(cfg.sample.negative_prompt)
    for row, image in inputs:
        yield row.id, encode_text(row.prompt) | encode_image(image, cfg.data.num_frames)


def check_adapter(folder: Path) -> None:
    """Raise FileNotFoundError where the folder holds no adapter, before anything loads."""
    if not any(folder.glob(f"*/{lora.WEIGHTS_NAME}")):
        raise FileNotFoundError(f"{folder}: holds no */{lora.WEIGHTS_NAME}; name a checkpoint with --adapter")


def load_model(backbone: Backbone, adapter: Path | None, experts: str, device: torch.device) -> tuple[Experts, Decoder]:
    """Load the model with the checkpoint's adapter, if any. experts: as `offload.move_expert` takes it."""
    decoder = backbone.load_decoder(device)
    loaded = {name: backbone.load_expert(name) for name in backbone.experts}
    if adapter is not None:
        backbone.attach_adapters(loaded, adapter)
    classes = backbone.block_classes
    return Experts({name: offload.move_expert(net, experts, device, classes) for name, net in loaded.items()}), decoder


def batches(jobs: Sequence[Job], sizes: Mapping[str, tuple[int, int]], count: int) -> list[list[Job]]:
    """Group the jobs into lists of at most `count` whose videos have one size. sizes: by row id."""
    by_size: dict[tuple[int, int], list[Job]] = {}
    for row, seed in jobs:
        by_size.setdefault(sizes[row.id], []).append((row, seed))
    return [group[i : i + count] for group in by_size.values() for i in range(0, len(group), count)]
