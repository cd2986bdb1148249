"""What an evaluation samples from the same noises: base model, the run's start, adapters at strengths and steps."""

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from rewardfl import config, data, lora, reward_flow
from rewardfl.backbones import protocol
from rewardfl.backbones.protocol import Backbone, Conditioning, Decoder, Experts, Velocity
from rewardfl.config.schema import LoraConfig, SampleConfig, WholeSampleConfig
from rewardfl.files import digest_files
from rewardfl.memory import offload
from rewardfl.noise import draw_noise, noise_seed
from rewardfl.training.lora_init import read_initial_adapters
from rewardfl.weights.lora_files import Lora
from rewardfl.weights.shards import InputError, read_json_object

BASE, START = "base", "start"

WITHOUT_START = "name what the run started from by lora.init_from=PATH, or leave it out by lora.init_from=null"

NEGATIVE = ""  # key of the negative prompt; no row has this id

Sampling = SampleConfig | WholeSampleConfig

InferencePlacement = Literal["gpu", "cpu_swap"]  # the experts' placement, as `offload.move_expert` takes it

Files = dict[tuple[str, int], Path]  # another tool's videos by row id and number of the noise

Job = tuple[data.Row, int]  # a row of the table, and the number of the noise


def load_config(args: argparse.Namespace) -> config.AnyConfig:
    """Return the configuration of --config or --run for the table --data; without the start if nothing is sampled."""
    overrides = [*args.overrides, f"data.file_name={json.dumps(args.data)}"]
    if args.videos and not args.adapter:
        overrides.append("lora.init_from=null")
    if args.config:
        return config.load(args.config, overrides)
    cfg = config.parse(config.without_removed(read_json_object(args.run / "run.json").get("config", {})), overrides)
    if (start := cfg.lora.init_from) and not Path(start).exists():
        raise FileNotFoundError(f"lora.init_from: {Path(start).absolute()}: no such file or folder; {WITHOUT_START}")
    return cfg


def read_start(settings: LoraConfig, backbone: Backbone, trained: Sequence[str], run: Path) -> Mapping[str, Lora]:
    """Read lora.init_from as training does, by expert. Raise InputError unless run.json has the same digests."""
    targets = lora.target_modules(settings.lora_target_modules, backbone.layer_names)
    loras = read_initial_adapters(settings, backbone, trained, targets)
    digests = read_json_object(run / "run.json").get("init_from")
    if loras and digests and digests != {name: digest_files([adapter.path]) for name, adapter in loras.items()}:
        raise InputError(f"lora.init_from: {settings.init_from} has changed since {run} began with it; {WITHOUT_START}")
    return loras


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to make every row's video. The name must be fit for a file's."""

    name: str
    steps: int = 0  # sampling steps; 0 for another tool's videos
    adapter: Path | None = None  # a checkpoint; None for the base model
    strength: float = 1.0  # the adapter's factor
    videos: Path | None = None  # another tool's videos, judged as they are
    origin: str = ""  # the path of the run's start; empty for others


def make_arms(
    named: Sequence[tuple[str, float]],
    strengths: Sequence[float] | None,
    steps: Sequence[int],
    usual: int,
    videos: Sequence[Path],
    run: Path | None,
    start: str | None = None,
) -> list[Arm]:
    """Return, for each step count of a run, the base model, its start and all adapters, and then other tools' videos.

    named: adapters by --adapter, each with its strength; without any and without videos the run's latest. strengths: of
    every adapter. usual: the step count that names omit.
    """
    if strengths and any(strength != 1 for _, strength in named):
        raise ValueError("--strengths: an --adapter names a strength of its own; give one or the other")
    adapters = [(Path(path), strengths or [strength]) for path, strength in named]
    if run and not named and not videos:
        adapters = [(run / "checkpoints" / "latest", strengths or [1.0])]
    folders = list(dict.fromkeys(folder for folder, _ in adapters))
    if missing := [folder for folder in folders if not any(folder.glob(f"*/{lora.WEIGHTS_NAME}"))]:
        raise FileNotFoundError(f"{missing[0]}: holds no */{lora.WEIGHTS_NAME}; name a checkpoint with --adapter")
    names = dict(zip(folders, unique_names(folders), strict=True))
    arms = []
    for count in steps if run else ():
        tail = "" if count == usual else f"_{count}steps"
        arms.append(Arm(name=BASE + tail, steps=count))
        if start:
            arms.append(Arm(name=START + tail, steps=count, adapter=Path(start), origin=start))
        for folder, strength in ((folder, strength) for folder, of_folder in adapters for strength in of_folder):
            name = names[folder] + ("" if strength == 1 else f"_x{strength:g}") + tail
            arms.append(Arm(name=name, steps=count, adapter=folder, strength=strength))
    arms += [Arm(name=name, videos=folder) for name, folder in zip(unique_names(videos), videos, strict=True)]
    if twice := [name for name, count in Counter(arm.name for arm in arms).items() if count > 1]:
        raise ValueError(f"--adapter, --strengths, --steps, --videos: {twice[0]} is there twice; remove or rename one")
    return arms


def unique_names(folders: Sequence[Path]) -> list[str]:
    """Return unique names of folders, fit for files: the last parts of each path, as many as tell them apart."""
    paths, names, reserved = [folder.absolute() for folder in folders], [], {BASE, START, "real", "vae"}
    for count in range(1, max((len(path.parts) for path in paths), default=0) + 1):
        names = [re.sub(r"[^\w.-]", "_", "_".join(path.parts[-count:])) for path in paths]
        if len(set(names)) == len(names) and not reserved & {*names}:
            return names
    return [f"{i}_{name}" for i, name in enumerate(names)]


def plain(row_id: str) -> str:
    """Return a row's id with all characters replaced that a file name should not have."""
    return re.sub(r"[^\w.-]", "_", row_id)


