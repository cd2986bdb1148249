"""The tiny images' words, and their pipeline and its training: tiny_pipeline's with the pictures of the scenes."""

import torch
from diffusers import AutoencoderKL, StableDiffusion3Pipeline
from torch import Tensor
from transformers import CLIPTokenizer, T5Tokenizer

import tiny_pipeline
from rewardfl.rewards.scenes.checker import SCENES
from tiny_images.drawing import SIZE, draw_scenes
from tiny_world.video import LETTERS, new_tokenizer

TOKENS = 10  # of a prompt, for each of the three text encoders
WORDS = sorted({word for prompt in SCENES for word in prompt.split()})


def _new_clip_tokenizer() -> CLIPTokenizer:
    """Return a tokenizer with a token for each word of the prompts, and letters for other text."""
    merges: list[str] = []
    for word in sorted(WORDS, key=len, reverse=True):  # else a short word's merges would split a longer one
        letters = [*word[:-1], f"{word[-1]}</w>"]
        for i in range(1, len(letters)):
            merge = f"{''.join(letters[:i])} {letters[i]}"
            merges += [] if merge in merges else [merge]
    tokens = [*LETTERS, *(f"{letter}</w>" for letter in LETTERS), *(merge.replace(" ", "") for merge in merges)]
    return tiny_pipeline.new_clip_tokenizer(tokens, merges, TOKENS)


def _new_t5_tokenizer() -> T5Tokenizer:
    return new_tokenizer(WORDS, model_max_length=TOKENS)


def new_pipeline(vae: AutoencoderKL, layers: int) -> StableDiffusion3Pipeline:
    return tiny_pipeline.new_pipeline(vae, _new_clip_tokenizer(), _new_t5_tokenizer(), SIZE, layers)


def draw(count: int, generator: torch.Generator) -> tuple[list[str], Tensor]:
    """Return prompts to train on and their pictures (count, 3, SIZE, SIZE)."""
    scenes, pictures = draw_scenes(count, generator)
    return [scene.prompt for scene in scenes], pictures
