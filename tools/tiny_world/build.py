"""The tiny world from a seed: what is trained how long, in which order, and what is written."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import WanImageToVideoPipeline
from torch import nn

from rewardfl.data import write_video
from rewardfl_tools.tiny_world import faces, people, vae, video


@dataclass(frozen=True)
class Plan:
    """How long everything trains, and how many people there are. Seeds keep the sets of identities apart."""

    vae_frame_steps: int = 1800
    vae_clip_steps: int = 500
    detector_steps: int = 900
    judge_detector_steps: int = 900
    reward_steps: int = 450
    judge_steps: int = 400
    people_per_step: int = 96
    clips: int = 6000
    high_steps: int = 4000
    low_steps: int = 8000
    layers: tuple[int, int] = (4, 6)  # of the high-noise and the low-noise expert
    residual_vae_steps: tuple[int, int] = (1500, 150)  # of the second pipeline: on frames and on clips
    only_clips: int = 2000
    only_steps: int = 900
    train_people: int = 48
    eval_people: int = 24
    statistics_clips: int = 64
    measured_people: int = 200  # by the recognisers; a fifth of them by the detector


QUICK = Plan(
    vae_frame_steps=4, vae_clip_steps=2, detector_steps=2, judge_detector_steps=2, reward_steps=2, judge_steps=2,
    people_per_step=4, clips=16, high_steps=2, low_steps=2, layers=(1, 1),
    residual_vae_steps=(2, 1), only_clips=16, only_steps=2, train_people=4, eval_people=2,
    statistics_clips=8, measured_people=20,
)  # fmt: skip


@dataclass(frozen=True)
class Stages:
    """What is trained once: `work` keeps the weights of each stage."""

    work: Path
    start: float

    def log(self, text: str) -> None:
        print(f"[{time.time() - self.start:6.0f} s] {text}", flush=True)

    def __call__(self, name: str, module: nn.Module, training: Callable[..., nn.Module | None]) -> nn.Module:
        """`module` trained, or filled with the weights that an earlier run left."""
        path = self.work / f"{name}.pt"
        if path.exists():
            module.load_state_dict(torch.load(path, weights_only=True))
            return module.eval()
        self.log(f"training {name}")
        module = training(module) or module
        torch.save(module.state_dict(), path)
        return module.eval()


def build(plan: Plan, out: Path, work: Path, seed: int) -> None:
    """Train what `work` does not hold yet and write the world to `out`."""
    stage = Stages(work, time.time())
    log = stage.log

    # -- the video autoencoder: frames first, then clips
    torch.manual_seed(seed)
    tiny_vae = vae.new_vae()
    stage("vae_frames", tiny_vae, lambda m: vae.train_vae(m, True, plan.vae_frame_steps, 16, 4e-3, seed + 1, log))
    stage("vae", tiny_vae, lambda m: vae.train_vae(m, False, plan.vae_clip_steps, 2, 8e-4, seed + 2, log))
    vae.set_latent_statistics(tiny_vae, seed + 3, plan.statistics_clips)

    # -- faces: two packs that share neither an architecture nor a person
    reward_detector = stage(
        "detector", faces.PyramidDetector(), lambda m: faces.train_detector(m, seed + 5, plan.detector_steps, log)
    )
    torch.manual_seed(seed + 6)
    judge_detector = stage(
        "judge_detector", faces.SeparableDetector(),
        lambda m: faces.train_detector(m, seed + 6, plan.judge_detector_steps, log, damage=faces.handled),
    )  # fmt: skip
    for name, detector, width, offset, steps in (
        ("reward", reward_detector, 12, 11, plan.reward_steps),
        ("judge", judge_detector, 10, 12, plan.judge_steps),
    ):
        torch.manual_seed(seed + offset)
        recogniser = stage(
            name, faces.Recogniser(width),
            lambda m, o=offset, s=steps: faces.train_recogniser(m, seed + o, s, plan.people_per_step, log),
        )  # fmt: skip
        faces.export(detector, out / "faces" / name / "detector.onnx")
        faces.export(recogniser, out / "faces" / name / "recogniser.onnx")

    # -- the experts
    torch.manual_seed(seed + 20)
    pipe = video.new_pipeline(tiny_vae, plan.layers)
    experts = (("high", "transformer", plan.high_steps), ("low", "transformer_2", plan.low_steps))
    if not all((work / f"{name}.pt").exists() for name, _, _ in experts):
        clips = video.training_set(pipe, plan.clips, seed + 21, log)
    for name, part, steps in experts:
        trained = stage(
            name, pipe.components[part],
            lambda m, n=name, s=steps: video.train_expert(m, clips, n, s, seed + 22, log),
        )  # fmt: skip
        pipe.register_modules(**{part: trained})
    video.save_pipeline(pipe, out / "pipeline")
    build_second(plan, out, work, seed)

    # -- clips of people that no network above has seen, those to train on and those to judge by
    for name, count, offset in (("train", plan.train_people, 31), ("eval", plan.eval_people, 32)):
        write_clips(out / name, count, seed + offset)
    log(f"written to {out}")


def build_second(plan: Plan, out: Path, work: Path, seed: int) -> None:
    """The world's second pipeline, of Wan2.2-TI2V-5B's kind, out of the written first one."""
    stage = Stages(work, time.time())
    log = stage.log
    first = WanImageToVideoPipeline.from_pretrained(
        out / "pipeline", dtype=torch.float32, image_processor=None, image_encoder=None
    )
    torch.manual_seed(seed + 40)
    residual = vae.new_residual_vae()
    for name, frames, steps, batch, lr in (
        ("residual_vae_frames", True, plan.residual_vae_steps[0], 16, 4e-3),
        ("residual_vae", False, plan.residual_vae_steps[1], 4, 1e-3),
    ):
        stage(name, residual, lambda m, f=frames, s=steps, b=batch, r=lr: vae.train_vae(
            m, f, s, b, r, seed + 41 + f, log, teacher=first.vae))  # fmt: skip
    vae.set_latent_statistics(residual, seed + 43, plan.statistics_clips)
    pipe = video.converted(first, residual)
    if not (work / "only.pt").exists():
        clips = video.training_set(pipe, plan.only_clips, seed + 44, log)
    only = stage(
        "only", pipe.transformer,
        lambda m: video.train_expert(m, clips, "only", plan.only_steps, seed + 45, log, lr=1e-3, batch=8),
    )  # fmt: skip
    pipe.register_modules(transformer=only)
    video.save_pipeline(pipe, out / "pipeline_ti2v")
    log(f"written to {out / 'pipeline_ti2v'}")


def write_clips(folder: Path, count: int, seed: int) -> None:
    """folder/metadata.csv (video, prompt) and folder/videos/*.mp4, one clip for each of `count` people."""
    (folder / "videos").mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    traits = people.draw_people(count, generator)
    motion, actions = people.draw_motion(count, generator)
    clips, _, _ = people.render(traits, motion, generator)
    lines = ["video,prompt"]
    for i, (clip, person, action) in enumerate(zip(clips, people.describe(traits), actions, strict=True)):
        write_video(folder / "videos" / f"{i:03d}.mp4", clip, people.FPS)
        lines.append(f'videos/{i:03d}.mp4,"{person}, {action}"')
    (folder / "metadata.csv").write_text("\n".join(lines) + "\n")
