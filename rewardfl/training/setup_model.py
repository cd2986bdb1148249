"""Open the model, check its headers, load experts, and give adapters their first weights."""

import os
from collections.abc import Mapping, Sequence
from functools import partial

from diffusers import ModelMixin
from torch import nn

from rewardfl import backbones, lora, machine
from rewardfl.backbones.protocol import Backbone, Experts, Source
from rewardfl.config import AnyConfig
from rewardfl.memory import attention, compiling, offload
from rewardfl.noise import draw_noise, noise_seed
from rewardfl.training import checkpoint, checks, plan, rounding
from rewardfl.training.conditions import Conditions
from rewardfl.training.distributed import Distributed
from rewardfl.training.lora_init import read_initial_adapters
from rewardfl.training.samples import Sample
from rewardfl.training.state import RunState

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
        distilled=(model.distill_lora_high, model.distill_lora_low, model.distill_lora_mode),
    )


def open_model(cfg: AnyConfig) -> Backbone:
    """Open the model, and check its files by their headers and the configuration against them."""
    checks.check_tracker(cfg.run.log_with)
    checks.check_threads(cfg.run.cpu_threads, machine.usable_cores())
    checks.check_paths(cfg)
    backbone = backbones.open(cfg.model.model_name, model_source(cfg))
    lora.check_targets(plan.lora_targets(cfg, backbone), backbone.linear_layers(), backbone.layer_names)
    backbone.check_clips(cfg.data.height, cfg.data.width, cfg.data.num_frames, cfg.data.max_pixels)
    read_initial_adapters(cfg, backbone)
    if cfg.model.attention_backend != attention.NATIVE or attention.VARIABLE in os.environ:
        network = next(iter(backbone.on_meta(512, 512, cfg.data.num_frames).experts.values()))[0].build(None)
        attention.check_name(cfg.model.attention_backend, network, may_download=cfg.model.allow_download)
    return backbone


def load_experts(
    cfg: AnyConfig, backbone: Backbone, job: Distributed, conditions: Conditions, samples: Sequence[Sample]
) -> tuple[Experts, dict[str, nn.Module]]:
    """Load and place all experts, and print the error of fp8 on a sample. Return (experts, trained ones with LoRA)."""
    names = plan.trained_experts(cfg, backbone.experts)
    outside = [name for name in backbone.experts if name not in names]
    experts: dict[str, nn.Module | None] = dict.fromkeys(backbone.experts)  # loaded one at a time, to save host memory

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
            row, conditioning = conditions.read_or_substitute(samples, 0, cfg.data.skip_bad_rows)
            shape = conditions.latent_shape(samples[row])
            noise = draw_noise((1, *shape), noise_seed(cfg.run.seed, 0, "8 bits"))
            schedule = plan.make_schedule(cfg, backbone, shape)
            probe = rounding.Probe(
                backbone=backbone, schedule=schedule, noise=noise, conditioning=conditioning, device=job.device
            )
        for name in outside:
            measures = probe is not None and job.main and name in probe.schedule.experts
            # loaded twice, since two experts at once would exceed the host's memory
            exact = probe.exact(name, partial(load, name)) if measures else None
            expert = offload.move_expert(load(name), cfg.experts.untrained, job.device, backbone.block_classes)
            if exact is not None:
                job.print(probe.note(name, expert, exact))
            experts[name] = expert
    trained, rank, targets = {}, cfg.lora.lora_rank, plan.lora_targets(cfg, backbone)
    for i, name in enumerate(names):
        expert = load(name)
        lora.inject(expert, rank, cfg.lora.lora_alpha or rank, targets, cfg.run.seed + i * SEED_STRIDE)
        expert = offload.move_expert(expert, cfg.experts.trained, job.home, backbone.block_classes)
        if cfg.train.use_gradient_checkpointing:
            on_host, keep = cfg.train.use_gradient_checkpointing_offload, cfg.train.keep_attention
            checkpoint = offload.checkpointing(job.device, inputs_on_host=on_host, keep_attention=keep)
            expert.enable_gradient_checkpointing(checkpoint)
        trained[name] = experts[name] = expert
    return Experts(experts, outside), trained


def fill_adapters(model: Experts, trained: Mapping[str, nn.Module], backbone: Backbone, resumed: RunState) -> None:
    """Load the adapters from the checkpoint or lora.init_from. Raise CheckpointError where the checkpoint lacks one."""
    folder = resumed.resume_point.path
    if folder is None:
        for name, adapter in resumed.init.items():
            lora.start_from(trained[name], adapter)
        return
    for name, expert in trained.items():
        try:
            backbone.load_adapter(name, expert, folder)
        except (ValueError, FileNotFoundError) as error:
            raise checkpoint.CheckpointError(f"{folder} cannot be gone on from: {error}") from error
    if "parameters" in resumed.state:  # the checkpoint's adapter is an average of these
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter, value in zip(parameters, resumed.state.pop("parameters"), strict=True):
            parameter.data.copy_(value)
