"""CLIP as rewards use it: pixels to unit embeddings with a gradient, prompts to unit embeddings without.

What the published scorers do to an image (PIL, bytes) is done here in torch on floats, so that the gradient reaches
the frames; the scores agree to the rounding of PIL's bytes (tests/rewards/clip/test_clip_network.py measures it).
"""

import json
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import CLIPModel, CLIPTokenizer

from rewardfl.files import digest_files
from rewardfl.rewards.frames import FrameReward
from rewardfl.rewards.settings import Frames, Pooling

# Of OpenAI's training images (github.com/openai/CLIP, clip.py); the LAION models and their fine-tunes keep them.
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)

# What reading a missing, truncated or foreign weights file raises in torch.load and from_pretrained.
UNREADABLE = (OSError, EOFError, KeyError, RuntimeError, ValueError, SafetensorError, pickle.UnpicklingError)


def load_weights(path: str | Path) -> Any:
    """What torch.load takes from a file of tensors and plain values; ValueError for a missing, broken or other one."""
    if not Path(path).is_file():
        raise ValueError(f"there is no file {path}")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except UNREADABLE as error:
        raise ValueError(f"{path} cannot be read as a {Path(path).suffix} file, fetch it again ({error})") from error


# ---- pixels ----


def unit_range(frames: Tensor) -> Tensor:
    """Frames in [-1, 1] -> [0, 1]; values outside are clipped, as in every file, and get no gradient."""
    return ((frames + 1) / 2).clamp(0, 1)


