"""Reading a configuration: one YAML file plus `section.key=value` overrides, checked before anything loads.

An override reaches into a key that holds keys, too: `reward.terms.flow.weight=0.3`.

The section `grpo` identifies a file of train_flow_grpo.py, `forward` one of train_forward_rl.py. pydantic checks the
values (rewardfl/config/schema.py). This module reads YAML, applies the overrides and reports each wrong key in a line.
"""

import re
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from rewardfl.config.aliases import RENAMED, find, merge, modernise, order
from rewardfl.config.schema import (
    ONE_STEP,
    PRESETS,
    SECTIONS,
    AnyConfig,
    FlowGrpoConfig,
    ForwardRlConfig,
    RewardFlConfig,
    Section,
    did_you_mean,
    shown,
)

MOST_BYTES, MOST_BRACKETS = 100_000, 500  # our longest configuration has 4,000 and 20
_TYPES = {
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "a text",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "keys and values",
}
_GROUPS_PLACE = "samples are placed in a row on as few processes as possible"
_REMOVED = {  # {key: reason}
    "run.logging_steps": "every step is logged",
    "model.allow_download": "fetch the files before the run, by `hf download`",
    "reward.recogniser_chunk": "eight faces are embedded at a time",
    "reward.motion_alarm": "the alarm is at 0.8",
    "reward.reward_timeout": "a concurrent reward has 600 seconds",
    "train.max_nonfinite": "a fourth step in a row without a finite gradient or a judged sample stops the run",
    "grpo.ratio_tolerance": "it is 0 in float32, and 0.1 * clip_range in bfloat16 or with train.compile_blocks",
    "grpo.spread": _GROUPS_PLACE,
    "forward.spread": _GROUPS_PLACE,
    "forward.allow_distilled": "nft makes a distilled model worse; take objective rvm",
    "train.keep_attention": "it saved 6 % of the FLOPs for 8 GB of a GPU",
    "train.max_sample_norm": "no shipped configuration set it; train/sample_norm shows clips that outweigh others",
    "reward.landmark_jitter": "no shipped configuration set it",
    "reward.views": "it traded identity for motion",
}
_CONSTANTS = {  # {removed key that changes numbers: what the code does today}
    "reward.recogniser_chunk": 8, "reward.views": 0, "reward.landmark_jitter": 0.0, "train.max_sample_norm": None,
}  # fmt: skip
_NAMELESS = ("missing", "extra_forbidden", "invalid_key")  # errors of keys that the file or the schema lacks
_OBJECTIVES: dict[str, type[AnyConfig]] = {"grpo": FlowGrpoConfig, "forward": ForwardRlConfig}


class ConfigError(ValueError):
    """A setting that cannot work. The message has one line per problem: the key, the value, the way out."""


def load(path: str | Path, overrides: Sequence[str] = (), schema: type[AnyConfig] | None = None) -> Any:
    """Return the checked configuration of YAML file `path` with `section.key=value` overrides (YAML values) applied.

    schema: the calling script's, RewardFlConfig or FlowGrpoConfig; None takes the file's.

    Raise ConfigError for an unreadable file, a file of the other script, unknown or missing keys, wrong types, values
    out of range and combinations that cannot work.
    """
    raw = _read(Path(path))
    file_schema = _schema_of(raw)
    if schema not in (None, file_schema):
        raise ConfigError(f"{path} {_sign(file_schema)}, so it is for {file_schema.script}, not {schema.script}")
    return parse(raw, overrides)


def parse(raw: Mapping[str, Any], overrides: Sequence[str] = ()) -> AnyConfig:
    """Return the checked configuration of {section: {key: value}}, as in run.json's "config". Raise as `load` does."""
    schema = _schema_of(raw)
    today, problems = modernise(raw, {}, groups=schema is not RewardFlConfig)
    sections: dict[str, Any] = {**dict.fromkeys(SECTIONS[schema], {}), **today}
    overrides, conflicts = order(overrides)
    problems += [*conflicts, *(problem for text in overrides for problem in _override(sections, text, schema))]
    _apply_preset(sections, schema)
    try:
        cfg = schema.model_validate(sections)
    except ValidationError as error:
        raise ConfigError("\n".join([*problems, *describe_errors(error, sections, schema)])) from None
    problems += [line for part in (*dict(cfg).values(), cfg) for line in part.conflicts()]
    if problems:
        raise ConfigError("\n".join(problems))
    return cfg


