"""Build the tiny images from a seed, and measure them."""

import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import StableDiffusion3Pipeline
from safetensors.torch import save_file
from torch import Tensor, nn

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
    vae = model.new_vae()
    stages.train("vae", vae, lambda m: model.train_vae(m, plan.vae_steps, seed + 1, log))
    model.set_latent_statistics(vae, seed + 2)

    torch.manual_seed(seed + 3)
    finder = stages.train(
        "judge", judge.Finder(), lambda m: train_finder(m, plan.judge_pictures, plan.judge_steps, seed + 4, log)
    )
    out.mkdir(parents=True, exist_ok=True)
    save_file(finder.state_dict(), out / "judge.safetensors")

    torch.manual_seed(seed + 5)
    pipe = model.new_pipeline(vae, plan.layers)

    trained = ("transformer", "text_encoder", "text_encoder_2", "text_encoder_3")
    for i, steps in enumerate(plan.rounds):
        parts = stages.train(
            f"transformer_{i}",
            nn.ModuleDict({name: pipe.components[name] for name in trained}),
            lambda m, n=steps, s=seed + 6 + 2 * i: model.train_transformer(
                pipe, m, model.training_set(pipe, plan.pictures, s, log), n, s + 1, log
            ),
        )
        pipe.register_modules(**dict(parts.named_children()))
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
    pipe = load_pipeline(folder)
    judges = {"checker": SceneChecker(), "judge": judge.SceneJudge(folder / "judge.safetensors")}
    generator = torch.Generator().manual_seed(seed)
    scenes, drawn = draw_scenes(count, generator, held_out=True)
    with torch.no_grad():
        decoded = pipe.vae.decode(pipe.vae.encode(drawn).latent_dist.mode(), return_dict=False)[0]
    prompts = [scene.prompt for scene in scenes]
    sampled = sample(pipe, prompts, generator)
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


def load_pipeline(folder: Path) -> StableDiffusion3Pipeline:
    """Load the written pipeline in float32."""
    pipe = StableDiffusion3Pipeline.from_pretrained(folder / "pipeline", torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def sample(pipe: StableDiffusion3Pipeline, prompts: list[str], generator: torch.Generator) -> Tensor:
    """Sample images (N, 3, SIZE, SIZE) in [-1, 1] with the settings of configs/tiny_image_flow_grpo.yaml."""
    return (
        pipe(
            prompts, height=SIZE, width=SIZE, num_inference_steps=10, guidance_scale=1.0,
            max_sequence_length=model.TOKENS, output_type="pt", generator=generator,
        ).images * 2 - 1
    )  # fmt: skip