def preprocess(frames: Tensor, size: int) -> Tensor:
    """(N, 3, H, W) frames in [-1, 1] -> (N, 3, size, size), as transformers' CLIPImageProcessor does to bytes.

    Bicubic with antialias until the shorter edge has `size` pixels, the centre cut out, normalised by MEAN and STD.
    """
    height, width = frames.shape[-2:]
    short = min(height, width)
    resized = resize(unit_range(frames), size * height // short, size * width // short)
    top, left = (resized.shape[-2] - size) // 2, (resized.shape[-1] - size) // 2
    return normalise(resized[..., top : top + size, left : left + size])


def resize(images: Tensor, height: int, width: int) -> Tensor:
    """(N, 3, H, W) in [0, 1] -> (N, 3, height, width) in [0, 1], as PIL resizes bytes: bicubic (a = -0.5), antialias.

    PIL does the rows first and clips after either pass, since bytes cannot overshoot. One pass over both axes that
    is clipped at the end is up to six levels away from it on noise, this is at most one: PIL's rounding.
    """
    for shape in ((images.shape[-2], width), (height, width)):
        images = F.interpolate(images, shape, mode="bicubic", antialias=True).clamp(0, 1)
    return images


def normalise(images: Tensor) -> Tensor:
    mean, std = (images.new_tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    return (images - mean) / std


# ---- model ----


def load_clip(folder: str | Path) -> CLIPModel:
    """A CLIP from a transformers folder, in float32; ValueError when it is not there, not whole, or no CLIP."""
    folder = Path(folder)
    config = folder / "config.json"
    if not config.is_file():
        raise ValueError(f"{folder} is no folder of a transformers model: it has no config.json")
    try:
        kind = json.loads(config.read_text()).get("model_type")
    except json.JSONDecodeError as error:
        raise ValueError(f"{config} is no JSON ({error})") from error
    if kind != "clip":
        raise ValueError(f"{config} is of a model of type {kind!r}; a CLIP is needed, whose type is 'clip'")
    try:
        model, found = CLIPModel.from_pretrained(
            folder, local_files_only=True, dtype=torch.float32, output_loading_info=True
        )
    except UNREADABLE as error:
        raise ValueError(f"{folder}: the weights cannot be read, fetch them again ({error})") from error
    if found["missing_keys"]:
        raise ValueError(f"{folder}: the weights lack {some(found['missing_keys'])}; a whole CLIP is needed")
    return model


def load_tokenizer(folder: str | Path, vocabulary: int) -> CLIPTokenizer:
    """CLIP's tokenizer from a folder; ValueError when it is not there or has not `vocabulary` tokens."""
    folder = Path(folder)
    # without these, transformers makes up a tokenizer of three tokens
    if not any(all((folder / name).is_file() for name in names) for names in TOKENIZER_FILES):
        raise ValueError(f"{folder} holds no CLIP tokenizer: neither tokenizer.json nor vocab.json with merges.txt")
    tokenizer = CLIPTokenizer.from_pretrained(folder, local_files_only=True)
    if len(tokenizer) != vocabulary:
        raise ValueError(f"{folder} has a tokenizer of {len(tokenizer)} tokens, the model knows {vocabulary}")
    return tokenizer


TOKENIZER_FILES = (("tokenizer.json",), ("vocab.json", "merges.txt"))


def some(names: Iterable[str]) -> str:
    """The first three of some names, in order, and how many more there are."""
    names = sorted(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


class ImageTower(nn.Module):
    """The half of a CLIP that sees: frozen, (N, 3, H, W) frames in [-1, 1] -> (N, D) unit embeddings."""

    def __init__(self, model: CLIPModel):
        super().__init__()
        self.model, self.projection = model.vision_model, model.visual_projection
        self.size = model.config.vision_config.image_size
        self.eval().requires_grad_(False)

    def forward(self, frames: Tensor) -> Tensor:
        return self.embed(preprocess(frames.to(self.projection.weight), self.size))

    def embed(self, pixels: Tensor) -> Tensor:
        """Unit embeddings of (N, 3, size, size) images that are already normalised."""
        return F.normalize(self.projection(self.model(pixels).pooler_output), dim=-1)


class TextTower(nn.Module):
    """The half of a CLIP that reads: frozen, a prompt -> its (D,) unit embedding."""

    def __init__(self, model: CLIPModel, tokenizer: CLIPTokenizer):
        super().__init__()
        self.model, self.projection = model.text_model, model.text_projection
        self.limit = model.config.text_config.max_position_embeddings
        self.tokenizer = tokenizer
        self.eval().requires_grad_(False)

    @torch.no_grad()
    def forward(self, prompt: str) -> Tensor:
        """A prompt of more tokens than the model takes (77) is cut off, its end-of-text token stays."""
        tokens = self.tokenizer(prompt, truncation=True, max_length=self.limit, return_tensors="pt").input_ids
        # One prompt needs no padding, and attention is causal: the last state is that of the end-of-text token. So it
        # does not matter what a model's folder pads with (open_clip 0, others end-of-text) nor which eos_token_id
        # its config gives: old ones say 2, for which transformers takes the highest token, others are wrong.
        states = self.model(tokens.to(self.projection.weight.device)).last_hidden_state
        return F.normalize(self.projection(states[0, -1]), dim=-1)


class PromptReward(FrameReward):
    """How well frames fit the prompt: a function of the cosine between a CLIP's two embeddings.

    The reference is the prompt's embedding, so the text tower runs once per clip.
    """

    differentiable = True
    uses_prompt = True

    def __init__(
        self,
        model: CLIPModel,
        tokenizer_dir: str | Path,
        files: list[Path],
        frames: Frames,
        pooling: Pooling,
        first_frame: bool,
        chunk: int,
    ):
        """files: what the embedding of a prompt depends on."""
        super().__init__(frames, pooling, first_frame, chunk)
        self.image = ImageTower(model)
        self.text = TextTower(model, load_tokenizer(tokenizer_dir, model.config.text_config.vocab_size))
        self.digest = digest_files([*files, Path(tokenizer_dir)])

    compares_with = "nothing"  # but the prompt

    def reference(self, video: Tensor, prompt: str = "") -> dict[str, Tensor]:
        """The prompt's unit embedding (D,) as `text`; ValueError without a prompt."""
        if not prompt:
            raise ValueError(f"reward {self.name!r} compares a clip with its prompt, and there is none")
        return {"text": self.text(prompt)}

    def fingerprint(self) -> dict[str, object]:
        return {"name": self.name, "weights": self.digest}

    def score_frames(self, frames: Tensor, reference: Mapping[str, Tensor]) -> Tensor:
        embeddings = self.embed(frames)
        return self.from_cosine(embeddings @ reference["text"].to(embeddings))

    def embed(self, frames: Tensor) -> Tensor:
        """(N, D) unit embeddings of (N, 3, H, W) frames in [-1, 1]."""
        return self.image(frames)

    def from_cosine(self, cosine: Tensor) -> Tensor:
        """(N,) scores of (N,) cosines between frame and prompt."""
        raise NotImplementedError
