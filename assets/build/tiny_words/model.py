"""The tiny words' prompts as tokens: letter by letter, so that a text encoder can spell."""

import string
from collections.abc import Callable

import torch
from diffusers import AutoencoderKL, StableDiffusion3Pipeline
from tokenizers import AddedToken
from torch import Tensor
from transformers import CLIPTokenizer, T5Tokenizer

import tiny_pipeline
from tiny_words.drawing import GROUNDS, INKS, WIDTH, draw_word, draw_words
from tiny_world.video import LETTERS, new_tokenizer

TOKENS = 16  # of a prompt, for each of the three text encoders
WORDS = ["the", "word", "in", "on", *INKS, *GROUNDS]


def _new_clip_tokenizer() -> CLIPTokenizer:
    """Return a tokenizer of letters, with a token for each word of WORDS in lower case.

    The words are no merges of letters, which would also join letters of the quoted word.
    """
    letters = LETTERS + '"'
    tokenizer = tiny_pipeline.new_clip_tokenizer([*letters, *(f"{letter}</w>" for letter in letters)], [], TOKENS)
    tokenizer.add_tokens([AddedToken(word, single_word=True, normalized=False) for word in WORDS])
    return tokenizer


def _new_t5_tokenizer() -> T5Tokenizer:
    return new_tokenizer([*WORDS, '"'], LETTERS + string.ascii_uppercase + '"', model_max_length=TOKENS)


def new_pipeline(vae: AutoencoderKL, layers: int, heads: int) -> StableDiffusion3Pipeline:
    return tiny_pipeline.new_pipeline(vae, _new_clip_tokenizer(), _new_t5_tokenizer(), WIDTH, layers, heads)


def draw(mistakes: float) -> Callable[[int, torch.Generator], tuple[list[str], Tensor]]:
    """Return a function that draws words to train on, with letters misspelt with this probability."""

    def draw_some(count: int, generator: torch.Generator) -> tuple[list[str], Tensor]:
        words = draw_words(count, generator)
        return [word.prompt for word in words], torch.stack([draw_word(word, generator, mistakes) for word in words])

    return draw_some
