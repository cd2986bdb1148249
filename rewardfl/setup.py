"""What both training scripts do before their first step, of the whole configuration: data, rewards, model, adapter.

Nothing here decides what happens in training. `gather` collects a list over all processes, as
accelerate.utils.gather_object does.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from accelerate.utils import set_seed
from torch import Tensor, nn

from rewardfl import checkpoint, data, distributed, face_parity, lora, offload, prepare, trackers, wan, wan_load
from rewardfl import config as configuration
from rewardfl.cache import Cache, model_digest
from rewardfl.config import AnyConfig
from rewardfl.face_pack import describe, file_hashes
from rewardfl.rewards import FaceIdentityReward
from rewardfl.rewards.remote import RewardServerError
from rewardfl.rewards.terms import RewardError, Term
from rewardfl.shards import Refused

VERSIONED = (
    "torch",
    "accelerate",
    "diffusers",
    "transformers",
    "peft",
    "safetensors",
    "onnx",
    "numpy",
    "av",
    "deepspeed",
)

# what is wrong with the input: one line for the user instead of a traceback
REFUSALS = (
    configuration.ConfigError, data.DataError, checkpoint.CheckpointError, Refused, RewardError, RewardServerError,
    face_parity.FaceParityError, distributed.LaunchError, prepare.CacheError, trackers.TrackerError,
)  # fmt: skip


def command_line(description: str) -> argparse.Namespace:
    """config, dry_run, overrides."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved plan and stop before loading weights"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    return parser.parse_args()


def open_model(cfg: AnyConfig) -> tuple[wan_load.Layout, float]:
    """(the model's files, sigma of the boundary between its experts), all checked by their headers alone."""
    trackers.check_installed(cfg.run.log_with)
    configuration.check_threads(cfg.run.cpu_threads, os.cpu_count())
    configuration.check_paths(cfg)
    layout = wan_load.find(
        cfg.model.model_paths, cfg.model.tokenizer_path, cfg.model.model_id_with_origin_paths, cfg.model.allow_download
    )
    opened = wan_load.open_files(layout)
    lora.check_targets(lora.target_modules(cfg.lora.lora_target_modules), wan_load.linear_layers(opened["low_noise"]))
    spatial, temporal = configuration.vae_factors(layout.configs)
    configuration.check_geometry(
        cfg.data.height, cfg.data.width, cfg.data.num_frames, spatial, temporal, max_pixels=cfg.data.max_pixels
    )
    boundary = cfg.model.min_timestep_boundary
    return layout, configuration.boundary_ratio(layout.configs) if boundary is None else boundary


def loader(cfg: AnyConfig, layout: wan_load.Layout) -> prepare.Load:
    """parts -> a pipeline that has them, on the CPU, with the distillation that belongs to the base model."""
    distilled = wan_load.read_distilled(cfg.model.distill_lora_high, cfg.model.distill_lora_low)
    return partial(wan_load.load_pipeline, layout, wan.DTYPES[cfg.model.dtype], distilled, cfg.model.distill_lora_mode)


# ------------------------------------------------------------------------------------------------------------
# Clips and rewards


def load_example(cfg: AnyConfig, row: data.Row) -> data.Example:
    size = (cfg.data.height, cfg.data.width, cfg.data.num_frames)
    return data.load_example(row, *size, max_pixels=cfg.data.max_pixels, fps=cfg.data.fps)


def find_samples(
    cfg: AnyConfig,
    rows: Sequence[data.Row],
    terms: Sequence[Term],
    store: Cache,
    device: torch.device,
    share: prepare.Share,
    gather: Callable[[list], list],
) -> tuple[list[prepare.Sample], list[str]]:
    """(samples, what is said of rows that are left out): the clips, read once, and what the rewards keep of them."""
    rewards = [term.reward for term in terms]
    size = {key: getattr(cfg.data, key) for key in ("height", "width", "num_frames", "max_pixels", "fps")}
    found = gather(prepare.references(store, rows, size, partial(load_example, cfg), rewards, device, share))
    rows, problems = data.usable_rows(rows, found, cfg.data.skip_bad_rows)
    return prepare.samples(store, rows, size, rewards), problems


def check_face_packs(terms: Sequence[Term], clip: Tensor) -> tuple[dict[str, dict[str, str]], list[str]]:
    """({configuration key: {file: sha256}}, what is said of them) of the face rewards; clip: (3, F, H, W), a real one.

    FaceParityError when a pack does not answer on the device as onnxruntime does.
    """
    packs = {term.key: term.reward.identity for term in terms if isinstance(term.reward, FaceIdentityReward)}
    hashes = {key: file_hashes(identity.files) for key, identity in packs.items()}
    return hashes, describe(hashes) + face_parity.check_packs(packs, clip)


# ------------------------------------------------------------------------------------------------------------
# Model and adapter


def base_model(cfg: AnyConfig, layout: wan_load.Layout) -> dict[str, str]:
    """{part of the base model: digest of its files}, the distillation included."""
    weights = {part: model_digest(files) for part, files in wan_load.files(layout).items()}
    distilled = {"distill_high": cfg.model.distill_lora_high, "distill_low": cfg.model.distill_lora_low}
    return weights | {name: model_digest([Path(path)]) for name, path in distilled.items() if path}