def _schema_of(raw: Mapping[str, Any]) -> type[AnyConfig]:
    """Return the complete configuration that a file's sections say: one of them names the script's objective."""
    return next((schema for section, schema in _OBJECTIVES.items() if section in raw), RewardFlConfig)


def _sign(schema: type[AnyConfig]) -> str:
    """Describe by which section a script's file is known."""
    section = next((section for section, owner in _OBJECTIVES.items() if owner is schema), None)
    return f"has a section {section}" if section else f"has no section {' or '.join(_OBJECTIVES)}"


def to_dict(cfg: AnyConfig) -> dict[str, dict[str, Any]]:
    """Return {section: {key: value}} with plain JSON and YAML values."""
    return cfg.model_dump(mode="json")


def flat(settings: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return {section.key: value} as text, which every tracker takes. settings: of to_dict."""
    return {f"{section}.{key}": str(value) for section, keys in settings.items() for key, value in keys.items()}


def dump(cfg: AnyConfig) -> str:
    """Return YAML text with every key; `load` reads it back to the same configuration."""
    return yaml.safe_dump(to_dict(cfg), sort_keys=False)


class _Loader(yaml.SafeLoader):
    """yaml.SafeLoader that raises for aliases, which may nest without end, and for duplicate keys."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise _refusal("a configuration takes no aliases (*); write the value out", self.peek_event())
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        self.flatten_mapping(node)
        keys = [key.value for key, _ in node.value]
        for i, (key, _) in enumerate(node.value):
            if key.value in keys[:i]:
                raise _refusal(f"{shown(key.value)} is given twice; remove one", key)
        return super().construct_mapping(node, deep)


# as YAML 1.2: 042 is 42, not 34, and 1:30 and 1:30.5 are refused, not 90 and 90.5
_Loader.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(node.value))
_Loader.add_constructor("tag:yaml.org,2002:float", lambda _, node: float(re.sub(r"\.(?=\D)", "", node.value)))


def _refusal(problem: str, at: yaml.Node | yaml.Event) -> yaml.MarkedYAMLError:
    mark: Any = at.start_mark  # the stubs tell libyaml's marks from PyYAML's
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


def without_removed(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections of a run of an earlier version without keys that no longer exist, or do nothing."""
    idle = {"sample.mid_timestep"} if find(sections, "sample.gradient_mode") in ONE_STEP else set()
    return {
        name: {key: value for key, value in part.items() if f"{name}.{key}" not in _REMOVED.keys() | idle}
        if isinstance(part, dict) else part
        for name, part in sections.items()
    }  # fmt: skip


def read_saved(raw: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the settings of a run.json of this or an earlier version. Raise ConfigError if today's keys cannot."""
    schema = _schema_of(raw)
    today, problems = modernise(without_removed(raw), {}, groups=schema is not RewardFlConfig)
    for key, constant in _CONSTANTS.items():
        section, _, name = key.partition(".")
        if (value := (raw.get(section) or {}).get(name, constant)) != constant:
            problems.append(f"{key} was {shown(value)}, and is {shown(constant)} today: {_REMOVED[key]}")
    try:
        saved = to_dict(schema.model_validate(today))
    except ValidationError as error:
        problems += describe_errors(error, today, schema)
    if problems:
        raise ConfigError("\n".join(problems))
    return saved


def parse_value(text: str, where: str, expected: Any = Any) -> Any:
    """Return the YAML value of a command line's text. A text without quotes is taken as it is, " #" included.

    expected: a type. One that takes texts and no numbers gets every text but null and false as it is.
    """
    takes_text = _fits(expected, text) and not _fits(expected, 0)
    if takes_text and text not in ("null", "false") and not text.startswith(('"', "'")):
        return text
    try:
        value = parse_yaml(text, where)
    except ConfigError:
        if takes_text:  # half of a pair of quotes
            return text
        raise
    if isinstance(value, str):
        return value if text.startswith(('"', "'")) else text
    return value if not takes_text or _fits(expected, value) else text


def _fits(expected: Any, value: Any) -> bool:
    try:
        TypeAdapter(expected).validate_python(value, strict=True)
    except ValidationError:
        return False
    return True


def parse_yaml(text: str, where: str) -> Any:
    """Return the value of YAML `text`. Raise ConfigError in one line if it is not valid, too long or too deep."""
    if len(text) > MOST_BYTES or text.count("[") + text.count("{") > MOST_BRACKETS:
        raise ConfigError(f"{where} must have at most {MOST_BYTES} characters and {MOST_BRACKETS} brackets; shorten it")
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}:" if error.problem_mark else None
        problem = " ".join(filter(None, (line, error.context, error.problem)))
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a control character, month 99, too deep
        problem = str(error)
    problem = " ".join(problem.split())[:250]
    raise ConfigError(f"{where} is not valid YAML: {problem if problem.isprintable() else repr(problem)}")


