"""The checks of tools/doctor.py that run the model, an expert at a time: beside the stock pipeline, and the base."""

import contextlib
import gc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, ModelMixin, WanTransformer3DModel
from diffusers.loaders.lora_pipeline import WanLoraLoaderMixin
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from rewardfl import data, groups, offload, reward_flow
from rewardfl.backbones.seam import Conditioning, Schedule, Velocity
from rewardfl.backbones.stock import pipeline_class
from rewardfl.backbones.wan import files as wan_files
from rewardfl.backbones.wan import model as wan
from rewardfl.backbones.wan.backbone import Wan
from rewardfl.rewards.face import FaceIdentity, FacePool, FaceScore
from rewardfl.rewards.face.reward import ratio
from rewardfl.rewards.face.track import MIN_MOTION
from rewardfl.rewards.face_judge import LEAST_FLOW
from rewardfl.rewards.video_motion import video_motion
from rewardfl.run import start, work
from rewardfl.run.monitor import peak_memory_gb
from rewardfl.weights import wan_names
from rewardfl_tools._doctor_page import DIFFERS, NOT_DONE, OK, Case, Finding

STEPS, SIDE, SEED = 4, 256, 0  # of the comparison with the stock pipeline; sides in pixels, at most
SAME_LATENTS = 1e-5  # in float32, of their norm: a CPU may add up in another order where tensors lie elsewhere
# Of answers and of latents where we have fused a distillation, which diffusers' adapter adds to every product instead.
# The tests' small network shows 4e-7 and 7e-3; of one with 40 blocks nobody knows yet
FUSED = {torch.float32: 1e-4, torch.bfloat16: 0.03}
OF_DISTILLATION = 0.1  # of what a distillation changes that may be another number
LORA_LEAVES = (".lora_down.weight", ".lora_up.weight", ".lora_A.weight", ".lora_B.weight", ".alpha")
# FaceSim of the published model itself, by IPRO (arXiv 2510.14255, table 1), on its own clips of small faces
PUBLISHED_FACE_SIM = {"wan2_2": 0.578, "wan2_2_ti2v": 0.379}
Load = Callable[[str], nn.Module]


@dataclass(frozen=True)
class Sampled:
    """What the stock pipeline did. given: how many of its latent frames are the image, and not sampled."""

    latents: list[Tensor]  # before every step, and the last
    answers: list[Tensor]  # of the network at every step
    asked: list[str]  # which expert
    distilled: list[float]  # how far its distillation moved each answer, as `apart`; empty where that was not asked
    video: Tensor  # (1, 3, F, H, W) in [-1, 1]
    weights: str  # whose loading they are of, in words
    given: int


@dataclass(frozen=True)
class StockWeights:
    """What loads an expert for the stock pipeline, whose loading that is in words, and which have adapters on."""

    load: Callable[[str], ModelMixin]
    words: str
    distilled: Sequence[str] = ()


class OneAtATime(nn.Module):
    """A model's experts, called as seam.Experts is, of which memory holds the one that was asked last.

    load: by an expert's name, the expert in its place.
    """

    def __init__(self, load: Load):
        super().__init__()
        self.load = load
        self.held: dict[str, nn.Module] = {}  # a plain dict: no submodule, so that nothing moves or walks it

    def forward(self, name: str, **inputs: Tensor) -> Tensor:
        if name not in self.held:
            self.drop()
            self.held[name] = self.load(name)
        return self.held[name](**inputs, return_dict=False)[0]

    def drop(self) -> None:
        """Hold none, and give its memory back."""
        self.held.clear()
        give_back()


def give_back() -> None:
    """What nothing refers to any more: to Python, and of the GPU to others."""
    gc.collect()  # what swaps blocks refers to itself
    torch.cuda.empty_cache()


def placed(case: Case, load: Callable[[str], ModelMixin]) -> Load:
    """`load`, with the expert where the run has it."""
    return lambda name: offload.place(load(name), case.place(name), case.device, case.backbone.block_classes)


