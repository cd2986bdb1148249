"""Does a frame show what the prompt says? CLIPScore, Hessel et al. 2021, arXiv 2104.08718."""

from pathlib import Path

from torch import Tensor

from rewardfl.rewards.clip import PromptReward, load_clip


class ClipScoreReward(PromptReward):
    """weight * max(cosine(frame, prompt), 0), section 3 of the paper, where w = 2.5 stretches it to about [0, 1].

    weight: 100 gives per cent of the cosine, the scale of torchmetrics' clip_score. The paper's prefix "A photo
    depicts" is not added. Below a cosine of 0 there is no gradient; natural pairs are at 0.1 to 0.35.
    model_dir: any CLIP, tokenizer_dir: "" for the tokenizer within model_dir. Other settings: FrameReward.
    """

    name = "clip_score"
    weights = "any CLIP (transformers folder), e.g. openai/clip-vit-large-patch14"
    licence = "OpenAI's CLIP: MIT (github.com/openai/CLIP)"
    range = "[0, weight]"

    def __init__(
        self,
        model_dir: str | Path,
        tokenizer_dir: str | Path = "",
        weight: float = 100.0,
        frames: str | int = "all",
        pooling: str = "mean",
        first_frame: bool = False,
        chunk: int = 8,
    ):
        if not weight > 0:
            raise ValueError(f"reward 'clip_score': weight must be positive, got {weight!r}")
        model = load_clip(model_dir)
        super().__init__(model, tokenizer_dir or model_dir, [Path(model_dir)], frames, pooling, first_frame, chunk)
        self.weight = weight

    def from_cosine(self, cosine: Tensor) -> Tensor:
        return self.weight * cosine.clamp(min=0)
