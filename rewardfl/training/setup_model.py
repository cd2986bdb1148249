"""Open the model, check its headers, load experts, and give adapters their first weights."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from diffusers import ModelMixin
from torch import nn

from rewardfl import backbones, lora
from rewardfl.backbones.protocol import Backbone, Experts, Source
from rewardfl.config import AnyConfig, ConfigError, RewardSpec, list_reward_specs, processes_per_clip
from rewardfl.config.schema import SharedRewardConfig
from rewardfl.file_kinds import foreign_path_hint
from rewardfl.files import sha256
from rewardfl.memory import attention, compiling, context_parallel, offload
from rewardfl.rewards.face import pack as face_pack
from rewardfl.rewards.face.detect import FaceDetector
from rewardfl.training import checkpoint, plan
from rewardfl.training.distributed import Distributed
from rewardfl.training.state import ResumePoint, TrainState
from rewardfl.weights import lora_files

SEED_STRIDE = 1_000_003  # between the adapters of two experts, which must not start from equal matrices


def model_source(cfg: AnyConfig) -> Source:
    """Return the configuration's settings of the model's files."""
    model = cfg.model
    return Source(
        model_paths=model.model_paths,
        tokenizer_path=model.tokenizer_path,
        origin_paths=model.model_id_with_origin_paths,
        allow_download=model.allow_download,
        boundary=model.min_timestep_boundary,
        embedded_guidance=model.embedded_guidance,
        dtype=model.dtype,
        distilled=(model.distill_lora_high, model.distill_lora_low),
        distill_mode=model.distill_lora_mode,
    )


def check_files(cfg: AnyConfig) -> None:
    """Raise ConfigError for missing paths, and for face packs that may not be used together."""
    paths = {
        "data.file_name": cfg.data.file_name,
        "model.model_paths": cfg.model.model_paths,
        "model.distill_lora_high": cfg.model.distill_lora_high,
        "model.distill_lora_low": cfg.model.distill_lora_low,
        "model.tokenizer_path": cfg.model.tokenizer_path,
        "lora.init_from": cfg.lora.init_from,
    }
    problems = [
        f"{key}: no such file or folder: {Path(path).absolute()}{foreign_path_hint(path)}"
        for key, path in paths.items()
        if path and not Path(path).exists()
    ]
    for key in ("reward_model_path", "held_out_model_path", "second_model_path"):
        folder = getattr(cfg.reward, key)
        try:
            if folder is not None:
                detector, _ = face_pack.pack_files(folder)
                if key != "second_model_path":  # only its recogniser is used
                    FaceDetector(detector, cfg.reward.det_size)
        except (OSError, ValueError) as error:
            problems.append(f"reward.{key}: {error}")
    if problems:
        raise ConfigError("\n".join(problems))
    check_shared_networks(cfg.reward, list_reward_specs(cfg))


def check_shared_networks(reward: SharedRewardConfig, specs: Sequence[RewardSpec]) -> None:
    """Raise ConfigError for one recogniser in both trained packs, or a network of theirs in the held-out judge's."""
    first, second, judge = reward.reward_model_path, reward.second_model_path, reward.held_out_model_path
    if first is not None and second is not None:
        network, other = (face_pack.pack_files(folder)[1] for folder in (second, first))
        if sha256(network) == sha256(other):
            why = f"the recogniser {network} is the same as {other} of reward.reward_model_path"
            raise ConfigError(f"reward.second_model_path: {why}; name a pack with another one, or leave it out")
    if judge is None:
        return
    trained = {"reward.reward_model_path": first, "reward.second_model_path": second}
    for term in specs:
        packs = {key: value for key, value in term.settings.items() if key.endswith("pack_dir") and value}
        trained |= {f"{term.key}.settings.{key}": str(value) for key, value in packs.items() if term.weight > 0}
    for key, folder in trained.items():
        try:
            shared = folder and face_pack.shared_file(judge, folder)
        except (OSError, ValueError):
            continue  # no pack: the reward itself reports that
        if shared:
            task, file, other = shared
            raise ConfigError(
                f"reward.held_out_model_path: the {task} {file} is the same as {other} of {key}, which is trained "
                "against; name a pack with two other networks. antelopev2 and buffalo_l have one detector: next to "
                "antelopev2, put buffalo_l's w600k_r50.onnx and buffalo_s's det_500m.onnx in a folder, and name that"
            )


