"""Qwen2-VL as rewards use it: frames to patches with a gradient, a question to tokens, hidden states at its answers.

What the published scorers do to bytes (PIL or torchvision, then transformers' processor) is done here in torch on
floats, so that the gradient reaches the frames; tests/rewards/vlm/test_qwen2_vl.py compares both.

Positions are 0, 1, 2, ... for text and patches alike. Qwen2-VL itself gives patches the place of their frame, row and
column, but both scorers call the text model with embeddings and without `position_ids` (VideoAlign trainer.py:115,
hpsv3 1.0.0 qwen2vl_trainer.py:179), which then counts tokens; they were trained and are published so.
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
from rewardfl.rewards.clip.network import TOKENIZER_FILES, UNREADABLE, some
from rewardfl.weights.shards import parse_json_object

MAX_RATIO = 200  # of a picture's edges, qwen-vl-utils

Head = TypeVar("Head", bound=nn.Module)

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


# ---- pixels ----


def shown_size(height: int, width: int, factor: int, fewest: int, most: int) -> tuple[int, int]:
    """Height and width, multiples of `factor`, at which the model is shown a picture: `fewest` to `most` pixels.

    qwen-vl-utils' smart_resize (VideoAlign vision_process.py:55). Where it has to shrink it rounds down, so that it
    may stay below `fewest`; the quotients are taken in its order, since rounding follows. ValueError for an aspect
    ratio beyond 200.
    """
    if max(height, width) > MAX_RATIO * min(height, width):
        raise ValueError(f"frames of {height} x {width} are longer than {MAX_RATIO} times their width; Qwen2-VL stops")
    tall, wide = (max(factor, round(edge / factor) * factor) for edge in (height, width))
    if tall * wide > most:
        shrink = math.sqrt(height * width / most)
        return math.floor(height / shrink / factor) * factor, math.floor(width / shrink / factor) * factor
    if tall * wide < fewest:
        grow = math.sqrt(fewest / (height * width))
        return math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor
    return tall, wide


def to_patches(images: Tensor, patch: int, merge: int, frames: int) -> Tensor:
    """Normalised images (T, 3, H, W) -> (T / frames * H / patch * W / patch, 3 * frames * patch * patch).

    The order of transformers' processors: rows by time, then by squares of merge x merge patches, which the model
    joins to one token, then by the place within the square; columns by channel, frame, row, column. T is a multiple of
    `frames`, H and W of patch * merge.
    """
    count, channels, height, width = images.shape
    high, wide = height // (merge * patch), width // (merge * patch)
    axes = images.reshape(count // frames, frames, channels, high, merge, patch, wide, merge, patch)
    return axes.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, channels * frames * patch * patch)


# ---- the question ----


@dataclass(frozen=True)
class Question:
    """What a model was trained to be asked, as its authors publish it.

    literals: names of the strings in a Python file of theirs that make the text, joined in this order; {text_prompt} in
    it stands for a clip's prompt. digest: the text's sha256. source: that file, for messages. vision: the token that
    stands for the picture. answers: tokens, added to the tokenizer in this order, at which the heads read.
    """

    literals: tuple[str, ...]
    digest: str
    source: str
    vision: str
    answers: tuple[str, ...]


def read_text(path: str | Path, question: Question) -> str:
    """The question's text, from its authors' file, of which nothing is run; ValueError when it is another one."""
    path = Path(path)
    try:
        body = ast.parse(path.read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as {question.source} ({error})") from error
    found = {
        node.targets[0].id: node.value.value
        for node in body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }
    missing = [name for name in question.literals if name not in found]
    if missing:
        raise ValueError(f"{path} has no string {some(missing)}; {question.source} has")
    text = "".join(found[name] for name in question.literals)
    if hashlib.sha256(text.encode()).hexdigest() != question.digest:
        raise ValueError(
            f"{path}: {' + '.join(question.literals)} is another text than that of {question.source}, on which the "
            "weights were trained; fetch that file"
        )
    return text


def load_qwen_tokenizer(folder: str | Path, question: Question, config: Qwen2VLConfig) -> Qwen2Tokenizer:
    """Qwen2-VL's tokenizer with the answers' tokens behind its own; ValueError for another one, or none."""
    folder = Path(folder)
    if not any(all((folder / name).is_file() for name in names) for names in TOKENIZER_FILES):
        raise ValueError(f"{folder} holds no tokenizer: neither tokenizer.json nor vocab.json with merges.txt")
    try:
        tokenizer = Qwen2Tokenizer.from_pretrained(folder, local_files_only=True)
    except UNREADABLE as error:
        raise ValueError(f"{folder}: the tokenizer cannot be read, fetch it again ({error})") from error
    wanted = {"<|image_pad|>": config.image_token_id, "<|video_pad|>": config.video_token_id}
    known = tokenizer.get_added_vocab()
    if question.vision not in known or known[question.vision] != wanted[question.vision]:
        raise ValueError(
            f"{folder}: the tokenizer has {question.vision} at {known.get(question.vision)}, config.json at "
            f"{wanted[question.vision]}; both must be Qwen2-VL's"
        )
    twice = [token for token in question.answers if token in known]
    if twice:
        raise ValueError(f"{folder}: the tokenizer knows {some(twice)} already; take the one of Qwen2-VL itself")
    tokenizer.add_tokens(list(question.answers), special_tokens=True)
    return tokenizer


# ---- weights ----


@dataclass(frozen=True)
class StateFile:
    """The tensors of a file: all shapes are known before one of them is read."""

    path: Path
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], Tensor]


def open_state(path: str | Path) -> StateFile:
    """A .safetensors file, or a state dict that torch.save wrote; ValueError, naming the file, for anything else."""
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


# as transformers names the model's halves since 4.52 and before (VideoAlign issue 15) -> as Qwen2VLModel does
HALVES = {
    "model.language_model.": "language_model.", "model.visual.": "visual.", "visual.": "visual.",
    "model.": "language_model.",
}  # fmt: skip

LORA = re.compile(r"(?P<layer>.+)\.lora_(?P<side>[AB])\.default\.weight")


def own_name(name: str) -> str:
    """A tensor's name in Qwen2VLModel, without what PEFT puts around it; rm_head and lm_head keep theirs."""
    name = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
    for prefix, own in HALVES.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return name


