"""CLIP for rewards: pixels to unit embeddings with a gradient, prompts to unit embeddings without.

Images are preprocessed in torch on floats, where published scorers use PIL on bytes: the scores agree to its rounding.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, Unpack

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import CLIPConfig, CLIPModel, CLIPTokenizer, PreTrainedTokenizerBase

from rewardfl.file_kinds import first_line
from rewardfl.files import digest_files
from rewardfl.rewards.frames import FrameReward, FrameSettings
from rewardfl.weights import lora_files, shards

Tokenizer = TypeVar("Tokenizer", bound=PreTrainedTokenizerBase)

# OpenAI's training images (github.com/openai/CLIP, clip.py); the LAION models and their fine-tunes keep them.
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def load_weights(path: str | Path, key: str = "") -> dict[str, Tensor]:
    """Load the tensors of a .safetensors file, or of one by torch.save; key: where the latter has them, "" for itself.

    Raise ValueError for a missing, broken or other file.
    """
    path = Path(path)
    if path.suffix == ".safetensors":
        shards.read_header(path)
        return load_file(path)
    content = lora_files.load_torch(path)
    state = content.get(key) if key and isinstance(content, Mapping) else content
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"{path} holds no tensors by name" + (f" under {key!r}" if key else ""))
    return dict(state)


def check_state(path: str | Path, what: str, state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a file's tensors have other names or shapes than the `expected` ones of `what`."""
    pairs = ({(name, value.shape) for name, value in tensors.items()} for tensors in (state, expected))
    if different := {name for name, _ in set.symmetric_difference(*pairs)}:
        raise ValueError(f"{path} is not {what}: it differs in {len(different)} tensors, such as {min(different)}")


def unit_range(frames: Tensor) -> Tensor:
    """Map frames in [-1, 1] to [0, 1]; values outside are clipped, as in every file, and get no gradient."""
    return ((frames + 1) / 2).clamp(0, 1)


