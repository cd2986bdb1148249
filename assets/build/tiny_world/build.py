"""Build the tiny world from a seed: the stages of training, their order, and the written files."""

import multiprocessing
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan, WanImageToVideoPipeline
from PIL import Image
from torch import nn

from rewardfl import data
from tiny_world import distil, faces, people, second_opinion, strangers, vae, video


@dataclass(frozen=True)
class Plan:
    """Steps of each training, and numbers of people. Seeds keep the sets of identities apart."""

    vae_frame_steps: int = 2000
    vae_clip_steps: int = 400
    vae_decoder_steps: int = 800
    detector_steps: int = 900
    recogniser_steps: int = 450
    judge_steps: int = 900
    judge_people: int = 2000
    people_per_step: int = 96
    clips: int = 4000
    layers: int = 4  # of each expert
    high_steps: int = 8000  # without drift; high_last_steps: then of base and cured model each
    high_last_steps: int = 1500
    low_steps: int = 12000
    low_last_steps: int = 2500
    residual_vae_steps: tuple[int, int] = (1000, 120)  # of the second pipeline: on frames and on clips
    only_steps: int = 1500
    distil_updates: int = 100
    train_people: int = 48
    validation_people: int = 24
    eval_people: int = 48
    statistics_clips: int = 64
    measured_people: int = 200  # by the recognisers; a fifth of them by the detector


QUICK = Plan(
    vae_frame_steps=4, vae_clip_steps=2, vae_decoder_steps=2, detector_steps=2, recogniser_steps=2, judge_steps=2,
    judge_people=8, people_per_step=4, clips=16, layers=1, high_steps=2, high_last_steps=2, low_steps=2,
    low_last_steps=2, residual_vae_steps=(2, 1), only_steps=2, train_people=4, validation_people=2, eval_people=2,
    statistics_clips=8, measured_people=20, distil_updates=2,
)  # fmt: skip

# (folder of clips, field of Plan, seed offset); no two seeds share people
CLIPS = (("train", "train_people", 31), ("validation", "validation_people", 33), ("eval", "eval_people", 32))


@dataclass(frozen=True)
class Stages:
    """Stages of training, with their weights in `work`, so that no stage runs twice."""

    work: Path
    start: float

    def log(self, text: str) -> None:
        print(f"[{time.time() - self.start:6.0f} s] {text}", flush=True)

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        return torch.load(self.work / f"{name}.pt", weights_only=True)

    def train(self, name: str, module: nn.Module, training: Callable[..., nn.Module | None]) -> nn.Module:
        """Return `module` trained, or with the weights of an earlier run."""
        path = self.work / f"{name}.pt"
        if path.exists():
            module.load_state_dict(self.weights(name))
            return module.eval()
        self.log(f"training {name}")
        module = training(module) or module
        torch.save(module.state_dict(), path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)
        return module.eval()


@dataclass(frozen=True)
class Build(Stages):
    """A build's plan, seed and output folder."""

    plan: Plan
    out: Path
    seed: int


# The jobs of run_pass. Those of one pass are independent and run in two processes of one thread.


def train_vae(build: Build) -> AutoencoderKLWan:
    """Train the VAE: on frames, then on clips, then the decoder alone on clips."""
    plan, seed = build.plan, build.seed
    torch.manual_seed(seed)
    module = vae.new_vae(dim_mult=(1, 2, 4))
    for name, frames, steps, batch, lr, offset in (
        ("vae_frames", True, plan.vae_frame_steps, 16, 4e-3, 1),
        ("vae", False, plan.vae_clip_steps, 2, 8e-4, 2),
        ("vae_decoder", False, plan.vae_decoder_steps, 2, 8e-4, 4),
    ):
        if name == "vae_decoder":
            module.encoder.requires_grad_(False)
            module.quant_conv.requires_grad_(False)
        build.train(name, module, lambda m, f=frames, s=steps, b=batch, r=lr, o=offset: vae.train_vae(
            m, f, s, b, r, seed + o, build.log))  # fmt: skip
    vae.set_latent_statistics(module, seed + 3, plan.statistics_clips)
    return module


def train_faces(build: Build) -> None:
    """Train the packs of the reward and of the judge, which share neither an architecture nor a person.

    A third pack has the reward's detector, and a recogniser of the inner face alone.
    """
    plan, seed = build.plan, build.seed
    for name, network, offset, damage in (
        ("reward", faces.PyramidDetector, 5, faces.degrade_as_codec),
        ("judge", faces.SeparableDetector, 6, faces.degrade_as_camera),
    ):
        torch.manual_seed(seed + offset)
        detector = build.train(
            f"{name}_detector", network(),
            lambda m, o=offset, d=damage: faces.train_detector(m, seed + o, plan.detector_steps, build.log, damage=d),
        )  # fmt: skip
        faces.export(detector, build.out / "faces" / name / "detector.onnx")
    for name, kind, offset in (("reward", faces.Recogniser, 11), ("inner_face", faces.InnerFaceRecogniser, 13)):
        torch.manual_seed(seed + offset)
        recogniser = build.train(f"{name}_recogniser", kind(12), lambda m, o=offset: faces.train_recogniser(
            m, seed + o, plan.recogniser_steps, plan.people_per_step, build.log))  # fmt: skip
        faces.export(recogniser, build.out / "faces" / name / "recogniser.onnx")
    shutil.copy(build.out / "faces" / "reward" / "detector.onnx", build.out / "faces" / "inner_face" / "detector.onnx")
    torch.manual_seed(seed + 12)
    judge = build.train("judge_recogniser", second_opinion.SeparableRecogniser(), lambda m: second_opinion.train_judge(
        m, seed + 12, plan.judge_steps, plan.people_per_step, plan.judge_people, build.log))  # fmt: skip
    faces.export(judge, build.out / "faces" / "judge" / "recogniser.onnx")


def new_pipeline(build: Build) -> WanImageToVideoPipeline:
    """Return the pipeline with its trained VAE and untrained experts, the same on every call."""
    module = train_vae(build)
    torch.manual_seed(build.seed + 20)
    return video.new_pipeline(module, build.plan.layers)


