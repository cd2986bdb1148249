"""Before and after an adapter: the work of tools/evaluate.py."""

import argparse
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import numpy as np
import torch
from matplotlib import pyplot as plt
from PIL import Image, ImageDraw, ImageOps
from torch import Tensor
from tqdm import tqdm

from rewardfl import config, data
from rewardfl.files import printable
from rewardfl.rewards import face
from rewardfl.rewards.video_motion import VideoMotion, video_motion
from rewardfl.run import start
from rewardfl_tools import _arms, _common, _evaluate_images
from rewardfl_tools._arms import ARMS, interval, resampled

AMOUNTS = ("flow", "face_flow", "pixel_change", "sharpness")  # of VideoMotion: those that are compared by their ratio


@dataclass(frozen=True)
class Clip:
    """One person and noise: the real clip and both generated ones, uint8 (F, H, W, 3), and what the recognisers say.

    scores: recogniser -> arm -> its FaceScore, or None where no frame shows a face. motion: of `real` and of each arm.
    """

    row: data.Row
    seed: int
    real: Tensor
    made: dict[str, Tensor]
    scores: dict[str, dict[str, face.FaceScore | None]]
    motion: dict[str, VideoMotion]


def run(args: argparse.Namespace) -> int:
    """Before and after an adapter: the exit code."""
    args.device = _common.device(args.device)
    out = args.out or args.run / "evaluation"
    try:
        cfg = _arms.run_config(args.run, [*args.overrides, f"data.file_name={json.dumps(args.data)}"])
        if cfg.data.num_frames == 1:
            return _evaluate_images.run(cfg, args, out)
        clips, pools = evaluate(cfg, args.adapter or args.run / "checkpoints" / "latest", args, out)
    except (*start.REFUSALS, ValueError, OSError) as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return 2
    report = summarise(clips, pools)
    report["command"] = sys.argv
    data_path = out / "report.json"
    data_path.write_text(json.dumps(report, indent=2) + "\n")
    draw_curves(report, out / "curves.png")
    draw_grid(clips, out / "grid.png")
    print(table(report))
    print(f"\nreport: {data_path}\npictures: {out / 'grid.png'}, {out / 'curves.png'}\nvideos: {out / 'videos'}")
    return 0


@torch.no_grad()
def evaluate(cfg: config.AnyConfig, adapter: Path, args: argparse.Namespace, out: Path) -> tuple[list[Clip], dict]:
    """Sample and score every person and seed; writes the videos as they come. Pools by recogniser and row id."""
    rows = data.load_metadata(args.data)
    for note in data.notes(rows):
        print(f"note: {note}")
    rows, problems = data.check_rows(rows, cfg.data.num_frames, cfg.data.skip_bad_rows, cfg.data.fps)
    if alone := [row.line for row in rows if row.video is None]:
        raise ValueError(f"--data: line {alone[0]} of {args.data} names no video, and real clips are what is compared")
    packs = {"reward": cfg.reward.reward_model_path, "held_out": cfg.reward.held_out_model_path}
    judges = {
        name: face.FaceIdentity(pack, cfg.reward.det_size).to(args.device)
        for name, pack in packs.items()
        if pack is not None
    }
    if not judges:
        raise ValueError(
            "this tool judges faces, and the run has no face pack; name one: reward.held_out_model_path=FOLDER"
        )
    examples = {row.id: start.example_of(cfg, row) for row in rows}
    pools = {
        name: {row.id: judge.pool(examples[row.id].reference.to(args.device)) for row in rows}
        for name, judge in judges.items()
    }
    usable = [row for row in rows if all(pool[row.id] is not None for pool in pools.values())]
    problems += [f"line {row.line}: no face was found in {row.reference}" for row in rows if row not in usable]
    for problem in problems:
        print(printable(f"skipped: {problem}"))
    if not usable:
        raise ValueError(f"--data: no clip of {args.data} shows a face")

    detector = list(judges.values())[-1].detector  # the judge's, else the reward's
    real_motion = {row.id: motion_of_real(detector, examples[row.id].video, args.device) for row in usable}
    used = {row.id: (row, examples[row.id]) for row in usable}
    sampler = _arms.sampler(cfg, start.open_model(cfg), used, adapter, args.experts, torch.device(args.device))
    (out / "videos").mkdir(parents=True, exist_ok=True)

    clips = []
    jobs = [(row, seed) for seed in range(args.seeds) for row in usable]
    for batch in tqdm(_arms.batches(jobs, sampler.sizes, args.batch), desc="evaluating"):
        videos = sampler.both(batch)
        for i, (row, seed) in enumerate(batch):
            scores = {
                name: {arm: judge.score(videos[arm][i], pools[name][row.id].embeddings) for arm in ARMS}
                for name, judge in judges.items()
            }
            made = {arm: data.to_uint8(videos[arm][i]).cpu() for arm in ARMS}
            shown = list(scores.values())[-1]
            motion = {arm: video_motion(made[arm].contiguous().numpy(), boxes_of(shown[arm])) for arm in ARMS}
            motion["real"] = real_motion[row.id]
            clips.append(Clip(row, seed, data.to_uint8(examples[row.id].video), made, scores, motion))
            beside = torch.cat([clips[-1].real, made["before"], made["after"]], 2)
            fps = cfg.data.fps or data.frame_rate(row.video)
            data.write_video(out / "videos" / f"{row.index:03d}_seed{seed}.mp4", beside, fps)
    return clips, pools


