"""The tiny words' prompts as tokens: letter by letter, so that a text encoder can spell."""

import string
from collections.abc import Callable

import torch
from diffusers import AutoencoderKL, StableDiffusion3Pipeline
from tokenizers import AddedToken
from torch import Tensor, nn
from transformers import CLIPTokenizer, T5Tokenizer

import tiny_pipeline
from rewardfl.rewards.pixels.ink import GROUNDS, INKS
from tiny_words.drawing import WIDTH, draw_word, draw_words
from tiny_world.video import LETTERS, new_tokenizer

TOKENS = 16  # of a prompt, for each of the three text encoders
ATTENTION_NORM = 1.5  # of queries and keys, at the start
WORDS = ["the", "word", "in", "on", *INKS, *GROUNDS]


def _new_clip_tokenizer() -> CLIPTokenizer:
    """Return a tokenizer of letters, with a token for each word of WORDS in lower case.

    The words are no merges of letters, which would also join letters of the quoted word.
    """
    letters = LETTERS + '"'
    tokenizer = tiny_pipeline.new_clip_tokenizer([*letters, *(f"{letter}</w>" for letter in letters)], TOKENS)
    tokenizer.add_tokens([AddedToken(word, single_word=True, normalized=False) for word in WORDS])
    return tokenizer


def _new_t5_tokenizer() -> T5Tokenizer:
    return new_tokenizer([*WORDS, '"'], LETTERS + string.ascii_uppercase + '"', model_max_length=TOKENS)


def new_pipeline(vae: AutoencoderKL, layers: int, heads: int) -> StableDiffusion3Pipeline:
    """Return an untrained pipeline that learns in a few hundred steps which letter is where.

    CLIP's small embeddings would be lost in its first layer's output, so that neither a letter nor its place could be
    told from the other; and with norms of 1 no attention could look at one letter alone.
    """
    pipe = tiny_pipeline.new_pipeline(vae, _new_clip_tokenizer(), _new_t5_tokenizer(), WIDTH, layers, heads)
    for encoder in (pipe.text_encoder, pipe.text_encoder_2):
        for embedding in (part for part in encoder.modules() if isinstance(part, nn.Embedding)):
            nn.init.normal_(embedding.weight)
    for name, parameter in pipe.transformer.named_parameters():
        if "attn.norm_" in name:
            nn.init.constant_(parameter, ATTENTION_NORM)
    return pipe


def draw(mistakes: float) -> Callable[[int, torch.Generator], tuple[list[str], Tensor]]:
    """Return a function that draws words to train on, with letters misspelt with this probability."""

    def draw_some(count: int, generator: torch.Generator) -> tuple[list[str], Tensor]:
        words = draw_words(count, generator)
        return [word.prompt for word in words], torch.stack([draw_word(word, generator, mistakes) for word in words])

    return draw_some
