"""Types of rewards' settings, and the check of a configuration's settings against a constructor's annotations.

Settings follow the rules of the configuration's sections (rewardfl/config/schema.py): strict types; 1e-2 is a number.
"""

import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, Unpack, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Strict, ValidationError, ValidationInfo, create_model

from rewardfl.config import describe_errors, did_you_mean, parse_value, shown
from rewardfl.config.schema import Count, Number, PathText, must_be
from rewardfl.rewards.base import RewardError


def on_this_machine(check: Callable[[str], object]) -> AfterValidator:
    """Return a validator by `check`, whose ValueError completes "must be". A plan for another machine skips it."""

    def validate(value: str, info: ValidationInfo) -> str:
        if info.context:
            check(value)
        return value

    return AfterValidator(validate)


def _check_exists(path: str) -> None:
    if not os.path.exists(path):
        raise ValueError("a file or folder that exists")


PathSetting = Annotated[PathText, BeforeValidator(lambda value: str(value) if isinstance(value, Path) else value)]
ExistingPath = Annotated[PathSetting, on_this_machine(_check_exists)]
Frames = Literal["all", "first_middle_last"] | Count
_is_pooling = re.compile(r"mean|min|worst-[1-9]\d{0,8}").fullmatch
Pooling = Annotated[str, must_be("mean, min or worst-k with a number k, as worst-4", lambda text: _is_pooling(text))]


def setting_types(cls: type) -> dict[str, Any]:
    """Return {name: (type, None, or ... if required)} of the named arguments of a class's constructor, as for pydantic.

    The names of a TypedDict in **name: Unpack[TypedDict] are among them. Other *args and **kwargs are not.
    """
    hints = get_type_hints(cls.__init__, include_extras=True)  # type: ignore[misc]  # this very class's
    types = {}
    for parameter in inspect.signature(cls).parameters.values():
        hint = hints.get(parameter.name, Any)
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            types[parameter.name] = (_readable(hint), ... if parameter.default is parameter.empty else None)
        elif get_origin(hint) is Unpack:
            optional = get_type_hints(get_args(hint)[0], include_extras=True)
            types |= {name: (_readable(annotation), None) for name, annotation in optional.items()}
    return types


def check_settings(
    cls: type, settings: Mapping[str, object], place: str = "settings", *, here: bool = True
) -> dict[str, object]:
    """Convert settings to the types of the class's constructor. Raise RewardError with a line for each wrong setting.

    place: their key, for messages. here: whether the files that they name must exist.
    """
    types = setting_types(cls)
    takes = f"it takes {', '.join(types)}" if types else "it takes none"
    unknown = settings.keys() - types.keys()
    problems = [f"unknown key {shown(f'{place}.{key}')}{did_you_mean(key, types)}; {takes}" for key in sorted(unknown)]
    strict = ConfigDict(strict=True, arbitrary_types_allowed=True, allow_inf_nan=False, protected_namespaces=())
    model = create_model("Settings", __config__=strict, **types)
    values = {key: value for key, value in settings.items() if key in types}
    try:
        checked = model.model_validate(values, context=here)
    except ValidationError as error:
        problems += [f"{place}.{line}" for line in describe_errors(error, values, model)]
    if problems:
        raise RewardError("\n".join(problems))
    return {key: getattr(checked, key) for key in values}


def parse_settings(texts: Sequence[str]) -> dict[str, object]:
    """Parse ["chunk=4", ...] to {"chunk": 4, ...}, values as YAML. Raise ValueError for other text."""
    settings = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--settings {shown(text)}: write key=value")
        settings[key] = parse_value(value, f"--settings {shown(text)}") if value else ""
    return settings


def _readable(annotation: Any) -> Any:
    """Return the type as read from YAML: finite numbers, lists for tuples, strings for paths."""
    origin = get_origin(annotation) or annotation
    if annotation is float:
        return Number
    if origin in (Union, UnionType):
        return Union[tuple(map(_readable, get_args(annotation)))]  # noqa: UP007  (`|` takes no tuple)
    if isinstance(origin, type) and issubclass(origin, tuple | set | frozenset | Path | Enum):
        return Annotated[annotation, Strict(strict=False)]
    return annotation