def preprocess(frames: Tensor, size: int) -> Tensor:
    """Resize, crop and normalise frames (N, 3, H, W) in [-1, 1] to (N, 3, size, size), as CLIPImageProcessor on bytes.

    Bicubic with antialias to a shorter edge of `size` pixels, centre crop, normalised by MEAN and STD.
    """
    height, width = frames.shape[-2:]
    short = min(height, width)
    resized = resize(unit_range(frames), size * height // short, size * width // short)
    top, left = (resized.shape[-2] - size) // 2, (resized.shape[-1] - size) // 2
    return normalise(resized[..., top : top + size, left : left + size])


def letterbox(frames: Tensor, size: int) -> Tensor:
    """Resize full frames (N, 3, H, W) in [-1, 1] to (N, 3, size, size) with black bars, HPSv2's transform.

    Bicubic to a longer edge of `size` pixels, on floats that may overshoot [0, 1], then CLIP's normalisation. With
    antialias, which HPSv2's torchvision lacked; without it the gradient would miss most of the pixels.
    """
    scale = size / max(frames.shape[-2:])
    height, width = (round(edge * scale) for edge in frames.shape[-2:])
    resized = F.interpolate(unit_range(frames), (height, width), mode="bicubic", antialias=True)
    above, left = (size - height) // 2, (size - width) // 2
    return normalise(F.pad(resized, (left, size - width - left, above, size - height - above)))


def resize(images: Tensor, height: int, width: int) -> Tensor:
    """Resize images (N, 3, H, W) in [0, 1] to (N, 3, height, width), bicubic with antialias, as PIL does on bytes.

    PIL resizes the rows first and clips after each pass.
    """
    for shape in ((images.shape[-2], width), (height, width)):
        images = F.interpolate(images, shape, mode="bicubic", antialias=True).clamp(0, 1)
    return images


def normalise(images: Tensor) -> Tensor:
    mean, std = (images.new_tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    return (images - mean) / std


def check_model_type(folder: str | Path, model_type: str) -> None:
    """Raise ValueError unless the folder has the config.json of a transformers model of this type."""
    config = Path(folder) / "config.json"
    actual = shards.read_json_object(config).get("model_type")
    if actual != model_type:
        raise ValueError(f"{config} has model type {actual!r}; {model_type!r} is needed")


def _check_files(folder: str | Path) -> None:
    """Raise InputError for a file of a transformers folder that is of another type, or damaged."""
    shards.check_folder(Path(folder))
    for path in sorted(Path(folder).iterdir()):
        if path.suffix == ".safetensors":
            shards.read_header(path)
        elif path.suffix == ".bin":
            lora_files.check_torch(path)


def load_clip(folder: str | Path) -> CLIPModel:
    """Load a CLIP from a transformers folder in float32; raise ValueError for a missing, incomplete or other model."""
    check_model_type(folder, "clip")
    _check_files(folder)
    options = {"local_files_only": True, "dtype": torch.float32, "output_loading_info": True}
    with _as_value_error(folder):
        model, info = CLIPModel.from_pretrained(folder, **options)
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise ValueError(f"{folder}: the weights lack {len(missing)} tensors, such as {missing[0]}; fetch all files")
    return model


def load_tokenizer(tokenizer_class: type[Tokenizer], folder: str | Path) -> Tokenizer:
    """Load a tokenizer from a folder; raise ValueError for broken files. Without files it has two tokens."""
    _check_files(folder)
    with _as_value_error(folder):
        return tokenizer_class.from_pretrained(folder, local_files_only=True)


@contextmanager
def _as_value_error(folder: str | Path) -> Iterator[None]:
    """Raise transformers' errors for damaged or other files as ValueError, in one line."""
    try:
        yield
    except (KeyError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"{folder} cannot be read, fetch it again ({first_line(error)})") from error


class ImageTower(nn.Module):
    """CLIP's image encoder, frozen: frames (N, 3, H, W) in [-1, 1] to unit embeddings (N, D)."""

    def __init__(self, model: CLIPModel):
        super().__init__()
        self.model, self.projection = model.vision_model, model.visual_projection
        self.size = model.config.vision_config.image_size
        self.preprocess: Callable[[Tensor, int], Tensor] = preprocess
        self.eval().requires_grad_(requires_grad=False)

    def forward(self, frames: Tensor) -> Tensor:
        pixels = self.preprocess(frames.to(self.projection.weight), self.size)
        return F.normalize(self.projection(self.model(pixels).pooler_output), dim=-1)


class PromptReward(FrameReward):
    """Base class of scores by the cosine between a CLIP's embeddings of frame and prompt."""

    differentiable = True
    uses_prompt = True
    compares_with = "nothing"  # but the prompt

    def __init__(
        self, model: CLIPModel, tokenizer_dir: str | Path, files: list[Path], **frame_settings: Unpack[FrameSettings]
    ):
        """Load the towers. files: the weights that a prompt's embedding depends on, for the fingerprint."""
        super().__init__(**frame_settings)
        self.image = ImageTower(model)
        self.tokenizer = load_tokenizer(CLIPTokenizer, tokenizer_dir)
        text = model.config.text_config
        if len(self.tokenizer) != text.vocab_size:
            raise ValueError(f"{tokenizer_dir} has {len(self.tokenizer)} tokens, the model knows {text.vocab_size}")
        self.limit = text.max_position_embeddings
        self.text_model, self.text_projection = model.text_model, model.text_projection
        self.eval().requires_grad_(requires_grad=False)
        self.digest = digest_files([*files, Path(tokenizer_dir)])

    @classmethod
    def prompt_limits(cls, settings: Mapping[str, Any]) -> Mapping[Path, int]:
        folder, config = settings.get("model_dir"), CLIPConfig()  # the published length; a folder has its own
        if folder:
            config = CLIPConfig.from_pretrained(folder, local_files_only=True)
        return {Path(settings.get("tokenizer_dir") or str(folder)): config.text_config.max_position_embeddings}

    @torch.no_grad()
    def reference(self, video: Tensor, prompt: str = "") -> dict[str, Tensor]:
        """Return the prompt's unit embedding (D,) as `text`; raise ValueError without a prompt.

        A prompt of more tokens than the model's limit (77) is truncated before its end-of-text token.
        """
        if not prompt:
            raise ValueError(f"reward {self.name!r} compares a clip with its prompt, which is empty; write one")
        tokens = self.tokenizer(prompt, truncation=True, max_length=self.limit, return_tensors="pt").input_ids
        # the last state is the end-of-text token's; pooler_output depends on eos_token_id, wrong in some configs
        states = self.text_model(tokens.to(self.text_projection.weight.device)).last_hidden_state
        return {"text": F.normalize(self.text_projection(states[0, -1]), dim=-1)}

    def fingerprint(self) -> dict[str, object]:
        return {"name": self.name, "weights": self.digest}

    def score_frames(self, frames: Tensor, reference: Mapping[str, Tensor]) -> Tensor:
        embeddings = self.image(frames)
        return self.from_cosine(embeddings @ reference["text"].to(embeddings))

    def from_cosine(self, cosine: Tensor) -> Tensor:
        """Return scores (N,) for cosines (N,) between frame and prompt; the cosines by default."""
        return cosine
