"""Shared uses of diffusers and transformers: their pipelines, complete loading, saving adapters."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from diffusers import ModelMixin
from diffusers.loaders.lora_base import LoraBaseMixin
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers.utils import logging

from rewardfl import lora
from rewardfl.weights.shards import InputError

LOCAL = {"local_files_only": True, "output_loading_info": True}  # for from_pretrained
Model = TypeVar("Model", bound=nn.Module)


def pipeline_class(name: str) -> Any:
    """Import one of diffusers' pipelines, without the note on torchvision that its image processors print."""
    import diffusers

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        return getattr(diffusers, name)
    finally:
        logging.set_verbosity(verbosity)


def read_json(path: Path) -> Any:
    """Read a JSON file. Raise InputError where it is missing or not JSON."""
    if not path.is_file():
        raise InputError(f"{path} is missing; the folder must have diffusers' layout")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise InputError(f"{path} is not JSON: {error}") from None


def cast(model: Model, dtype: torch.dtype) -> Model:
    """Cast all parameters in place; diffusers' own `to` prints a note on modules that none of these models has."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def complete(path: Path, model: Model, report: Mapping[str, Sequence[str]]) -> Model:
    """Return the model. Raise InputError where the library filled missing tensors with random numbers."""
    if missing := sorted(report["missing_keys"]):
        raise InputError(f"{path} lacks {missing[0]} ({len(missing)} such tensors)")
    return model


def save_adapter(mixin: type[LoraBaseMixin], model: ModelMixin, folder: Path, state: dict[str, Tensor]) -> None:
    """Write folder/pytorch_lora_weights.safetensors as `pipe.load_lora_weights` reads it, alpha in the metadata.

    mixin: of the stock pipeline. state: the model's lora.adapter_state, gathered by all processes. Raise OSError when
    the disk is full.
    """
    config = model.peft_config[lora.POLICY]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        mixin.save_lora_weights(
            folder,
            transformer_lora_layers=state,
            # peft has the names in a set, whose order differs from process to process
            transformer_lora_adapter_metadata=config.to_dict() | {"target_modules": sorted(config.target_modules)},
            weight_name=lora.WEIGHTS_NAME,
        )
    except SafetensorError as error:  # no OSError, whatever the disk says
        raise OSError(f"{folder / lora.WEIGHTS_NAME}: {error}") from error
    lora.order_metadata(folder / lora.WEIGHTS_NAME)


def attach_adapters(parts: Mapping[str, str], experts: Mapping[str, ModelMixin], checkpoint: Path) -> None:
    """Add a checkpoint's adapters to plain experts; parts: {expert: folder}. Raise FileNotFoundError without any."""
    trained = [name for name, part in parts.items() if (checkpoint / part / lora.WEIGHTS_NAME).is_file()]
    if not trained:
        files = " or ".join(f"{part}/{lora.WEIGHTS_NAME}" for part in parts.values())
        raise FileNotFoundError(
            f"no adapter in {checkpoint}: it should hold {files}, as checkpoints/step-* of a run do"
        )
    for name in trained:
        lora.attach_adapter(experts[name], checkpoint / parts[name])
