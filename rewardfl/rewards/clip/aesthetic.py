"""Would people find a frame beautiful? LAION's improved aesthetic predictor (C. Schuhmann, 2022)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Unpack

from torch import Tensor, nn

from rewardfl.rewards.clip.network import ImageTower, check_state, load_clip, load_weights
from rewardfl.rewards.frames import FrameReward, FrameSettings
from rewardfl.rewards.settings import ExistingPath

WIDTH = 768  # width of CLIP ViT-L/14's embedding


class AestheticReward(FrameReward):
    """The mean rating, from 1 to 10, predicted by a linear regression on CLIP ViT-L/14's unit image embedding.

    model_dir: openai/clip-vit-large-patch14 in transformers' layout. head: sac+logos+ava1-l14-linearMSE.pth.
    Other settings: FrameReward.
    """

    name = "aesthetic"
    differentiable = True
    weights = "openai/clip-vit-large-patch14 (transformers folder); sac+logos+ava1-l14-linearMSE.pth"
    licence = "CLIP: MIT; head: Apache-2.0 (github.com/christophschuhmann/improved-aesthetic-predictor)"
    range = "about 1 to 10"

    def __init__(self, model_dir: ExistingPath, head: ExistingPath, **frame_settings: Unpack[FrameSettings]):
        super().__init__(**frame_settings)
        self.head = load_head(head)
        model = load_clip(model_dir)
        if model.config.projection_dim != WIDTH:
            raise ValueError(
                f"{model_dir} embeds images in {model.config.projection_dim} numbers, the aesthetic head takes "
                f"{WIDTH}; give CLIP ViT-L/14"
            )
        self.image = ImageTower(model)

    def score_frames(self, frames: Tensor, reference: Mapping[str, Tensor]) -> Tensor:
        return self.head(self.image(frames))[:, 0]


def load_head(path: str | Path) -> nn.Sequential:
    """Load the predictor's frozen layers, unit embeddings (N, 768) to (N, 1); raise ValueError for another file.

    github.com/christophschuhmann/improved-aesthetic-predictor: linear layers without activations between them. Where
    the published head has a dropout, which does nothing outside of training, this has an Identity.
    """
    head = nn.Sequential(
        nn.Linear(WIDTH, 1024), nn.Identity(), nn.Linear(1024, 128), nn.Identity(), nn.Linear(128, 64), nn.Identity(),
        nn.Linear(64, 16), nn.Linear(16, 1),
    )  # fmt: skip
    state = {name.removeprefix("layers."): value for name, value in load_weights(path).items()}
    check_state(path, "the head of the aesthetic predictor", state, head.state_dict())
    head.load_state_dict(state)
    return head.eval().requires_grad_(requires_grad=False)