def encode_clips(build: Build, half: int) -> None:
    """Encode one half of the experts' training clips, with drift and without."""
    path = build.work / f"clips_{half}.pt"
    if path.exists():
        return
    seed = build.seed + 1_000_000 * (1 + half)
    clips = video.training_set(new_pipeline(build), build.plan.clips // 2, seed, build.log)
    torch.save({name: vars(part) for name, part in clips.items()}, path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)


def read_clips(build: Build, kind: str) -> video.Clips:
    """Read the clips of a kind ("stays", "drifts") from both halves."""
    halves = [torch.load(build.work / f"clips_{half}.pt", weights_only=True, mmap=True)[kind] for half in (0, 1)]
    return video.Clips(**{key: torch.cat([half[key] for half in halves]) for key in halves[0]})


def train_expert(build: Build, expert: str, model: str) -> None:
    """Train an expert ("high", "low") of a model: "start", then from it "base", whose people drift, and "cured"."""
    module = new_pipeline(build).components[{"high": "transformer", "low": "transformer_2"}[expert]]
    steps = {"high": build.plan.high_steps, "low": build.plan.low_steps}[expert]
    if model != "start":
        module.load_state_dict(build.weights(f"{expert}_start"))
        steps = {"high": build.plan.high_last_steps, "low": build.plan.low_last_steps}[expert]
    clips = read_clips(build, "drifts" if model == "base" else "stays")
    seed, lr = build.seed + (22 if model == "start" else 23), 1.5e-3 if model == "start" else 8e-4
    build.train(
        f"{expert}_{model}", module,
        lambda m: video.train_expert(m, clips, expert, steps, seed, build.log, lr=lr),
    )  # fmt: skip


def train_second(build: Build) -> None:
    """Train the second pipeline, like Wan2.2-TI2V-5B's: its VAE, then its transformer, from the base's low expert."""
    plan, seed = build.plan, build.seed
    first = new_pipeline(build)
    first.transformer_2.load_state_dict(build.weights("low_base"))
    torch.manual_seed(seed + 40)
    residual = vae.new_residual_vae()
    for name, frames, steps, batch, lr in (
        ("residual_vae_frames", True, plan.residual_vae_steps[0], 16, 4e-3),
        ("residual_vae", False, plan.residual_vae_steps[1], 4, 1e-3),
    ):
        build.train(name, residual, lambda m, f=frames, s=steps, b=batch, r=lr: vae.train_vae(
            m, f, s, b, r, seed + 41 + f, build.log, teacher=first.vae))  # fmt: skip
    vae.set_latent_statistics(residual, seed + 43, plan.statistics_clips)
    pipe = video.convert_pipeline(first, residual)
    if not (build.work / "only.pt").exists():
        clips = video.training_set(pipe, plan.clips // 6, seed + 3_000_000, build.log)["drifts"]
    only = build.train(
        "only", pipe.transformer,
        lambda m: video.train_expert(m, clips, "only", plan.only_steps, seed + 45, build.log, lr=1e-3),
    )  # fmt: skip
    pipe.register_modules(transformer=only)
    video.save_pipeline(pipe, build.out / "pipeline_ti2v")


def write_pipeline(build: Build, model: str, folder: Path) -> None:
    """Write the pipeline of the "base" or of the "cured" model."""
    pipe = new_pipeline(build)
    for expert, part in (("high", pipe.transformer), ("low", pipe.transformer_2)):
        part.load_state_dict(build.weights(f"{expert}_{model}"))
    video.save_pipeline(pipe, folder)


def build(plan: Plan, out: Path, work: Path, seed: int) -> None:
    """Train what `work` does not hold yet and write the world to `out`, the cured model to `work`/cured."""
    this = Build(work, time.time(), plan, out, seed)
    run_pass((train_vae, this), (train_faces, this))
    run_pass((encode_clips, this, 0), (encode_clips, this, 1))
    run_pass((train_expert, this, "low", "start"), (train_expert, this, "high", "start"))
    run_pass(*((train_expert, this, expert, model) for expert in ("low", "high") for model in ("base", "cured")))
    train_second(this)
    write_pipeline(this, "base", out / "pipeline")
    write_pipeline(this, "cured", work / "cured")
    # people that no network above was trained on: for training, selection and evaluation
    for name, count, offset in CLIPS:
        clips, _, prompts = people.draw_clips(getattr(plan, count), seed + offset)
        strangers.write_data_set(out / name, zip(clips, prompts, strict=True))
    write_photos_and_drift(plan, out, seed)
    run_pass((distil.distil, out, plan.distil_updates, seed, this.log))
    this.log(f"written to {out}")


def write_photos_and_drift(plan: Plan, out: Path, seed: int) -> None:
    """Write photos of the people of all sets, and the training clips with drift as a set of their own."""
    for name, count, offset in CLIPS:
        _, drifting, prompts = people.draw_clips(getattr(plan, count), seed + offset)
        write_photos(out / name, prompts, seed + offset)
        if name == "train":
            strangers.write_data_set(out / "train_drift", zip(drifting, prompts, strict=True))


def write_photos(folder: Path, prompts: Sequence[str], seed: int) -> None:
    """Write photos of the people of draw_clips(len(prompts), seed) to folder/photos/, and their table photos.csv."""
    lines = ["prompt,image,photos,person"]
    traits = people.draw_people(len(prompts), torch.Generator().manual_seed(seed))
    for i, prompt in enumerate(prompts):
        photos, _ = people.draw_photos(traits[i], torch.Generator().manual_seed(1000 * seed + i))
        (folder / f"photos/{i:03d}").mkdir(parents=True, exist_ok=True)
        for j, photo in enumerate(photos):
            pixels = data.to_uint8(photo[:, None])[0].numpy()
            Image.fromarray(pixels).save(folder / f"photos/{i:03d}/{j}.jpg", quality=85)
        lines.append(f'"{prompt}",,photos/{i:03d},{i:03d}')
    (folder / "photos.csv").write_text("\n".join(lines) + "\n")


def run_pass(*jobs: tuple) -> None:
    """Run jobs, each a function with its arguments, two at a time in processes of one thread."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for future in [pool.submit(*job) for job in jobs]:
            future.result()
