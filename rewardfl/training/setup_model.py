"""Open the model, check its headers, load experts, and give adapters their first weights."""

import os
from collections.abc import Mapping, Sequence
from functools import partial

from diffusers import ModelMixin
from torch import nn

from rewardfl import backbones, lora
from rewardfl.backbones.protocol import Backbone, Experts, Source
from rewardfl.config import AnyConfig, list_reward_specs
from rewardfl.memory import attention, compiling, offload
from rewardfl.noise import draw_noise, noise_seed
from rewardfl.training import checkpoint, checks, plan, rounding
from rewardfl.training.conditions import Conditions
from rewardfl.training.distributed import Distributed
from rewardfl.training.plan import RunPlan
from rewardfl.training.samples import Sample
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
    checks.check_paths(paths, cfg.reward)
    checks.check_second_recogniser(cfg.reward)
    checks.check_judge(cfg.reward, list_reward_specs(cfg))


def open_model(cfg: AnyConfig) -> Backbone:
    """Open the model, and check its files by their headers and the configuration against them."""
    checks.check_tracker(cfg.run.log_with)
    check_files(cfg)
    backbone = backbones.open(cfg.model.model_name, model_source(cfg))
    lora.check_targets(plan.lora_targets(cfg, backbone), backbone.linear_layers(), backbone.layer_names)
    backbone.check_clips(cfg.data.height, cfg.data.width, cfg.data.num_frames, cfg.data.max_pixels)
    if cfg.model.attention_backend != attention.NATIVE or attention.VARIABLE in os.environ:
        network = next(iter(backbone.on_meta(512, 512, cfg.data.num_frames).experts.values()))[0].build(None)
        attention.check_name(cfg.model.attention_backend, network, may_download=cfg.model.allow_download)
    return backbone


def load_experts(
    cfg: AnyConfig,
    run_plan: RunPlan,
    backbone: Backbone,
    job: Distributed,
    conditions: Conditions,
    samples: Sequence[Sample],
) -> tuple[Experts, dict[str, nn.Module]]:
    """Load and place all experts, and print the error of fp8 on a sample. Return (experts, trained ones with LoRA)."""
    outside = [name for name in backbone.experts if name not in run_plan.trained]
    experts: dict[str, nn.Module] = {}  # loaded one at a time, to save host memory

    def load(name: str) -> ModelMixin:
        expert = backbone.load_expert(name)
        if cfg.model.attention_backend != attention.NATIVE:
            expert.set_attention_backend(cfg.model.attention_backend)
        if cfg.train.compile_blocks:
            compiling.compile_blocks(expert, backbone.block_classes)
        return expert

    if cfg.experts.untrained != "boundary_cache":
        probe = None
        if cfg.experts.untrained == "fp8":
            row, conditioning = conditions.read_or_substitute(samples, 0, skip=cfg.data.skip_bad_rows)
            shape = conditions.latent_shape(samples[row])
            noise = draw_noise((1, *shape), noise_seed(cfg.run.seed, 0, "8 bits"))
            schedule = run_plan.schedule(shape)
            probe = rounding.Probe(
                backbone=backbone, schedule=schedule, noise=noise, conditioning=conditioning, device=job.device
            )
        for name in outside:
            place = partial(
                offload.move_expert,
                where=cfg.experts.untrained,
                device=job.device,
                block_classes=backbone.block_classes,
            )
            if probe is None or not job.main or name not in probe.schedule.experts:
                experts[name] = place(load(name))
                continue
            # loaded twice, since two experts at once would exceed the host's memory
            exact = probe.exact(name, partial(load, name))
            experts[name] = expert = place(load(name))
            job.print(probe.note(name, expert, exact))
    trained: dict[str, nn.Module] = {}
    rank = cfg.lora.lora_rank
    for i, name in enumerate(run_plan.trained):
        expert = load(name)
        lora.inject(expert, rank, cfg.lora.lora_alpha or rank, list(run_plan.targets), cfg.run.seed + i * SEED_STRIDE)
        expert = offload.move_expert(expert, cfg.experts.trained, job.home, backbone.block_classes)
        if cfg.train.use_gradient_checkpointing:
            on_host, keep = cfg.train.use_gradient_checkpointing_offload, cfg.train.keep_attention
            checkpoint = offload.checkpointing(job.device, inputs_on_host=on_host, keep_attention=keep)
            expert.enable_gradient_checkpointing(checkpoint)
        trained[name] = experts[name] = expert
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
