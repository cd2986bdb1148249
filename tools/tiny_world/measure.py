"""What the tiny world's networks reach on people they never saw, from the files and by the package's own code."""

from pathlib import Path

import torch
from matplotlib import pyplot as plt
from torch import Tensor

from rewardfl import data, groups, reward_flow
from rewardfl.backbones.seam import Experts, Source, Velocity
from rewardfl.backbones.wan import backbone as wan2_2
from rewardfl.rewards import face
from rewardfl_tools.tiny_world import faces
from rewardfl_tools.tiny_world.people import NUM_FRAMES, SIZE, draw_motion, draw_people, render

STEPS, SHIFT = 8, 5.0  # of the schedule that is measured


def measure(world: Path, seed: int, count: int) -> dict[str, object]:
    """All figures of the world, of `count` people; also writes its contact sheets."""
    judges = judges_of(world)
    figures: dict[str, object] = {"bytes": sum(f.stat().st_size for f in world.rglob("*") if f.is_file())}
    people = draw_people(count, torch.Generator().manual_seed(seed + 1))
    for name, judge in judges.items():
        figures[f"detector_{name}"] = detection(judge.detector, seed, count // 5)
        figures[f"recogniser_{name}"] = faces.verification(
            judge.recogniser.net, people, torch.Generator().manual_seed(seed)
        )
    figures |= video_figures(world, "wan2_2", "pipeline", "contact_sheet.png")
    return figures | measure_second(world)


def measure_second(world: Path) -> dict[str, object]:
    """The figures of the second pipeline, as {"ti2v": ...}; also writes its contact sheet."""
    return {"ti2v": video_figures(world, "wan2_2_ti2v", "pipeline_ti2v", "contact_sheet_ti2v.png")}


def judges_of(world: Path) -> dict[str, face.FaceIdentity]:
    """Both recognisers."""
    return {name: face.FaceIdentity(world / "faces" / name, det_size=faces.DET_SIZE) for name in ("reward", "judge")}


def detection(detector: face.FaceDetector, seed: int, count: int) -> dict[str, float]:
    """Share of frames whose face is found, and landmark error over face width (mean, and mean of each landmark)."""
    generator = torch.Generator().manual_seed(seed)
    motion, _ = draw_motion(count, generator)
    video, landmarks, boxes = render(draw_people(count, generator), motion, generator)
    frames, truth = video.transpose(1, 2).flatten(0, 1), landmarks.flatten(0, 1)
    width = (boxes[..., 2] - boxes[..., 0]).flatten()
    found = detector.detect(frames)
    errors = [(f.landmarks[0] - truth[i]).norm(dim=-1) / width[i] for i, f in enumerate(found) if len(f.scores)]
    errors = torch.stack(errors) if errors else torch.full((1, 5), torch.nan)
    return {
        "found": sum(len(f.scores) > 0 for f in found) / len(found),
        "faces_per_frame": sum(len(f.scores) for f in found) / len(found),
        "landmark_error": float(errors.mean()),
        "landmark_error_p95": float(errors.mean(1).quantile(0.95)),
    }


@torch.no_grad()
def video_figures(world: Path, model: str, pipeline: str, sheet: str) -> dict[str, object]:
    """Reconstruction and generation of the evaluation people; FaceSim per frame by both recognisers.

    model: the pipeline's model.model_name; pipeline and sheet: its folder, and the contact sheet, in `world`.
    """
    judges = judges_of(world)
    source = Source(model_paths=str(world / pipeline), dtype="float32")
    backbone, device = wan2_2.open(model, source), torch.device("cpu")
    experts = Experts({name: backbone.load_expert(name) for name in backbone.experts})
    encode_text, encode_image = backbone.text_encoder(device), backbone.image_encoder(device)
    decoder, vae = backbone.load_decoder(device), backbone.load(["vae"]).vae
    rows = data.load_metadata(world / "eval" / "metadata.csv")
    shape = backbone.latent_shape(SIZE, SIZE, NUM_FRAMES)
    schedule = backbone.schedule(STEPS, SHIFT, shape)
    real, again, made = [], [], []
    for row in rows:
        clip = data.load_example(row, SIZE, SIZE, NUM_FRAMES).video
        conditioning = encode_text(row.prompt) | encode_image(clip[:, 0], NUM_FRAMES)
        noise = groups.noise((1, *shape), groups.noise_seed(0, 0, row.id))
        x0 = reward_flow.rollout(
            Velocity(backbone, experts, conditioning, schedule), noise, schedule.sigmas, keep=()
        ).x0
        real.append(clip)
        again.append(vae.decode(vae.encode(clip[None]).latent_dist.mode()).sample[0])
        made.append(decoder.decode(x0, conditioning)[0])
    mse = torch.stack([(a - b).square().mean() for a, b in zip(real, again, strict=True)])
    figures: dict[str, object] = {"vae_psnr": float((10 * torch.log10(4 / mse)).mean())}
    for name, judge in judges.items():
        figures[name] = identity_figures(judge, real, again, made)
    contact_sheet(
        world / sheet,
        [x for triple in zip(real, again, made, strict=True) for x in triple][:24],
    )
    return figures


def identity_figures(judge: face.FaceIdentity, real: list[Tensor], again: list[Tensor], made: list[Tensor]) -> dict:
    """Mean over people of: the cap, FaceSim of reconstructed and of generated clips, coverage, motion ratio."""
    pools = [judge.pool(clip) for clip in real]
    usable = [i for i, pool in enumerate(pools) if pool is not None]
    result: dict[str, object] = {"usable": len(usable)}
    if not usable:
        return result
    result["cap"] = sum(pools[i].cap for i in usable) / len(usable)
    for name, clips in (("reconstructed", again), ("base", made)):
        scores = [judge.score(clips[i], pools[i].embeddings) for i in usable]
        pairs = [(s, pools[i]) for s, i in zip(scores, usable, strict=True) if s is not None]
        if not pairs:
            continue
        per_frame = torch.stack([s.per_frame for s, _ in pairs]).mean(0)
        result[name] = {
            "face_sim": float(per_frame.mean()),
            "per_frame": [round(float(value), 4) for value in per_frame],
            "coverage": sum(s.coverage for s, _ in pairs) / len(usable),
            "speed_ratio": sum(s.speed for s, _ in pairs) / sum(p.speed for _, p in pairs),
            "nonrigid_ratio": sum(s.nonrigid for s, _ in pairs) / sum(p.nonrigid for _, p in pairs),
        }
    return result


def contact_sheet(path: Path, clips: list[Tensor]) -> None:
    """A row of frames for each clip (3, F, H, W): real, reconstructed, generated, and so on with the next person."""
    rows = [torch.cat(list(clip.unbind(1)), 2) for clip in clips]
    sheet = (
        torch.cat(rows, 1).clamp(-1, 1).permute(1, 2, 0).add(1).div(2).repeat_interleave(2, 0).repeat_interleave(2, 1)
    )
    plt.imsave(path, sheet.numpy())
