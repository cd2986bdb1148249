"""Text rendering: how much of the text that the prompt quotes an OCR engine reads in the picture.

The score is Flow-GRPO's ocr reward (Liu et al. 2025, arXiv 2505.05470).
"""

import functools
import math
import os
import re
import shutil
import string
import subprocess
import unicodedata
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import cv2
import numpy as np
import onnx
import torch
from torch import Tensor

from rewardfl.config.schema import Count
from rewardfl.rewards.base import Reference, Reward, RewardError, RewardOutput, score_clips
from rewardfl.rewards.frames import select_frames, to_uint8_frames

_LINE_CHARACTERS = string.ascii_letters + string.digits  # characters of a line that Tesseract reads without detection
_DETECTOR, _RECOGNISER = "PP-OCRv6_det_small.onnx", "PP-OCRv6_rec_small.onnx"
_SAME_LINE, _STACKED = 0.25, 0.5  # shares of the smaller box: of the height on one line, of the width above another
_SINGLE, _DOUBLE = "'’‘‚‛`´＇", '"“”„‟«»‹›「」『』〝〞〟＂'
_MARKS = rf"(?:[{_DOUBLE}]|''|``|‘‘|’’)+"  # neighbours count as one
_OPENING = rf"(?<![\d¼-¾⅐-⅞{_DOUBLE}])(?:(?<!\d\s)|(?={_MARKS}\S)){_MARKS}"  # not the inches of 24" or 24 " wide
_doubles = re.compile(f"{_OPENING}(.*?){_MARKS}", re.DOTALL)
_singles = re.compile(rf"(?<![\w{_SINGLE}])[{_SINGLE}]+(?=\S)(.*?)(?<=\S)[{_SINGLE}]+(?!\w)", re.DOTALL)
_find_loose = re.compile(rf"(?<!\w)[{_SINGLE}](?=\S)|(?<=[^\W\d])[{_SINGLE}](?!\w)").search  # a mark at a word's edge
_elisions = re.compile(rf"(?<!\w)[{_SINGLE}](?=\d0s\b|[nN][{_SINGLE}])")  # the '90s, rock 'n' roll
_composed = functools.partial(unicodedata.normalize, "NFKC")
# apostrophes, quotation marks and dashes of Unicode, which are written and read for each other
_ALIKE = str.maketrans("’‘‚‛ʼʻˈ′`´“”„‟«»〝〞〟″‐‑‒–—―−⁃⁄∕ı", "'" * 10 + '"' * 10 + "-" * 8 + "//i")


def quotations(prompt: str) -> tuple[list[str], bool]:
    """Return the texts that the prompt quotes, and whether a quotation mark has no partner.

    A single mark opens at the start of a word and closes at the end of one; others are apostrophes.
    """
    prompt = re.sub(rf"\\+(?=[{_DOUBLE}{_SINGLE}])", "", prompt)
    rest = _elisions.sub("", _doubles.sub(" ", prompt))
    singles = _singles.findall(rest)
    loose = [*singles, _singles.split(rest)[-1]] if singles else []
    unpaired = re.search(_OPENING, rest) is not None or any(map(_find_loose, loose))
    return _doubles.findall(prompt) + singles, unpaired


def quoted_text(prompt: str) -> str:
    """Return plain_text of the text that the prompt quotes; "" for none, several or a mark without a partner."""
    texts, unpaired = quotations(prompt)
    return plain_text(texts[0]) if len(texts) == 1 and not unpaired else ""


def plain_text(text: str) -> str:
    """Return the text as it is compared: NFKC, casefold, one apostrophe, quote and dash, nothing invisible or white."""
    visible = "".join(c for c in text if unicodedata.category(c) != "Cf" and not "\ufe00" <= c <= "\ufe0f")
    folded = _composed(_composed(visible.translate(_ALIKE)).casefold()).translate(_ALIKE)
    return "".join(folded.replace("i\u0307", "i").replace("''", '"').split())  # a Turkish capital has a second dot


def text_score(reading: str, target: str) -> float:
    """Return 1 if the reading contains the target, else 1 - min(edit distance, n) / n with n the target's length.

    Both are of plain_text, and the target is not empty.
    """
    from rapidfuzz.distance import Levenshtein  # from the extra `ocr`

    return 1.0 if target in reading else 1 - min(Levenshtein.distance(reading, target), len(target)) / len(target)


class Ocr(Reward):
    """The share of the text that the prompt quotes (quotations) that is read in the picture.

    The score is text_score of what rapidocr's PP-OCRv6 reads, on the CPU, in reading order; for videos, its mean over
    `frames` evenly spaced frames. docs/rewards.md explains the settings and parts.
    """

    name = "ocr"
    uses_prompt = True
    concurrent = True
    weights = "in rapidocr"
    licence = "Apache-2.0"
    range = "[0, 1]"
    has_cap = True
    compares_with = "nothing"  # but the prompt
    evaluation_settings = {"second": "tesseract"}  # a reader that training fooled must be seen

    def __init__(
        self, frames: Count = 4, *, detect: bool = True, second: Literal["tesseract"] | None = None, parallel: Count = 4
    ):
        super().__init__()
        self.frames, self.detect, self.second, self.parallel = frames, detect, second, parallel
        self._engine = _load_engine(detect=detect)
        if second and shutil.which("tesseract") is None:
            raise RewardError("second: tesseract is not installed; apt-get install tesseract-ocr, or leave second out")
        self._part_names = ["exact", "read_characters", "confidence"]
        if second:
            self._part_names += ["rapidocr_score", "tesseract_score", "tesseract_exact"]
            self.second_opinion = ("exact", "tesseract_exact")

    @staticmethod
    def prompt_problem(prompt: str) -> str:
        texts, unpaired = quotations(prompt)
        if unpaired or len(texts) > 1:
            marks = "a quotation mark without a partner" if unpaired else f"{len(texts)} quoted texts"
            problem = f"has {marks}; leave marks around the text to be read only"
        elif not quoted_text(prompt):
            problem = 'quotes no text; put the text to be read in quotation marks, as in: a sign "OPEN"'
        elif _alphabet() and (lacking := [c for c in _composed(texts[0]) if not {*plain_text(c)} <= _alphabet()]):
            problem = f"quotes {' '.join(dict.fromkeys(lacking))}, which the engine's alphabet lacks; quote other text"
        else:
            return ""
        return f"the prompt {problem}, got {prompt!r}"

    @staticmethod
    def prompt_target(prompt: str) -> str:
        return quotations(prompt)[0][0].strip()

    def fingerprint(self) -> dict[str, object]:
        return {"name": self.name, "rule": 2}  # the version of quoted_text, whose texts are cached

    def reference(self, video: Tensor, prompt: str = "") -> dict[str, Tensor]:
        """Return target (n,) uint8, the UTF-8 of quoted_text. Raise RewardError for a prompt without one."""
        if problem := self.prompt_problem(prompt):
            raise RewardError(f"reward ocr: {problem}")
        return {"target": torch.tensor(list(quoted_text(prompt).encode()), dtype=torch.uint8)}

    def held(self, video: Tensor, batch: Sequence[Reference]) -> tuple[Tensor, Sequence[Reference]]:
        """Return the frames to read, (B, F', H, W, 3) uint8, and references, as to_uint8_frames."""
        return to_uint8_frames(video, batch, select_frames(video.shape[2], self.frames, first_frame=True))

    @torch.no_grad()
    def forward(self, video: Tensor, batch: Sequence[Reference]) -> RewardOutput:
        """Score videos (B, 3, F, H, W) in [-1, 1], or the output of `held` for them, on the CPU."""
        pictures, references = (video, batch) if video.dtype == torch.uint8 else self.held(video, batch)
        return score_clips(pictures, references, self._score_clip, self._part_names)

    def _score_clip(self, clip: Tensor, reference: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, float]]:
        target = bytes(reference["target"].tolist()).decode()
        figures = torch.tensor([self._measure(picture, target) for picture in clip.numpy()], dtype=torch.float64)
        score, *parts = figures.nanmean(0).tolist()  # confidence is NaN without a reading
        return torch.tensor(score), dict(zip(self._part_names, parts, strict=True))

    def _measure(self, picture: np.ndarray, target: str) -> list[float]:
        """Return score and parts of an RGB picture (H, W, 3) uint8."""
        result = self._engine(cv2.cvtColor(picture, cv2.COLOR_RGB2BGR))
        lines = list(zip(result.txts or (), result.scores or (), strict=True))
        if self.detect and lines:
            lines = [lines[i] for i in reading_order(result.boxes)]
        lines = [line for line in lines if plain_text(line[0])]
        reading = plain_text("".join(text for text, _ in lines))
        confidence = sum(share for _, share in lines) / len(lines) if lines else math.nan
        figures = [text_score(reading, target), float(reading == target), len(reading), confidence]
        if self.second:
            other = plain_text(read_by_tesseract(picture, detect=self.detect))
            figures += [figures[0], text_score(other, target), float(other == target)]
        return figures


def reading_order(boxes: np.ndarray) -> list[int]:
    """Return the indices of boxes (N, 4, 2) in pixels, lines from top to bottom, each from left to right.

    A box is on the line of a box next to it, if they share _SAME_LINE of the lower height.
    """
    low, high = boxes.min(1), boxes.max(1)  # (N, 2), x and y
    size = np.maximum(high - low, 1)
    shared = np.minimum(high[:, None], high) - np.maximum(low[:, None], low)
    width, height = np.moveaxis(shared / np.minimum(size[:, None], size), -1, 0)  # (N, N)
    lines: list[list[int]] = []
    for i in np.lexsort(low.T[::-1]).tolist():
        line = max(lines, key=lambda line: height[i, line].max(), default=[])
        if not line or height[i, line].max() < _SAME_LINE or width[i, line].max() >= _STACKED:
            lines.append(line := [])
        line.append(i)
    return sum(sorted(lines, key=lambda line: (low + high)[line, 1].mean()), [])


@functools.cache
def _alphabet() -> frozenset[str]:
    """Return the characters that the engine can read, in plain_text; none if it is not installed."""
    spec = find_spec("rapidocr")
    if spec is None or spec.origin is None:
        return frozenset()
    properties = onnx.load(Path(spec.origin).parent / "models" / _RECOGNISER).metadata_props
    return frozenset(plain_text("".join(item.value for item in properties if item.key == "character")))


def _load_engine(*, detect: bool):
    """Return rapidocr's engine with the weights of its wheel, so that it downloads nothing. Calls share it."""
    try:
        import rapidfuzz  # noqa: F401  text_score needs it
        import rapidocr
    except ImportError as error:
        raise RewardError(f"reward ocr needs rapidocr and rapidfuzz ({error}); pip install 'rewardfl[ocr]'") from error
    folder = Path(rapidocr.__file__).parent / "models"
    return rapidocr.RapidOCR(
        params={
            "Det.model_path": str(folder / _DETECTOR),
            "Rec.model_path": str(folder / _RECOGNISER),
            "EngineConfig.onnxruntime.intra_op_num_threads": 1,
            "EngineConfig.onnxruntime.inter_op_num_threads": 1,
            "Global.use_det": detect,
            "Global.use_cls": False,  # no upside-down text
            "Global.log_level": "error",
        }
    )


def read_by_tesseract(picture: np.ndarray, *, detect: bool) -> str:
    """Return what tesseract reads in an RGB picture (H, W, 3) uint8.

    detect: whether to look for text; otherwise, the picture is one line of Latin letters and digits.
    """
    grey = cv2.cvtColor(picture, cv2.COLOR_RGB2GRAY)  # it reads less in noisy colours
    if max(grey.shape) < 256:  # it reads large letters better
        grey = cv2.resize(grey, None, fx=3, fy=3, interpolation=cv2.INTER_CUBIC)
    options = ["--psm", "11"] if detect else ["--psm", "7", "-c", f"tessedit_char_whitelist={_LINE_CHARACTERS}"]
    _, png = cv2.imencode(".png", grey)
    done = subprocess.run(
        ["tesseract", "stdin", "stdout", *options], input=png.tobytes(), capture_output=True, check=True,
        timeout=60.0, env=os.environ | {"OMP_THREAD_LIMIT": "1"},
    )  # fmt: skip
    return done.stdout.decode()
