"""Qwen2-VL for rewards: frames to patches with a gradient, a question to tokens, hidden states at its score tokens.

Preprocessing is in torch on floats, so that the gradient reaches the frames.

Positions are 0, 1, 2, ... for text and patches, as both scorers were trained: they call the text model with embeddings
and without `position_ids` (VideoAlign trainer.py:115, hpsv3 1.0.0 qwen2vl_trainer.py:179).
"""

import ast
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import Qwen2Tokenizer, Qwen2VLConfig, Qwen2VLModel

from rewardfl.files import digest_files
from rewardfl.rewards.base import Reward
from rewardfl.rewards.clip.network import check_model_type, check_state, load_tokenizer, load_weights

Dtype = Literal["bfloat16", "float32"]

Head = TypeVar("Head", bound=nn.Module)


def to_patches(images: Tensor, patch: int, merge: int, frames: int) -> Tensor:
    """Cut normalised images (T, 3, H, W) to (T / frames * H / patch * W / patch, 3 * frames * patch * patch).

    The order is as in transformers' processors. Rows: time, squares of merge x merge patches (one token of the
    model), patches within a square. Columns: channel, frame, row, column. T is a multiple of `frames`, H and W of
    patch * merge.
    """
    count, channels, height, width = images.shape
    high, wide = height // (merge * patch), width // (merge * patch)
    axes = images.reshape(count // frames, frames, channels, high, merge, patch, wide, merge, patch)
    return axes.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, channels * frames * patch * patch)


@dataclass(frozen=True, kw_only=True)
class Question:
    """The question that a model was trained on, as published by its authors."""

    literals: tuple[str, ...]  # names of its strings in the authors' file; {text_prompt} stands for a clip's prompt
    digest: str  # sha256 of the joined text
    source: str  # that file, for messages
    vision: str  # the image's placeholder token
    score_tokens: tuple[str, ...]  # tokens to add to the tokenizer in this order, whose hidden states the head reads


def read_text(path: str | Path, question: Question) -> str:
    """Read the question's text from its authors' file, without running it. Raise ValueError for another text."""
    strings = {}
    try:
        for node in ast.parse(Path(path).read_text(encoding="utf-8")).body:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(string))):
                    strings[name] = string
    except (SyntaxError, ValueError) as error:  # such as a page of a website
        raise ValueError(f"{path} cannot be read as {question.source} ({error})") from error
    text = "".join(strings.get(name, "") for name in question.literals)
    if hashlib.sha256(text.encode()).hexdigest() != question.digest:
        raise ValueError(
            f"{path}: {' + '.join(question.literals)} is not the text of {question.source}, on which the weights were "
            "trained; fetch that file"
        )
    return text


def load_qwen_tokenizer(folder: str | Path, question: Question, config: Qwen2VLConfig) -> Qwen2Tokenizer:
    """Load Qwen2-VL's tokenizer and append the score tokens. Raise ValueError for a missing or other tokenizer."""
    tokenizer = load_tokenizer(Qwen2Tokenizer, folder)
    token = {"<|image_pad|>": config.image_token_id, "<|video_pad|>": config.video_token_id}[question.vision]
    if (actual := tokenizer.get_added_vocab().get(question.vision)) != token:
        raise ValueError(
            f"{folder}: the tokenizer is not Qwen2-VL's own: {question.vision} is {actual}, not config.json's {token}"
        )
    tokenizer.add_tokens(list(question.score_tokens), special_tokens=True)
    return tokenizer


# transformers' prefixes of the model's halves, since 4.52 and before (VideoAlign issue 15) -> Qwen2VLModel's
HALVES = {"model.language_model.": "language_model.", "model.visual.": "visual.", "model.": "language_model."}


def to_model_name(name: str) -> str:
    """Return a tensor's name in Qwen2VLModel, without PEFT's affixes; rm_head and lm_head keep their names."""
    name = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
    for prefix, half in HALVES.items():
        if name.startswith(prefix):
            return half + name.removeprefix(prefix)
    return name


