"""Which of two images would people prefer for this prompt? HPSv3, Ma et al. 2025, arXiv 2508.03789.

File and line numbers refer to its package hpsv3 1.0.0 (github.com/MizzenAI/HPSv3).
"""

from collections.abc import Mapping
from typing import Unpack

from torch import Tensor, nn
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from rewardfl.rewards.clip.network import normalise, resize, unit_range
from rewardfl.rewards.frames import FrameReward, FrameSettings
from rewardfl.rewards.settings import ExistingPath
from rewardfl.rewards.vlm.qwen2_vl import Dtype, Question, QuestionReward, load_judge

FRAME_QUESTION = Question(
    literals=("INSTRUCTION", "prompt_with_special_token"),
    digest="f6ee57479d4e9eee76b49c00dc962e1e696a5a2b3cc32cebd9b1fa76fe27502c",
    source="hpsv3/dataset/data_collator_qwen.py of github.com/MizzenAI/HPSv3",
    vision="<|image_pad|>",
    score_tokens=("<|Reward|>",),
)

PIXELS = 256 * 28 * 28  # pixels of an image, minimum and maximum, inference.py:98


class Hpsv3Reward(QuestionReward, FrameReward):
    """mu, the mean preference for a frame given its prompt, of a Qwen2-VL-7B with a head of three layers.

    The head's other output, sigma, is not used; the authors' score is mu, too (inference.py:166).
    dtype: of the backbone; the head is float32 as published. Other settings: FrameReward, and docs/rewards.md. By
    default four frames, one at a time, since each is a forward pass of seven billion parameters.
    """

    name = "hpsv3"
    weights = (
        "HPSv3.safetensors of MizzenAI/HPSv3; config and tokenizer of Qwen/Qwen2-VL-7B-Instruct; data_collator_qwen.py"
    )
    licence = "code: MIT (github.com/MizzenAI/HPSv3); Qwen2-VL-7B: Apache-2.0; weights: as their page says"
    range = "any; over published image models from -0.2 (SD2) to 10.6 (Kolors)"

    def __init__(
        self,
        checkpoint: ExistingPath,
        model_dir: ExistingPath,
        prompt_file: ExistingPath,
        dtype: Dtype = "bfloat16",
        **frame_settings: Unpack[FrameSettings],
    ):
        super().__init__(**FrameSettings(frames=4, chunk=1) | frame_settings)
        self.judge, self.head = load_judge(FRAME_QUESTION, model_dir, prompt_file, checkpoint, dtype, ranknet)

    def score_frames(self, frames: Tensor, reference: Mapping[str, Tensor]) -> Tensor:
        height, width = frames.shape[2:]
        size = smart_resize(height, width, self.judge.factor, PIXELS, PIXELS)
        images = normalise(resize(unit_range(frames.to(next(self.head.parameters()))), *size))
        depth = self.judge.vision.temporal_patch_size  # an image is input as a video of equal frames
        states = self.judge(images.repeat_interleave(depth, 0), depth, reference["tokens"].to(frames.device))
        return self.head(states[:, 0].to(images))[:, 0]


def ranknet(width: int) -> nn.Sequential:
    """Build the head, hidden states (..., width) to mu and sigma (..., 2), as qwen2vl_trainer.py:99."""
    # Identity: the published head has a dropout there, which does nothing outside of training
    return nn.Sequential(
        nn.Linear(width, 1024), nn.ReLU(), nn.Identity(), nn.Linear(1024, 16), nn.ReLU(), nn.Linear(16, 2)
    )