def motion_of_real(detector: face.FaceDetector, video: Tensor, device: str) -> VideoMotion:
    """How a real clip (3, F, H, W) moves, as `video_motion` measures it."""
    track = face.track_largest(detector.detect(video.to(device).transpose(0, 1)))
    return video_motion(data.to_uint8(video).contiguous().numpy(), None if track is None else track.boxes.numpy())


def boxes_of(score: face.FaceScore | None) -> np.ndarray | None:
    return None if score is None else score.boxes.numpy()


# --------------------------------------------------------------------------------------------------------------------
# Statistics. People are resampled, not clips: two noises of one person are not two people.


def summarise(clips: list[Clip], pools: dict) -> dict:
    """All figures of the report; means over clips, 95 % bootstrap intervals over people."""
    people = sorted({clip.row.id for clip in clips})
    report: dict = {"people": len(people), "clips": len(clips), "recognisers": {}}
    for name in pools:
        figures: dict = {"cap": sum(pools[name][person].cap for person in people) / len(people)}
        for arm in ARMS:
            per_frame = torch.stack([frames(clip.scores[name][arm], clip) for clip in clips])
            values = {"face_sim": per_frame.mean(1)}
            for key in ("coverage", "speed", "nonrigid"):
                values[key] = torch.tensor([field(clip.scores[name][arm], key) for clip in clips])
            figures[arm] = {key: interval(by_person(value, clips, people)) for key, value in values.items()}
            figures[arm]["per_frame"] = [round(value, 4) for value in per_frame.mean(0).tolist()]
            figures[arm]["last_quarter"] = float(per_frame[:, -max(1, per_frame.shape[1] // 4) :].mean())
        figures["gain"] = compared(name, "face_sim", clips, people)
        figures["motion_after_to_before"] = motion_ratios(name, clips, pools, people, "before")
        figures["motion_after_to_real"] = motion_ratios(name, clips, pools, people, "real")
        report["recognisers"][name] = figures
    report["motion"] = video_figures(clips, people)
    report["per_clip"] = [
        {
            "id": clip.row.id, "seed": clip.seed, "motion": {arm: known(motion) for arm, motion in clip.motion.items()},
            **{f"{name}/{arm}": float(frames(clip.scores[name][arm], clip).mean()) for name in pools for arm in ARMS},
        }
        for clip in clips
    ]  # fmt: skip
    return report


def frames(score: face.FaceScore | None, clip: Clip) -> Tensor:
    """(F - 1,) FaceSim per frame; 0 for a clip without any face."""
    return torch.zeros(len(clip.real) - 1) if score is None else score.per_frame.float().cpu()


def field(score: face.FaceScore | None, key: str) -> float:
    return 0.0 if score is None else {"coverage": score.coverage, "speed": score.speed, "nonrigid": score.nonrigid}[key]


def by_person(values: Tensor, clips: list[Clip], people: list[str]) -> Tensor:
    """(people,) mean over each person's clips, of (clips,) values."""
    return torch.stack(
        [values[[i for i, clip in enumerate(clips) if clip.row.id == person]].mean() for person in people]
    )


def compared(name: str, key: str, clips: list[Clip], people: list[str]) -> dict:
    """The paired gain after - before, absolute and relative to the mean before."""
    arms = {
        arm: by_person(torch.stack([frames(c.scores[name][arm], c).mean() for c in clips]), clips, people)
        for arm in ARMS
    }
    rows = resampled(len(people))
    before, after = arms["before"][rows].mean(1), arms["after"][rows].mean(1)
    relative = after / before - 1
    return {
        "absolute": interval(arms["after"] - arms["before"]),
        "relative": {
            "mean": float(arms["after"].mean() / arms["before"].mean() - 1),
            "low": float(relative.quantile(0.025)),
            "high": float(relative.quantile(0.975)),
        },
        "people_improved": float((arms["after"] > arms["before"]).float().mean()),
    }


def motion_ratios(name: str, clips: list[Clip], pools: dict, people: list[str], to: str) -> dict:
    """Motion after over motion `to` (before | real): of the means over people, with interval, and median per clip."""
    result = {}
    for key in ("speed", "nonrigid"):
        after = torch.tensor([field(clip.scores[name]["after"], key) for clip in clips])
        if to == "before":
            base = torch.tensor([field(clip.scores[name]["before"], key) for clip in clips])
        else:
            real = {"speed": lambda pool: pool.speed, "nonrigid": lambda pool: pool.nonrigid}[key]
            base = torch.tensor([real(pools[name][clip.row.id]) for clip in clips])
        result[key] = ratio(by_person(after, clips, people), by_person(base, clips, people))
        result[key]["median_per_clip"] = float((after / base.clamp(min=1e-9)).median())
    return result


def video_figures(clips: list[Clip], people: list[str]) -> dict:
    """What no network measures of the real clips and both arms: means, and what became of them with the adapter.

    A figure that some arm of a person does not have (no face, no motion) leaves that person out of that figure; None
    where nobody is left.
    """
    arms = ("real", *ARMS)
    figures: dict = {arm: {} for arm in arms} | {"after_to_before": {}}
    for key in (*AMOUNTS, "reversals"):
        values = torch.stack(
            [by_person(torch.tensor([getattr(clip.motion[arm], key) for clip in clips]), clips, people) for arm in arms]
        )
        values = values[:, values.isfinite().all(0)]  # (arm, person)
        means = [float(value) if values.shape[1] else None for value in values.mean(1)]
        if key in AMOUNTS:
            for arm, mean in zip(arms, means, strict=True):
                figures[arm][key] = mean
            figures["after_to_before"][key] = ratio(values[2], values[1]) if values.shape[1] else None
        else:
            figures[key] = dict(zip(arms, means, strict=True))
            figures[key]["after_minus_before"] = interval(values[2] - values[1]) if values.shape[1] else None
    return figures


def known(motion: VideoMotion) -> dict[str, float | None]:
    """Its figures, None for NaN, which is no JSON."""
    return {key: value if math.isfinite(value) else None for key, value in vars(motion).items()}


def ratio(mine: Tensor, theirs: Tensor) -> dict[str, float]:
    """The mean of (people,) values over that of others, with its interval."""
    rows = resampled(len(mine))
    ratios = mine[rows].mean(1) / theirs[rows].mean(1).clamp(min=1e-9)
    return {
        "mean": float(mine.mean() / theirs.mean().clamp(min=1e-9)),
        "low": float(ratios.quantile(0.025)),
        "high": float(ratios.quantile(0.975)),
    }


def table(report: dict) -> str:
    """The report's main figures for a terminal."""

    def show(value: dict, unit: str = "") -> str:
        scale = 100 if unit == "%" else 1
        low, high = value["low"] * scale, value["high"] * scale
        return (
            f"{value['mean'] * scale:+.1f}% [{low:+.1f}, {high:+.1f}]"
            if unit
            else f"{value['mean']:.3f} [{low:.3f}, {high:.3f}]"
        )

    lines = [f"{report['people']} people, {report['clips']} clips; mean [95 % interval over people]", ""]
    for name, figures in report["recognisers"].items():
        lines.append("held-out judge" if name == "held_out" else "reward's recogniser (trained against)")
        for label, key in (("FaceSim", "face_sim"), ("coverage", "coverage")):
            lines.append(f"  {label:22s} before {show(figures['before'][key])}   after {show(figures['after'][key])}")
        lines.append(f"  {'FaceSim gain':22s} {show(figures['gain']['relative'], '%')} relative")
        lines.append(f"  {'real clips vs themselves':22s} {figures['cap']:.3f}")
        for to in ("before", "real"):
            by = figures[f"motion_after_to_{to}"]
            lines.append(f"  {'motion after / ' + to:22s} speed {show(by['speed'])}   non-rigid {show(by['nonrigid'])}")
    lines.append("measured without a network")
    motion = report["motion"]
    for key in (*AMOUNTS, "reversals"):
        means = [motion[key][arm] if key == "reversals" else motion[arm][key] for arm in ("real", *ARMS)]
        change = motion[key]["after_minus_before"] if key == "reversals" else motion["after_to_before"][key]
        if change is None:
            lines.append(f"  {key.replace('_', ' '):22s} nothing to measure")
            continue
        texts = [f"{arm} {mean:.4g}" for arm, mean in zip(("real", *ARMS), means, strict=True)]
        words = "after - before" if key == "reversals" else "after / before"
        lines.append(f"  {key.replace('_', ' '):22s} {'   '.join(texts)}   {words} {show(change)}")
    return "\n".join(lines)


# --------------------------------------------------------------------------------------------------------------------
# Pictures


def draw_curves(report: dict, path: Path) -> None:
    """FaceSim along the clip by each recogniser, and every clip before against after."""
    figure, axes = plt.subplots(1, 1 + len(report["recognisers"]), figsize=(5 * (1 + len(report["recognisers"])), 4))
    for axis, (name, figures) in zip(axes, report["recognisers"].items(), strict=False):
        for arm, colour in zip(ARMS, ("tab:red", "tab:blue"), strict=True):
            curve = figures[arm]["per_frame"]
            axis.plot(range(1, len(curve) + 1), curve, marker="o", color=colour, label=arm)
        axis.axhline(figures["cap"], color="grey", linestyle="--", label="real clips")
        axis.set(title=f"FaceSim by the {name} recogniser", xlabel="frame", ylabel="cosine", ylim=(0, 1))
        axis.legend()
    for name, colour in zip(report["recognisers"], ("tab:orange", "tab:green"), strict=False):
        before, after = ([clip[f"{name}/{arm}"] for clip in report["per_clip"]] for arm in ARMS)
        axes[-1].scatter(before, after, s=12, color=colour, label=name)
    axes[-1].plot([-1, 1], [-1, 1], color="grey", linewidth=0.8)
    every = [clip[f"{name}/{arm}"] for clip in report["per_clip"] for name in report["recognisers"] for arm in ARMS]
    lowest = min([0.0, *every])  # a cosine may be below 0
    axes[-1].set(title="every clip", xlabel="before", ylabel="after", xlim=(lowest, 1), ylim=(lowest, 1))
    axes[-1].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_grid(clips: list[Clip], path: Path, people: int = 8, shown: int = 4, height: int = 96) -> None:
    """A row per person: frames of the real clip | before | after, the judge's (else the reward's) score under each."""
    chosen = [clip for clip in clips if clip.seed == 0][:people]
    count = len(chosen[0].real)
    width = max(round(clip.real.shape[2] * height / clip.real.shape[1]) for clip in chosen)
    picked = torch.linspace(1, count - 1, min(shown, count - 1)).round().long().tolist()
    columns = ("real", *ARMS)
    block = len(picked) * width + 10
    sheet = Image.new("RGB", (len(columns) * block, 16 + len(chosen) * (height + 14)), "white")
    pen = ImageDraw.Draw(sheet)
    judge = list(chosen[0].scores)[-1]
    for c, name in enumerate(columns):
        pen.text((c * block + 4, 2), name, fill="black")
        for r, clip in enumerate(chosen):
            source = clip.real if name == "real" else clip.made[name]
            top = 16 + r * (height + 14)
            for k, frame in enumerate(picked):
                picture = ImageOps.contain(Image.fromarray(source[frame].numpy()), (width, height))
                sheet.paste(picture, (c * block + k * width, top))
                if name != "real":
                    score = float(frames(clip.scores[judge][name], clip)[frame - 1])
                    pen.text((c * block + k * width + 4, top + height), f"{score:.2f}", fill="black")
    sheet.save(path)