def _read(path: Path) -> dict[str, Any]:
    try:
        if not path.is_file():
            raise ConfigError(f"config file not found: {path.absolute()}")
        with path.open(encoding="utf-8") as file:
            raw = parse_yaml(file.read(MOST_BYTES + 1), str(path))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 ({error}); save it as UTF-8") from error
    if not isinstance(raw, dict):
        sections = ", ".join(RewardFlConfig.model_fields)
        raise ConfigError(f"{path} must hold sections ({sections}) with keys beneath them")
    return raw


def _override(raw: dict[str, Any], text: str, schema: type[AnyConfig]) -> list[str]:
    """Put "section.key=value" into `raw` without mutating its values; return the problems.

    "section.key.inner=value" sets one key of a value that holds keys, and leaves its other keys.
    """
    name, equals, value = text.partition("=")
    *outer, key = path = name.split(".")
    if not equals or not all(path):
        return [f"override {shown(text)} must have the form section.key=value"]
    if path[0] not in SECTIONS[schema] and name not in RENAMED:
        return [_unknown(path[:1], schema)]
    if not outer:
        return [f"override {shown(text)} must name a key: {name}.<key>=value"]
    try:
        expected = _annotation(schema, path)
    except (LookupError, AttributeError):  # the key does not exist, which the schema reports
        expected = Any
    change: Any = parse_value(value, f"override {shown(text)}", expected)
    for part in reversed(path):
        change = {part: change}
    today, problems = modernise(change, raw, groups=schema is not RewardFlConfig)
    if today != change:
        if path == ["reward", "others"]:  # it replaces the file's
            raw["reward"] = {**raw["reward"], "terms": {"score": (raw["reward"].get("terms") or {}).get("score", {})}}
        merge(raw, today)
        return problems
    mapping = raw
    for i, part in enumerate(outer, 1):
        inner, change = mapping.get(part), change[part]
        if not isinstance(inner, dict | NoneType):
            return [f"override {shown(text)}: {_dotted(path[:i])} holds {shown(inner)}, no keys"]
        mapping[part] = mapping = dict(inner or {})
    mapping[key] = change[key]
    return []


def _apply_preset(sections: dict[str, Any], schema: type[AnyConfig]) -> None:
    """Set the keys of train.memory that its preset names, as far as the run has them and they are not given."""
    name = find(sections, "train.memory.preset")
    preset = PRESETS.get(name, {}) if isinstance(name, str) else {}
    unfit = set(preset) - _without_null(_annotation(schema, ("train", "memory"))).model_fields.keys()
    if "," in str(find(sections, "model.trainable_models")):
        unfit.add("untrained")
    if find(sections, "data.num_frames") == 1:
        unfit.add("kept_chunks")
    if find(sections, "sample.gradient_mode") == "endpoint" or find(sections, "train.context_parallel", 1) != 1:
        unfit.add("active_graphs")
    fitting = {key: value for key, value in preset.items() if key not in unfit}
    if fitting:
        sections["train"] = sections["train"] | {"memory": fitting | sections["train"]["memory"]}


