"""Is a clip good to look at, does it move well, does it show the prompt? VideoReward, Liu et al. 2025, 2501.13918.

File and line numbers refer to github.com/KwaiVGI/VideoAlign at commit 219ab9d.
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
from rewardfl.rewards.base import Reference, RewardOutput, score_clips
from rewardfl.rewards.clip.network import normalise, unit_range
from rewardfl.rewards.settings import ExistingPath
from rewardfl.rewards.vlm.qwen2_vl import JudgeFiles, Question, QuestionReward, input_size, load_judge
from rewardfl.weights.shards import parse_json_object

PARTS = ("vq", "mq", "ta")  # the order of the tokens and of the head's rows, train_reward.py:95

QUESTION = Question(
    literals=("DETAILED_PROMPT_WITH_SPECIAL_TOKEN",),
    digest="fdb6309bac618dd0c8b1b589d3a0970a974f7856eecbb355a190b2dce54af700",
    source="prompt_template.py of github.com/KwaiVGI/VideoAlign",
    vision="<|video_pad|>",
    answers=("<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>"),
)

MIN_PIXELS = 128 * 28 * 28  # of a frame, vision_process.py:31

FEWEST_FRAMES, MOST_FRAMES = 4, 768  # of a clip sampled at a frame rate, vision_process.py:36


class VideoAlignReward(QuestionReward):
    """The weighted sum of visual quality (vq), motion quality (mq) and text alignment (ta), each normalised.

    A linear head reads the hidden states of a Qwen2-VL-2B at three tokens of a question about the clip's frames. vq and
    mq do not depend on the prompt, which comes after their tokens.

    checkpoint_dir: KwaiVGI/VideoReward, with model_config.json and checkpoint-*/model.pth. model_dir: config.json and
    tokenizer of Qwen/Qwen2-VL-2B-Instruct. prompt_file: prompt_template.py of github.com/KwaiVGI/VideoAlign, the source
    of the question. parts: weight of each part, by default {vq: 1, mq: 1, ta: 1}, the authors' "Overall"; a missing
    part has weight 0. fps: the videos' frame rate, data.fps of a configuration. frames: number of frames that the model
    is given, instead of the two a second of model_config.json. dtype: of the backbone, bfloat16 or float32.
    checkpointing: recompute the network's blocks in the backward pass, to save memory.

    Parts: vq, mq, ta. A sample is invalid when a part with a weight is not finite.
    """

    name = "video_align"
    fewest_frames = 2
    weights = "KwaiVGI/VideoReward; config and tokenizer of Qwen/Qwen2-VL-2B-Instruct; prompt_template.py"
    licence = "weights: Apache-2.0 (huggingface.co/KwaiVGI/VideoReward, Qwen2-VL-2B); question: MIT (VideoAlign)"
    range = "a part: deviations from the mean of its authors' data"
    chosen: Tensor  # (3,) weights of the parts
    mean: Tensor  # (3,) of the parts on the authors' data
    std: Tensor  # (3,) their deviation

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
        self.trained = read_training_config(Path(checkpoint_dir) / "model_config.json")
        self.fps, self.frames = fps, frames if frames is not None else self.trained.frames
        checkpoint = newest_checkpoint(Path(checkpoint_dir))
        files = JudgeFiles(model_dir=model_dir, prompt_file=prompt_file, weights=checkpoint, lora=self.trained.lora)
        outputs = self.trained.outputs
        self.judge, self.head = load_judge(QUESTION, files, dtype, lambda width: nn.Linear(width, outputs, bias=False))
        if checkpointing:
            self.judge.recompute()
        for name, values in (("chosen", weights), ("mean", self.trained.mean), ("std", self.trained.std)):
            self.register_buffer(name, torch.tensor(values), persistent=False)
        self.digest = files.digest()

    def forward(self, video: Tensor, batch: Sequence[Reference]) -> RewardOutput:
        with torch.autocast(video.device.type, enabled=False):
            return score_clips(video, batch, self._sample, PARTS)

    def _sample(self, clip: Tensor, reference: Mapping[str, Tensor]) -> tuple[Tensor | None, dict[str, float]]:
        parts = self.score_parts(clip, reference["tokens"].to(clip.device))
        used = self.chosen > 0
        score = parts[used] @ self.chosen[used] if parts[used].isfinite().all() else None
        return score, dict(zip(PARTS, parts.tolist(), strict=True))

    def score_parts(self, clip: Tensor, tokens: Tensor) -> Tensor:
        """Return normalised vq, mq and ta (3,) of one clip (3, F, H, W) in [-1, 1]."""
        frames = sampled_frames(clip.shape[1], self.fps, self.trained.fps, self.frames)
        height, width = clip.shape[2:]
        size = input_size(height, width, self.judge.factor, MIN_PIXELS, self.trained.pixels)
        images = unit_range(clip[:, frames].transpose(0, 1).to(self.head.weight))
        # one pass over both axes, clipped at the end: torchvision's resize (vision_process.py:318) without its rounding
        images = F.interpolate(images, size, mode="bicubic", antialias=True).clamp(0, 1)
        answers = self.judge(normalise(images), len(frames), tokens)[0].to(self.head.weight)
        # a row for each token, or one for all (trainer.py:165); the published head is in the backbone's dtype
        return ((answers * self.head.weight).sum(-1) - self.mean) / self.std


def weigh_parts(parts: Mapping[Any, float]) -> list[float]:
    """Return the weights of vq, mq and ta. Raise ValueError where all are 0, warn where only vq has one."""
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


def sampled_frames(count: int, fps: float, sample_fps: float, frames: int | None) -> list[int]:
    """Return the indices of an even number of frames, from the first to the last of a clip of `count`.

    frames: their number, rounded to even; None for sample_fps a second, 4 to 768. At most `count`
    (vision_process.py:129 and 202). Raise ValueError for a clip of fewer than two.
    """
    if count < 2:
        raise ValueError(f"reward 'video_align' judges clips of at least 2 frames, this has {count}")
    number = min(max(count / fps * sample_fps, FEWEST_FRAMES), MOST_FRAMES) if frames is None else frames
    even = min(round(number / 2) * 2, count // 2 * 2)
    return torch.linspace(0, count - 1, even).round().int().tolist()


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """The training's settings in model_config.json.

    fps: frames a second that the model is given; frames: their number instead, or None. pixels: maximum of a frame.
    outputs: rows of the head. lora: rank and factor, or None. mean, std: of each part on the authors' data, 0 and 1
    where the file has none (inference.py:68).
    """

    fps: float
    frames: int | None
    pixels: int
    outputs: int
    lora: tuple[int, float] | None
    mean: tuple[float, ...]
    std: tuple[float, ...]


def read_training_config(path: Path) -> TrainingConfig:
    """Read model_config.json. Raise ValueError for a missing or other file, or a model of another question."""
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
        trained = TrainingConfig(
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
    for key, value, valid in (
        ("data_config.prompt_template_type", data.get("prompt_template_type"), "detailed_special"),
        ("data_config.sample_type", data.get("sample_type", "uniform"), "uniform"),
        ("model_config.use_special_tokens", model.get("use_special_tokens"), True),
    ):
        if value != valid:
            raise ValueError(f"{path}: {key} is {value!r}; only a model that was trained with {valid!r} is known here")
    return trained


def newest_checkpoint(folder: Path) -> Path:
    """Return model.pth of the checkpoint-<step> with the highest step, as the authors' code does (utils.py:166)."""
    folders = [(re.fullmatch(r"checkpoint-(\d+)", path.name), path) for path in sorted(folder.glob("checkpoint-*"))]
    steps = {int(match[1]): path for match, path in folders if match}
    if not steps:
        raise ValueError(f"{folder} has no folder checkpoint-<step>; KwaiVGI/VideoReward has")
    path = steps[max(steps)] / "model.pth"
    if not path.is_file():
        raise ValueError(
            f"{path} is missing; a checkpoint of an adapter (adapter_model.safetensors) is not read: save it whole, "
            "VideoAlign's --save_full_model True"
        )
    return path
