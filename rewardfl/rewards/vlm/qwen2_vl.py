"""Qwen2-VL for rewards: frames to patches with a gradient, a question to tokens, hidden states at its answer tokens.

The published scorers preprocess bytes with PIL or torchvision and transformers' processor. This does it in torch on
floats, so that the gradient reaches the frames; tests/test_rewards_vlm.py compares both.

Positions are 0, 1, 2, ... for text and patches. Qwen2-VL itself derives a patch's position from its frame, row and
column. Both scorers were trained without that: they call the text model with embeddings and without `position_ids`
(VideoAlign trainer.py:115, hpsv3 1.0.0 qwen2vl_trainer.py:179).
"""

import ast
import hashlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import Qwen2Tokenizer, Qwen2VLConfig, Qwen2VLModel

from rewardfl.files import digest_files
from rewardfl.rewards.base import Reward
from rewardfl.rewards.clip.network import UNREADABLE, has_tokenizer, list_some
from rewardfl.weights.shards import parse_json_object

MAX_RATIO = 200  # of an image's edges, qwen-vl-utils

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

Head = TypeVar("Head", bound=nn.Module)


def input_size(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Return the height and width, multiples of `factor`, of the model's input: `min_pixels` to `max_pixels` pixels.

    qwen-vl-utils' smart_resize (VideoAlign vision_process.py:55). It rounds down when it shrinks, so that the result
    may have less than `min_pixels`. The order of the divisions is its own, since rounding follows. Raise ValueError for
    an aspect ratio above 200.
    """
    if max(height, width) > MAX_RATIO * min(height, width):
        raise ValueError(f"frames of {height} x {width} are longer than {MAX_RATIO} times their width; Qwen2-VL stops")
    tall, wide = (max(factor, round(edge / factor) * factor) for edge in (height, width))
    if tall * wide > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        return math.floor(height / shrink / factor) * factor, math.floor(width / shrink / factor) * factor
    if tall * wide < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        return math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor
    return tall, wide


def to_patches(images: Tensor, patch: int, merge: int, frames: int) -> Tensor:
    """Cut normalised images (T, 3, H, W) to (T / frames * H / patch * W / patch, 3 * frames * patch * patch).

    The order is that of transformers' processors. Rows: time, squares of merge x merge patches (one token of the
    model), patches within a square. Columns: channel, frame, row, column. T is a multiple of `frames`, H and W of
    patch * merge.
    """
    count, channels, height, width = images.shape
    high, wide = height // (merge * patch), width // (merge * patch)
    axes = images.reshape(count // frames, frames, channels, high, merge, patch, wide, merge, patch)
    return axes.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, channels * frames * patch * patch)


@dataclass(frozen=True, kw_only=True)
class Question:
    """The question that a model was trained on, as published by its authors.

    literals: names of the strings in the authors' Python file, joined in this order to the text with {text_prompt} for
    a clip's prompt. digest: the text's sha256. source: that file, for messages. vision: the image's placeholder token.
    answers: tokens, added to the tokenizer in this order, whose hidden states the head reads.
    """

    literals: tuple[str, ...]
    digest: str
    source: str
    vision: str
    answers: tuple[str, ...]


def read_text(path: str | Path, question: Question) -> str:
    """Read the question's text from its authors' file, without running it. Raise ValueError for another text."""
    path = Path(path)
    try:
        body = ast.parse(path.read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as {question.source} ({error})") from error
    strings = {}
    for node in body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name), *_], value=ast.Constant(value=str(string))):
                strings[name] = string
    if missing := [name for name in question.literals if name not in strings]:
        raise ValueError(f"{path} has no string {list_some(missing)}; {question.source} has")
    text = "".join(strings[name] for name in question.literals)
    if hashlib.sha256(text.encode()).hexdigest() != question.digest:
        raise ValueError(
            f"{path}: {' + '.join(question.literals)} is another text than that of {question.source}, on which the "
            "weights were trained; fetch that file"
        )
    return text


def load_qwen_tokenizer(folder: str | Path, question: Question, config: Qwen2VLConfig) -> Qwen2Tokenizer:
    """Load Qwen2-VL's tokenizer and append the answer tokens. Raise ValueError for a missing or other tokenizer."""
    folder = Path(folder)
    if not has_tokenizer(folder):
        raise ValueError(f"{folder} holds no tokenizer: neither tokenizer.json nor vocab.json with merges.txt")
    try:
        tokenizer = Qwen2Tokenizer.from_pretrained(folder, local_files_only=True)
    except UNREADABLE as error:
        raise ValueError(f"{folder}: the tokenizer cannot be read, fetch it again ({error})") from error
    added = tokenizer.get_added_vocab()
    token = {"<|image_pad|>": config.image_token_id, "<|video_pad|>": config.video_token_id}[question.vision]
    if question.vision not in added or added[question.vision] != token:
        raise ValueError(
            f"{folder}: the tokenizer has {question.vision} at {added.get(question.vision)}, config.json at {token}; "
            "both must be Qwen2-VL's"
        )
    if twice := [answer for answer in question.answers if answer in added]:
        raise ValueError(f"{folder}: the tokenizer knows {list_some(twice)} already; take the one of Qwen2-VL itself")
    tokenizer.add_tokens(list(question.answers), special_tokens=True)
    return tokenizer