def describe_errors(error: ValidationError, raw: Mapping[str, Any], schema: type[BaseModel]) -> list[str]:
    """Return a line per key, which joins pydantic's errors for the members of a union."""
    by_key: dict[tuple[int | str, ...], list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        by_key.setdefault(_key(detail, raw), []).append(detail)
    return [_line(key, details, schema) for key, details in by_key.items()]


def _key(detail: ErrorDetails, raw: Any) -> tuple[int | str, ...]:
    """Return the error's key in the file, without what pydantic appends: members of a union, "[key]" for a name."""
    for depth, part in enumerate(detail["loc"] if detail["type"] not in _NAMELESS else ()):
        if not (part in raw if isinstance(raw, dict) else isinstance(raw, list) and isinstance(part, int)):
            return detail["loc"][:depth]
        raw = raw[part]
    return detail["loc"]


def _line(key: tuple[int | str, ...], errors: Sequence[ErrorDetails], schema: type[BaseModel]) -> str:
    problem, value, name = errors[0]["type"], errors[0]["input"], _dotted(key)
    if problem in ("extra_forbidden", "invalid_key"):
        return _unknown(key, schema)
    if problem == "missing":
        return f"{name} is required; write it in the file or pass {name}=..."
    if problem == "model_type":
        return f"section {name!r} must hold keys, got {shown(value)}; write them beneath it or remove the line"
    matched = [detail for detail in errors if detail["type"] not in (*_TYPES, "literal_error")]
    words = map(_words, matched or errors)  # only the union member whose type matched, if one did
    expected = " ".join(detail.get("ctx", {}).get("expected", "") for detail in errors)
    hint = did_you_mean(value, re.findall("'([^']+)'", expected))
    return f"{name} must be {' or '.join(words)}, got {shown(value)}{hint}"


def _words(detail: ErrorDetails) -> str:
    """Describe a valid value."""
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])
    words = _TYPES.get(detail["type"]) or detail["msg"].removeprefix("Input should be ").replace("False", "false")
    return words.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")


def _dotted(key: Sequence[int | str]) -> str:
    return shown(".".join(map(str, key)))[1:-1] or "the file"


def _annotation(schema: Any, key: Sequence[int | str]) -> Any:
    """Return the type of the value at `key`."""
    annotation = schema
    for part in key:
        annotation = _without_null(annotation)
        annotation = (
            get_args(annotation)[1] if get_origin(annotation) is dict else annotation.model_fields[part].annotation
        )
    return annotation


def _without_null(annotation: Any) -> Any:
    """Return the section of a type `Section | None`, and any other type as it is."""
    if get_origin(annotation) is dict:
        return annotation
    return next(
        (item for item in get_args(annotation) if isinstance(item, type) and issubclass(item, Section)), annotation
    )


def _unknown(key: Sequence[int | str], schema: Any) -> str:
    """Describe a key or section that `schema` does not have, by its section, its script or the nearest name."""
    name, last, names = _dotted(key), key[-1], _without_null(_annotation(schema, key[:-1])).model_fields
    if name in _REMOVED:
        return f"{name} was removed: {_REMOVED[name]}; delete the key"
    for owner, sections in ({schema: SECTIONS[schema]} | SECTIONS).items() if len(key) <= 2 else ():
        target = next((section for section, model in sections.items() if last in model.model_fields), None)
        if target is not None and owner is schema:
            return f"{name} -> {target}.{last}: keys live in their sections, move it there"
        if target is not None or name in sections:
            return f"{name} is for {owner.script}, whose file {_sign(owner)}; remove it"
    if len(key) == 1:
        return f"unknown section {shown(last)}{did_you_mean(last, names)}; sections are {', '.join(names)}"
    return f"unknown key {shown(name)}{did_you_mean(last, names)}"
