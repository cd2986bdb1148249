"""Types of rewards' settings, and the check of a configuration's settings against a constructor's annotations.

Settings are read as the configuration's sections are (rewardfl/config/schema.py): strictly, and 1e-2 is a number.
"""

import inspect
import os
import re
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Strict, ValidationError, ValidationInfo, create_model

from rewardfl.config import describe, did_you_mean, shown
from rewardfl.config.schema import Count, Number, PathText, must_be


def on_this_machine(check: Callable[[str], object]) -> AfterValidator:
    """Apply `check`, which raises ValueError with what the value must be. A plan for another machine skips it."""

    def validate(value: str, info: ValidationInfo) -> str:
        if info.context == HERE:
            check(value)
        return value

    return AfterValidator(validate)


def _check_exists(path: str) -> None:
    if not os.path.exists(path):
        raise ValueError("a file or folder that exists")


HERE = "this machine"
PathSetting = Annotated[PathText, BeforeValidator(lambda value: str(value) if isinstance(value, Path) else value)]
ExistingPath = Annotated[PathSetting, on_this_machine(_check_exists)]
Frames = Literal["all", "first_middle_last"] | Count
_is_pooling = re.compile(r"mean|min|worst-[1-9]\d{0,8}").fullmatch
Pooling = Annotated[str, must_be("mean, min or worst-k with a number k, as worst-4", lambda text: _is_pooling(text))]


def types_of_settings(cls: type) -> dict[str, tuple[Any, bool]]:
    """Return {name: (type, whether it is required)} of the named arguments of a class's constructor."""
    # nn.Module's own constructor takes *args and **kwargs, which are no settings
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    try:
        hints = get_type_hints(cls.__init__, include_extras=True)  # type: ignore[misc]  # of this very class
    except NameError:  # names that only a type checker imports
        hints = {}
    parameters = [one for one in inspect.signature(cls).parameters.values() if one.kind in named]
    return {one.name: (_readable(hints.get(one.name, Any)), one.default is one.empty) for one in parameters}


def check_settings(
    cls: type, settings: Mapping[str, object], place: str = "settings", here: bool = True
) -> dict[str, object]:
    """Return the settings with the types of the class's constructor. ValueError with a line for each that is wrong.

    place: where they stand, for messages. here: whether the files that they name must exist.
    """
    types = types_of_settings(cls)
    takes = f"it takes {', '.join(types)}" if types else "it takes none"
    unknown = settings.keys() - types.keys()
    problems = [f"unknown key {shown(f'{place}.{key}')}{did_you_mean(key, types)}; {takes}" for key in sorted(unknown)]
    problems += [
        f"{place}.{key} is required; {takes}" for key, (_, needed) in types.items() if needed and key not in settings
    ]
    fields: dict[str, Any] = {name: (kind, None) for name, (kind, _) in types.items()}
    strictly = ConfigDict(strict=True, arbitrary_types_allowed=True, allow_inf_nan=False, protected_namespaces=())
    model = create_model("Settings", __config__=strictly, **fields)
    known = {key: value for key, value in settings.items() if key in types}
    try:
        checked = model.model_validate(known, context=HERE if here else None)
    except ValidationError as error:
        problems += [f"{place}.{line}" for line in describe(error, known, model)]
    if problems:
        raise ValueError("\n".join(problems))
    return {key: getattr(checked, key) for key in known}


def _readable(kind: Any) -> Any:
    """The type as YAML can give it: a number is finite, a tuple comes as a list, a path as a text."""
    origin = get_origin(kind) or kind
    if kind is float:
        return Number
    if origin in (Union, UnionType):
        return Union[tuple(map(_readable, get_args(kind)))]  # noqa: UP007  (made of a tuple)
    if isinstance(origin, type) and issubclass(origin, tuple | set | frozenset | Path | Enum):
        return Annotated[kind, Strict(False)]
    return kind