def find_videos(folder: Path, rows: Sequence[data.Row]) -> Files:
    """Return {(row id, number of the noise): file}. A file's name is the row's index in the table, from 0, or its id.

    007.mp4, 7.mp4 and 007_seed0.mp4 are the first video of row 7, 007_seed1.mp4 the second. Ignore other files.
    """
    if not folder.is_dir():
        raise ValueError(f"--videos: {folder}: no such folder")
    ids = {str(row.index): row.id for row in rows} | {plain(row.id): row.id for row in rows}
    files: Files = {}
    for path in sorted(folder.glob("*.mp4")):
        match = re.fullmatch(r"(.+?)(?:_seed(\d+))?\.mp4", path.name)
        row_id = match and (ids.get(match[1]) or ids.get(match[1].lstrip("0") or "0"))
        if not match or not row_id:
            continue
        key = (row_id, int(match[2] or 0))
        if key in files:
            raise ValueError(f"--videos: {path} and {files[key].name} are both noise {key[1]} of one row; remove one")
        files[key] = path
    with_video = {row_id for row_id, _ in files}
    if missing := [row for row in rows if row.id not in with_video]:
        row = missing[0]
        raise ValueError(
            f"--videos: {folder} has no video of {len(missing)} rows, the first is line {row.line}: name it "
            f"{row.index:03d}.mp4 or {plain(row.id)}.mp4, with _seed1, _seed2 before .mp4 for further noises"
        )
    return files


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """A model with an adapter. conditioning: of `encode_inputs`. sizes: (H, W) by row id."""

    sampling: Sampling
    num_frames: int
    backbone: Backbone
    experts: Experts
    decoder: Decoder
    conditioning: Mapping[str, Conditioning]
    sizes: Mapping[str, tuple[int, int]]
    device: torch.device

    def sample(self, batch: Sequence[Job], arm: Arm) -> Tensor:
        """Sample jobs of one size by the ODE: (B, 3, F, H, W) in [-1, 1]. A job has the same noise in every arm."""
        conditioning = self.backbone.collate([self._conditioning(row.id) for row, _ in batch])
        shape = self.backbone.latent_shape(*self.sizes[batch[0][0].id], self.num_frames)
        schedule = self.backbone.schedule(arm.steps, self.sampling.shift, shape)
        if arm.steps == self.sampling.num_inference_steps:
            schedule = schedule.until(self.sampling.final_timestep)
        guidance = self.sampling.guidance_scale
        negative = self._conditioning(NEGATIVE) if guidance != 1 else None
        velocity = Velocity(
            backbone=self.backbone, model=self.experts, conditioning=conditioning, schedule=schedule, negative=negative,
            guidance=guidance,
        )  # fmt: skip
        seeds = [noise_seed(seed, 0, row.id) for row, seed in batch]
        noise = torch.cat([draw_noise((1, *shape), seed, self.device) for seed in seeds])
        lora.set_strength(self.experts, arm.strength)
        arm_velocity = velocity.reference if arm.adapter is None else velocity
        x0 = reward_flow.rollout(arm_velocity, noise, schedule.sigmas, keep=()).x0
        for (row, seed), latents in zip(batch, x0, strict=True):
            if not latents.isfinite().all():
                raise InputError(
                    f"{arm.name}: the latents of line {row.line}, noise {seed}, are not finite, and a decoder would "
                    "make them black; look for NaN in the model and the adapter"
                )
        return self.decoder.decode(x0, conditioning).float()

    def _conditioning(self, row_id: str) -> Conditioning:
        return protocol.move_to(self.conditioning[row_id], self.device)


def encode_inputs(
    sampling: Sampling,
    num_frames: int,
    backbone: Backbone,
    inputs: Iterable[tuple[data.Row, Tensor | None]],
    device: torch.device,
) -> dict[str, Conditioning]:
    """Return the conditioning, on the CPU, of rows and their images (3, H, W) by row id, and by NEGATIVE if guided."""
    encode_text, encode_image, encoded = backbone.text_encoder(device), backbone.image_encoder(device), {}
    if sampling.guidance_scale != 1:
        encoded[NEGATIVE] = protocol.move_to(encode_text(sampling.negative_prompt), "cpu")
    for row, image in inputs:
        encoded[row.id] = protocol.move_to(encode_text(row.prompt) | encode_image(image, num_frames), "cpu")
    return encoded


def load_model(
    backbone: Backbone, adapter: Path | Mapping[str, Lora] | None, experts: InferencePlacement, device: torch.device
) -> tuple[Experts, Decoder]:
    """Load the model with the checkpoint's adapter or the LoRAs by expert, if any."""
    decoder = backbone.load_decoder(device)
    loaded = {name: backbone.load_expert(name) for name in backbone.experts}
    if isinstance(adapter, Path):
        backbone.attach_adapters(loaded, adapter)
    for name, expert_lora in adapter.items() if isinstance(adapter, Mapping) else ():
        lora.attach_adapter(loaded[name], expert_lora)
    classes = backbone.block_classes
    return Experts({name: offload.move_expert(net, experts, device, classes) for name, net in loaded.items()}), decoder


def batches(jobs: Sequence[Job], sizes: Mapping[str, tuple[int, int]], count: int) -> list[list[Job]]:
    """Group the jobs into lists of at most `count` whose videos have one size. sizes: by row id."""
    by_size: dict[tuple[int, int], list[Job]] = {}
    for row, seed in jobs:
        by_size.setdefault(sizes[row.id], []).append((row, seed))
    return [group[i : i + count] for group in by_size.values() for i in range(0, len(group), count)]