# ------------------------------------------------------------------------------------------------------------
# Beside the stock pipeline


class OurSigmas(FlowMatchEulerDiscreteScheduler):
    """diffusers' Euler steps at a schedule that is given: pipelines ask for a number of steps alone.

    Its own would shift an already shifted range.
    """

    def __init__(self, schedule: Schedule):
        super().__init__()
        self.given = schedule

    def set_timesteps(self, num_inference_steps: int, device: torch.device | None = None) -> None:
        super().set_timesteps(num_inference_steps, device=device)
        self.sigmas, self.timesteps = self.given.sigmas.cpu(), self.given.timesteps.to(device)


class Turn(nn.Module):
    """What stands in the stock pipeline for an expert, and answers by `ask`; as the expert, but for its weights."""

    def __init__(self, backbone: Wan, name: str, device: torch.device, ask: Callable[[dict[str, Tensor]], Tensor]):
        super().__init__()
        config = wan_files.config_of(backbone.layout, backbone.variant.parts[name])
        empty = wan.new_expert(config, backbone.dtype, config["num_layers"], None)
        self.config, self.dtype, self.device, self.ask = empty.config, empty.dtype, device, ask

    def cache_context(self, name: str, **step: float) -> contextlib.AbstractContextManager:
        """diffusers' for caches over the steps, of which there are none, whatever is told of the step."""
        return contextlib.nullcontext()

    def forward(self, attention_kwargs: None, return_dict: bool, **inputs: Tensor | None) -> tuple[Tensor]:
        return (self.ask({key: value for key, value in inputs.items() if value is not None}),)


@torch.no_grad()
def stock(case: Case) -> Finding:
    """diffusers' own pipeline and ours from one image, prompt, noise and schedule, without guidance.

    Differs where an expert's answer to the same latents is not the same to the last bit (and repeats itself), where
    another expert is asked, and in float32 where the final latents are not the same. In bfloat16 the stock pipeline
    rounds its latents at every step and ours do not, so that their distance is told alone. A distillation is an adapter
    of the stock pipeline's, and is mostly fused in ours: then a tenth of what it changes may be another number.
    """
    backbone, cfg, row = case.backbone, case.cfg, case.rows[0]
    if not isinstance(backbone, Wan):
        return Finding(NOT_DONE, f"there is no such comparison for {cfg.model.model_name}, only for Wan models")
    height, width = (min(side, SIDE) for side in work.largest_clip(cfg, backbone))
    frames = min(cfg.data.num_frames, 2 * backbone.temporal + 1)
    shape = backbone.latent_shape(height, width, frames)
    schedule = backbone.schedule(STEPS, cfg.sample.shift, shape)
    example = data.load_example(row, height, width, frames, fps=cfg.data.fps)
    picture = data.to_uint8(example.image[:, None])[0].cpu() if backbone.takes_image else None
    image = None if picture is None else data.to_float(picture[None])[:, 0]
    given = backbone.text_encoder(case.device)(row.prompt)
    given |= backbone.image_encoder(case.device)(image, frames)
    noise = groups.noise((1, *shape), SEED, case.device).to(backbone.dtype).float()  # that rounding changes nothing
    theirs = sample_stock(case, backbone, schedule, given["text"], picture, noise, (height, width, frames))
    steps, x0 = sample_ours(case, schedule, given, noise, theirs)
    video = backbone.load_decoder(case.device).decode(x0, given).float().cpu()
    last = theirs.latents[-1][:, :, theirs.given :].float()
    facts = {
        "size": f"{height} x {width} x {frames} frames, {STEPS} steps, without guidance",
        "weights of the stock pipeline": theirs.weights,
        "final latents, relative distance": float((x0 - last).norm() / last.norm()),
        "frames, PSNR in dB": psnr(video, theirs.video),
        "peak memory, GB": peak_memory_gb(case.device),
        "steps": steps,
    }
    return judged(facts, steps, backbone.dtype, bool(theirs.distilled))