class Published:
    """A scorer's weights under Qwen2VLModel's names: the backbone's, a head's, and a LoRA that is yet to be merged.

    lora: rank and factor of up @ down, None where there is none. ValueError for a LoRA that does not fit.
    """

    def __init__(self, file: StateFile, lora: tuple[int, float] | None = None):
        self.file, self.path = file, file.path
        self.rank, self.factor = lora or (0, 0.0)
        self.names: dict[str, str] = {}
        sides: dict[str, dict[str, str]] = {}
        for name in file.shapes:
            own = own_name(name)
            adapter = LORA.fullmatch(own)
            if adapter:
                sides.setdefault(f"{adapter['layer']}.weight", {})[adapter["side"]] = name
            elif own in self.names:
                raise ValueError(f"{self.path} has one tensor under two names, {self.names[own]} and {name}")
            else:
                self.names[own] = name
        # names of the two matrices: lora_A, (rank, in), and lora_B, (out, rank)
        self.adapters = {own: self._adapter(own, pair) for own, pair in sides.items()}

    def _adapter(self, own: str, pair: Mapping[str, str]) -> tuple[str, str]:
        shapes = {side: self.file.shapes[name] for side, name in pair.items()}
        base = self.file.shapes[self.names[own]] if own in self.names else ()
        if len(base) != 2 or shapes != {"A": (self.rank, base[1]), "B": (base[0], self.rank)}:
            raise ValueError(
                f"{self.path}: the LoRA of {own} ({shapes}) does not fit the layer's {base} with the rank that the "
                f"configuration says, {self.rank or 'none'}"
            )
        return pair["A"], pair["B"]

    def shape(self, own: str) -> tuple[int, ...]:
        """() for one that is not there."""
        return self.file.shapes[self.names[own]] if own in self.names else ()

    def read(self, own: str, dtype: torch.dtype) -> Tensor:
        """A tensor of its own memory, with its LoRA merged in float32."""
        value = self.file.read(self.names[own])
        if own in self.adapters:
            down, up = (self.file.read(name).float() for name in self.adapters[own])
            value = value.float() + self.factor * (up @ down)
        return value.to(dtype, copy=True)

    def load_head(self, head: nn.Module) -> None:
        """Gives a head its weights, frozen, in float32; ValueError when those of the file have other shapes."""
        wanted = {f"rm_head.{name}": tuple(value.shape) for name, value in head.state_dict().items()}
        found = {name: self.shape(name) for name in self.names if name.startswith("rm_head.")}
        if found != wanted:
            different = {name for name, _ in set(found.items()) ^ set(wanted.items())}
            raise ValueError(f"{self.path} has not the head that this reward needs: it differs in {some(different)}")
        head.load_state_dict({name.removeprefix("rm_head."): self.read(name, torch.float32) for name in wanted})
        head.eval().requires_grad_(False)


