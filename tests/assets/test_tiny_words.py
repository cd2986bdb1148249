"""The committed words keep their promises, the readers read what is drawn, and they can be rebuilt."""

import csv
import json
import shutil
from importlib.util import find_spec

import pytest
import torch
from conftest import ROOT, run_python

import tiny_pipeline
from rewardfl.data.clips import read_video
from rewardfl.rewards.ocr import Ocr, quoted_text
from tiny_words import drawing, model
from tiny_words.drawing import Word, draw_letter, draw_word, draw_words

WORDS = ROOT / "assets" / "tiny_words"
readers = pytest.mark.skipif(
    not (find_spec("rapidocr") and shutil.which("tesseract")),
    reason="a reader is missing: pip install 'rewardfl[ocr]'; apt install tesseract-ocr",
)


def read_figures():
    return json.loads((WORDS / "figures.json").read_text())


def read_prompts(name):
    return (WORDS / f"{name}.txt").read_text().splitlines()


def read_exactly(pictures, prompts):
    """The shares of words that PP-OCR and Tesseract read exactly."""
    reward = Ocr(detect=False, second="tesseract")
    output = reward(pictures[:, :, None], [reward.reference(pictures[:0], prompt) for prompt in prompts])
    return [output.parts[name].mean().item() for name in ("exact", "tesseract_exact")]


@readers
@pytest.mark.long
def test_both_readers_read_drawings_also_through_the_vae():
    """Of held-out words, in each font."""
    generator = torch.Generator().manual_seed(77)
    words = draw_words(60, generator, held_out=True)
    drawn = torch.stack([draw_word(word, generator) for word in words])
    vae = tiny_pipeline.load_pipeline(WORDS).vae
    with torch.no_grad():
        decoded = vae.decode(vae.encode(drawn).latent_dist.mode(), return_dict=False)[0]
    prompts = [word.prompt for word in words]
    assert min(read_exactly(drawn, prompts)) >= 0.95
    assert min(read_exactly(decoded, prompts)) >= 0.9  # three of 60 are wrong by chance where 95 % are right


def test_the_figures_are_as_promised():
    figures = read_figures()
    for source in ("drawn", "through_the_vae"):
        assert min(figures[source][name] for name in ("exact", "tesseract_exact")) >= 0.95
    assert 0.25 <= figures["base"]["exact"] <= 0.5


def test_words_are_split_as_the_files_say():
    texts = {name: [quoted_text(prompt) for prompt in read_prompts(name)] for name in ("train", "validation", "eval")}
    assert len(texts["eval"]) == 200
    every = [text for part in texts.values() for text in part]
    assert len({*every}) == len(every)
    for name, part in texts.items():
        assert all(drawing.is_held_out(text.upper()) == (name != "train") for text in part)
        assert {len(text) for text in part} == {3, 4, 5, 6}
    drawn = draw_words(2000, torch.Generator().manual_seed(1))  # as those that the base was trained on
    assert not any(drawing.is_held_out(word.text) for word in drawn)
    for prompt in read_prompts("eval"):
        assert drawing.read_prompt(prompt).prompt == prompt


def test_the_training_words_have_right_drawings():
    """Each is a drawing of its own word and no other, for some font and place, in the prompt's colours."""
    with open(WORDS / "train" / "metadata.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["prompt"] for row in rows] == read_prompts("train")
    for row in rows[::10]:
        word = drawing.read_prompt(row["prompt"])
        picture = read_video(WORDS / "train" / row["video"])[0].float() / 255
        assert picture.shape == (32, 96, 3)
        ink, ground = torch.tensor(drawing.INKS[word.ink]), torch.tensor(drawing.GROUNDS[word.ground])
        covered = ((picture - ground) @ (ink - ground)) / (ink - ground).square().sum()
        masks = [
            torch.nn.functional.pad(
                torch.cat([draw_letter(letter, font) for letter in word.text], 1),
                (0, 96 - 16 * len(word.text), top, 32 - drawing.LETTER_HEIGHT - top),
            )
            for font in drawing.FONTS
            for top in drawing.TOPS
        ]
        assert min((covered - mask).abs().mean() for mask in masks) < 0.05


def test_mistakes_change_letters_and_nothing_else():
    word = Word("APPLE", "red", "white")
    right, wrong = (draw_word(word, torch.Generator().manual_seed(3), mistakes=share) for share in (0.0, 1.0))
    assert right.shape == (3, 32, 96) and right.abs().max() <= 1
    generator = torch.Generator().manual_seed(0)
    letter = draw_letter("A", drawing.FONTS[0])
    for mistake in drawing.MISTAKES:
        cell = drawing.misspell("A", drawing.FONTS[0], mistake, generator)
        assert cell.shape == letter.shape and (cell - letter).abs().mean() > 0.02
    assert not torch.equal(right, wrong) and (right[:, :, 80:] - right[:, :1, 80:81]).abs().max() == 0  # blank


def test_every_prompt_is_spelt_letter_by_letter():
    for tokenizer in (model._new_clip_tokenizer(), model._new_t5_tokenizer()):
        for text in ("THEONE", "RED", "INK", "JIQ", "BLACKS"):
            ids = tokenizer(Word(text, "red", "white").prompt).input_ids
            assert len(ids) <= model.TOKENS and tokenizer.unk_token_id not in ids[1:-1]
            tokens = [token.removesuffix("</w>").upper() for token in tokenizer.convert_ids_to_tokens(ids)]
            assert "".join(text) in "".join(tokens) and all(letter in tokens for letter in text)


@readers
@pytest.mark.long
def test_the_base_spells_what_the_figures_say():
    prompts = read_prompts("validation")
    pictures = tiny_pipeline.sample(
        tiny_pipeline.load_pipeline(WORDS), prompts, 32, 96, torch.Generator().manual_seed(5)
    )
    assert abs(read_exactly(pictures, prompts)[0] - read_figures()["base"]["exact"]) < 0.15  # two standard errors


def test_it_is_small():
    assert sum(path.stat().st_size for path in WORDS.rglob("*") if path.is_file()) < 6e6


@readers
@pytest.mark.slow(40)
@pytest.mark.long
def test_the_tool_builds_it_from_a_seed(tmp_path):
    run = run_python(["assets/build/make_tiny_words.py", "--quick", "--out", tmp_path / "words"], cwd=ROOT)
    assert run.returncode == 0, run.stderr
    built = {path.relative_to(tmp_path / "words") for path in (tmp_path / "words").rglob("*") if path.is_file()}
    committed = {path.relative_to(WORDS) for path in WORDS.rglob("*") if path.is_file()}
    assert committed <= built
    for name in ("train.txt", "validation.txt", "eval.txt", "train/metadata.csv"):
        assert (tmp_path / "words" / name).read_text() == (WORDS / name).read_text()
    assert (tmp_path / "words/train/pictures.zip").read_bytes() == (WORDS / "train/pictures.zip").read_bytes()
