"""Pictures of a word in capital letters, right or misspelt."""

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from matplotlib import get_data_path
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from rewardfl.rewards.pixels.ink import GROUNDS, INKS

HEIGHT, WIDTH = 32, 96  # pixels
CELL = 16  # pixels that a letter has from left to right: the first letter is in the first cell, and so on
CAPITAL_HEIGHT, LETTER_HEIGHT = 17, 20  # pixels; LETTER_HEIGHT with the part below the line
LETTER_WIDTH = 14  # pixels at most
TOPS = range(4, 9)  # of the letters, in pixels
SHORTEST, LONGEST = 3, 6  # letters of a word
ALPHABET = "ABCDEFGHKLMNOPRSTUVWXYZ"  # I, J and Q are taken for other letters by both readers
FONTS = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSerif-Bold", "DejaVuSansMono-Bold")
MISTAKES = ("wrong", "missing", "deformed")  # deformed: the upper half of the letter and the lower of another


@dataclass(frozen=True)
class Word:
    """A word and its colours."""

    text: str
    ink: str
    ground: str

    @property
    def prompt(self) -> str:
        return f'the word "{self.text}" in {self.ink} on {self.ground}'


def read_prompt(prompt: str) -> Word:
    """Return the word of a prompt of Word's form. Raise ValueError for another."""
    match = re.fullmatch(r'the word "([A-Z]+)" in (\w+) on (\w+)', prompt)
    if match is None:
        raise ValueError(f"not a prompt of the tiny words: {prompt!r}")
    return Word(*match.groups())


def is_held_out(text: str) -> bool:
    """Return whether training excludes the word: one in five."""
    return zlib.crc32(text.encode()) % 5 == 0


def _choose(values: Sequence[str], generator: torch.Generator) -> str:
    return values[int(torch.randint(len(values), (), generator=generator))]


def draw_words(count: int, generator: torch.Generator, *, held_out: bool = False) -> list[Word]:
    """Return `count` different words of random letters and colours, to train on or held out."""
    words: dict[str, Word] = {}
    while len(words) < count:
        length = int(torch.randint(SHORTEST, LONGEST + 1, (), generator=generator))
        text = "".join(_choose(ALPHABET, generator) for _ in range(length))
        word = Word(text, _choose([*INKS], generator), _choose([*GROUNDS], generator))
        if is_held_out(text) == held_out:
            words.setdefault(text, word)
    return list(words.values())


@cache
def draw_letter(letter: str, font: str) -> Tensor:
    """Return the letter's coverage (LETTER_HEIGHT, CELL) in [0, 1]; wide letters are made narrower."""
    large = ImageFont.truetype(f"{get_data_path()}/fonts/ttf/{font}.ttf", 160)
    left, _, right, _ = (int(edge) for edge in large.getbbox(letter, anchor="ls"))
    height = -int(large.getbbox("H", anchor="ls")[1])
    picture = Image.new("L", (right - left, height + 40))  # and the part below the line
    ImageDraw.Draw(picture).text((-left, height), letter, 255, large, anchor="ls")
    scale = CAPITAL_HEIGHT / height
    width = min(LETTER_WIDTH, round(scale * picture.width))
    small = picture.resize((width, round(scale * picture.height)), Image.Resampling.BOX)
    pixels = torch.from_numpy(np.array(small)).float()[:LETTER_HEIGHT] / 255
    cell, start = torch.zeros(LETTER_HEIGHT, CELL), (CELL - width) // 2
    cell[: len(pixels), start : start + width] = pixels
    return cell


def misspell(letter: str, font: str, mistake: str, generator: torch.Generator) -> Tensor:
    """Return the coverage of the letter with one of MISTAKES."""
    if mistake == "missing":
        return torch.zeros(LETTER_HEIGHT, CELL)
    other = draw_letter(_choose(ALPHABET.replace(letter, ""), generator), font)
    if mistake == "wrong":
        return other
    cell, middle = draw_letter(letter, font).clone(), LETTER_HEIGHT // 2
    cell[middle:] = other[middle:]
    return cell


def draw_word(word: Word, generator: torch.Generator, mistakes: float = 0.0) -> Tensor:
    """Return a picture (3, HEIGHT, WIDTH) in [-1, 1] in a random font, at a random place, in random shades.

    mistakes: the probability of each letter to be misspelt.
    """
    font = _choose(FONTS, generator)
    top = TOPS[int(torch.randint(len(TOPS), (), generator=generator))]
    covered = torch.zeros(HEIGHT, WIDTH)
    for i, letter in enumerate(word.text):
        cell = draw_letter(letter, font)
        if torch.rand((), generator=generator) < mistakes:
            cell = misspell(letter, font, _choose(MISTAKES, generator), generator)
        covered[top : top + LETTER_HEIGHT, i * CELL : (i + 1) * CELL] = cell
    shades = 0.06 * (torch.rand(2, 3, 1, 1, generator=generator) - 0.5)
    ink, ground = (torch.tensor(colours)[:, None, None] for colours in (INKS[word.ink], GROUNDS[word.ground]))
    return torch.lerp(ground + shades[0], ink + shades[1], covered).clamp(0, 1) * 2 - 1
