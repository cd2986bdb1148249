"""A LoRA's configuration as peft and diffusers store it: the only place that knows which of its keys are harmless.

A configuration may change the meaning of the tensors from base + scale * up @ down. Its base may have been changed
before training (PiSSA, LoftQ), layers may be repeated, or only some tokens get the update. So each key is read, or
changes nothing, or must hold nothing. Every other key is refused by name. No torch here.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rewardfl.weights import wan_names
from rewardfl.weights.shards import InputError, abbreviate, parse_json_object

CONFIG_NAME = "adapter_config.json"  # peft's, next to its adapter_model.safetensors
_PEFT = "base_model.model."  # prefix of peft's keys
IN_FILE = "lora_adapter_metadata"  # diffusers', in the metadata of the LoRA's file

# keys on the author, the target modules and the training; they do not change the meaning of the tensors
_HARMLESS = {
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout", "megatron_core",
    "qalora_group_size", "runtime_config",
    "loftq_config", "eva_config", "corda_config", "lora_ga_config",  # they count where init_lora_weights names them
}  # fmt: skip
_FLAGS = ("use_rslora", "use_dora", "lora_bias")
_READ = {"r", "lora_alpha", "rank_pattern", "alpha_pattern", *_FLAGS}
# With these values, and with empty ones, peft leaves the base as it is and saves all that it changed.
_INITS = (True, "gaussian", "eva", "orthogonal", "mica")
_ALLOWED = {"peft_type": ("LORA",), "bias": ("none",), "init_lora_weights": _INITS}
# A pattern's key that is a module's name, or the end of one. peft reads it as a regular expression, so users write `^`
# before a whole name. peft itself writes names only.
_PATTERN = r"\^?(?:[\w-]|\\?\.)+\$?"


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """The scale and parts of a LoRA by its configuration. alphas: {name of a module, or the end of one: alpha}."""

    name: str = CONFIG_NAME
    ranks: frozenset[float] = frozenset()  # allowed ranks of the tensors; empty: not stated
    alpha: float | None = None
    alphas: Mapping[str, float] = field(default_factory=dict)
    use_rslora: bool = False
    use_dora: bool = False
    lora_bias: bool = False

    def stored_alpha(self, module: str) -> float | None:
        """Return the alpha of the first pattern that fits a module's name in the file, as peft does."""
        ends = set(_name_ends(module))
        return next((alpha for pattern, alpha in self.alphas.items() if pattern in ends), self.alpha)

    def unused_pattern(self, path: Path, called: Mapping[str, str]) -> str:
        """Return a note on a pattern that fits no module, which peft allows; empty without one.

        called: {diffusers' name: the name in the file}.
        Raise InputError when the module is there by its other name: then
        the file was renamed and the pattern was not.
        """
        fitting = {end for name in called.values() for end in _name_ends(name)}
        unused = [pattern for pattern in self.alphas if pattern not in fitting]
        if not unused:
            return ""
        aliases = {name: module for module in called for name in (module, wan_names.to_original(module)) if name}
        modules = {end: module for name, module in aliases.items() for end in _name_ends(name)}
        for pattern in unused:
            if pattern in modules:
                raise InputError(
                    f"{path}: alpha_pattern of {self.name} names {abbreviate(pattern)}, which the file calls "
                    f"{called[modules[pattern]]}; write the names of the file's keys into it"
                )
        return f"{path}: alpha_pattern names {abbreviate(unused[0])}, which the file lacks"


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
        return _make_config(path, "the file's metadata", config or stored), None
    file = path.with_name(CONFIG_NAME)
    if not file.is_file():
        return AdapterConfig(), None
    if path.stem == "adapter_model":
        return _make_config(path, CONFIG_NAME, parse_json_object(file.read_bytes(), str(file))), None
    if list(path.parent.glob("adapter_model.*")):
        return AdapterConfig(), f"{file} is not read: it belongs to the adapter_model file next to it"
    if not all(key.startswith(_PEFT) for key in ranks):
        return AdapterConfig(), f"{file} is not read: the keys of {path.name} are not peft's ({_PEFT}...)"
    stored = parse_json_object(file.read_bytes(), str(file))
    if not set(ranks.values()) <= (stated := _read_ranks(path, stored, CONFIG_NAME)):
        has = f"ranks {sorted(stated)}" if stated else "no rank"
        return AdapterConfig(), f"{file} is not read: it states {has}, {path.name} has {sorted(set(ranks.values()))}"
    return _make_config(path, CONFIG_NAME, stored), None


def _make_config(path: Path, name: str, config: Mapping[str, object]) -> AdapterConfig:
    for key, value in config.items():
        plain = value.lower() if isinstance(value, str) and key == "init_lora_weights" else value
        if value and key not in _HARMLESS | _READ and plain not in _ALLOWED.get(key, ()):
            raise InputError(
                f"{path}: {abbreviate(key)} of {name} is {abbreviate(value)}, which is not known to leave base + "
                "scale * up @ down as it is; merge with the tool that trained it (peft: load it, then merge_and_unload)"
            )
    for flag in _FLAGS:
        if config.get(flag) not in (None, True, False):
            raise InputError(f"{path}: {flag} of {name} is {abbreviate(config[flag])}, not true or false")
    alpha = config.get("lora_alpha")
    return AdapterConfig(
        name=name,
        ranks=_read_ranks(path, config, name),
        alpha=None if alpha is None else _to_float(alpha, f"{path}: lora_alpha of {name}"),
        alphas=_read_alphas(path, config, name),
        **{flag: bool(config.get(flag)) for flag in _FLAGS},
    )


def _read_ranks(path: Path, config: Mapping[str, object], name: str) -> frozenset[float]:
    patterns = config.get("rank_pattern") or {}
    if not isinstance(patterns, dict):
        raise InputError(f"{path}: rank_pattern of {name} is {abbreviate(patterns)}, not a JSON object")
    values = [value for value in (config.get("r"), *patterns.values()) if value is not None]
    return frozenset(_to_float(value, f"{path}: r or rank_pattern of {name}") for value in values)


def _read_alphas(path: Path, config: Mapping[str, object], name: str) -> dict[str, float]:
    """Return alpha_pattern. Raise InputError for regular expressions, which may take hours to match."""
    patterns, label = config.get("alpha_pattern") or {}, f"{path}: alpha_pattern of {name}"
    if not isinstance(patterns, dict):
        raise InputError(f"{label} is {abbreviate(patterns)}, not a JSON object")
    alphas: dict[str, float] = {}
    for key, value in patterns.items():
        if not re.fullmatch(_PATTERN, key):
            raise InputError(
                f"{label} has the key {abbreviate(key)}, which is no module's name, nor the end of one; regular "
                "expressions of a file are not run. Write an entry for each module that it means"
            )
        alphas.setdefault(key.replace("\\", "").removesuffix("$"), _to_float(value, f"{label}: {abbreviate(key)}"))
    return alphas


def _to_float(value: object, label: str) -> float:
    """Return a number of JSON as a float. Raise InputError, with the value's label, when it is anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{label} is {abbreviate(value)}, not a number")
    try:
        return float(value)
    except OverflowError:
        raise InputError(f"{label} has {len(str(value))} digits") from None


def _name_ends(name: str) -> Iterator[str]:
    """Yield ^a.b.c, a.b.c, b.c and c of a.b.c: the keys of a pattern by which peft finds this module."""
    yield f"^{name}"
    while name:
        yield name
        name = name.partition(".")[2]
