"""A LoRA's configuration as peft and diffusers store it: the only place that knows which of its keys are harmless.

A configuration may change the meaning of the tensors from base + scale * up @ down. Its base may have been changed
before training (PiSSA, LoftQ), layers may be repeated, or only some tokens get the update. So each key is read, or
changes nothing, or must hold nothing. Every other key is refused by name. No torch here.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from rewardfl.weights.shards import InputError, abbreviate, parse_json_object, read_json_object

CONFIG_NAME = "adapter_config.json"  # peft's, next to its adapter_model.safetensors
_PEFT = "base_model.model."  # prefix of peft's keys
IN_FILE = "lora_adapter_metadata"  # diffusers', in the metadata of the LoRA's file

# keys on the author, the target modules and the training; they do not change the meaning of the tensors
_HARMLESS = {
    "task_type", "auto_mapping", "peft_version", "revision", "inference_mode",
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout", "megatron_core",
    "qalora_group_size", "runtime_config",
    "loftq_config", "eva_config", "corda_config", "lora_ga_config",  # they count where init_lora_weights names them
}  # fmt: skip
# With these values, and with empty ones, peft leaves the base as it is and saves all that it changed.
_INITS = (True, "gaussian", "eva", "orthogonal", "mica")
_ALLOWED = {"peft_type": ("LORA",), "bias": ("none",), "init_lora_weights": _INITS}
# A pattern's key that is a module's name, or the end of one. peft reads it as a regular expression, so users write `^`
# before a full name. peft itself writes names only.
_PATTERN = r"\^?(?:[\w-]|\\?\.)+\$?"


class AdapterConfig(BaseModel):
    """The keys that set the scale and parts of a LoRA. A pattern's key is the name of a module, or the end of one."""

    model_config = ConfigDict(strict=True)

    r: float | None = None
    lora_alpha: float | None = None
    rank_pattern: dict[str, float] = {}
    alpha_pattern: dict[str, float] = {}
    use_rslora: bool = False
    use_dora: bool = False
    lora_bias: bool = False
    base_model_name_or_path: str | None = None

    @property
    def ranks(self) -> set[float]:
        """Return the allowed ranks of the tensors; empty: not stated."""
        return {*(() if self.r is None else (self.r,)), *self.rank_pattern.values()}

    def stored_alpha(self, module: str) -> float | None:
        """Return the alpha of the first pattern that fits a module's name in the file, as peft does."""
        fitting = (alpha for pattern, alpha in self.alpha_pattern.items() if _fits(pattern, module))
        return next(fitting, self.lora_alpha)


def read_adapter_config(
    path: Path, metadata: Mapping[str, str], component: str, ranks: Mapping[str, int]
) -> tuple[AdapterConfig, str | None]:
    """Return the configuration of the LoRA file at `path`, empty without one, and a note for the user.

    component: the part of a pipeline whose keys count in diffusers' metadata. ranks: {key of a factor: its rank}.
    Raise InputError for a damaged configuration, and for a key or a value that changes what the tensors mean.
    """
    if IN_FILE in metadata:
        stored = parse_json_object(metadata[IN_FILE], f"{path}: {IN_FILE}")
        prefix = f"{component}."
        config = {key.removeprefix(prefix): value for key, value in stored.items() if key.startswith(prefix)}
        return _make_config(path, config or stored), None
    file = path.with_name(CONFIG_NAME)
    if not file.is_file():
        return AdapterConfig(), None
    is_pefts = path.stem == "adapter_model"
    if not is_pefts and (list(path.parent.glob("adapter_model.*")) or not all(key.startswith(_PEFT) for key in ranks)):
        return AdapterConfig(), f"{file} is not read: it belongs to a file of peft's, which {path.name} is not"
    config = _make_config(path, read_json_object(file))
    if not is_pefts and not config.ranks.issuperset(ranks.values()):
        return AdapterConfig(), f"{file} is not read: {path.name} has other ranks"
    return config, None


def _make_config(path: Path, config: Mapping[str, object]) -> AdapterConfig:
    for key, value in config.items():
        plain = value.lower() if isinstance(value, str) and key == "init_lora_weights" else value
        if value and key not in _HARMLESS | AdapterConfig.model_fields.keys() and plain not in _ALLOWED.get(key, ()):
            raise InputError(
                f"{path}: {abbreviate(key)} of the LoRA's configuration is {abbreviate(value)}, which is not known to "
                "leave base + scale * up @ down as it is; merge with the tool that trained it (peft: merge_and_unload)"
            )
    try:
        checked = AdapterConfig.model_validate({key: value for key, value in config.items() if value is not None})
    except ValidationError as error:
        problem = error.errors()[0]
        where, value = ".".join(map(str, problem["loc"])), abbreviate(problem["input"])
        raise InputError(f"{path}: {abbreviate(where)} of its configuration is {value}: {problem['msg']}") from None
    if regular := [key for key in checked.alpha_pattern if not re.fullmatch(_PATTERN, key)]:
        raise InputError(
            f"{path}: alpha_pattern of its configuration has the key {abbreviate(regular[0])}, which is no module's "
            "name, nor the end of one; regular expressions of a file are not run. Write an entry for each module"
        )
    return checked


def _fits(pattern: str, name: str) -> bool:
    """Return whether a pattern's key is a module's name, with or without ^ and $, or the end of one after a dot."""
    plain = pattern.replace("\\", "").removesuffix("$")
    return plain == f"^{name}" or f".{name}".endswith(f".{plain}")
