"""Field types and validators of the configuration, and the two helpers that its messages share."""

import difflib
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


class Section(BaseModel):
    """Settings, read strictly: true is not 1, 1.0 is not an integer, and an unknown key raises."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def conflicts(self) -> Iterator[str]:
        """Yield a line for each combination of settings that cannot work: the keys, the values, the way out."""
        yield from ()


_T = TypeVar("_T")


def must_be(words: str, holds: Callable[[Any], object]) -> AfterValidator:
    """Return a validator that raises ValueError(`words`) unless `holds(value)`."""

    def check(value: _T) -> _T:
        if not holds(value):
            raise ValueError(words)
        return value

    return AfterValidator(check)


def _from_text(value: object) -> object:
    """Convert text such as 1e-5 to a number; YAML 1.1 reads it as text because it has no dot."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _is_plain(text: str) -> bool:
    """Return whether `text` has no control character, lone surrogate or Unicode line end, except \\n and \\t."""
    return not any(unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") and c not in "\n\t" for c in text)


def _is_path(text: str) -> bool:
    """Return whether a file system takes it; the first access to a longer path would end in a traceback."""
    return len(os.fsencode(text)) <= 4000 and all(len(os.fsencode(part)) <= 255 for part in text.split("/"))


# The upper ends are far above any real setting. They catch a typo (1e30) before memory or float32 runs out.
Count = Annotated[int, Field(ge=1, le=1_000_000_000)]
Whole = Annotated[int, Field(ge=0, le=1_000_000_000)]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
BatchSize = Annotated[int, Field(ge=1, le=10_000)]
Steps = Annotated[int, Field(ge=1, le=100_000)]
Denoising = Annotated[int, Field(ge=1, le=1_000)]  # sampling steps: the model has 1000 timesteps
StepIndex = Annotated[int, Field(ge=0, le=999)]  # index of a sampling step, from 0
Side = Annotated[int, Field(ge=1, le=16_384)]
DetectionSide = Annotated[int, Field(ge=32, le=4_096, multiple_of=32)]  # multiples of a face detector's coarsest stride
Pixels = Annotated[int, Field(ge=16 * 16, le=16_384**2)]
# float32 would make a smaller or larger number 0 or infinite, here or in a product
Number = Annotated[
    float,
    BeforeValidator(_from_text),
    Field(allow_inf_nan=False),
    must_be("0 or of a size in 1e-30..1e30", lambda value: value == 0 or 1e-30 <= abs(value) <= 1e30),
]
_not_tiny = must_be("0 or at least 1e-12", lambda value: not 0 < value < 1e-12)
Positive = Annotated[Number, Field(gt=0, le=1e12), _not_tiny]
NonNegative = Annotated[Number, Field(ge=0, le=1e12), _not_tiny]
Share = Annotated[Number, Field(ge=0, le=1)]
ClipRange = Annotated[Number, Field(gt=0, lt=1)]
_is_bridge = re.compile(r"bridge:0?\.\d{1,6}").fullmatch
Bridge = Annotated[
    str,
    must_be(
        "chain, bridge, bridge:WEIGHT (between 0 and 1), drtune, last or endpoint",
        lambda text: _is_bridge(text) and float(text[7:]),
    ),
]
_are_epochs = re.compile(r"[1-9]\d{0,3} epochs?").fullmatch
Epochs = Annotated[str, must_be("a whole number, or epochs, such as 3 epochs", _are_epochs)]
FrameRate = Annotated[Number, Field(ge=0.1, le=1_000)]
# a score's mean and deviation: beyond these limits, weight * (score - mean) / std would be a constant
Mean = Annotated[Number, Field(ge=-1e6, le=1e6)]
Deviation = Annotated[Number, Field(ge=1e-6, le=1e6)]
Cap = Literal["self_similarity", "none"] | Annotated[Number, Field(gt=0, le=1)]
PlainText = Annotated[str, must_be("free of control characters", _is_plain)]
_Line = Annotated[PlainText, must_be("a text of one line", lambda text: "\n" not in text and "\t" not in text)]
Text = Annotated[_Line, must_be("a text that is not empty", lambda text: text.strip() != "")]
_fits = must_be("short enough for the name of a file", _is_path)
PathLine = Annotated[_Line, _fits]
PathText = Annotated[Text, _fits]
Off = Annotated[Literal[False], BeforeValidator(lambda value: None if value == 0 and value is not False else value)]
Listed = Annotated[tuple[_T, ...], Field(strict=False)]  # a strict tuple would not take a YAML list
ClipRanges = Annotated[Listed[ClipRange], must_be("one number or [low, high]", lambda values: len(values) == 2)]
Name = Annotated[
    str, must_be("a name of 1 to 80 printable characters", lambda name: name.isprintable() and 1 <= len(name) <= 80)
]
_is_label = re.compile(r"[\w-]{1,80}").fullmatch  # it names the metric reward/<label>
Label = Annotated[str, must_be("a name of 1 to 80 letters, digits, _ and -", lambda text: _is_label(text) is not None)]
Setting = PlainText | bool | int | Number | dict[Name, Number] | None


def shown(value: object) -> str:
    """Return `repr(value)` for a message: one line, without control characters, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def did_you_mean(word: object, names: Iterable[str]) -> str:
    """Return the end of a message with the name that `word` may be a typo of, or ""."""
    close = difflib.get_close_matches(str(word)[:80], list(names), n=1)
    return f", did you mean {close[0]!r}?" if close else ""