def conditions_of(cfg: AnyConfig, weights: dict[str, str], store: Cache) -> prepare.Conditions:
    """weights: as base_model gives them."""
    # what the untrained expert's answers depend on: its weights and the distillation that goes with them
    base = weights["high_noise"]
    if "distill_high" in weights:
        base = f"{base} {weights['distill_high']} {cfg.model.distill_lora_mode}"
    return prepare.Conditions(
        store, weights["text_encoder"], weights["vae"], base, cfg.model.dtype, cfg.data.num_frames
    )


def load_experts(
    cfg: AnyConfig,
    load: prepare.Load,
    boundary: float,
    device: torch.device,
    home: torch.device,
    skip: Sequence[str] = (),
) -> tuple[wan.Experts, dict[str, nn.Module]]:
    """(both experts in their places, the trained ones by name with their LoRA, at `home`).

    skip: experts that nothing will ask.
    """
    names = configuration.trainable_experts(cfg)
    outside = [name for name in wan.PARTS if name not in names]
    model_of = dict.fromkeys(wan.PARTS)  # one at a time: the host holds one expert
    for name in outside:
        if name not in skip:
            model_of[name] = offload.place(load((name,)).components[wan.PARTS[name]], cfg.experts.untrained, device)
    for name in names:
        expert = load((name,)).components[wan.PARTS[name]].to(home)
        lora.inject(
            expert, cfg.lora.lora_rank, cfg.lora.lora_alpha or cfg.lora.lora_rank,
            lora.target_modules(cfg.lora.lora_target_modules), cfg.run.seed,
        )  # fmt: skip
        if cfg.train.use_gradient_checkpointing_offload:
            expert.enable_gradient_checkpointing(offload.checkpoint_on_host)
        elif cfg.train.use_gradient_checkpointing:
            expert.enable_gradient_checkpointing()
        model_of[name] = expert
    model = wan.Experts(model_of["high_noise"], model_of["low_noise"], boundary, outside)
    return model, {name: model_of[name] for name in names}


def seed_generators(seed: int, step: int, rank: int) -> None:
    """Python's, numpy's and torch's own generators, which nothing here draws from but a reward of the user's may.

    A function of the step, so that a resumed run draws what it would have drawn.
    """
    set_seed(data.noise_seed(seed, step, f"process {rank}") % 2**32)


# ------------------------------------------------------------------------------------------------------------
# What a run leaves


def save_adapters(trained: dict[str, nn.Module], states: dict[str, dict[str, Tensor]], folder: Path) -> None:
    """states: lora.adapter_state of each, gathered by all processes."""
    for name, expert in trained.items():
        lora.save_adapter(expert, folder / wan.PARTS[name], states[name])


def load_adapters(trained: dict[str, nn.Module], folder: Path) -> None:
    for name, expert in trained.items():
        lora.load_adapter(expert, folder / wan.PARTS[name])


def load_state(
    folder: Path, num_samples: int, global_batch: int | None = None, one_shape_batch: int | None = None
) -> dict:
    """A checkpoint's state; CheckpointError when the data have changed since, or how they are batched.

    one_shape_batch: clips per forward pass where they differ in size, because their order depends on it then.
    """
    state = checkpoint.load_state(folder)
    if state["samples"] != num_samples:
        raise checkpoint.CheckpointError(
            f"{folder} was trained on {state['samples']} clips, data.file_name now gives {num_samples}: their "
            "order would change; restore the data or set run.output_dir to a new folder"
        )
    if state.get("global_batch") != global_batch:
        raise checkpoint.CheckpointError(
            f"{folder} was trained on {state.get('global_batch')} clips per update, "
            f"train.per_device_train_batch_size x train.gradient_accumulation_steps x the processes now give "
            f"{global_batch}; they may change, their product may not"
        )
    if state.get("one_shape_batch") != one_shape_batch:
        raise checkpoint.CheckpointError(
            f"{folder} was trained on clips of several sizes with train.per_device_train_batch_size "
            f"{state.get('one_shape_batch')}, now {one_shape_batch}: their order would change; set it back"
        )
    return state


@torch.no_grad()
def sample_videos(
    cfg: AnyConfig,
    samples: Sequence[prepare.Sample],
    generate: Callable[[int], tuple[int, Tensor]],
    share: prepare.Share,
    step: int,
) -> Path:
    """Write samples/step-*/<n>.mp4 of the first samples, each process its share; the folder.

    generate: row -> (row, its video (3, F, H, W)), asked as often on every process; another row where this one's inputs
    are lost. A video that the disk does not take is said and left out.
    """
    folder = Path(cfg.run.output_dir) / "samples" / f"step-{step:06d}"
    for wanted, mine in share.rounds(range(min(cfg.run.sample_videos, len(samples)))):
        row, video = generate(wanted)
        if mine:
            with checkpoint.tolerant(print, step, last=False):
                write_video(cfg, samples[row], video, folder / f"{wanted:02d}.mp4")
    return folder


def write_video(cfg: AnyConfig, sample: prepare.Sample, video: Tensor, path: Path) -> None:
    """The real clip, its face marked, beside the generated `video` (3, F, H, W). WriteError as a checkpoint's."""
    real = load_example(cfg, sample.row).video
    if "boxes" in (sample.references[0] or {}) and sample.row.reference_video is None:
        real = data.draw_boxes(real, sample.references[0]["boxes"])  # whom the reward follows
    fps = cfg.data.fps or data.frame_rate(sample.row.video)
    with checkpoint.writing(path, "training goes on without this sample video"):
        path.parent.mkdir(parents=True, exist_ok=True)
        data.write_video(path, torch.cat([real, video.float().cpu()], -1), fps=fps)