def load_published(
    path: str | Path, lora_factor: float, dtype: torch.dtype
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return a scorer's tensors: the backbone's in `dtype` under Qwen2VLModel's names, and the head's in float32.

    A LoRA is merged in float32, lora_factor times up @ down. The lm_head, which scorers do not use, is left out.
    """
    state = {to_model_name(name): value for name, value in load_weights(path).items()}
    for name in [name for name in state if name.endswith(".lora_A.default.weight")]:
        layer = name.replace(".lora_A.default", "")
        base, down, up = state[layer], state.pop(name), state.pop(name.replace("lora_A", "lora_B"))
        state[layer] = (base.float() + lora_factor * (up.float() @ down.float())).to(dtype)
    head = {name.removeprefix("rm_head."): state.pop(name).float() for name in [*state] if name.startswith("rm_head.")}
    return {name: value for name, value in state.items() if not name.startswith("lm_head.")}, head


class Judge(nn.Module):
    """A frozen Qwen2-VL with its question about images. digest: of the files that determine the question's tokens."""

    def __init__(self, model: Qwen2VLModel, tokenizer: Qwen2Tokenizer, text: str, question: Question, digest: str):
        super().__init__()
        self.digest = digest
        self.model, self.tokenizer, self.text, self.question = model, tokenizer, text, question
        self.vision = model.config.vision_config
        self.score_tokens = tokenizer.convert_tokens_to_ids(list(question.score_tokens))
        self.placeholder = tokenizer.convert_tokens_to_ids(question.vision)
        self.eval().requires_grad_(requires_grad=False)

    @property
    def factor(self) -> int:
        """Return the divisor of an image's edges."""
        return self.vision.patch_size * self.vision.spatial_merge_size

    def recompute(self) -> None:
        """Enable activation checkpointing of all blocks; transformers' own switch works in training mode only."""
        for block in (*self.model.visual.blocks, *self.model.language_model.layers):
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)

    def ask(self, prompt: str) -> Tensor:
        """Return the tokens (L,) of the question about a clip of this prompt, with one placeholder for the images.

        Raise ValueError for a prompt with one of the tokenizer's special tokens.
        """
        if special := sorted(token for token in self.tokenizer.get_added_vocab() if token in prompt):
            raise ValueError(f"the prompt {prompt!r} has {special[0]} in it, which Qwen2-VL reserves for itself")
        # Qwen2-VL-Instruct's chat template for an image and a text, up to the start of the reply
        turns = (
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n<|vision_start|>"
            f"{self.question.vision}<|vision_end|>{self.text.format(text_prompt=prompt)}<|im_end|>\n"
            "<|im_start|>assistant\n"
        )
        return self.tokenizer(turns, return_tensors="pt").input_ids[0]

    def forward(self, images: Tensor, frames: int, tokens: Tensor) -> Tensor:
        """Return hidden states (N, tokens, D) at the score tokens for N inputs of `frames` images each.

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
        # counted from the end, since the images' tokens precede these
        return states[:, [int((tokens == token).nonzero()) - len(tokens) for token in self.score_tokens]]


class QuestionReward(Reward):
    """Base class of rewards by a `judge` and a prompt."""

    differentiable = True
    uses_prompt = True
    compares_with = "nothing"  # but the prompt
    judge: Judge

    def reference(self, video: Tensor, prompt: str = "") -> dict[str, Tensor]:
        """Return the question about a clip of this prompt as `tokens` (L,); raise ValueError without a prompt."""
        if not prompt:
            raise ValueError(f"reward {self.name!r} compares a clip with its prompt, which is empty; write one")
        return {"tokens": self.judge.ask(prompt)}

    def fingerprint(self) -> dict[str, object]:
        return {"name": self.name, "question": self.judge.digest}


def load_judge(
    question: Question,
    model_dir: str | Path,
    prompt_file: str | Path,
    weights: str | Path,
    dtype: Dtype,
    make_head: Callable[[int], Head],
    lora_factor: float = 0.0,
) -> tuple[Judge, Head]:
    """Load a scorer's model and head. make_head: width of the hidden states -> the head, without its weights.

    model_dir: the Qwen2-VL with config.json and tokenizer. Raise ValueError, naming the file, for a missing or other
    file.
    """
    text, number_type = read_text(prompt_file, question), getattr(torch, dtype)
    check_model_type(model_dir, "qwen2_vl")
    config = Qwen2VLConfig.from_pretrained(model_dir, local_files_only=True)
    tokenizer = load_qwen_tokenizer(model_dir, question, config)
    config.text_config.vocab_size = len(tokenizer)  # the authors cut the embedding to it after adding their tokens
    with torch.device("meta"):
        expected = Qwen2VLModel(config).state_dict()
    head = make_head(config.text_config.hidden_size)
    state, head_state = load_published(weights, lora_factor, number_type)
    check_state(weights, "a scorer with this head", head_state, head.state_dict())
    check_state(weights, "a Qwen2-VL of this config.json", state, expected)
    head.load_state_dict(head_state)
    state = {name: value.to(number_type, copy=True) for name, value in state.items()}
    model = Qwen2VLModel.from_pretrained(None, config=config, state_dict=state, dtype=number_type)
    names = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt")
    digest = digest_files([Path(prompt_file), *filter(Path.is_file, (Path(model_dir) / name for name in names))])
    return Judge(model, tokenizer, text, question, digest), head.eval().requires_grad_(requires_grad=False)