@dataclass(frozen=True)
class StateFile:
    """The tensors of a file; their shapes are read first, each tensor on request."""

    path: Path
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], Tensor]


def open_state(path: str | Path) -> StateFile:
    """Open a .safetensors file or a state dict of torch.save. Raise ValueError, naming the file, for another file."""
    path = Path(path)
    try:
        if path.suffix == ".safetensors":
            file = safe_open(path, "pt")
            names = list(file.keys())
            return StateFile(path, {name: tuple(file.get_slice(name).get_shape()) for name in names}, file.get_tensor)
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except UNREADABLE as error:
        raise ValueError(f"{path} cannot be read as weights, fetch it again ({error})") from error
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"{path} is no state dict: names with tensors")
    return StateFile(path, {name: tuple(value.shape) for name, value in state.items()}, state.__getitem__)


# transformers' prefixes of the model's halves, since 4.52 and before (VideoAlign issue 15) -> those of Qwen2VLModel
HALVES = {
    "model.language_model.": "language_model.", "model.visual.": "visual.", "visual.": "visual.",
    "model.": "language_model.",
}  # fmt: skip

LORA = re.compile(r"(?P<layer>.+)\.lora_(?P<side>[AB])\.default\.weight")


def to_model_name(name: str) -> str:
    """Return a tensor's name in Qwen2VLModel, without PEFT's affixes; rm_head and lm_head keep their names."""
    name = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
    for prefix, half in HALVES.items():
        if name.startswith(prefix):
            return half + name.removeprefix(prefix)
    return name


