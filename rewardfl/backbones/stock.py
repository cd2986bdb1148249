"""Shared code of the backbones of diffusers' models: configurations, complete loading, networks on meta, adapters."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from diffusers import ModelMixin
from diffusers.loaders.lora_base import LoraBaseMixin
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers.utils import logging

from rewardfl import lora
from rewardfl.backbones.protocol import Adapter
from rewardfl.weights.shards import InputError

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True, kw_only=True)
class StockModel:
    """The members of Backbone that are the same for all models in diffusers' layout.

    folder: a pipeline's configurations. parts: {expert, in the order of their steps: its folder in a pipeline}.
    lora_loader: the stock pipeline's mixin. files: as `weight_files` returns them; empty for a described model.
    """

    folder: Path
    parts: Mapping[str, str]
    dtype: torch.dtype
    lora_loader: type[LoraBaseMixin]
    files: Mapping[str, list[Path]]

    @property
    def experts(self) -> tuple[str, ...]:
        return tuple(self.parts)

    def described_by(self) -> str:
        published = Path(__file__).parent in self.folder.parents
        return f"{self.folder}{' (published; no configurations in model.model_paths)' if published else ''}"

    def empty_expert(self, expert: str) -> ModelMixin:
        """Return the network on the meta device."""
        raise NotImplementedError

    def linear_layers(self) -> list[str]:
        modules = self.empty_expert(self.experts[-1]).named_modules()
        return [name for name, module in modules if isinstance(module, nn.Linear)]

    def adapter_shapes(self, expert: str, adapter: Adapter) -> dict[str, tuple[int, ...]]:
        model = self.empty_expert(expert)
        lora.inject(model, adapter.rank, adapter.rank, list(adapter.targets), seed=0)
        return {name: tuple(value.shape) for name, value in model.named_parameters() if value.requires_grad}

    def weight_files(self) -> Mapping[str, list[Path]]:
        return self.files

    def save_adapter(self, name: str, expert: ModelMixin, folder: Path, state: dict[str, Tensor]) -> None:
        save_adapter(self.lora_loader, expert, folder / self.parts[name], state)

    def load_adapter(self, name: str, expert: ModelMixin, folder: Path) -> None:
        lora.load_adapter(expert, folder / self.parts[name])

    def attach_adapters(self, experts: Mapping[str, ModelMixin], checkpoint: Path) -> None:
        trained = [name for name, part in self.parts.items() if (checkpoint / part / lora.WEIGHTS_NAME).is_file()]
        if not trained:
            files = " or ".join(f"{part}/{lora.WEIGHTS_NAME}" for part in self.parts.values())
            raise FileNotFoundError(
                f"no adapter in {checkpoint}: it should hold {files}, as checkpoints/step-* of a run do"
            )
        for name in trained:
            lora.attach_adapter(experts[name], checkpoint / self.parts[name])


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


def read_part_config(folder: Path, part: str) -> dict[str, Any]:
    """Read the config.json of a pipeline's part."""
    return read_json(folder / part / "config.json")


def settings(configs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the configurations without the version of diffusers that wrote them."""
    return {
        part: {key: value for key, value in config.items() if not key.startswith("_")}
        for part, config in configs.items()
    }


def size_problems(height: int, width: int, max_pixels: int | None, *, multiple: int, longest: int | None) -> list[str]:
    """Return a line for each side that a model does not take: data.height and data.width, or data.max_pixels'.

    multiple: of the sides. longest: the longest side, None for any.
    """
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
    if longest and max_pixels > longest**2:  # of a square clip
        return [f"data.max_pixels must be at most {longest**2}, got {max_pixels}"]
    return []


def new_on_meta(kind: type[Model], config: Mapping[str, Any]) -> Model:
    """Return a model of diffusers or transformers on the meta device."""
    make: Any = kind
    with torch.device("meta"):
        return make.from_config(dict(config)) if issubclass(kind, ModelMixin) else make(make.config_class(**config))


def cast(model: Model, dtype: torch.dtype) -> Model:
    """Cast all parameters in place; diffusers' own `to` prints a note on modules that none of these models has."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def load_pretrained(kind: type[Model], path: Path, dtype: torch.dtype) -> Model:
    """Load a model from its folder. Raise InputError where the library would fill in random numbers."""
    make: Any = kind
    precision = {"torch_dtype" if issubclass(kind, ModelMixin) else "dtype": dtype}
    model, report = make.from_pretrained(path, **precision, local_files_only=True, output_loading_info=True)
    if missing := sorted(report["missing_keys"]):
        raise InputError(f"{path} lacks {missing[0]} ({len(missing)} such tensors)")
    return model


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
