"""Figures of the tiny world's networks on held-out people, from the written files and by the package's code."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

import numpy as np
import torch
from matplotlib import pyplot as plt
from torch import Tensor

from rewardfl import data, reward_flow
from rewardfl.backbones.protocol import Experts, Source, Velocity
from rewardfl.backbones.wan import backbone as wan2_2
from rewardfl.noise import draw_noise, noise_seed
from rewardfl.rewards import face
from rewardfl.rewards.face.identity_kept import ThroughVae, find_scale
from rewardfl.rewards.pixels.measures import video_motion
from tiny_world import faces
from tiny_world.build import CLIPS
from tiny_world.people import NUM_FRAMES, SIZE, draw_clips, draw_motion, draw_people, render

STEPS, SHIFT = 8, 5.0  # of the schedule that is measured


def measure(world: Path, cured: Path, seed: int, count: int, packs: Mapping[str, Path]) -> dict[str, object]:
    """Return all figures of the world; also write its contact sheets.

    cured: the folder of the cured model. count: number of people for the recognisers. packs: further face packs of
    judges, by name.
    """
    figures: dict[str, object] = {"bytes": sum(f.stat().st_size for f in world.rglob("*") if f.is_file())}
    people = draw_people(count, torch.Generator().manual_seed(seed + 900))
    judges = load_judges(world)
    for name, judge in judges.items():
        figures[f"detector_{name}"] = detection(judge.detector, seed + 900, count // 5)
        figures[f"recogniser_{name}"] = faces.verification(
            judge.recogniser.net, people, torch.Generator().manual_seed(seed + 900)
        )
    judges |= {name: face.FaceIdentity(pack, det_size=faces.DET_SIZE) for name, pack in packs.items()}
    clips = make_clips(world, seed)
    generated = {"base": generate(world, "wan2_2", world / "pipeline"), "cured": generate(world, "wan2_2", cured)}
    contact_sheet(world / "contact_sheet.png", clips | generated, ("real", "through_vae", "base", "cured"))
    figures |= video_figures(judges, clips | generated)
    return figures | measure_second(world, seed, packs)


def measure_second(world: Path, seed: int, packs: Mapping[str, Path]) -> dict[str, object]:
    """Return the figures of the second pipeline, as {"ti2v": ...}; also write its contact sheet."""
    judges = load_judges(world) | {name: face.FaceIdentity(pack, faces.DET_SIZE) for name, pack in packs.items()}
    clips = make_clips(world, seed, "wan2_2_ti2v", "pipeline_ti2v")
    clips["base"] = generate(world, "wan2_2_ti2v", world / "pipeline_ti2v")
    contact_sheet(world / "contact_sheet_ti2v.png", clips, ("real", "through_vae", "base"))
    return {"ti2v": video_figures(judges, clips)}


def load_judges(world: Path) -> dict[str, face.FaceIdentity]:
    """Load the packs of the reward and of the judge."""
    return {name: face.FaceIdentity(world / "faces" / name, det_size=faces.DET_SIZE) for name in ("reward", "judge")}


def detection(detector: face.FaceDetector, seed: int, count: int) -> dict[str, float]:
    """Return the share of frames with a detection, and the landmark error over face width (mean, 95th percentile)."""
    generator = torch.Generator().manual_seed(seed)
    motion, _ = draw_motion(count, generator)
    video, landmarks, boxes = render(draw_people(count, generator), motion, generator)
    frames, truth = video.transpose(1, 2).flatten(0, 1), landmarks.flatten(0, 1)
    width = (boxes[..., 2] - boxes[..., 0]).flatten()
    detections = detector.detect(frames)
    errors = [(f.landmarks[0] - truth[i]).norm(dim=-1) / width[i] for i, f in enumerate(detections) if len(f.scores)]
    errors = torch.stack(errors) if errors else torch.full((1, 5), torch.nan)
    return {
        "found": sum(len(f.scores) > 0 for f in detections) / len(detections),
        "faces_per_frame": sum(len(f.scores) for f in detections) / len(detections),
        "landmark_error": float(errors.mean()),
        "landmark_error_p95": float(errors.mean(1).quantile(0.95)),
    }


@torch.no_grad()
def make_clips(world: Path, seed: int, model: str = "wan2_2", pipeline: str = "pipeline") -> dict[str, list[Tensor]]:
    """Return evaluation clips (3, F, H, W) without a model: real ones, with drift, and both through the VAE."""
    rows = data.load_metadata(world / "eval" / "metadata.csv")
    (offset,) = [offset for name, _, offset in CLIPS if name == "eval"]
    backbone = wan2_2.open(model, Source(model_paths=str(world / pipeline), dtype="float32"))
    vae = backbone.load(["vae"]).vae
    clips = {
        "real": [data.load_example(row, SIZE, SIZE, NUM_FRAMES).video for row in rows],
        "drift": list(draw_clips(len(rows), seed + offset)[1]),
    }
    for name, source in (("through_vae", "real"), ("drift_through_vae", "drift")):
        clips[name] = [vae.decode(vae.encode(clip[None]).latent_dist.mode()).sample[0] for clip in clips[source]]
    return clips


@torch.no_grad()
def generate(world: Path, model: str, pipeline: Path) -> list[Tensor]:
    """Generate clips from the evaluation people's first frames, with the evaluation's steps and noises.

    model: the pipeline's model.model_name.
    """
    backbone, device = wan2_2.open(model, Source(model_paths=str(pipeline), dtype="float32")), torch.device("cpu")
    experts = Experts({name: backbone.load_expert(name) for name in backbone.experts})
    encode_text, encode_image = backbone.text_encoder(device), backbone.image_encoder(device)
    decoder = backbone.load_decoder(device)
    shape = backbone.latent_shape(SIZE, SIZE, NUM_FRAMES)
    schedule = backbone.schedule(STEPS, SHIFT, shape)
    clips = []
    for row in data.load_metadata(world / "eval" / "metadata.csv"):
        clip = data.load_example(row, SIZE, SIZE, NUM_FRAMES).video
        conditioning = encode_text(row.prompt) | encode_image(clip[:, 0], NUM_FRAMES)
        noise = draw_noise((1, *shape), noise_seed(0, 0, row.id))
        velocity = Velocity(backbone=backbone, model=experts, conditioning=conditioning, schedule=schedule)
        clips.append(decoder.decode(reward_flow.rollout(velocity, noise, schedule.sigmas, keep=()).x0, conditioning)[0])
    return clips


def video_figures(judges: Mapping[str, face.FaceIdentity], clips: Mapping[str, list[Tensor]]) -> dict[str, object]:
    """Return the figures of named clips: the VAE's error, motion over the real clips', and identity by every judge."""
    errors = [(a - b).square().mean() for a, b in zip(clips["real"], clips["through_vae"], strict=True)]
    flow = {name: mean([video_motion(to_frames(clip))["flow"] for clip in arm]) for name, arm in clips.items()}
    identity = {name: identity_figures(judge, clips) for name, judge in judges.items()}
    return {
        "vae_psnr": float((10 * torch.log10(4 / torch.stack(errors))).mean()),
        "flow_over_real": {name: value / flow["real"] for name, value in flow.items()},
        "identity_kept": {
            name: {model: arms[model]["kept"] for model in ("base", "cured") if model in arms}
            for name, arms in identity.items()
        },
        "identity": identity,
    }


def to_frames(clip: Tensor) -> np.ndarray:
    return data.to_uint8(clip).contiguous().numpy()


@torch.no_grad()
def identity_figures(judge: face.FaceIdentity, clips: Mapping[str, list[Tensor]]) -> dict[str, dict[str, object]]:
    """Return FaceSim, identity kept (docs/evaluate.md), FaceSim by frame and landmark motion over the real clips'.

    "another" is the other people's clips through the VAE. rank_1: the share of people whose pool is the nearest. The
    result is empty where the judge detects fewer than two people.
    """
    pools = {i: pool for i, clip in enumerate(clips["real"]) if (pool := judge.pool(clip)) is not None}
    if len(pools) < 2:
        return {}
    scores = {name: {i: judge.score(arm[i], pools[i].embeddings) for i in pools} for name, arm in clips.items()}
    means = {i: pool.embeddings.mean(0) for i, pool in pools.items()}
    vae = {i: torch.zeros_like(means[i]) if s is None else s.embedding for i, s in scores["through_vae"].items()}
    scale = find_scale(
        [ThroughVae(person=str(i), face_sim=float(vae[i] @ means[i]), face=vae[i], pool=means[i]) for i in pools]
    )
    nearest = (torch.stack(list(means.values())) @ torch.stack(list(vae.values())).T).argmax(0)
    figures: dict[str, dict[str, object]] = {}
    for name, by_person in scores.items():
        seen = [score for score in by_person.values() if score is not None]
        face_sim = {str(i): 0.0 if score is None else float(score.mean) for i, score in by_person.items()}
        if name == "real":  # a frame is not compared with itself
            face_sim = {str(i): pool.cap for i, pool in pools.items()}
        figures[name] = {
            "face_sim": mean(face_sim.values()),
            "kept": None if scale is None else scale.place_mean(face_sim),
            "by_frame": torch.stack([s.per_frame for s in seen]).mean(0).tolist() if seen else [],
            "coverage": sum(score.coverage for score in seen) / len(pools),
            "speed_over_real": sum(score.speed for score in seen) / sum(pool.speed for pool in pools.values()),
            "nonrigid_over_real": sum(s.nonrigid for s in seen) / sum(pool.nonrigid for pool in pools.values()),
        }
    figures["through_vae"]["rank_1"] = float((nearest == torch.arange(len(pools))).float().mean())
    figures["another"] = {"face_sim": None if scale is None else mean(scale.another.values())}
    return figures


def contact_sheet(path: Path, clips: Mapping[str, list[Tensor]], names: Sequence[str]) -> None:
    """Write rows of frames: for each of the first six people one row per name."""
    people = range(min(6, len(clips["real"])))
    rows = [torch.cat(list(clips[name][person].unbind(1)), 2) for person in people for name in names]
    sheet = torch.cat(rows, 1).clamp(-1, 1).permute(1, 2, 0).add(1).div(2)
    plt.imsave(path, sheet.numpy())