class PublishedWeights:
    """A scorer's weights under Qwen2VLModel's names: backbone, head, and a LoRA that `read` merges.

    lora: rank and factor of up @ down, None without LoRA. Raises ValueError for a LoRA that does not fit.
    """

    def __init__(self, file: StateFile, lora: tuple[int, float] | None = None):
        self.file, self.path = file, file.path
        self.rank, self.factor = lora or (0, 0.0)
        self.names: dict[str, str] = {}
        sides: dict[str, dict[str, str]] = {}
        for stored in file.shapes:
            name = to_model_name(stored)
            if adapter := LORA.fullmatch(name):
                sides.setdefault(f"{adapter['layer']}.weight", {})[adapter["side"]] = stored
            elif name in self.names:
                raise ValueError(f"{self.path} has one tensor under two names, {self.names[name]} and {stored}")
            else:
                self.names[name] = stored
        # stored names of the two matrices: lora_A (rank, in) and lora_B (out, rank)
        self.adapters = {name: self._adapter(name, pair) for name, pair in sides.items()}

    def _adapter(self, name: str, pair: Mapping[str, str]) -> tuple[str, str]:
        shapes, base = {side: self.file.shapes[stored] for side, stored in pair.items()}, self.shape(name)
        if len(base) != 2 or shapes != {"A": (self.rank, base[1]), "B": (base[0], self.rank)}:
            raise ValueError(
                f"{self.path}: the LoRA of {name} ({shapes}) does not fit the layer's {base} with the rank that the "
                f"configuration says, {self.rank or 'none'}"
            )
        return pair["A"], pair["B"]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, () for a missing tensor."""
        return self.file.shapes[self.names[name]] if name in self.names else ()

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Read a copy of a tensor, with its LoRA merged in float32."""
        value = self.file.read(self.names[name])
        if name in self.adapters:
            down, up = (self.file.read(stored).float() for stored in self.adapters[name])
            value = value.float() + self.factor * (up @ down)
        return value.to(dtype, copy=True)

    def load_head(self, head: nn.Module) -> None:
        """Load a head's weights, frozen, in float32. Raise ValueError when the file's have other shapes."""
        expected = {f"rm_head.{name}": tuple(value.shape) for name, value in head.state_dict().items()}
        shapes = {name: self.shape(name) for name in self.names if name.startswith("rm_head.")}
        if different := {name for name, _ in shapes.items() ^ expected.items()}:
            raise ValueError(f"{self.path} lacks the head of this reward: it differs in {list_some(different)}")
        head.load_state_dict({name.removeprefix("rm_head."): self.read(name, torch.float32) for name in expected})
        head.eval().requires_grad_(False)


