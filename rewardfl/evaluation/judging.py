"""All that is measured of one video, real or generated: what becomes of it is a record (see _records)."""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import ViTModel

from rewardfl import config, data
from rewardfl.evaluation import face_protocols as protocols
from rewardfl.evaluation import subject_consistency
from rewardfl.evaluation.vbench import dynamic_degree, motion_smoothness
from rewardfl.files import model_digest
from rewardfl.rewards import RewardError, build_terms, face, find_terms
from rewardfl.rewards.face.look import compare_look, cut_patches
from rewardfl.rewards.face.pack import file_hashes
from rewardfl.rewards.pixels.artifacts import measure_artifacts
from rewardfl.rewards.pixels.video_motion import video_motion
from rewardfl.rewards.scoring import Reference, Term, score_safely
from rewardfl.training import setup_rewards

FACE = ("face_sim", "coverage", "speed", "nonrigid")  # the figures of a recogniser

Kept = dict[str, Tensor]  # what a row's videos are compared with; of a judge that needs several tensors, name/part

Figures = dict[str, float | None]

Scores = dict[str, face.FaceScore | None]  # by recogniser


@dataclass(frozen=True)
class Judges:
    """Everything that judges. faces: the recognisers; the last one's detector finds the face for all."""

    faces: dict[str, face.FaceIdentity]
    protocols: dict[str, int]  # how many frames each compares
    detectors: dict[str, face.FaceDetector]  # of the protocols, by recogniser
    terms: Sequence[Term]
    dino: ViTModel | None
    periods: Sequence[int]
    device: str

    @property
    def main(self) -> str:
        """The recogniser whose word counts: the last of --judge, else the held-out one, else the reward's."""
        return list(self.faces)[-1]


def judges_of(cfg: config.AnyConfig, args: argparse.Namespace) -> Judges:
    """The judges that a configuration and the options name. ValueError where none judges faces.

    RewardError for a reward that cannot be had.
    """
    found = find_terms(columns(cfg))
    setup_rewards.check_frames(cfg, found)
    packs = {"reward": cfg.reward.reward_model_path, "held_out": cfg.reward.held_out_model_path, **args.judge}
    faces = {
        name: face.FaceIdentity(pack, cfg.reward.det_size).to(args.device)
        for name, pack in packs.items()
        if pack is not None
    }
    if not faces:
        raise ValueError("this tool judges faces, and the run has no face pack; name one: --judge NAME=FOLDER")
    wanted = {name: protocols.PROTOCOLS[name] for name in args.protocol if name != "ours"}
    detectors = {
        name: face.FaceDetector(one.files[0], protocols.DET_SIZE).to(args.device)
        for name, one in faces.items()
        if wanted
    }
    terms = build_terms(found, torch.device(args.device))
    dino = subject_consistency.load_dino(args.dino, args.device) if args.dino else None
    return Judges(faces, wanted, detectors, terms, dino, args.periods, args.device)


def columns(cfg: config.AnyConfig) -> list[config.WantedReward]:
    """The rewards that are measured beside the faces: reward.others, and what is trained where that is no face.

    Where everybody is trained (reward.people: all) also `everybody`: their mean likeness by the pack that judges.
    """
    wanted = config.wanted_rewards(cfg)
    found = [wanted[0]] if cfg.reward.name != "face_identity" else []
    if cfg.reward.people == "all":
        score_safely = cfg.reward.held_out_model_path or cfg.reward.reward_model_path
        settings = {"pack_dir": score_safely, "cap": "none", "det_size": cfg.reward.det_size, "people": "all"}
        settings["min_face_size"] = cfg.reward.min_face_size
        found.append(config.WantedReward("reward.people", "everybody", "face_identity", settings, weight=0.0))
    return found + [one for one in wanted if one.key.startswith("reward.others.")]


def identify(judges: Judges, cfg: config.AnyConfig, dino: str | None) -> dict[str, str]:
    """What the figures depend on: digests of networks, settings, versions; plain words for _records.agree."""
    found: dict[str, str] = {}
    for name, one in judges.faces.items():
        hashes = file_hashes(one.files)
        found |= {f"{name}'s {file}": digest[:16] for file, digest in hashes.items()}
    found |= {term.key: str(term.reward.fingerprint()) for term in judges.terms}
    found |= {f"protocol {name}": f"version {protocols.VERSION}" for name in judges.protocols}
    found |= {"--dino": model_digest([Path(dino)])[:16] if dino else "none"}
    return found | {"--periods": " ".join(map(str, judges.periods)), "reward.det_size": str(cfg.reward.det_size)}