def judged(facts: dict[str, Any], steps: Sequence[Mapping[str, Any]], dtype: torch.dtype, distilled: bool) -> Finding:
    other = [step for step in steps if step["expert"] != step["stock's"]]

    def allowed(step: Mapping[str, Any]) -> float:
        rounding = max(OF_DISTILLATION * step["by the distillation"], FUSED[dtype]) if distilled else 0.0
        return max(step["ours again"], rounding)

    worst = max(steps, key=lambda step: (math.isnan(step["network"]), step["network"] - allowed(step)))
    distance, decibels = facts["final latents, relative distance"], facts["frames, PSNR in dB"]
    frames = "equal frames" if decibels == math.inf else f"frames at {decibels:.1f} dB"
    said = f"{facts['weights of the stock pipeline']}; final latents differ by {distance:.1e}, {frames}"
    if other:
        step, ours, stocks = (other[0][key] for key in ("step", "expert", "stock's"))
        return Finding(DIFFERS, f"step {step} is {ours}'s here and {stocks}'s there; {said}", facts)
    where = f"the {worst['expert']} expert's answer at step {worst['step']} differs by {worst['network']:.1e}"
    moved = f" (its distillation moves it by {worst['by the distillation']:.1e})" if distilled else ""
    if not worst["network"] <= allowed(worst):  # NaN differs, too
        return Finding(DIFFERS, f"{where} of its largest value{moved}, from the same latents; {said}", facts)
    if dtype == torch.float32 and not distance <= (FUSED[dtype] if distilled else SAME_LATENTS):
        return Finding(DIFFERS, f"the networks answer alike, and the latents are others; {said}", facts)
    if distilled:
        return Finding(OK, f"{where} of its largest value{moved}, and no other by more; {said}", facts)
    return Finding(OK, f"the networks' answers are equal to the last bit; {said}", facts)


