"""Is a clip good to look at, does it move well, does it show what was asked? VideoReward, Liu et al. 2025, 2501.13918.

Facts of the published scorer are from github.com/KwaiVGI/VideoAlign at commit 219ab9d, by file and line.
"""

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from rewardfl.config.schema import NonNegative, Positive
from rewardfl.rewards.base import RewardOutput, by_sample
from rewardfl.rewards.clip.network import normalise, unit_range
from rewardfl.rewards.settings import ExistingPath
from rewardfl.rewards.vlm.qwen2_vl import JudgeFiles, Question, QuestionReward, load_judge, shown_size
from rewardfl.weights.shards import parse_json_object

PARTS = ("vq", "mq", "ta")  # the order of the tokens and of the head's rows, train_reward.py:95

QUESTION = Question(
    literals=("DETAILED_PROMPT_WITH_SPECIAL_TOKEN",),
    digest="fdb6309bac618dd0c8b1b589d3a0970a974f7856eecbb355a190b2dce54af700",
    source="prompt_template.py of github.com/KwaiVGI/VideoAlign",
    vision="<|video_pad|>",
    answers=("<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>"),
)

FEWEST_PIXELS = 128 * 28 * 28  # of a frame, vision_process.py:31

FEWEST_FRAMES, MOST_FRAMES = 4, 768  # that a number of frames a second comes to, vision_process.py:36


class VideoAlignReward(QuestionReward):
    """The weighted sum of visual quality (vq), motion quality (mq) and text alignment (ta), each normalised.

    A Qwen2-VL-2B is asked about the clip's frames and reads, by a linear head, at three tokens of the question. vq and
    mq do not depend on the prompt, which stands behind their tokens.

    checkpoint_dir: KwaiVGI/VideoReward, with model_config.json and checkpoint-*/model.pth. model_dir:
    Qwen/Qwen2-VL-2B-Instruct, of which config.json and the tokenizer are used. prompt_file: prompt_template.py of
    github.com/KwaiVGI/VideoAlign, whose question is read from it. parts: the weight of each part, {vq: 1, mq: 1, ta: 1}
    by default, their "Overall"; one that is not named has none. fps: at which the videos play, data.fps of a
    configuration. frames: how many are shown, in place of the two a second of model_config.json. dtype: of the
    backbone, bfloat16 or float32. checkpointing: a backward runs the network's blocks again, so that their inputs alone
    are kept.

    Parts: vq, mq, ta. A sample is invalid when one of its parts with a weight is not finite.
    """

    name = "video_align"
    fewest_frames = 2
    weights = "KwaiVGI/VideoReward; config and tokenizer of Qwen/Qwen2-VL-2B-Instruct; prompt_template.py"
    licence = "weights: Apache-2.0 (huggingface.co/KwaiVGI/VideoReward, Qwen2-VL-2B); question: MIT (VideoAlign)"
    range = "a part: deviations from the mean of its authors' data"
    chosen: Tensor  # (3,) weights of the parts
    mean: Tensor  # (3,) of the authors' data, and
    std: Tensor  # its deviation

    def __init__(
        self,
        checkpoint_dir: ExistingPath,
        model_dir: ExistingPath,
        prompt_file: ExistingPath,
        parts: dict[Literal["vq", "mq", "ta"], NonNegative] | None = None,
        fps: Positive = 16.0,
        frames: Annotated[int, Field(ge=2, le=10_000)] | None = None,
        dtype: Literal["bfloat16", "float32"] = "bfloat16",
        checkpointing: bool = True,
    ):
        super().__init__()
        weights = weigh_parts(dict.fromkeys(PARTS, 1.0) if parts is None else parts)
        self.trained = read_trained(Path(checkpoint_dir) / "model_config.json")
        self.fps, self.frames = fps, frames if frames is not None else self.trained.frames
        files = JudgeFiles(model_dir, prompt_file, newest_checkpoint(Path(checkpoint_dir)), self.trained.lora)
        outputs = self.trained.outputs
        self.judge, self.head = load_judge(QUESTION, files, dtype, lambda width: nn.Linear(width, outputs, bias=False))
        if checkpointing:
            self.judge.recompute()
        for name, values in (("chosen", weights), ("mean", self.trained.mean), ("std", self.trained.std)):
            self.register_buffer(name, torch.tensor(values), persistent=False)
        self.digest = files.digest()

    def forward(self, video: Tensor, batch: Sequence[Mapping[str, Tensor] | None]) -> RewardOutput:
        with torch.autocast(video.device.type, enabled=False):
            return by_sample(video, batch, self._sample, PARTS)

    def _sample(self, clip: Tensor, reference: Mapping[str, Tensor]) -> tuple[Tensor | None, dict[str, float]]:
        parts = self.score_parts(clip, reference["tokens"].to(clip.device))
        used = self.chosen > 0
        known = dict(zip(PARTS, parts.tolist(), strict=True))
        return (parts[used] @ self.chosen[used] if parts[used].isfinite().all() else None), known

    def score_parts(self, clip: Tensor, tokens: Tensor) -> Tensor:
        """(3,) normalised vq, mq and ta of one clip (3, F, H, W) in [-1, 1]."""
        shown = shown_frames(clip.shape[1], self.fps, self.trained.fps, self.frames)
        height, width = clip.shape[2:]
        size = shown_size(height, width, self.judge.factor, FEWEST_PIXELS, self.trained.pixels)
        pictures = unit_range(clip[:, shown].transpose(0, 1).to(self.head.weight))
        # one pass over both axes, clipped at the end: torchvision's resize (vision_process.py:318) but for its rounding
        pictures = F.interpolate(pictures, size, mode="bicubic", antialias=True).clamp(0, 1)
        answers = self.judge(normalise(pictures), len(shown), tokens)[0].to(self.head.weight)
        # a row for each token, or one for all (trainer.py:165); the published head is in the backbone's dtype
        return ((answers * self.head.weight).sum(-1) - self.mean) / self.std


