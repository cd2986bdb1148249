"""Is a clip good to look at, does it move well, does it show the prompt? VideoReward, Liu et al. 2025, 2501.13918.

File and line numbers refer to github.com/KwaiVGI/VideoAlign at commit 219ab9d.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from rewardfl.config.schema import NonNegative, Positive
from rewardfl.rewards.base import Reference, RewardOutput, score_clips
from rewardfl.rewards.clip.network import normalise, unit_range
from rewardfl.rewards.settings import ExistingPath
from rewardfl.rewards.vlm.qwen2_vl import Dtype, Question, QuestionReward, load_judge
from rewardfl.weights.shards import read_json_object

_PARTS = ("vq", "mq", "ta")  # the order of the tokens and of the head's rows, train_reward.py:95

CLIP_QUESTION = Question(
    literals=("DETAILED_PROMPT_WITH_SPECIAL_TOKEN",),
    digest="fdb6309bac618dd0c8b1b589d3a0970a974f7856eecbb355a190b2dce54af700",
    source="prompt_template.py of github.com/KwaiVGI/VideoAlign",
    vision="<|video_pad|>",
    score_tokens=("<|VQ_reward|>", "<|MQ_reward|>", "<|TA_reward|>"),
)

MIN_PIXELS = 128 * 28 * 28  # pixels of a frame, vision_process.py:31


class VideoAlignReward(QuestionReward):
    """The weighted sum of visual quality (vq), motion quality (mq) and text alignment (ta), each normalised.

    A linear head reads the hidden states of a Qwen2-VL-2B at three tokens of a question about the clip's frames. vq and
    mq do not depend on the prompt, which comes after their tokens.

    docs/rewards.md lists the files. parts: weight of each part, by default all 1, the authors' "Overall"; others are 0.
    fps: the frame rate of the videos; a run sets its own (data.fps, or the model's). frames: number of frames that the
    model is given, instead of the two a second of model_config.json. dtype: of the backbone. checkpointing: recompute
    the blocks in the backward pass, to save memory.

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
        fps: Positive,
        parts: dict[Literal["vq", "mq", "ta"], NonNegative] | None = None,
        frames: Annotated[int, Field(ge=2, le=10_000)] | None = None,
        dtype: Dtype = "bfloat16",
        *,
        checkpointing: bool = True,
    ):
        super().__init__()
        parts = {"vq": 1.0, "mq": 1.0, "ta": 1.0} if parts is None else parts
        weights = [parts.get("vq", 0.0), parts.get("mq", 0.0), parts.get("ta", 0.0)]
        if not any(weights):
            raise ValueError("parts: at least one of the weights of vq, mq and ta must be positive")
        if weights[1:] == [0, 0]:
            message = "video_align with only vq turns videos into animation (docs/rewards.md); give mq a weight, too"
            warnings.warn(message, stacklevel=2)
        self.trained = read_training_config(Path(checkpoint_dir) / "model_config.json")
        self.fps, self.frames = fps, frames if frames is not None else self.trained.frames
        checkpoint = newest_checkpoint(Path(checkpoint_dir))
        self.judge, self.head = load_judge(
            CLIP_QUESTION, model_dir, prompt_file, checkpoint, dtype,
            lambda width: nn.Linear(width, self.trained.outputs, bias=False), self.trained.lora_factor,
        )  # fmt: skip
        if checkpointing:
            self.judge.recompute()
        for name, values in (("chosen", weights), ("mean", self.trained.mean), ("std", self.trained.std)):
            self.register_buffer(name, torch.tensor(values), persistent=False)

    def forward(self, video: Tensor, batch: Sequence[Reference]) -> RewardOutput:
        with torch.autocast(video.device.type, enabled=False):
            return score_clips(video, batch, self._sample, _PARTS)

    def _sample(self, clip: Tensor, reference: Mapping[str, Tensor]) -> tuple[Tensor | None, dict[str, float]]:
        parts = self.score_parts(clip, reference["tokens"].to(clip.device))
        used = self.chosen > 0
        score = parts[used] @ self.chosen[used] if parts[used].isfinite().all() else None
        return score, dict(zip(_PARTS, parts.tolist(), strict=True))

    def score_parts(self, clip: Tensor, tokens: Tensor) -> Tensor:
        """Return normalised vq, mq and ta (3,) of one clip (3, F, H, W) in [-1, 1]."""
        frames = sampled_frames(clip.shape[1], self.fps, self.trained.fps, self.frames)
        height, width = clip.shape[2:]
        size = smart_resize(height, width, self.judge.factor, MIN_PIXELS, self.trained.pixels)
        images = unit_range(clip[:, frames].transpose(0, 1).to(self.head.weight))
        # one pass over both axes, clipped at the end: torchvision's resize (vision_process.py:318) without its rounding
        images = F.interpolate(images, size, mode="bicubic", antialias=True).clamp(0, 1)
        states = self.judge(normalise(images), len(frames), tokens)[0].to(self.head.weight)
        # a row for each token, or one for all (trainer.py:165); the published head is in the backbone's dtype
        return ((states * self.head.weight).sum(-1) - self.mean) / self.std


def sampled_frames(count: int, fps: float, sample_fps: float, frames: int | None) -> list[int]:
    """Return the indices of an even number of frames, from the first to the last of a clip of `count`.

    frames: their number, rounded to even; None for sample_fps a second, 4 to 768. At most `count`, which is 2 or more
    (vision_process.py:36, 129 and 202).
    """
    number = min(max(count / fps * sample_fps, 4), 768) if frames is None else frames
    even = min(round(number / 2) * 2, count // 2 * 2)
    return torch.linspace(0, count - 1, even).round().int().tolist()


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """The settings in model_config.json of a model that was trained on this question."""

    fps: float  # frames a second that the model is given
    frames: int | None  # their number instead
    pixels: int  # maximum of a frame
    outputs: int  # rows of the head
    lora_factor: float
    mean: list[float]  # statistics of vq, mq and ta on the authors' data
    std: list[float]


def read_training_config(path: Path) -> TrainingConfig:
    """Read model_config.json. Raise ValueError for a missing or other file, or a model of another question."""
    config = read_json_object(path)
    try:
        data, model, lora = config["data_config"], config["model_config"], config["peft_lora_config"]
        statistics, parts, rank = config["inference_config"], [part.upper() for part in _PARTS], lora["lora_r"]
        if data["prompt_template_type"] != "detailed_special" or not model["use_special_tokens"]:
            raise ValueError(f"{path}: this model was trained on another question; give KwaiVGI/VideoReward")
        return TrainingConfig(
            fps=data["fps"],
            frames=data.get("num_frames"),
            pixels=data["max_frame_pixels"],
            outputs=model["output_dim"],
            lora_factor=lora["lora_alpha"] / (rank**0.5 if lora.get("use_rslora") else rank),
            mean=[statistics[f"{part}_mean"] for part in parts],
            std=[statistics[f"{part}_std"] for part in parts],
        )
    except KeyError as error:
        raise ValueError(f"{path} lacks {error}, which KwaiVGI/VideoReward has; fetch its file") from error


def newest_checkpoint(folder: Path) -> Path:
    """Return model.pth of the checkpoint-<step> with the highest step, as the authors' code does (utils.py:166)."""
    folders = [path for path in folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdecimal()]
    if not folders:
        raise ValueError(f"{folder} has no folder checkpoint-<step>; KwaiVGI/VideoReward has")
    return max(folders, key=lambda path: int(path.name.removeprefix("checkpoint-"))) / "model.pth"