def sample_stock(
    case: Case,
    backbone: Wan,
    schedule: Schedule,
    text: Tensor,
    picture: Tensor | None,
    noise: Tensor,
    size: tuple[int, int, int],
) -> Sampled:
    """The stock pipeline's call; picture: (H, W, 3) uint8; size: height, width, frames.

    Where it has a transformer there is a Turn, which has that expert loaded and the other one dropped.
    """
    variant, weights = backbone.variant, stock_experts(backbone)
    experts, answers, asked, moved = OneAtATime(placed(case, weights.load)), [], [], []

    def ask(name: str, inputs: dict[str, Tensor]) -> Tensor:
        asked.append(name)
        answers.append(experts(name, **inputs))
        if weights.distilled:
            moved.append(apart(undistilled(name, inputs), answers[-1]) if name in weights.distilled else 0.0)
        return answers[-1]

    def undistilled(name: str, inputs: dict[str, Tensor]) -> Tensor:
        expert = experts.held[name]
        assert isinstance(expert, WanTransformer3DModel)
        expert.disable_adapters()
        answer = experts(name, **inputs)
        expert.enable_adapters()
        return answer

    parts = backbone.load(["vae", "image_encoder"] if variant.clip else ["vae"])
    components = {
        part: Turn(backbone, name, case.device, partial(ask, name)) for name, part in variant.parts.items()
    } | {"vae": parts.vae.to(case.device)}
    if variant.clip:
        components |= {"image_encoder": parts.image_encoder.to(case.device), "image_processor": parts.image_processor}
    pipe = pipeline_class("WanPipeline" if variant.image == "none" else "WanImageToVideoPipeline")(
        tokenizer=None, text_encoder=None, scheduler=OurSigmas(schedule), boundary_ratio=backbone.boundary,
        expand_timesteps=variant.token_times, **components,
    )  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    given = int(variant.image == "frame")
    latents = [torch.cat([torch.zeros_like(noise[:, :, :given]), noise], 2)]  # whatever stands where the image goes

    def keep(pipe: object, step: int, time: Tensor, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        latents.append(inputs["latents"])
        return inputs

    height, width, frames = size
    image = {} if picture is None else {"image": Image.fromarray(picture.numpy())}
    video = pipe(
        **image, prompt_embeds=text, height=height, width=width, num_frames=frames, latents=latents[0].clone(),
        num_inference_steps=len(schedule), guidance_scale=1.0, output_type="pt", callback_on_step_end=keep,
    ).frames  # fmt: skip
    experts.drop()
    frames = video.float().cpu().transpose(1, 2) * 2 - 1
    return Sampled(latents, answers, asked, moved, frames, weights.words, given)


def stock_experts(backbone: Wan) -> StockWeights:
    """diffusers' own loading where it can read the files, ours elsewhere.

    Of a model in its original layout diffusers reads the tensors of all shards in one (from_single_file), and a
    distillation as its pipelines' load_lora_weights does.
    """
    layout, parts, dtype = backbone.layout, backbone.variant.parts, backbone.dtype
    in_folders = all(layout.experts[name] == [layout.configs / part] for name, part in parts.items())
    shards = wan_files.files(layout)
    if not in_folders and any(file.suffix != ".safetensors" for name in parts for file in shards[name]):
        return StockWeights(backbone.load_expert, "the same loaded weights in both, since they are no .safetensors")
    loras = {name: path for name, path in zip(parts, backbone.source.distilled[:2], strict=False) if path}
    if not all(whole_in_diffusers(Path(path)) for path in loras.values()):
        return StockWeights(
            backbone.load_expert, "the same loaded weights in both, since diffusers reads less of the distillation"
        )

    def load(name: str) -> ModelMixin:
        if in_folders:
            folder = layout.configs / parts[name]
            expert = WanTransformer3DModel.from_pretrained(folder, torch_dtype=dtype, local_files_only=True)
        else:
            tensors: dict[str, Tensor] = {}
            for file in shards[name]:
                tensors |= load_file(file)
            expert = WanTransformer3DModel.from_single_file(
                tensors, config=str(layout.configs), subfolder=parts[name], local_files_only=True
            )  # not torch_dtype, which would round the parts that from_pretrained keeps in float32
        for key, parameter in expert.named_parameters():
            kind = torch.float32 if wan_names.stays_float32(key) else dtype
            # a copy: mapped from the file they lie at odd addresses, and a CPU's sums differ
            parameter.data = parameter.data.to(kind, copy=True)
        if name in loras:
            # in float32: diffusers scales the factors in the precision that they come in
            values = {key: value.float() for key, value in load_file(loras[name]).items()}
            WanLoraLoaderMixin.load_lora_into_transformer(WanLoraLoaderMixin.lora_state_dict(values), expert)
        return expert.eval().requires_grad_(False)

    return StockWeights(load, "weights as diffusers loads them and as rewardfl does", tuple(loras))


def whole_in_diffusers(path: Path) -> bool:
    """Whether diffusers takes all of a distillation: products alone, in a file of the original names.

    It leaves out what DoRAs and norms bring, and of one file for two experts it would have to be told which.
    """
    if path.suffix != ".safetensors":
        return False
    with safe_open(path, "pt") as file:
        keys, scaled_elsewhere = list(file.keys()), "lora_adapter_metadata" in (file.metadata() or {})
    whole = all(key.startswith("diffusion_model.") and key.endswith(LORA_LEAVES) for key in keys)
    return whole and not scaled_elsewhere


def sample_ours(
    case: Case, schedule: Schedule, given: Conditioning, noise: Tensor, theirs: Sampled
) -> tuple[list[dict[str, Any]], Tensor]:
    """(by step, how far our network's answer to the stock pipeline's latents is from its own; our own x0).

    Distances are the largest difference over the largest absolute value. `ours again` is that of our answer asked
    twice: what the kernels themselves do not repeat.
    """
    experts, steps = OneAtATime(placed(case, case.backbone.load_expert)), []

    def velocity(x: Tensor, i: int) -> Tensor:
        same = theirs.latents[i][:, :, theirs.given :].float()
        expected = theirs.answers[i][:, :, theirs.given :].float()
        mine, again = (case.backbone.velocity(experts, same, i, schedule, given) for _ in range(2))
        record = {
            "step": i,
            "sigma": float(schedule.sigmas[i]),
            "expert": schedule.experts[i],
            "stock's": theirs.asked[i],
        }
        steps.append(record | {"network": apart(mine, expected), "ours again": apart(again, mine)})
        if theirs.distilled:
            steps[-1]["by the distillation"] = theirs.distilled[i]
        return case.backbone.velocity(experts, x, i, schedule, given)

    x0 = reward_flow.rollout(velocity, noise, schedule.sigmas, keep=()).x0
    experts.drop()
    return steps, x0


def apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


def psnr(one: Tensor, other: Tensor) -> float:
    """The PSNR in dB of videos in [-1, 1]; inf where they are equal."""
    error = float((one - other).square().mean())
    return 10 * math.log10(4 / error) if error else math.inf


# ------------------------------------------------------------------------------------------------------------
# The base model


@torch.no_grad()
def base(case: Case, identities: Mapping[str, FaceIdentity]) -> Finding:
    """The clips as the untrained model makes them, at the run's size and steps, one noise each.

    Likeness by each pack, also of the first and the last quarter of the frames: what falls is what training can mend.
    Motion is over the real clip's, by flow, landmark speed and landmarks' own shape. Differs where a video is not
    finite, or no frame of it shows a face. The videos (real | base) lie in OUT/base.
    """
    if case.cfg.data.num_frames == 1 or not case.clips:
        return Finding(NOT_DONE, "clips are what it measures, and no row names a video, or data.num_frames is 1")
    examples = {row.line: start.example_of(case.cfg, row) for row in case.clips}
    pools = {
        label: {line: identity.pool(example.reference.to(case.device)) for line, example in examples.items()}
        for label, identity in identities.items()
    }
    videos = sampled(case, {line: example.image for line, example in examples.items()}, sizes_of(examples))
    (case.out / "base").mkdir(exist_ok=True)
    motion, likenesses, problems = [], [], []
    for row in case.clips:
        line, real, video = row.line, examples[row.line].video, videos[row.line]
        beside = torch.cat([data.to_uint8(real), data.to_uint8(video.nan_to_num())], 2)
        rate = case.cfg.data.fps or data.frame_rate(row.video)
        data.write_video(case.out / "base" / f"line{line:04d}.mp4", beside, rate)
        if not video.isfinite().all():
            problems.append(f"the video of line {line} is not finite")
            continue
        motion.append({"line": line} | moves(real, video))
        for label, identity in identities.items():
            if (pool := pools[label][line]) is None:
                continue  # the check of faces says so
            score = identity.score(video.to(case.device), pool.embeddings)
            if score is None:
                problems.append(f"{label} finds no face in the video of line {line}")
            likenesses.append({"pack": label, "line": line} | likeness(score, pool))
    return summary(case, motion, likenesses, problems)


def sizes_of(examples: Mapping[int, data.Example]) -> dict[int, tuple[int, int]]:
    return {line: example.size for line, example in examples.items()}


def sampled(case: Case, images: Mapping[int, Tensor | None], sizes: Mapping[int, tuple[int, int]]) -> dict[int, Tensor]:
    """{line: video (3, F, H, W) in [-1, 1] on the CPU} of the base model; each expert is loaded once, for all."""
    cfg, backbone, device = case.cfg, case.backbone, case.device
    encode_text, encode_image = backbone.text_encoder(device), backbone.image_encoder(device)
    told = {
        row.line: encode_text(row.prompt) | encode_image(images[row.line], cfg.data.num_frames) for row in case.clips
    }
    guidance = cfg.sample.guidance_scale
    negative = encode_text(cfg.sample.negative_prompt) if guidance != 1 else None
    del encode_text, encode_image  # the text encoder alone is 11 GB
    experts, latents, velocities = OneAtATime(placed(case, backbone.load_expert)), {}, {}
    for row in case.clips:
        shape = backbone.latent_shape(*sizes[row.line], cfg.data.num_frames)
        schedule = work.schedule_of(cfg, backbone, shape)
        velocities[row.line] = Velocity(backbone, experts, told[row.line], schedule, negative, guidance)
        latents[row.line] = groups.noise((1, *shape), groups.noise_seed(SEED, 0, row.id), device)
    for name in backbone.experts:  # in the order in which they answer
        for line, velocity in velocities.items():
            own = [i for i, expert in enumerate(velocity.schedule.experts) if expert == name]
            if own:
                sigmas = velocity.schedule.sigmas[: own[-1] + 2]
                latents[line] = reward_flow.rollout(velocity, latents[line], sigmas, keep=(), start=own[0]).x0
    experts.drop()
    decoder = backbone.load_decoder(device)
    return {line: decoder.decode(x0, told[line])[0].float().cpu() for line, x0 in latents.items()}


def moves(real: Tensor, made: Tensor) -> dict[str, float]:
    """Flow over the real clip's and sharpness of both, without a network; videos (3, F, H, W) in [-1, 1]."""
    was, now = (video_motion(data.to_uint8(one).contiguous().numpy()) for one in (real, made))
    return {
        "flow / real": ratio(now.flow, was.flow, LEAST_FLOW),
        "sharpness": now.sharpness,
        "sharpness of real": was.sharpness,
    }


def likeness(score: FaceScore | None, pool: FacePool) -> dict[str, float]:
    """FaceSim of a clip, of its first and its last quarter, and the landmarks' motion over the real clip's."""
    if score is None:
        return {"FaceSim": 0.0, "coverage": 0.0}
    quarter = max(1, len(score.per_frame) // 4)
    return {
        "FaceSim": float(score.mean),
        "first quarter": float(score.per_frame[:quarter].mean()),
        "last quarter": float(score.per_frame[-quarter:].mean()),
        "real clip": pool.cap,
        "coverage": score.coverage,
        "landmark speed / real": ratio(score.speed, pool.speed, MIN_MOTION),
        "non-rigid / real": ratio(score.nonrigid, pool.nonrigid, MIN_MOTION),
    }


def summary(
    case: Case,
    motion: Sequence[Mapping[str, Any]],
    likenesses: Sequence[Mapping[str, Any]],
    problems: Sequence[str],
) -> Finding:
    packs = list(dict.fromkeys(record["pack"] for record in likenesses))
    of_pack = {pack: means([record for record in likenesses if record["pack"] == pack]) for pack in packs}
    moved = means(motion)
    facts = {
        "published FaceSim of this model's base (IPRO, other clips)": PUBLISHED_FACE_SIM.get(case.cfg.model.model_name),
        "peak memory, GB": peak_memory_gb(case.device),
        **{f"means by {pack}": values for pack, values in of_pack.items()},
        "means of motion": moved,
        "likeness": likenesses,
        "motion": motion,
    }
    if problems:
        return Finding(DIFFERS, problems[0], facts)
    words = [
        f"FaceSim by {pack} {values['FaceSim']:.3f} (first quarter {values['first quarter']:.3f}, last "
        f"{values['last quarter']:.3f}, real clips {values['real clip']:.3f})"
        for pack, values in of_pack.items()
    ]
    sharpness = f"sharpness {moved['sharpness']:.0f} of {moved['sharpness of real']:.0f}"
    words.append(f"flow {moved['flow / real']:.2f} of the real clips', {sharpness}")
    return Finding(OK, "; ".join(words), facts)


def means(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """{column: mean} of the columns of numbers, over the records that have one; NaN where none has."""
    columns = dict.fromkeys(column for record in records for column in record if column not in ("pack", "line"))
    return {column: mean([record[column] for record in records if column in record]) for column in columns}


def mean(values: Sequence[float]) -> float:
    """The mean of those that are numbers; NaN where none is."""
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan
