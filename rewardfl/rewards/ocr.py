"""Text rendering: how much of the text that the prompt quotes an OCR engine reads in the picture.

The score is that of Flow-GRPO's ocr reward (Liu et al. 2025, arXiv 2505.05470).
"""

import math
import os
import re
import shutil
import string
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import cv2
import numpy as np
import torch
from torch import Tensor

from rewardfl import data
from rewardfl.config.schema import Count
from rewardfl.rewards.base import Reference, Reward, RewardError, RewardOutput, score_clips
from rewardfl.rewards.frames import select_frames

_SMALL, _ENLARGED = 256, 3  # Tesseract sees pictures with a long side below so many pixels so much larger
_LINE_CHARACTERS = string.ascii_letters + string.digits  # of a line that Tesseract reads without detection
_TESSERACT_SECONDS = 60.0
_find_quoted = re.compile(r'"([^"]*)"').search


def quoted_text(prompt: str) -> str:
    """Return the text between the first pair of straight double quotes, in lower case without spaces; "" for none."""
    match = _find_quoted(prompt)
    return plain_text(match[1]) if match else ""


def plain_text(text: str) -> str:
    """Return the text in lower case without white space."""
    return "".join(text.split()).lower()


def text_score(reading: str, target: str) -> float:
    """Return 1 if the reading contains the target, else 1 - min(edit distance, n) / n with n the target's length.

    Both are of plain_text, and the target is not empty.
    """
    from rapidfuzz.distance import Levenshtein  # of the extra `ocr`

    return 1.0 if target in reading else 1 - min(Levenshtein.distance(reading, target), len(target)) / len(target)


class Ocr(Reward):
    """The share of the text in the prompt's first pair of straight double quotes that is read in the picture.

    The score is text_score of what rapidocr's PP-OCRv6 reads, on the CPU, in reading order; for videos, its mean over
    `frames` evenly spaced frames. detect: find the lines of text first; without it, the picture is read as one line,
    which is ten times as fast and for small pictures. second: read with Debian's tesseract, too, for evaluation.
    parallel: batches that are read at a time, each on one core.

    Parts: exact, 1 if the reading is the text and nothing else, else 0; read_characters, their number; confidence, of
    the engine, NaN where nothing is read. With `second` also rapidocr_score, tesseract_score and tesseract_exact.
    """

    name = "ocr"
    uses_prompt = True
    concurrent = True
    weights = "in rapidocr"
    licence = "Apache-2.0"
    range = "[0, 1]"
    compares_with = "nothing"  # but the prompt
    evaluation_settings = {"second": "tesseract"}  # a reader that training fooled must be seen

    def __init__(
        self,
        frames: Count = 4,
        *,
        detect: bool = True,
        second: Literal["tesseract"] | None = None,
        parallel: Count = 4,
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
        how = 'put the text to be read in straight double quotes, the first in the prompt, as in: a sign "OPEN"'
        return "" if quoted_text(prompt) else f"the prompt quotes no text; {how}"

    def reference(self, video: Tensor, prompt: str = "") -> dict[str, Tensor]:
        """Return target (n,) uint8, the UTF-8 of quoted_text. Raise RewardError for a prompt without one."""
        if problem := self.prompt_problem(prompt):
            raise RewardError(f"reward ocr: {problem}, got {prompt!r}")
        return {"target": torch.tensor(list(quoted_text(prompt).encode()), dtype=torch.uint8)}

    def held(self, video: Tensor, batch: Sequence[Reference]) -> tuple[Tensor, Sequence[Reference]]:
        """Return the frames to read, (B, F', H, W, 3) uint8, and references, None where pixels are not finite."""
        finite = video.flatten(1).isfinite().all(1).tolist()
        selected = video[:, :, select_frames(video.shape[2], self.frames, first_frame=True)]
        pictures = torch.stack([data.to_uint8(clip) for clip in selected]).cpu().contiguous()
        return pictures, [reference if ok else None for reference, ok in zip(batch, finite, strict=True)]

    @torch.no_grad()
    def forward(self, video: Tensor, batch: Sequence[Reference]) -> RewardOutput:
        """Score videos (B, 3, F, H, W) in [-1, 1], or the output of `held` for them."""
        pictures, references = (video, batch) if video.dtype == torch.uint8 else self.held(video, batch)
        output = score_clips(pictures, references, self._score_clip, self._part_names)
        parts = {name: part.to(video.device) for name, part in output.parts.items()}
        return RewardOutput(output.score.to(video.device), output.valid.to(video.device), parts)

    def _score_clip(self, clip: Tensor, reference: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, float]]:
        """Return the means of score and parts over the pictures (F, H, W, 3); confidence, over those with a reading."""
        target = bytes(reference["target"].tolist()).decode()
        figures = torch.tensor([self._measure(picture, target) for picture in clip.numpy()], dtype=torch.float64)
        score, *parts = figures.nanmean(0).tolist()
        return torch.tensor(score), dict(zip(self._part_names, parts, strict=True))

    def _measure(self, picture: np.ndarray, target: str) -> list[float]:
        """Return score and parts of an RGB picture (H, W, 3) uint8."""
        result = self._engine(cv2.cvtColor(picture, cv2.COLOR_RGB2BGR))
        lines = [line for line in zip(result.txts or (), result.scores or (), strict=True) if plain_text(line[0])]
        reading = plain_text("".join(text for text, _ in lines))
        confidence = sum(share for _, share in lines) / len(lines) if lines else math.nan
        figures = [text_score(reading, target), float(reading == target), len(reading), confidence]
        if self.second:
            other = plain_text(read_by_tesseract(picture, detect=self.detect))
            figures += [figures[0], text_score(other, target), float(other == target)]
        return figures


def _load_engine(*, detect: bool):
    """Return rapidocr's engine with the weights of its wheel, so that it downloads nothing. Calls share it."""
    try:
        import rapidfuzz  # noqa: F401  text_score needs it
        import rapidocr
    except ImportError as error:
        raise RewardError(f"reward ocr needs rapidocr and rapidfuzz ({error}); pip install 'rewardfl[ocr]'") from error
    folder = Path(rapidocr.__file__).parent / "models"
    files = {f"{task}.model_path": str(folder / f"PP-OCRv6_{task.lower()}_small.onnx") for task in ("Det", "Rec")}
    if missing := [file for file in files.values() if not os.path.isfile(file)]:
        raise RewardError(f"reward ocr: rapidocr lacks {missing[0]}; pip install --force-reinstall 'rewardfl[ocr]'")
    threads = {f"EngineConfig.onnxruntime.{kind}_op_num_threads": 1 for kind in ("intra", "inter")}
    switches = {"Global.use_det": detect, "Global.use_cls": False, "Global.log_level": "error"}  # no upside-down text
    return rapidocr.RapidOCR(params=files | threads | switches)


def read_by_tesseract(picture: np.ndarray, *, detect: bool) -> str:
    """Return what tesseract reads in an RGB picture (H, W, 3) uint8. Raise RuntimeError where it fails.

    detect: whether to look for text; otherwise, the picture is one line of Latin letters and digits.
    """
    grey = cv2.cvtColor(picture, cv2.COLOR_RGB2GRAY)  # of noisy colours it reads less
    if max(grey.shape) < _SMALL:
        grey = cv2.resize(grey, None, fx=_ENLARGED, fy=_ENLARGED, interpolation=cv2.INTER_CUBIC)
    options = ["--psm", "11"] if detect else ["--psm", "7", "-c", f"tessedit_char_whitelist={_LINE_CHARACTERS}"]
    _, png = cv2.imencode(".png", grey)
    done = subprocess.run(
        ["tesseract", "stdin", "stdout", *options], input=png.tobytes(), capture_output=True,
        timeout=_TESSERACT_SECONDS, env=os.environ | {"OMP_THREAD_LIMIT": "1"},
    )  # fmt: skip
    if done.returncode:
        words = done.stderr.decode(errors="replace").strip()[-200:]
        raise RuntimeError(f"tesseract ended with code {done.returncode} {words}")
    return done.stdout.decode()
