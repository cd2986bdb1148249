"""Would people find a frame beautiful? LAION's improved aesthetic predictor (C. Schuhmann, 2022)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Unpack

from torch import Tensor, nn

from rewardfl.rewards.clip.network import ImageTower, list_some, load_clip, load_weights
from rewardfl.rewards.frames import FrameReward, FrameSettings
from rewardfl.rewards.settings import ExistingPath

# github.com/christophschuhmann/improved-aesthetic-predictor: linear layers without activations between them. INDICES
# are theirs in its nn.Sequential; the modules between them are dropouts, which do nothing outside of training.
WIDTHS = (768, 1024, 128, 64, 16, 1)
INDICES = (0, 2, 4, 6, 7)


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
        if model.config.projection_dim != WIDTHS[0]:
            raise ValueError(
                f"{model_dir} embeds images in {model.config.projection_dim} numbers, the aesthetic head takes "
                f"{WIDTHS[0]}: those of CLIP ViT-L/14"
            )
        self.image = ImageTower(model)

    def score_frames(self, frames: Tensor, reference: Mapping[str, Tensor]) -> Tensor:
        return self.head(self.image(frames))[:, 0]


def load_head(path: str | Path) -> nn.Sequential:
    """Load the predictor's frozen layers, unit embeddings (N, 768) to (N, 1); raise ValueError for another file."""
    state = load_weights(path)
    layers = [nn.Linear(*pair) for pair in zip(WIDTHS, WIDTHS[1:], strict=False)]
    expected = {
        f"layers.{index}.{name}": tuple(value.shape)
        for index, layer in zip(INDICES, layers, strict=True)
        for name, value in layer.state_dict().items()
    }
    items = state.items() if isinstance(state, Mapping) else ()
    shapes = {name: tuple(value.shape) for name, value in items if isinstance(value, Tensor)}
    if shapes != expected:
        different = dict(set(shapes.items()) ^ set(expected.items()))
        raise ValueError(
            f"{path} is not the head of the aesthetic predictor (layers of {', '.join(map(str, WIDTHS))} numbers): "
            f"it differs in {list_some(different)}"
        )
    for index, layer in zip(INDICES, layers, strict=True):
        layer.load_state_dict({name: state[f"layers.{index}.{name}"].float() for name in ("weight", "bias")})
    return nn.Sequential(*layers).eval().requires_grad_(False)
