"""Reading a configuration: one YAML file plus `section.key=value` overrides, checked before anything loads.

An override reaches into a key that holds keys, too: `reward.others.flow.weight=0.3`.

The section `grpo` identifies a file of train_flow_grpo.py, `forward` one of train_forward_rl.py. pydantic checks the
values (rewardfl/config/schema.py). This module reads YAML, applies the overrides and reports each wrong key in a line.
"""

import json
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rewardfl.config.fields import Section, did_you_mean, shown
from rewardfl.config.schema import SECTIONS, AnyConfig, FlowGrpoConfig, ForwardRlConfig, RewardFlConfig

MOST_BYTES, MOST_BRACKETS = 100_000, 500  # our longest configuration has 4,000 and 20
_DECIMAL = re.compile(r"[-+]?(0|[1-9]\d{0,18}|\d*\.\d*(e[-+]\d+)?|\.inf|\.nan)", re.IGNORECASE)
_TYPES = {
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "a text",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "keys and values",
}
_REMOVED = {"train.keep_attention": "it saved 6 % of the FLOPs for 8 GB of a GPU"}  # {key: reason}

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
    sections: dict[str, Any] = {**dict.fromkeys(SECTIONS[schema], {}), **raw}
    problems = [problem for text in overrides for problem in _override(sections, text, schema)]
    try:
        cfg = schema.model_validate(sections)
    except ValidationError as error:
        raise ConfigError("\n".join([*problems, *describe(error, sections, schema)])) from None
    problems += [line for part in (*dict(cfg).values(), cfg) for line in part.conflicts()]
    if problems:
        raise ConfigError("\n".join(problems))
    return cfg


def _schema_of(raw: Mapping[str, Any]) -> type[AnyConfig]:
    """Return the whole configuration that a file's sections say: one of them names the script's objective."""
    return next((schema for section, schema in _OBJECTIVES.items() if section in raw), RewardFlConfig)


def _sign(schema: type[AnyConfig]) -> str:
    """Describe by which section a script's file is known."""
    section = next((section for section, owner in _OBJECTIVES.items() if owner is schema), None)
    return f"has a section {section}" if section else f"has no section {' or '.join(_OBJECTIVES)}"


def to_dict(cfg: AnyConfig) -> dict[str, dict[str, Any]]:
    """Return {section: {key: value}} with plain JSON and YAML values."""
    return cfg.model_dump(mode="json")


def flat(cfg: AnyConfig) -> dict[str, str]:
    """Return {section.key: value} as text, which every tracker takes."""
    return {f"{section}.{key}": str(value) for section, keys in to_dict(cfg).items() for key, value in keys.items()}


def dump(cfg: AnyConfig) -> str:
    """Return YAML text with every key; `load` reads it back to the same configuration."""
    return yaml.safe_dump(to_dict(cfg), sort_keys=False)


class _Loader(yaml.SafeLoader):
    """yaml.SafeLoader that raises for aliases, tags, duplicate keys and numbers like 042 and 1:30.

    YAML 1.1 reads these as 34 and 90, YAML 1.2 as 42 and as a text.
    """

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or (isinstance(event, yaml.NodeEvent) and event.anchor):
            raise _refusal("a configuration takes no anchors and aliases (&, *); write the value out", event)
        if isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent) and event.tag is not None:
            raise _refusal(f"a configuration takes no tags, got {shown(event.tag)}", event)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        self.flatten_mapping(node)
        keys = [key.value for key, _ in node.value]
        for i, key in enumerate(keys):
            if key in keys[:i]:
                raise _refusal(f"{shown(key)} is given twice; remove one", node.value[i][0])
        return super().construct_mapping(node, deep)

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        if not _DECIMAL.fullmatch(node.value):
            raise _refusal(f"{shown(node.value)} is no plain decimal number; write it as one, or in quotes", node)
        return int(node.value) if node.tag.endswith(":int") else self.construct_yaml_float(node)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_number)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_number)


def _refusal(problem: str, at: yaml.Node | yaml.Event) -> yaml.MarkedYAMLError:
    mark: Any = at.start_mark  # the stubs tell libyaml's marks from PyYAML's
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


def parse_value(text: str, where: str) -> Any:
    """Return the YAML value of a command line's text. A text without quotes is taken as it is, " #" included."""
    value = parse_yaml(text, where)
    return text if isinstance(value, str) and not text.startswith(('"', "'")) else value


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
        if path.stat().st_size > MOST_BYTES:
            raise ConfigError(f"{path} has {path.stat().st_size} bytes, a configuration at most {MOST_BYTES}")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 ({error}); save it as UTF-8") from error
    raw = parse_yaml(text, str(path))
    if not isinstance(raw, dict):
        raise ConfigError(
            f"{path} must hold sections ({', '.join(RewardFlConfig.model_fields)}) with keys beneath them"
        )
    return raw


