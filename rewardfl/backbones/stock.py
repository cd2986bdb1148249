"""Shared uses of diffusers and transformers: configurations, headers, complete loading, saving adapters."""

import importlib
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
from rewardfl.weights import shards
from rewardfl.weights.shards import Checkpoint, InputError

Model = TypeVar("Model", bound=nn.Module)


def import_class(library: str, name: str) -> Any:
    """Import a class of diffusers or transformers, without the note on torchvision that image processors print."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        return getattr(importlib.import_module(library), name)
    finally:
        logging.set_verbosity(verbosity)


# by part in diffusers' layout; that of every other part is its config.json
_CONFIG_FILES = {
    "model_index": "model_index.json", "scheduler": "scheduler/scheduler_config.json",
    "image_processor": "image_processor/preprocessor_config.json",
}  # fmt: skip


def read_config(configs: Path, part: str) -> dict[str, Any]:
    """Return the configuration of a pipeline's part, or its model_index.

    configs: a pipeline folder, or the file of a published model. Raise InputError for a missing or damaged file.
    """
    if configs.is_file():
        return shards.read_json_object(configs)[part]
    path = configs / _CONFIG_FILES.get(part, f"{part}/config.json")
    if not path.is_file():
        raise InputError(f"{path} is missing; the folder must have diffusers' layout")
    return shards.read_json_object(path)


def settings(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the configurations without the version of diffusers that wrote them."""
    return {
        part: {key: value for key, value in config.items() if not key.startswith("_")}
        for part, config in configs.items()
    }


def refuse_settings(model: str, settings: Mapping[str, Any]) -> None:
    """Raise InputError for a setting, {key: value}, that a model does not take."""
    for key, value in settings.items():
        if value not in ("", None):
            raise InputError(f"{key}: {model} takes none, got {value!r}; remove it")


def size_problems(height: int, width: int, max_pixels: int | None, *, multiple: int, longest: int | None) -> list[str]:
    """Return a line for each side that a model does not take. longest: the longest side, None for any."""
    if max_pixels is None:
        limit = f", at most {longest}" if longest else ""
        return [
            f"data.{key} must be a multiple of {multiple}{limit}, got {size}"
            for key, size in {"height": height, "width": width}.items()
            if size % multiple or (longest and size > longest)
        ]
    if 16 % multiple:
        return [
            f"data.max_pixels gives sides in multiples of 16, this model takes multiples of {multiple}; remove "
            "max_pixels and set data.height and data.width"
        ]
    if longest and max_pixels > longest**2:  # the area of a square clip
        return [f"data.max_pixels must be at most {longest**2}, got {max_pixels}"]
    return []


def new_on_meta(cls: type[Model], config: Mapping[str, Any]) -> Model:
    """Return a model of diffusers or transformers on the meta device."""
    make: Any = cls
    with torch.device("meta"):
        return make.from_config(dict(config)) if issubclass(cls, ModelMixin) else make(make.config_class(**config))


def cast(model: Model, dtype: torch.dtype) -> Model:
    """Cast all parameters in place; diffusers' own `to` prints a note on modules that none of these models has."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def latent_statistics(vae: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return mean and 1 / standard deviation of a VAE's latents by channel, (1, C, 1, 1, 1) each, on its device."""
    statistics = [vae.config.latents_mean, vae.config.latents_std]
    mean, std = torch.tensor(statistics, dtype=dtype, device=vae.device).view(2, 1, -1, 1, 1, 1)
    return mean, 1.0 / std


def load_pretrained(cls: type[Model], path: Path, dtype: torch.dtype) -> Model:
    """Load a model from its folder. Raise InputError if the library would fill in random numbers."""
    make: Any = cls
    precision = {"torch_dtype" if issubclass(cls, ModelMixin) else "dtype": dtype}
    model, report = make.from_pretrained(path, **precision, local_files_only=True, output_loading_info=True)
    if missing := sorted(report["missing_keys"]):
        raise InputError(f"{path} lacks {missing[0]} ({len(missing)} such tensors)")
    return model


def open_network(source: Path | list[Path]) -> Checkpoint:
    """Open a network's files by their headers. Raise InputError for damaged, incomplete and quantised ones."""
    checkpoint = shards.open_checkpoint(source)
    shards.check_unquantised(
        checkpoint, "it cannot be trained on as it is; give the fp32, fp16 or bf16 files of the same model"
    )
    return checkpoint


def check_tensors(path: Path, shapes: Mapping[str, Sequence[int]], model: Mapping[str, Tensor], name: str) -> None:
    """Raise InputError unless a file's tensors, {name: shape}, are the model's. name: of the model."""
    if differing := sorted(shapes.keys() ^ model.keys()):
        side = "lacks" if differing[0] in model else "has a surplus"
        raise InputError(f"{path} {side} {differing[0]} ({len(differing)} names differ from those of {name})")
    for key, shape in shapes.items():
        if tuple(shape) != tuple(model[key].shape):
            raise InputError(f"{path}: {key} is {tuple(shape)}, that of {name} is {tuple(model[key].shape)}")


def save_adapter(mixin: type[LoraBaseMixin], model: ModelMixin, folder: Path, state: dict[str, Tensor]) -> None:
    """Write folder/pytorch_lora_weights.safetensors as `pipe.load_lora_weights` reads it, alpha in the metadata.

    state: the model's lora.adapter_state, gathered by all processes. Raise OSError when the disk is full.
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
