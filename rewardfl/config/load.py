"""Reading a configuration: one YAML file plus `section.key=value` overrides, checked before anything loads.

An override reaches into a key that holds keys, too: `reward.others.flow.weight=0.3`.

The section `grpo` tells a file of train_flow_grpo.py. pydantic checks the values (rewardfl/config/schema.py); what is
here reads YAML, places the overrides and says what is wrong in one line per key.
"""

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rewardfl.config.schema import SECTIONS, AnyConfig, FlowGrpoConfig, RewardFlConfig, Section, did_you_mean, shown


class ConfigError(ValueError):
    """A setting that cannot work. The message has one line per problem: the key, the value, the way out."""


def load(path: str | Path, overrides: Sequence[str] = (), schema: type[AnyConfig] | None = None) -> Any:
    """The checked configuration of YAML file `path` with `section.key=value` overrides (YAML values) applied.

    schema: RewardFlConfig or FlowGrpoConfig, of the script that asks; None takes the file's.

    Raises ConfigError for a file that cannot be read or is another script's, unknown or missing keys, wrong types,
    values out of range and combinations that cannot work.
    """
    raw = _read(Path(path))
    of_file = FlowGrpoConfig if "grpo" in raw else RewardFlConfig
    if schema not in (None, of_file):
        has = "has a" if of_file is FlowGrpoConfig else "has no"
        raise ConfigError(f"{path} {has} section grpo, so it is for {of_file.script}, not {schema.script}")
    return parse(raw, overrides)


def parse(raw: Mapping[str, Any], overrides: Sequence[str] = ()) -> AnyConfig:
    """`load` of what a file would hold: {section: {key: value}}, as in run.json's "config"."""
    schema = FlowGrpoConfig if "grpo" in raw else RewardFlConfig
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


def to_dict(cfg: AnyConfig) -> dict[str, dict[str, Any]]:
    """{section: {key: value}} of plain JSON and YAML values."""
    return cfg.model_dump(mode="json")


def flat(cfg: AnyConfig) -> dict[str, str]:
    """{section.key: value} as text, which every tracker takes."""
    return {f"{section}.{key}": str(value) for section, keys in to_dict(cfg).items() for key, value in keys.items()}


def dump(cfg: AnyConfig) -> str:
    """YAML text with every key written out; `load` reads it back to the same configuration."""
    return yaml.safe_dump(to_dict(cfg), sort_keys=False)


# YAML


MOST_BYTES = 100_000  # our longest configuration has 4,000
_DECIMAL = re.compile(r"[-+]?(0|[1-9]\d{0,18}|\d*\.\d*(e[-+]\d+)?|\.inf|\.nan)", re.IGNORECASE)


class _Loader(yaml.SafeLoader):
    """yaml.SafeLoader without aliases and tags, which refuses a key that is given twice and numbers like 042 and 1:30.

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


def _parse(text: str, where: str) -> Any:
    """What YAML `text` stands for. ConfigError in one line for what is not valid."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        problem = " ".join(filter(None, (f"line {error.problem_mark.line + 1}:", error.context, error.problem)))
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a control character, month 99, too deep
        problem = str(error)
    problem = " ".join(problem.split())[:250]
    raise ConfigError(f"{where} is not valid YAML: {problem if problem.isprintable() else repr(problem)}")


def _read(path: Path) -> dict[str, Any]:
    try:
        if not path.is_file():
            raise ConfigError(f"config file not found: {path}")
        if path.stat().st_size > MOST_BYTES:
            raise ConfigError(f"{path} has {path.stat().st_size} bytes, a configuration at most {MOST_BYTES}")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 ({error}); save it as UTF-8") from error
    raw = _parse(text, str(path))
    if not isinstance(raw, dict):
        raise ConfigError(
            f"{path} must hold sections ({', '.join(RewardFlConfig.model_fields)}) with keys beneath them"
        )
    return raw


