"""Build the tiny words from a seed, and measure them."""

import csv
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

import tiny_pipeline
from rewardfl.data import to_uint8, write_picture
from rewardfl.rewards.ocr import Ocr
from tiny_words import model
from tiny_words.drawing import HEIGHT, WIDTH, draw_word, draw_words, read_prompt
from tiny_world.build import Stages
from tiny_world.video import save_pipeline


@dataclass(frozen=True)
class Round:
    """Training of the transformer on new pictures, with a new learning-rate schedule."""

    steps: int
    mistakes: float  # the probability of each letter to be misspelt


@dataclass(frozen=True)
class Plan:
    """Steps and numbers of pictures of each training, and numbers of words."""

    vae_steps: int = 800
    layers: int = 6
    heads: int = 4
    pictures: int = 6000  # of each round
    batch: int = 32
    rounds: tuple[Round, ...] = (Round(2000, 0.0), Round(600, 0.22))
    train_words: int = 256
    validation_words: int = 64
    eval_words: int = 200
    measured: int = 200  # of the words of eval


QUICK = Plan(vae_steps=2, layers=2, pictures=16, rounds=(Round(2, 0.0), Round(1, 0.5)), measured=24)


def build(plan: Plan, out: Path, work: Path, seed: int) -> None:
    """Train what `work` does not hold yet and write pipeline, words and drawings to `out`."""
    stages = Stages(work, time.time())

    torch.manual_seed(seed)
    vae = tiny_pipeline.new_vae(HEIGHT)
    draw = model.draw(0.2)  # of both kinds of letters
    stages.train("vae", vae, lambda m: tiny_pipeline.train_vae(m, draw, plan.vae_steps, seed + 1, stages.log, batch=12))
    tiny_pipeline.set_latent_statistics(vae, draw, seed + 2)

    torch.manual_seed(seed + 3)
    pipe = model.new_pipeline(vae, plan.layers, plan.heads)
    for i, part in enumerate(plan.rounds):
        drawn = model.draw(part.mistakes)
        tiny_pipeline.train_round(
            pipe, stages, f"transformer_{i}", drawn, plan.pictures, part.steps, seed + 4 + 2 * i, plan.batch
        )
    save_pipeline(pipe, out / "pipeline")
    write_words(plan, out, seed + 100)
    stages.log(f"written to {out}")


def write_words(plan: Plan, out: Path, seed: int) -> None:
    """Write OUT/{train,validation,eval}.txt, and OUT/train/ with right drawings of the training words in one zip."""
    generator = torch.Generator().manual_seed(seed)
    held_out = draw_words(plan.validation_words + plan.eval_words, generator, held_out=True)
    words = {
        "train": draw_words(plan.train_words, generator),
        "validation": held_out[: plan.validation_words],
        "eval": held_out[plan.validation_words :],
    }
    (out / "train").mkdir(parents=True, exist_ok=True)
    for name, part in words.items():
        (out / f"{name}.txt").write_text("".join(f"{word.prompt}\n" for word in part))
    archive = zipfile.ZipFile(out / "train" / "pictures.zip", "w")  # PNG is compressed already
    with archive, open(out / "train" / "metadata.csv", "w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["video", "prompt"])
        for word in words["train"]:
            (pixels,) = to_uint8(draw_word(word, generator)[:, None])
            with archive.open(zipfile.ZipInfo(f"{word.text}.png"), "w") as picture:
                Image.fromarray(pixels.numpy()).save(picture, "png")
            table.writerow([f"pictures.zip/{word.text}.png", word.prompt])


def measure(folder: Path, seed: int, count: int) -> dict[str, object]:
    """Measure the written files with the words of eval.txt (the first `count`) and write a contact sheet.

    The figures are the VAE's PSNR and, by reader, the share of exactly read words: of right drawings, of the same
    through the VAE, and of the base's pictures.
    """
    pipe = tiny_pipeline.load_pipeline(folder)
    generator = torch.Generator().manual_seed(seed)
    prompts = (folder / "eval.txt").read_text().splitlines()[:count]
    drawn = torch.stack([draw_word(read_prompt(prompt), generator) for prompt in prompts])
    with torch.no_grad():
        decoded = torch.cat(
            [
                pipe.vae.decode(pipe.vae.encode(part).latent_dist.mode(), return_dict=False)[0]
                for part in drawn.split(50)
            ]
        )
    sampled = tiny_pipeline.sample(pipe, prompts, HEIGHT, WIDTH, generator)
    figures: dict[str, object] = {
        "vae_psnr": round(float(10 * torch.log10(4 / (decoded - drawn).square().mean())), 2),
        "parameters": sum(p.numel() for p in pipe.transformer.parameters()),
    }
    for source, pictures in (("drawn", drawn), ("through_the_vae", decoded), ("base", sampled)):
        figures[source] = read_words(pictures, prompts)
    rows = [torch.cat(list(images[:24].unflatten(0, (-1, 6))[i]), 2) for images in (drawn, sampled) for i in range(4)]
    sheet = torch.nn.functional.interpolate(torch.cat(rows, 1)[None], scale_factor=2)[0]
    write_picture(folder / "contact_sheet.png", sheet[:, None])
    return figures


def read_words(pictures: Tensor, prompts: Sequence[str]) -> dict[str, float]:
    """Return both readers' scores, and the shares of words that they read exactly, without detection."""
    reward = Ocr(detect=False, second="tesseract")
    output = reward(pictures[:, :, None], [reward.reference(pictures[:0], prompt) for prompt in prompts])
    parts = ("exact", "tesseract_exact", "rapidocr_score", "tesseract_score")
    return {part: round(output.parts[part].mean().item(), 3) for part in parts}