def open_model(cfg: AnyConfig) -> Backbone:
    """Open the model, and check its files by their headers and the configuration against them."""
    check_files(cfg)
    backbone = backbones.open(cfg.model.model_name, model_source(cfg))
    lora.check_targets(plan.lora_targets(cfg, backbone), backbone.linear_layers(), backbone.layer_names)
    backbone.check_clips(cfg.data.height, cfg.data.width, cfg.data.num_frames, cfg.data.max_pixels)
    if (processes := processes_per_clip(cfg)) > 1:
        backbone.check_split(processes, cfg.data.height, cfg.data.width, cfg.data.num_frames)
    if cfg.model.attention_backend != attention.NATIVE or attention.VARIABLE in os.environ:
        network = next(iter(backbone.on_meta(512, 512, cfg.data.num_frames).experts.values()))[0].build(None)
        attention.check_name(cfg.model.attention_backend, network, may_download=cfg.model.allow_download)
    return backbone


def load_experts(
    cfg: AnyConfig, run_plan: plan.RunPlan, backbone: Backbone, job: Distributed
) -> tuple[Experts, dict[str, nn.Module]]:
    """Load and place all experts. Return (experts, trained ones with LoRA)."""
    outside = [name for name in backbone.experts if name not in run_plan.trained]
    experts: dict[str, nn.Module] = {}

    def load(name: str) -> ModelMixin:
        expert = backbone.load_expert(name)
        if cfg.model.attention_backend != attention.NATIVE:
            expert.set_attention_backend(cfg.model.attention_backend)
        if cfg.train.compile_blocks:
            compiling.compile_blocks(expert, backbone.block_classes)
        return expert

    def place(expert: ModelMixin, where: offload.Placement, device: torch.device = job.device) -> ModelMixin:
        return offload.move_expert(expert, where, device, backbone.block_classes)

    where = cfg.experts.untrained
    if where != "boundary_cache":
        experts = {name: place(load(name), where) for name in outside}  # one at a time, to save host memory
    trained: dict[str, nn.Module] = {}
    rank = cfg.lora.lora_rank
    for i, name in enumerate(run_plan.trained):
        expert = load(name)
        lora.inject(expert, rank, cfg.lora.lora_alpha or rank, list(run_plan.targets), cfg.run.seed + i * SEED_STRIDE)
        expert = place(expert, cfg.experts.trained, job.home)
        if cfg.train.use_gradient_checkpointing:
            on_host = cfg.train.use_gradient_checkpointing_offload
            expert.enable_gradient_checkpointing(offload.checkpointing(job.device, inputs_on_host=on_host))
        trained[name] = experts[name] = expert
    for expert in experts.values() if job.processes_per_clip > 1 else ():
        context_parallel.split_tokens(expert, job.clip_mesh)
    return Experts({name: experts[name] for name in backbone.experts if name in experts}, outside), trained


def fill_adapters(
    model: Experts,
    trained: Mapping[str, nn.Module],
    backbone: Backbone,
    init: Mapping[str, lora_files.Lora],
    resume_point: ResumePoint,
    restored: TrainState | None,
) -> None:
    """Load the adapters from the checkpoint or `init`. Raise CheckpointError where the checkpoint lacks one."""
    folder = resume_point.path
    if folder is None or restored is None:
        for name, adapter in init.items():
            lora.start_from(trained[name], adapter)
        return
    for name, expert in trained.items():
        try:
            backbone.load_adapter(name, expert, folder)
        except (ValueError, FileNotFoundError) as error:
            raise checkpoint.CheckpointError(f"{folder} cannot be resumed from: {error}") from error
    if restored.parameters is not None:  # the checkpoint's adapter is an average of these
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter, value in zip(parameters, restored.parameters, strict=True):
            parameter.data.copy_(value)
