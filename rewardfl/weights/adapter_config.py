"""A LoRA's configuration as peft and diffusers store it: the only place that knows which of its keys are harmless.

A configuration may say that the tensors mean something else than base + scale * up @ down: that the base was changed
before training (PiSSA, LoftQ), that layers are repeated, that only some tokens get the update. So each key is read,
or is known to change nothing, or must hold nothing. Everything else is refused by name. No torch here.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rewardfl.weights import wan_names
from rewardfl.weights.shards import Refused, json_object, quoted

CONFIG_NAME = "adapter_config.json"  # peft's, next to its adapter_model.safetensors
_PEFT = "base_model.model."  # what peft's own keys begin with
IN_FILE = "lora_adapter_metadata"  # diffusers', in the metadata of the LoRA's file

# who wrote it, where adapters were put, how they were trained: the saved tensors mean the same
_HARMLESS = {
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout", "megatron_core",
    "qalora_group_size", "runtime_config",
    "loftq_config", "eva_config", "corda_config", "lora_ga_config",  # they count where init_lora_weights names them
}  # fmt: skip
_READ = {"r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "lora_bias"}
# values with which peft leaves the base as it is and saves all that it changed; the empty ones are allowed as well
_ALLOWED = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal", "mica"),
}
# A key of peft's patterns that is a module's name, or the end of one. peft takes it as a regular expression and so
# tells users of `^` for a name from its start on; all that it writes itself are names.
_PATTERN = r"\^?(?:[\w-]|\\?\.)+\$?"


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """What a configuration says of a LoRA's scale and parts. alphas: {name of a module, or the end of one: alpha}."""

    name: str = CONFIG_NAME
    ranks: frozenset[float] = frozenset()  # that its tensors may have; empty: not stated
    alpha: float | None = None
    alphas: Mapping[str, float] = field(default_factory=dict)
    use_rslora: bool = False
    use_dora: bool = False
    lora_bias: bool = False

    def stored_alpha(self, module: str) -> float | None:
        """Return the alpha of a module, by its name in the file: of the first pattern that fits, as in peft."""
        ends = set(_ends(module))
        return next((alpha for pattern, alpha in self.alphas.items() if pattern in ends), self.alpha)

    def unused_pattern(self, path: Path, called: Mapping[str, str]) -> str:
        """Return a line on a pattern that no module fits, as peft allows; empty without one.

        called: {diffusers' name: the name in the file}. Refused when the module is there by its other name: the file
        was renamed and the pattern was not.
        """
        fitting = {end for name in called.values() for end in _ends(name)}
        unused = [pattern for pattern in self.alphas if pattern not in fitting]
        if not unused:
            return ""
        others = {name: module for module in called for name in (module, wan_names.to_original(module)) if name}
        modules = {end: module for name, module in others.items() for end in _ends(name)}
        for pattern in unused:
            if pattern in modules:
                raise Refused(
                    f"{path}: alpha_pattern of {self.name} names {quoted(pattern)}, which the file calls "
                    f"{called[modules[pattern]]}; write the names of the file's keys into it"
                )
        return f"{path}: alpha_pattern names {quoted(unused[0])}, which the file lacks"