def weigh_parts(parts: Mapping[Any, float]) -> list[float]:
    """The weights of vq, mq and ta. ValueError for weights from which nothing could be learnt.

    Says, as a warning, what is known of vq alone.
    """
    weights = [float(parts.get(name, 0)) for name in PARTS]
    if not any(weights):
        raise ValueError(f"reward 'video_align': parts must be weights of which one is positive, got {parts!r}")
    if weights[1:] == [0, 0]:
        warnings.warn(
            "reward 'video_align' with vq alone: videos that are trained on it become animation (DanceGRPO issue 74; "
            "its author calls that typical); give mq a weight, too, and look at the videos",
            stacklevel=3,
        )
    return weights


def shown_frames(count: int, fps: float, wanted_fps: float, frames: int | None) -> list[int]:
    """Which frames of a clip of `count` the model is shown: an even number of them, from the first to the last.

    frames: how many, rounded to even; None: wanted_fps of them a second, 4 to 768. At most as many as there are
    (vision_process.py:129 and 202). ValueError for a clip of fewer than two.
    """
    if count < 2:
        raise ValueError(f"reward 'video_align' judges clips of at least 2 frames, this has {count}")
    wanted = count / fps * wanted_fps if frames is None else frames
    if frames is None:
        wanted = min(max(wanted, FEWEST_FRAMES), MOST_FRAMES)
    even = min(round(wanted / 2) * 2, count // 2 * 2)
    return torch.linspace(0, count - 1, even).round().int().tolist()


# ---- the authors' files ----


@dataclass(frozen=True)
class Trained:
    """What model_config.json says of a training.

    fps: frames a second that are shown, or frames: their number, where it has one. pixels: of a frame, at most.
    outputs: rows of the head. lora: rank and factor, None without. mean, std: of each part on the authors' data, 0 and
    1 where the file has none, as inference.py:68 has it.
    """

    fps: float
    frames: int | None
    pixels: int
    outputs: int
    lora: tuple[int, float] | None
    mean: tuple[float, ...]
    std: tuple[float, ...]


def read_trained(path: Path) -> Trained:
    """ValueError for a file that is not there, is no such file, or is of a model that is asked another question."""
    if not path.is_file():
        raise ValueError(f"{path} is missing; KwaiVGI/VideoReward has it beside its folder checkpoint-*")
    content = parse_json_object(path.read_bytes(), str(path))
    try:
        data, model, peft = (content[f"{name}_config"] for name in ("data", "model", "peft_lora"))
        rank, frames = int(peft["lora_r"]), data.get("num_frames")
        factor = float(peft["lora_alpha"]) / (rank**0.5 if peft.get("use_rslora") else rank)
        mean, std = (0.0,) * len(PARTS), (1.0,) * len(PARTS)
        if (norm := content.get("inference_config")) is not None:
            mean, std = (tuple(float(norm[f"{part.upper()}_{of}"]) for part in PARTS) for of in ("mean", "std"))
        if not all(value > 0 for value in std):
            raise ValueError(f"deviations must be positive, {std}")
        trained = Trained(
            fps=float(data["fps"]),
            frames=None if frames is None else int(frames),
            pixels=int(data["max_frame_pixels"]),
            outputs=int(model["output_dim"]),
            lora=(rank, factor) if peft["lora_enable"] else None,
            mean=mean,
            std=std,
        )
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ValueError(f"{path} lacks, or has in another form, what KwaiVGI/VideoReward has: {error!r}") from error
    for key, value, wanted in (
        ("data_config.prompt_template_type", data.get("prompt_template_type"), "detailed_special"),
        ("data_config.sample_type", data.get("sample_type", "uniform"), "uniform"),
        ("model_config.use_special_tokens", model.get("use_special_tokens"), True),
    ):
        if value != wanted:
            raise ValueError(f"{path}: {key} is {value!r}; only a model that was trained with {wanted!r} is known here")
    return trained


def newest_checkpoint(folder: Path) -> Path:
    """model.pth of the checkpoint-<step> with the highest step, which the authors' code takes (utils.py:166)."""
    found = [(re.fullmatch(r"checkpoint-(\d+)", path.name), path) for path in sorted(folder.glob("checkpoint-*"))]
    steps = {int(match[1]): path for match, path in found if match}
    if not steps:
        raise ValueError(f"{folder} has no folder checkpoint-<step>; KwaiVGI/VideoReward has")
    path = steps[max(steps)] / "model.pth"
    if not path.is_file():
        raise ValueError(
            f"{path} is missing; a checkpoint of an adapter (adapter_model.safetensors) is not read: save it whole, "
            "VideoAlign's --save_full_model True"
        )
    return path
