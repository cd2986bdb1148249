"""Wan's experts: their steps of a schedule, and their networks without weights."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed

from rewardfl import lora
from rewardfl.backbones.protocol import Adapter, Schedule
from rewardfl.backbones.stock import new_on_meta
from rewardfl.flow import linear_sigmas
from rewardfl.weights import wan_names

TEXT_LENGTH = 512  # tokens; the length that diffusers' pipeline pads prompts to


def schedule(num_steps: int, shift: float, experts: Sequence[str], boundary: float | None) -> Schedule:
    """Return flow.linear_sigmas with the expert of each step; boundary: the pipeline's boundary_ratio, None for one.

    As in diffusers' pipeline (pipeline_wan_i2v.py, __call__), the first expert computes the steps whose float32
    timestep is at or above 1000 * boundary. Comparing sigmas differs at a tie: 0.9 in float32 is below 0.9, and 1000
    times it is 900.
    """
    sigmas = linear_sigmas(num_steps, shift)
    timesteps = 1000 * sigmas[:-1]
    is_first = (timesteps >= 1000 * (boundary or 0.0)).tolist()
    names = tuple(experts[0] if first else experts[1] for first in is_first)
    return Schedule(sigmas, timesteps, names, boundary or 0.0)


def empty_expert(config: Mapping[str, Any]) -> WanTransformer3DModel:
    """Build an expert without memory for its weights. The rotary tables are in no file, so they are computed."""
    model = new_on_meta(WanTransformer3DModel, config)
    model.rope = WanRotaryPosEmbed(
        model.config.attention_head_dim, model.config.patch_size, model.config.rope_max_seq_len
    )
    return model


def new_expert(
    config: Mapping[str, Any], dtype: torch.dtype, layers: int, adapter: Adapter | None
) -> WanTransformer3DModel:
    """Build an expert of `layers` blocks on the meta device, in the dtypes of loading and of `lora.inject`."""
    model = new_on_meta(WanTransformer3DModel, dict(config) | {"num_layers": layers})
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if wan_names.stays_float32(name) else dtype)
    model.requires_grad_(requires_grad=False)
    if adapter:
        lora.inject(model, adapter.rank, adapter.rank, list(adapter.targets), seed=0)
    return model