def read_config(folder: str | Path) -> Qwen2VLConfig:
    """Read a folder's config.json. Raise ValueError when it is missing or of another model."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} is no folder of a transformers model: it has no config.json")
    kind = parse_json_object(path.read_bytes(), str(path)).get("model_type")
    if kind != "qwen2_vl":
        raise ValueError(f"{path} is of a model of type {kind!r}; a Qwen2-VL is needed, whose type is 'qwen2_vl'")
    return Qwen2VLConfig.from_pretrained(folder, local_files_only=True)


def load_backbone(config: Qwen2VLConfig, published: PublishedWeights, dtype: torch.dtype) -> Qwen2VLModel:
    """Load the model with the published weights, without its lm_head, which scorers do not use.

    Raise ValueError for other names or shapes, before a tensor is read.
    """
    with torch.device("meta"):
        shapes = {name: tuple(value.shape) for name, value in Qwen2VLModel(config).state_dict().items()}
    names = {name for name in published.names if not name.startswith(("rm_head.", "lm_head."))}
    if different := {name for name in names | shapes.keys() if published.shape(name) != shapes.get(name)}:
        raise ValueError(f"{published.path} is no Qwen2-VL of this config.json: it differs in {list_some(different)}")
    state = {name: published.read(name, dtype) for name in shapes}
    return Qwen2VLModel.from_pretrained(None, config=config, state_dict=state, dtype=dtype)


class Judge(nn.Module):
    """A frozen Qwen2-VL with its question about images, whose output are the hidden states at the answer tokens."""

    def __init__(self, model: Qwen2VLModel, tokenizer: Qwen2Tokenizer, text: str, question: Question):
        super().__init__()
        self.model, self.tokenizer, self.text, self.question = model, tokenizer, text, question
        self.vision = model.config.vision_config
        self.answers = tokenizer.convert_tokens_to_ids(list(question.answers))
        self.placeholder = tokenizer.convert_tokens_to_ids(question.vision)
        self.eval().requires_grad_(False)

    @property
    def factor(self) -> int:
        """Return the divisor of an image's edges."""
        return self.vision.patch_size * self.vision.spatial_merge_size

    def recompute(self) -> "Judge":
        """Enable activation checkpointing of all blocks, and return the judge.

        transformers' own switch works in training mode only, and a frozen judge has none.
        """
        for block in (*self.model.visual.blocks, *self.model.language_model.layers):
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
        return self

    def ask(self, prompt: str) -> Tensor:
        """Return the tokens (L,) of the question about a clip of this prompt, with one placeholder for the images.

        Raise ValueError for a prompt with one of the tokenizer's special tokens.
        """
        if special := [token for token in self.tokenizer.get_added_vocab() if token in prompt]:
            raise ValueError(
                f"the prompt {prompt!r} has {list_some(special)} in it, which Qwen2-VL reserves for itself"
            )
        # Qwen2-VL-Instruct's chat template for an image and a text, up to the start of the answer
        turns = (
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n<|vision_start|>"
            f"{self.question.vision}<|vision_end|>{self.text.format(text_prompt=prompt)}<|im_end|>\n"
            "<|im_start|>assistant\n"
        )
        return self.tokenizer(turns, return_tensors="pt").input_ids[0]

    def forward(self, images: Tensor, frames: int, tokens: Tensor) -> Tensor:
        """Return hidden states (N, answers, D) for N inputs of `frames` images each.

        images: (N * frames, 3, H, W), normalised, H and W multiples of `factor`, frames of temporal_patch_size.
        tokens: (L,), of `ask`.
        """
        patch, merge, depth = self.vision.patch_size, self.vision.spatial_merge_size, self.vision.temporal_patch_size
        grid = [frames // depth, images.shape[-2] // patch, images.shape[-1] // patch]
        count = len(images) // frames
        patches = to_patches(images, patch, merge, depth).to(self.model.dtype)
        visual = self.model.visual(patches, grid_thw=torch.tensor([grid] * count, device=patches.device)).pooler_output
        language = self.model.language_model
        words = language.embed_tokens(tokens).expand(count, -1, -1)
        at = int((tokens == self.placeholder).nonzero())  # the images' tokens replace this one
        inputs = torch.cat([words[:, :at], visual.reshape(count, -1, visual.shape[-1]), words[:, at + 1 :]], 1)
        states = language(inputs_embeds=inputs, use_cache=False).last_hidden_state
        # counted from the end, since the images' tokens precede the answers
        return states[:, [int((tokens == token).nonzero()) - len(tokens) for token in self.answers]]


class QuestionReward(Reward):
    """Base class of rewards by a `judge` and a prompt. digest: of the files that determine the question's tokens."""

    differentiable = True
    uses_prompt = True
    compares_with = "nothing"  # but the prompt
    judge: Judge
    digest: str

    def reference(self, video: Tensor, prompt: str = "") -> dict[str, Tensor]:
        """Return the question about a clip of this prompt as `tokens` (L,); raise ValueError without a prompt."""
        if not prompt:
            raise ValueError(f"reward {self.name!r} compares a clip with its prompt, and there is none")
        return {"tokens": self.judge.ask(prompt)}

    def fingerprint(self) -> dict[str, object]:
        return {"name": self.name, "question": self.digest}


@dataclass(frozen=True, kw_only=True)
class JudgeFiles:
    """Paths of a scorer's files. model_dir: the Qwen2-VL with config.json and tokenizer. lora: see Published."""

    model_dir: str | Path
    prompt_file: str | Path
    weights: str | Path
    lora: tuple[int, float] | None = None

    def digest(self) -> str:
        """Return a digest of the files that determine a question's tokens."""
        names = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt")
        files = [Path(self.prompt_file), *(Path(self.model_dir) / name for name in names)]
        return digest_files([path for path in files if path.is_file()])


def load_judge(
    question: Question, files: JudgeFiles, dtype: str, make_head: Callable[[int], Head]
) -> tuple[Judge, Head]:
    """Load a scorer's model and head. make_head: width of the hidden states -> the head, without its weights.

    Raise ValueError, naming the file, for a missing or other file; the largest is read last.
    """
    published = PublishedWeights(open_state(files.weights), files.lora)
    text = read_text(files.prompt_file, question)
    config = read_config(files.model_dir)
    tokenizer = load_qwen_tokenizer(files.model_dir, question, config)
    head = make_head(config.text_config.hidden_size)
    published.load_head(head)
    config.text_config.vocab_size = len(tokenizer)  # the authors cut the embedding to it after adding their tokens
    return Judge(load_backbone(config, published, DTYPES[dtype]), tokenizer, text, question), head
