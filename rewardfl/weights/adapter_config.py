"""A LoRA's configuration as peft and diffusers store it, and the model that its words name. No torch here.

A configuration may change the meaning of the tensors from base + scale * up @ down: PiSSA and LoftQ change the base
before training, layers may be repeated. So each key is read, or changes nothing, or is refused by name.
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

# keys of a file's metadata or of peft's configuration whose text names the model; the last one's is a path
STATEMENT_KEYS = ("modelspec.architecture", "ss_base_model_version", "base_model_name_or_path")

# {family, named as in image_names.IMAGE_MODELS: the words that mean it}
_FAMILIES = {
    "Wan": r"(?<![a-z])wan(?![a-z])|wan(video|transformer)",
    "FLUX.1": r"flux(?![^a-z0-9]*2(?![0-9]))",
    "FLUX.2": r"flux[^a-z0-9]*2(?![0-9])",
    "SD3": r"((?<![a-z])sd|stable[^a-z0-9]?diffusion)[^a-z0-9]?v?3",
    "Qwen-Image": r"qwen[^a-z0-9]?image",
    "Z-Image": r"(?<![a-z])z[^a-z0-9]?image",
    "Stable Diffusion 1, 2 or XL": r"((?<![a-z])sd|stable[^a-z0-9]?diffusion)[^a-z0-9]?v?(1|2|xl)",
    "HunyuanVideo": r"hunyuan|framepack", "Chroma": r"(?<![a-z])chroma",  # whose layers FLUX.1 has, too
}  # fmt: skip


class AdapterConfig(BaseModel):
    """The keys that set the scale and parts of a LoRA. A pattern's key fits the end of a module's name."""

    model_config = ConfigDict(strict=True)

    r: float | None = None
    lora_alpha: float | None = None
    rank_pattern: dict[str, float] = {}
    alpha_pattern: dict[re.Pattern[str], float] = {}
    use_rslora: bool = False
    use_dora: bool = False
    lora_bias: bool = False
    base_model_name_or_path: str | None = None

    @property
    def ranks(self) -> set[float]:
        """Return the allowed ranks of the tensors; empty: not stated."""
        return {*(() if self.r is None else (self.r,)), *self.rank_pattern.values()}

    def stored_alpha(self, module: str) -> float | None:
        """Return the alpha of the first pattern that fits a module's name in the file, as peft's get_pattern_key."""
        patterns = self.alpha_pattern.items()
        fitting = (alpha for key, alpha in patterns if re.match(rf"(.*\.)?({key.pattern})$", module))
        return next(fitting, self.lora_alpha)


def read_adapter_config(
    path: Path, metadata: Mapping[str, str], component: str, ranks: Mapping[str, int]
) -> tuple[AdapterConfig, str | None]:
    """Return the configuration of the LoRA file at `path`, empty without one, and a note for the user.

    component: the part of a pipeline whose keys count in diffusers' metadata. ranks: {key of a factor: its rank}.
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
                f"{path}: {abbreviate(key)} of its configuration is {abbreviate(value)}, which is not read here; merge "
                "it with the tool that trained it (peft: merge_and_unload)"
            )
    try:
        return AdapterConfig.model_validate({key: value for key, value in config.items() if value is not None})
    except ValidationError as error:
        problem = error.errors()[0]
        where, value = ".".join(map(str, problem["loc"])), abbreviate(problem["input"])
        raise InputError(f"{path}: {abbreviate(where)} of its configuration is {value}: {problem['msg']}") from None


def stated_family(text: str) -> str | None:
    """Return the family that a text names, such as a class or a path; None if it names none, or several."""
    families = [family for family, pattern in _FAMILIES.items() if re.search(pattern, text.lower())]
    return families[0] if len(families) == 1 else None


def read_statements(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return {key: its text} of the keys that name a model; of a path or repository only the last name."""
    return {
        key: metadata[key].rstrip("/").split("/")[-1 if key == STATEMENT_KEYS[2] else 0]
        for key in STATEMENT_KEYS
        if metadata.get(key)
    }