def read_adapter_config(
    path: Path, metadata: Mapping[str, str], component: str, ranks: Mapping[str, int]
) -> tuple[AdapterConfig, str | None]:
    """Return the configuration of the LoRA file at `path`, empty without one, and a note for the user.

    component: the part of a pipeline whose keys count in diffusers' metadata. ranks: {key of a factor: its rank}.
    Refused: a damaged configuration, and one with a key or a value that changes what the tensors mean.
    """
    if IN_FILE in metadata:
        stored = json_object(metadata[IN_FILE], f"{path}: {IN_FILE}")
        prefix = f"{component}."
        config = {key.removeprefix(prefix): value for key, value in stored.items() if key.startswith(prefix)}
        return _checked(path, "the file's metadata", config or stored), None
    file = path.with_name(CONFIG_NAME)
    if not file.is_file():
        return AdapterConfig(), None
    if path.stem == "adapter_model":
        return _checked(path, CONFIG_NAME, json_object(file.read_bytes(), str(file))), None
    if list(path.parent.glob("adapter_model.*")):
        return AdapterConfig(), f"{file} is not read: it belongs to the adapter_model file next to it"
    if not all(key.startswith(_PEFT) for key in ranks):
        return AdapterConfig(), f"{file} is not read: the keys of {path.name} are not peft's ({_PEFT}...)"
    stored = json_object(file.read_bytes(), str(file))
    if not set(ranks.values()) <= (stated := _ranks(path, stored, CONFIG_NAME)):
        has = f"ranks {sorted(stated)}" if stated else "no rank"
        return AdapterConfig(), f"{file} is not read: it states {has}, {path.name} has {sorted(set(ranks.values()))}"
    return _checked(path, CONFIG_NAME, stored), None


def _checked(path: Path, name: str, config: Mapping[str, object]) -> AdapterConfig:
    for key, value in config.items():
        plain = value.lower() if isinstance(value, str) and key == "init_lora_weights" else value
        if value and key not in _HARMLESS | _READ and plain not in _ALLOWED.get(key, ()):
            raise Refused(
                f"{path}: {quoted(key)} of {name} is {quoted(value)}, which is not known to leave base + scale * up @ "
                "down as it is; merge with the tool that trained it (peft: load it, then merge_and_unload)"
            )
    for flag in ("use_rslora", "use_dora", "lora_bias"):
        if config.get(flag) not in (None, True, False):
            raise Refused(f"{path}: {flag} of {name} is {quoted(config[flag])}, not true or false")
    alpha = config.get("lora_alpha")
    return AdapterConfig(
        name=name,
        ranks=_ranks(path, config, name),
        alpha=None if alpha is None else _number(alpha, f"{path}: lora_alpha of {name}"),
        alphas=_patterns(path, config, name),
        use_rslora=bool(config.get("use_rslora")),
        use_dora=bool(config.get("use_dora")),
        lora_bias=bool(config.get("lora_bias")),
    )


def _ranks(path: Path, config: Mapping[str, object], name: str) -> frozenset[float]:
    patterns = config.get("rank_pattern") or {}
    if not isinstance(patterns, dict):
        raise Refused(f"{path}: rank_pattern of {name} is {quoted(patterns)}, not a JSON object")
    values = [value for value in (config.get("r"), *patterns.values()) if value is not None]
    return frozenset(_number(value, f"{path}: r or rank_pattern of {name}") for value in values)


def _patterns(path: Path, config: Mapping[str, object], name: str) -> dict[str, float]:
    """Return alpha_pattern, ^ before a name that must be the whole. Refused: other regular expressions.

    Those of a stranger's file may take hours to match.
    """
    patterns, what = config.get("alpha_pattern") or {}, f"{path}: alpha_pattern of {name}"
    if not isinstance(patterns, dict):
        raise Refused(f"{what} is {quoted(patterns)}, not a JSON object")
    alphas: dict[str, float] = {}
    for key, value in patterns.items():
        if not re.fullmatch(_PATTERN, key):
            raise Refused(
                f"{what} has the key {quoted(key)}, which is no module's name, nor the end of one; regular expressions "
                "of a file are not run. Write an entry for each module that it means"
            )
        alphas.setdefault(key.replace("\\", "").removesuffix("$"), _number(value, f"{what}: {quoted(key)}"))
    return alphas


def _number(value: object, what: str) -> float:
    """Return `value`, an int or float of JSON. what: its name in the message. Refused when it is anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Refused(f"{what} is {quoted(value)}, not a number")
    try:
        return float(value)
    except OverflowError:
        raise Refused(f"{what} has {len(str(value))} digits") from None


def _ends(name: str) -> Iterator[str]:
    """Return ^a.b.c, a.b.c, b.c, c of a.b.c: the keys of a pattern by which peft finds a module of this name."""
    yield f"^{name}"
    while name:
        yield name
        name = name.partition(".")[2]