def judge_real(judges: Judges, row: data.Row, example: data.Example, fps: float) -> tuple[dict, Kept] | str:
    """Return a real clip's part of the record and what its row's videos are compared with, or why neither exists."""
    reference = example.reference.to(judges.device)
    pools = {name: one.pool(reference) for name, one in judges.faces.items()}
    if any(pool is None for pool in pools.values()):
        return f"no face was found in {row.reference}"
    kept: Kept = {f"pool/{name}": pool.embeddings for name, pool in pools.items()}
    kept |= _input_faces(judges, example)
    patches = cut_patches(reference.transpose(0, 1), pools[judges.main].landmarks)
    kept |= {f"look/{name}": patch for name, patch in patches.items()}
    for term in judges.terms:
        found = term.reward.reference(reference, row.prompt) if term.reward.compares_with in row.offers else None
        if found is not None:
            kept |= {f"term/{term.label}": torch.tensor(True)}
            kept |= {f"term/{term.label}/{name}": value for name, value in found.items()}
    record = judge_video(judges, example.video.to(judges.device), kept, fps)
    record["figures"] |= {f"{name}/cap": pool.cap for name, pool in pools.items()}
    if example.reference is example.video:  # its own frames are in the pool
        for name, pool in pools.items():
            curve = without_itself(record["curves"][name], record["detected"][name][1:], len(pool.embeddings))
            record["curves"][name] = curve
            record["figures"][f"{name}/face_sim"] = float(np.mean(curve))
    widths = pools[judges.main].boxes[:, 2] - pools[judges.main].boxes[:, 0]
    return record | {"size": list(example.size), "face_width": float(widths.median()), "fps": fps}, kept


def without_itself(curve: Sequence[float], detected: Sequence[bool], pool: int) -> list[float]:
    """A real clip's likeness to its own pool of that many frames, each frame without its cosine of 1 with itself.

    The mean over the detected frames is the pool's cap. Frames without a detection are not in the pool.
    """
    if pool == 1:
        return list(curve)
    return [(pool * s - 1) / (pool - 1) if seen else s for s, seen in zip(curve, detected, strict=True)]


def _input_faces(judges: Judges, example: data.Example) -> Kept:
    """The largest face of the input image by each recogniser, as the protocols find it; nothing where none is found."""
    found = {}
    for name, detector in judges.detectors.items():
        image = _rounded(example.image[:, None].to(judges.device)).transpose(0, 1)
        (embedding,) = protocols.largest_faces(image, detector, judges.faces[name].recogniser)
        if embedding is not None:
            found[f"input/{name}"] = embedding
    return found


def judge_video(judges: Judges, video: Tensor, kept: Kept, fps: float) -> dict:
    """Figures, curves and detections (see _records) of a clip (3, F, H, W) in [-1, 1] on the judges' device.

    A clip without any face has a FaceSim, a coverage and a motion of 0. RewardError when a reward has failed.
    """
    return _record(judges, video, kept, fps, _face_scores(judges, video, kept))


@torch.no_grad()
def _face_scores(judges: Judges, video: Tensor, kept: Kept) -> Scores:
    """Return each recogniser's score of the clip against the row's pool, None where it finds no face."""
    return {name: identity.score(video, kept[f"pool/{name}"]) for name, identity in judges.faces.items()}