def read_config(folder: str | Path) -> Qwen2VLConfig:
    """ValueError when the folder is not there or is of another model."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} is no folder of a transformers model: it has no config.json")
    kind = parse_json_object(path.read_bytes(), str(path)).get("model_type")
    if kind != "qwen2_vl":
        raise ValueError(f"{path} is of a model of type {kind!r}; a Qwen2-VL is needed, whose type is 'qwen2_vl'")
    return Qwen2VLConfig.from_pretrained(folder, local_files_only=True)


def load_backbone(config: Qwen2VLConfig, published: Published, dtype: torch.dtype) -> Qwen2VLModel:
    """The model with the published weights; ValueError, before one is read, when names or shapes are others.

    The language model's own head (lm_head), which scorers do not use, is left out.
    """
    with torch.device("meta"):
        wanted = {name: tuple(value.shape) for name, value in Qwen2VLModel(config).state_dict().items()}
    rest = {name for name in published.names if not name.startswith(("rm_head.", "lm_head."))}
    if different := {name for name in rest | wanted.keys() if published.shape(name) != wanted.get(name)}:
        raise ValueError(f"{published.path} is no Qwen2-VL of this config.json: it differs in {some(different)}")
    state = {name: published.read(name, dtype) for name in wanted}
    return Qwen2VLModel.from_pretrained(None, config=config, state_dict=state, dtype=dtype)


# ---- the model at work ----


class Judge(nn.Module):
    """A frozen Qwen2-VL that is asked its question about pictures and read at its answers' tokens."""

    def __init__(self, model: Qwen2VLModel, tokenizer: Qwen2Tokenizer, text: str, question: Question):
        super().__init__()
        self.model, self.tokenizer, self.text, self.question = model, tokenizer, text, question
        self.vision = model.config.vision_config
        self.answers = tokenizer.convert_tokens_to_ids(list(question.answers))
        self.place = tokenizer.convert_tokens_to_ids(question.vision)
        self.eval().requires_grad_(False)

    @property
    def factor(self) -> int:
        """What the edges of a picture must be multiples of."""
        return self.vision.patch_size * self.vision.spatial_merge_size

    def recompute(self) -> "Judge":
        """The judge itself, whose blocks from now on keep their inputs alone for a backward, which runs them again.

        transformers' own switch works in training mode only, and a frozen judge has none.
        """
        for block in (*self.model.visual.blocks, *self.model.language_model.layers):
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
        return self

    def ask(self, prompt: str) -> Tensor:
        """(L,) tokens of the question about a clip of this prompt; one of them stands for the picture.

        ValueError for a prompt with a token that means something else to the model than its letters.
        """
        meant = [token for token in self.tokenizer.get_added_vocab() if token in prompt]
        if meant:
            raise ValueError(f"the prompt {prompt!r} has {some(meant)} in it, a sign that Qwen2-VL has for itself")
        # what Qwen2-VL-Instruct's chat template makes of a picture and a text, up to the answer's begin
        turns = (
            "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n<|vision_start|>"
            f"{self.question.vision}<|vision_end|>{self.text.format(text_prompt=prompt)}<|im_end|>\n"
            "<|im_start|>assistant\n"
        )
        return self.tokenizer(turns, return_tensors="pt").input_ids[0]

    def forward(self, pictures: Tensor, frames: int, tokens: Tensor) -> Tensor:
        """(N, answers, D) hidden states about N pictures of `frames` frames each, all of one size.

        pictures: (N * frames, 3, H, W), normalised, H and W multiples of `factor`, frames of temporal_patch_size.
        tokens: of `ask`.
        """
        patch, merge, depth = self.vision.patch_size, self.vision.spatial_merge_size, self.vision.temporal_patch_size
        grid = [frames // depth, pictures.shape[-2] // patch, pictures.shape[-1] // patch]
        count = len(pictures) // frames
        patches = to_patches(pictures, patch, merge, depth).to(self.model.dtype)
        seen = self.model.visual(patches, grid_thw=torch.tensor([grid] * count, device=patches.device)).pooler_output
        language = self.model.language_model
        words = language.embed_tokens(tokens).expand(count, -1, -1)
        at = int((tokens == self.place).nonzero())  # the picture's tokens stand here, in place of this one
        inputs = torch.cat([words[:, :at], seen.reshape(count, -1, seen.shape[-1]), words[:, at + 1 :]], 1)
        states = language(inputs_embeds=inputs, use_cache=False).last_hidden_state
        places = [int((tokens == token).nonzero()) - len(tokens) for token in self.answers]
        return states[:, places]


class QuestionReward(Reward):
    """A reward whose `judge` is asked about a clip with a prompt. digest: of the files that the question depends on."""

    differentiable = True
    uses_prompt = True
    compares_with = "nothing"  # but the prompt
    judge: Judge
    digest: str

    def reference(self, video: Tensor, prompt: str = "") -> dict[str, Tensor]:
        """The question about a clip of this prompt as `tokens` (L,); ValueError without one."""
        if not prompt:
            raise ValueError(f"reward {self.name!r} compares a clip with its prompt, and there is none")
        return {"tokens": self.judge.ask(prompt)}

    def fingerprint(self) -> dict[str, object]:
        return {"name": self.name, "question": self.digest}


@dataclass(frozen=True)
class JudgeFiles:
    """Where a scorer's files are. model_dir: the Qwen2-VL whose config.json and tokenizer it has.

    lora: of the weights, see Published.
    """

    model_dir: str | Path
    prompt_file: str | Path
    weights: str | Path
    lora: tuple[int, float] | None = None

    def digest(self) -> str:
        """Identifies all that the tokens of a question depend on beside the prompt."""
        names = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt")
        files = [Path(self.prompt_file), *(Path(self.model_dir) / name for name in names)]
        return digest_files([path for path in files if path.is_file()])


def load_judge(
    question: Question, files: JudgeFiles, dtype: str, make_head: Callable[[int], Head]
) -> tuple[Judge, Head]:
    """A scorer's model and head. make_head: width of the hidden states -> the head, without its weights.

    ValueError, naming the file, for whatever is missing or other, from the small files to the large one.
    """
    published = Published(open_state(files.weights), files.lora)
    text = read_text(files.prompt_file, question)
    config = read_config(files.model_dir)
    tokenizer = load_qwen_tokenizer(files.model_dir, question, config)
    head = make_head(config.text_config.hidden_size)
    published.load_head(head)
    config.text_config.vocab_size = len(tokenizer)  # as the authors cut the embedding after adding their tokens
    return Judge(load_backbone(config, published, DTYPES[dtype]), tokenizer, text, question), head
