"""Open the model, check its headers, load experts, and give adapters their first weights."""

from collections.abc import Mapping

import torch
from diffusers import ModelMixin
from torch import nn

from rewardfl import lora
from rewardfl.backbones.protocol import Backbone, Experts
from rewardfl.memory import attention, compiling, context_parallel, offload
from rewardfl.training import checkpoint, plan
from rewardfl.training.distributed import Distributed
from rewardfl.training.state import ResumePoint, TrainState
from rewardfl.weights import lora_files

SEED_STRIDE = 1_000_003  # between the adapters of two experts, which must not start from equal matrices


def load_experts(run_plan: plan.RunPlan, backbone: Backbone, job: Distributed) -> tuple[Experts, dict[str, nn.Module]]:
    """Load and place all experts. Return (experts, trained ones with LoRA)."""
    outside = [name for name in backbone.experts if name not in run_plan.trained]
    experts: dict[str, nn.Module] = {}

    def load(name: str) -> ModelMixin:
        expert = backbone.load_expert(name)
        if run_plan.model.attention_backend != attention.NATIVE:
            expert.set_attention_backend(run_plan.model.attention_backend)
        if run_plan.train.compile_blocks:
            compiling.compile_blocks(expert, backbone.block_classes)
        return expert

    def place(expert: ModelMixin, where: offload.Placement, device: torch.device = job.device) -> ModelMixin:
        return offload.move_expert(expert, where, device, backbone.block_classes)

    where = run_plan.memory.untrained
    if where != "boundary_cache":
        experts = {name: place(load(name), where) for name in outside}  # one at a time, to save host memory
    trained: dict[str, nn.Module] = {}
    rank = run_plan.lora.lora_rank
    for i, name in enumerate(run_plan.trained):
        expert = load(name)
        seed = run_plan.run.seed + i * SEED_STRIDE
        lora.inject(expert, rank, run_plan.lora.lora_alpha or rank, list(run_plan.targets), seed)
        expert = place(expert, run_plan.memory.trained, job.home)
        if run_plan.memory.use_gradient_checkpointing:
            on_host = run_plan.memory.use_gradient_checkpointing_offload
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
    """Load the adapters from the checkpoint or `init`. Raise CheckpointError if the checkpoint lacks one."""
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
