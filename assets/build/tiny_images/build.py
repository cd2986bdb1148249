"""Build the tiny images from a seed, and measure them."""

import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

import tiny_pipeline
from rewardfl.data import write_picture
from rewardfl.rewards.scenes import judge
from rewardfl.rewards.scenes.checker import SCENES, SceneChecker, score_scene
from tiny_images import model
from tiny_images.drawing import SHARES, SIZE, draw_scenes, form, is_held_out
from tiny_images.finder import train_finder
from tiny_world.build import Stages
from tiny_world.video import save_pipeline


@dataclass(frozen=True)
class Plan:
    """Steps and numbers of pictures of each training."""

    vae_steps: int = 600
    judge_pictures: int = 5000
    judge_steps: int = 1500
    layers: int = 6
    pictures: int = 20000
    rounds: tuple[int, ...] = (4000, 3500)  # steps of the transformer, with new pictures and a new schedule each
    measured: int = 256


QUICK = Plan(vae_steps=2, judge_pictures=8, judge_steps=2, layers=2, pictures=16, rounds=(2, 1), measured=4)


def build(plan: Plan, out: Path, work: Path, seed: int) -> None:
    """Train what `work` does not hold yet and write pipeline, judge and prompts to `out`."""
    stages = Stages(work, time.time())
    log = stages.log

    torch.manual_seed(seed)
    vae = tiny_pipeline.new_vae(SIZE)
    stages.train("vae", vae, lambda m: tiny_pipeline.train_vae(m, model.draw, plan.vae_steps, seed + 1, log))
    tiny_pipeline.set_latent_statistics(vae, model.draw, seed + 2)

    torch.manual_seed(seed + 3)
    finder = stages.train(
        "judge", judge.Finder(), lambda m: train_finder(m, plan.judge_pictures, plan.judge_steps, seed + 4, log)
    )
    out.mkdir(parents=True, exist_ok=True)
    save_file(finder.state_dict(), out / "judge.safetensors")

    torch.manual_seed(seed + 5)
    pipe = model.new_pipeline(vae, plan.layers)

    for i, steps in enumerate(plan.rounds):
        tiny_pipeline.train_round(pipe, stages, f"transformer_{i}", model.draw, plan.pictures, steps, seed + 6 + 2 * i)
    save_pipeline(pipe, out / "pipeline")
    for name, held_out in (("train", False), ("eval", True)):  # no picture was drawn for the prompts of eval
        prompts = [prompt for prompt in SCENES if is_held_out(prompt) == held_out]
        (out / f"{name}.txt").write_text("\n".join(prompts) + "\n")
    log(f"written to {out}")


def measure(folder: Path, count: int, seed: int) -> dict[str, object]:
    """Measure the written files and write a contact sheet.

    The figures are the VAE's PSNR and, by judge and kind of prompt, the share of correct pictures: of drawn ones, of
    the same through the VAE, and of the base's.
    """
    pipe = tiny_pipeline.load_pipeline(folder)
    judges = {"checker": SceneChecker(), "judge": judge.SceneJudge(folder / "judge.safetensors")}
    generator = torch.Generator().manual_seed(seed)
    scenes, drawn = draw_scenes(count, generator, held_out=True)
    with torch.no_grad():
        decoded = pipe.vae.decode(pipe.vae.encode(drawn).latent_dist.mode(), return_dict=False)[0]
    prompts = [scene.prompt for scene in scenes]
    sampled = tiny_pipeline.sample(pipe, prompts, SIZE, SIZE, generator)
    figures: dict[str, object] = {
        "vae_psnr": round(float(10 * torch.log10(4 / (decoded - drawn).square().mean())), 2),
        "parameters": sum(p.numel() for p in pipe.transformer.parameters()),
    }
    for name, scorer in judges.items():
        for source, images in (("drawn", drawn), ("through_the_vae", decoded), ("base", sampled)):
            right = defaultdict(list)
            for scene, image in zip(scenes, images, strict=True):
                right[form(scene)].append(score_scene(scene, scorer.things_in(image))[1])
            total = sum(sum(values) for values in right.values())
            by_form = {kind: round(sum(right[kind]) / len(right[kind]), 3) for kind in SHARES if right[kind]}
            figures[f"{name}/{source}"] = {"all": round(total / count, 3)} | by_form
    rows = [torch.cat(list(images[:12]), 2) for images in (drawn, sampled)]
    sheet = torch.nn.functional.interpolate(torch.cat(rows, 1)[None], scale_factor=3)[0]
    write_picture(folder / "contact_sheet.png", sheet[:, None])
    return figures