def _override(raw: dict[str, Any], text: str, schema: type[AnyConfig]) -> list[str]:
    """Put "section.key=value" into `raw`, of which nothing is changed in place; what kept it from going there.

    Where the value of a key is keys itself, "section.key.inner=value" sets one of them and keeps the others.
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
        return []  # the schema refuses the section
    *outer, key = keys
    here = raw[section] = dict(raw[section])
    for i, part in enumerate(outer):
        below = here.get(part)
        if not isinstance(below, dict | NoneType):
            return [f"override {shown(text)}: {_dotted([section, *outer[: i + 1]])} holds {shown(below)}, no keys"]
        here[part] = dict(below or {})
        here = here[part]
    here[key] = _parse(value, f"override {shown(text)}")
    return []


# What pydantic found, in our lines


_TYPES = {
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "a text",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "keys and values",
}


def describe(error: ValidationError, raw: Mapping[str, Any], schema: type[BaseModel]) -> Iterator[str]:
    """A line per key, which unites what pydantic says of it for each member of a union."""
    errors = error.errors(include_url=False)
    refused_names = [found["loc"][:-1] for found in errors if found["loc"][-1:] == ("[key]",)]
    by_key: dict[tuple[int | str, ...], list[ErrorDetails]] = {}
    for found in errors:
        loc = found["loc"]
        if loc[-1:] == ("[key]",):
            yield f"{_dotted(loc[:-2])} takes {_words(found)}, got {shown(found['input'])}"
        elif not any(loc[: len(name)] == name for name in refused_names):
            by_key.setdefault(_key(found, raw), []).append(found)
    for key, of_key in by_key.items():
        yield _line(key, of_key, schema)


def _key(found: ErrorDetails, raw: Any) -> tuple[int | str, ...]:
    """The error's place without the members of unions, which pydantic adds to what the file holds."""
    if found["type"] in ("missing", "extra_forbidden", "invalid_key"):
        return found["loc"]
    for depth, part in enumerate(found["loc"]):
        if not (part in raw if isinstance(raw, dict) else isinstance(raw, list) and isinstance(part, int)):
            return found["loc"][:depth]
        raw = raw[part]
    return found["loc"]


def _line(key: tuple[int | str, ...], errors: Sequence[ErrorDetails], schema: type[BaseModel]) -> str:
    kind, value, name = errors[0]["type"], errors[0]["input"], _dotted(key)
    if kind in ("extra_forbidden", "invalid_key"):
        return _unknown(key, schema)
    if kind == "missing":
        return f"{name} is required; write it in the file or pass {name}=..."
    if kind == "model_type":
        return f"section {name!r} must hold keys, got {shown(value)}; write them beneath it or remove the line"
    # Of a union, only the member that takes values of this type has more to say than its type.
    telling = [found for found in errors if found["type"] not in (*_TYPES, "literal_error")]
    words = [_words(found) for found in telling or errors]
    if not telling and NoneType in get_args(_annotation(schema, key)):
        words.append("null")
    expected = " ".join(found.get("ctx", {}).get("expected", "") for found in errors)
    hint = did_you_mean(value, re.findall("'([^']+)'", expected))
    return f"{name} must be {' or '.join(words)}, got {shown(value)}{hint}"


def _words(found: ErrorDetails) -> str:
    """What the value must be."""
    if found["type"] == "value_error":
        return str(found["ctx"]["error"])
    words = _TYPES.get(found["type"]) or found["msg"].removeprefix("Input should be ").replace("False", "false")
    return words.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")


def _dotted(key: Sequence[int | str]) -> str:
    return ".".join(map(str, key)) or "the file"


def _annotation(schema: type[BaseModel], key: Sequence[int | str]) -> Any:
    """The type of what stands at `key`."""
    kind: Any = schema
    for part in key:
        if isinstance(part, int):
            return int  # all lists of ours hold one type of item, and none may be null
        kind = _keys_of(kind)
        kind = get_args(kind)[1] if get_origin(kind) is dict else kind.model_fields[part].annotation
    return kind


def _keys_of(kind: Any) -> Any:
    """A section's type without the null that may stand for it; another type as it is."""
    if get_origin(kind) is dict:
        return kind
    return next((one for one in get_args(kind) if isinstance(one, type) and issubclass(one, Section)), kind)


def _unknown(key: Sequence[int | str], schema: Any) -> str:
    """What to say of a key or section that `schema` does not have: its place, its script or its nearest name."""
    name, last, known = _dotted(key), key[-1], _keys_of(_annotation(schema, key[:-1])).model_fields
    for owner, sections in ({schema: SECTIONS[schema]} | SECTIONS).items() if len(key) <= 2 else ():
        place = next((section for section, kind in sections.items() if last in kind.model_fields), None)
        if place is not None and owner is schema:
            return f"{name} -> {place}.{last}: keys live in their sections, move it there"
        if place is not None or name in sections:
            has = "a" if owner is FlowGrpoConfig else "no"
            return f"{name} is for {owner.script}, whose files have {has} section grpo; remove it"
    if len(key) == 1:
        return f"unknown section {shown(last)}{did_you_mean(last, known)}; sections are {', '.join(known)}"
    return f"unknown key {shown(name)}{did_you_mean(last, known)}"