def _override(raw: dict[str, Any], text: str, schema: type[AnyConfig]) -> list[str]:
    """Put "section.key=value" into `raw` without mutating its values; return the problems.

    "section.key.inner=value" sets one key of a value that holds keys, and leaves its other keys.
    """
    name, equals, value = text.partition("=")
    section, *keys = name.split(".")
    if not equals:
        return [f"override {shown(text)} must have the form section.key=value"]
    if section not in SECTIONS[schema]:
        return [_unknown([section], schema)]
    if not keys or not all(keys):
        return [f"override {shown(text)} must name a key: {section}.<key>=value"]
    if not isinstance(raw[section], dict):
        return []  # the schema reports the section
    *outer, key = keys
    mapping = raw[section] = dict(raw[section])
    for i, part in enumerate(outer):
        inner = mapping.get(part)
        if not isinstance(inner, dict | NoneType):
            return [f"override {shown(text)}: {_dotted([section, *outer[: i + 1]])} holds {shown(inner)}, no keys"]
        mapping[part] = dict(inner or {})
        mapping = mapping[part]
    reads_text = _is_text(schema, [section, *keys])
    mapping[key] = _read_text(value, reads_text) if reads_text else parse_value(value, f"override {shown(text)}")
    return []


def _is_text(schema: type[BaseModel], key: Sequence[str]) -> tuple[Any, ...]:
    """Return the members of the type at `key` if it takes texts, choices, false and null only; else nothing."""
    try:
        kind = _annotation(schema, key)
    except (LookupError, AttributeError):  # there is no such key, which the schema reports
        return ()
    members = [kind] if get_origin(kind) in (None, Literal) else [_bare(member) for member in get_args(kind)]
    choices = [word for member in members if get_origin(member) is Literal for word in get_args(member)]
    plain = [member for member in members if get_origin(member) is not Literal]
    takes_text = str in plain or any(isinstance(word, str) for word in choices)
    return (*plain, *choices) if takes_text and {*plain} <= {str, NoneType} else ()


def _bare(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _read_text(text: str, members: Sequence[Any]) -> str | bool | None:
    """Return a text as it was written, without the quotes of a JSON text; null and false where the key takes them."""
    if (text == "null" and NoneType in members) or (text == "false" and False in members):
        return None if text == "null" else False
    try:
        value = json.loads(text) if text.startswith('"') else text
    except ValueError:
        return text
    return value if isinstance(value, str) else text


def describe(error: ValidationError, raw: Mapping[str, Any], schema: type[BaseModel]) -> Iterator[str]:
    """Yield a line per key, which joins pydantic's errors for the members of a union."""
    by_key: dict[tuple[int | str, ...], list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        by_key.setdefault(_key(detail, raw), []).append(detail)
    for key, details in by_key.items():
        yield _line(key, details, schema)


def _key(detail: ErrorDetails, raw: Any) -> tuple[int | str, ...]:
    """Return the error's key in the file, without what pydantic appends: members of a union, "[key]" for a name."""
    if detail["type"] in ("missing", "extra_forbidden", "invalid_key"):
        return detail["loc"]
    for depth, part in enumerate(detail["loc"]):
        if not (part in raw if isinstance(raw, dict) else isinstance(raw, list) and isinstance(part, int)):
            return detail["loc"][:depth]
        raw = raw[part]
    return detail["loc"]


def _line(key: tuple[int | str, ...], errors: Sequence[ErrorDetails], schema: type[BaseModel]) -> str:
    kind, value, name = errors[0]["type"], errors[0]["input"], _dotted(key)
    if kind in ("extra_forbidden", "invalid_key"):
        return _unknown(key, schema)
    if kind == "missing":
        return f"{name} is required; write it in the file or pass {name}=..."
    if kind == "model_type":
        return f"section {name!r} must hold keys, got {shown(value)}; write them beneath it or remove the line"
    # Report only the union member whose type matched.
    matched = [detail for detail in errors if detail["type"] not in (*_TYPES, "literal_error")]
    words = [_words(detail) for detail in matched or errors]
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


def _annotation(schema: type[BaseModel], key: Sequence[int | str]) -> Any:
    """Return the type of the value at `key`."""
    kind: Any = schema
    for part in key:
        kind = _without_null(kind)
        kind = get_args(kind)[1] if get_origin(kind) is dict else kind.model_fields[part].annotation
    return kind


def _without_null(kind: Any) -> Any:
    """Return the section of a type `Section | None`, and any other type as it is."""
    if get_origin(kind) is dict:
        return kind
    return next((item for item in get_args(kind) if isinstance(item, type) and issubclass(item, Section)), kind)


def _unknown(key: Sequence[int | str], schema: Any) -> str:
    """Describe a key or section that `schema` does not have, by its section, its script or the nearest name."""
    name, last, names = _dotted(key), key[-1], _without_null(_annotation(schema, key[:-1])).model_fields
    if name in _REMOVED:
        return f"{name} was removed: {_REMOVED[name]}; delete the key"
    for owner, sections in ({schema: SECTIONS[schema]} | SECTIONS).items() if len(key) <= 2 else ():
        target = next((section for section, kind in sections.items() if last in kind.model_fields), None)
        if target is not None and owner is schema:
            return f"{name} -> {target}.{last}: keys live in their sections, move it there"
        if target is not None or name in sections:
            return f"{name} is for {owner.script}, whose file {_sign(owner)}; remove it"
    if len(key) == 1:
        return f"unknown section {shown(last)}{did_you_mean(last, names)}; sections are {', '.join(names)}"
    return f"unknown key {shown(name)}{did_you_mean(last, names)}"