@torch.no_grad()
def _record(judges: Judges, video: Tensor, kept: Kept, fps: float, scores: Scores) -> dict:
    frames = data.to_uint8(video).contiguous().cpu().numpy()
    figures: Figures = {}
    for name, score in scores.items():
        values = (0.0,) * 4 if score is None else (float(score.mean), score.coverage, score.speed, score.nonrigid)
        figures |= dict(zip((f"{name}/{key}" for key in FACE), values, strict=True))
    found = scores[judges.main]
    figures["look/face"] = _look(video, found, kept)
    figures |= _pixel_figures(frames, None if found is None else found.boxes.numpy(), judges.periods, fps)
    if judges.dino is not None:
        figures["still/subject_consistency"] = subject_consistency.subject_consistency(judges.dino, frames)
    figures |= _protocol_figures(judges, video, kept) | _reward_figures(judges.terms, video, kept)
    count = len(frames)
    return {
        # NaN is no JSON
        "figures": {name: None if v is None or not math.isfinite(v) else float(v) for name, v in figures.items()},
        "curves": {
            name: [0.0] * (count - 1) if score is None else [round(one, 6) for one in score.per_frame.tolist()]
            for name, score in scores.items()
        },
        "detected": {
            name: [False] * count if score is None else score.detected.tolist() for name, score in scores.items()
        },
    }


def _look(video: Tensor, face: face.FaceScore | None, kept: Kept) -> float:
    if face is None:
        return 0.0
    patches = cut_patches(video.transpose(0, 1), face.landmarks)
    return compare_look(patches, {name: kept[f"look/{name}"] for name in patches})


def judge_through_vae(judges: Judges, video: Tensor, references: Kept, fps: float) -> dict:
    """Return `judge_video` of a real clip that the VAE has encoded and decoded, and two vectors by recogniser.

    embedding: by recogniser the mean embedding of the face in frames 1 .. F - 1, zeros where no face is found; pool:
    that of the row's pool. Their product is the clip's FaceSim.
    """
    pools = {name: references[f"pool/{name}"].mean(0) for name in judges.faces}
    scores = _face_scores(judges, video, references)
    vectors = {
        name: torch.zeros_like(pools[name]) if score is None else score.embedding for name, score in scores.items()
    }
    return _record(judges, video, references, fps, scores) | {
        "embedding": {name: vector.tolist() for name, vector in vectors.items()},
        "pool": {name: pool.tolist() for name, pool in pools.items()},
    }


def _pixel_figures(frames: np.ndarray, boxes: np.ndarray | None, periods: Sequence[int], fps: float) -> Figures:
    """What no network measures of frames (F, H, W, 3) uint8."""
    motion, seen = video_motion(frames, boxes), measure_artifacts(frames, periods)
    return {
        **{f"motion/{name}": value for name, value in vars(motion).items()},
        "motion/dynamic_degree": float(dynamic_degree(frames, fps)),
        "still/temporal_flickering": 1 - motion.pixel_change,  # vbench/temporal_flickering.py
        "still/motion_smoothness": motion_smoothness(frames),
        "canary/grid": seen.grid,
        "canary/saturation": seen.saturation,
        **{f"canary/{name}": value for name, value in zip(("red", "green", "blue"), seen.colour, strict=True)},
    }


def _protocol_figures(judges: Judges, video: Tensor, kept: Kept) -> Figures:
    """Each protocol's score by each recogniser; None where the input image shows no face: the authors leave it out."""
    found: Figures = {}
    for name, detector in judges.detectors.items():
        face_sim = partial(protocols.protocol_score, detector=detector, recogniser=judges.faces[name].recogniser)
        for label, protocol in judges.protocols.items():
            reference = kept.get(f"input/{name}")
            found[f"{label}/{name}"] = None if reference is None else face_sim(protocol, _rounded(video), reference)
    return found


def _reward_figures(terms: Sequence[Term], video: Tensor, kept: Kept) -> Figures:
    found: Figures = {}
    for term in terms:
        judged = score_safely(term.reward, video[None], [_reference(kept, term.label)])
        if judged.failed.any():
            raise RewardError(f"{term.key}: {judged.problems[0]}")
        valid = bool(judged.output.valid[0])
        found[f"rewards/{term.label}"] = float(judged.output.score[0]) if valid else None
    return found


def _reference(kept: Mapping[str, Tensor], label: str) -> Reference:
    """What the reward of this label keeps of the real clip; None for nothing."""
    if f"term/{label}" not in kept:
        return None
    head = f"term/{label}/"
    return {name.removeprefix(head): value for name, value in kept.items() if name.startswith(head)}


def _rounded(video: Tensor) -> Tensor:
    """A video (3, F, H, W) as a file of 8 bits would have it."""
    return ((video.clamp(-1, 1) + 1) * 127.5).round() / 127.5 - 1
