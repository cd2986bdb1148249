"""Measurements of one video, real or generated, as a record (see `records`)."""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from rewardfl import data
from rewardfl.backbones import protocol
from rewardfl.config import DataConfig, RewardSpec
from rewardfl.config.schema import SharedRewardConfig
from rewardfl.evaluation.records import FACE, Record
from rewardfl.evaluation.verification import PersonFaces
from rewardfl.rewards import RewardError, build_terms, face
from rewardfl.rewards.base import NONFINITE, Reference
from rewardfl.rewards.face.look import MOUTH_MOVES, compare_look, cut_patches, mouth_movement
from rewardfl.rewards.face.pack import file_hashes
from rewardfl.rewards.face.track import SAME_PERSON
from rewardfl.rewards.pixels.measures import measure_artifacts, video_motion
from rewardfl.rewards.pixels.optical_flow import damped_flow
from rewardfl.rewards.registry import ResolvedReward
from rewardfl.rewards.scoring import Term, score_safely
from rewardfl.training import clip_scan

Figures = dict[str, float | None]

VaePass = Callable[[Tensor, Tensor | None], Tensor]  # a video (3, F, H, W) and its image -> the decoded video

STILL = 5  # frames of a photo that goes through a VAE; the last one counts, which is of a second latent frame


@dataclass(frozen=True, kw_only=True)
class References:
    """What a row's videos are compared with, on the CPU.

    pools: embeddings (n, D) of the real clip's frames, else of the photos, by recogniser. photos: those of the photos
    next to a clip. patches: of the real eyes and mouth. mouth: movement of the real mouth, else of the base's.
    """

    size: tuple[int, int]  # (H, W) of the videos
    image: Tensor | None  # the model's input
    terms: dict[str, Reference]  # by the reward's label
    pools: Mapping[str, Tensor] = field(default_factory=dict)
    photos: Mapping[str, Tensor] = field(default_factory=dict)
    patches: dict[str, Tensor] = field(default_factory=dict)
    mouth: float | None = None


@dataclass(frozen=True, kw_only=True)
class Judges:
    """All judges. faces: the recognisers, none for images; the last one's detector finds the face for all."""

    faces: dict[str, face.FaceIdentity]
    terms: Sequence[Term]
    periods: Sequence[int]
    device: str

    @property
    def main(self) -> str:
        """Return the recogniser that decides: the last of --judge, else the held-out one, else the reward's."""
        return list(self.faces)[-1]


def load_judges(
    reward: SharedRewardConfig, rewards: Sequence[ResolvedReward], args: argparse.Namespace, *, of_images: bool
) -> Judges:
    """Load the judges. Raise ValueError without a recogniser, RewardError for a reward that cannot be built."""
    packs, size = {"reward": reward.reward_model_path, "held_out": reward.held_out_model_path}, reward.det_size
    named = {} if of_images else {name: pack for name, pack in (packs | args.judge).items() if pack is not None}
    faces = {name: face.FaceIdentity(pack, size).to(args.device) for name, pack in named.items()}
    if not faces and not of_images:
        raise ValueError("this tool judges faces, and the run has no face pack; name one: --judge NAME=FOLDER")
    terms = build_terms(rewards, torch.device(args.device))
    return Judges(faces=faces, terms=terms, periods=args.periods, device=args.device)


def measured_rewards(reward: SharedRewardConfig, specs: Sequence[RewardSpec]) -> list[RewardSpec]:
    """Return the measured specs: without face_identity as score, with `everybody` if all people are trained."""
    trained = [] if reward.terms["score"].name == "face_identity" else list(specs[:1])
    settings = {
        "pack_dir": reward.held_out_model_path or reward.reward_model_path, "cap": "none", "people": "all",
        "det_size": reward.det_size, "min_face_size": reward.min_face_size,
    }  # fmt: skip
    spec = RewardSpec(key="reward.people", label="everybody", name="face_identity", settings=settings, weight=0.0)
    everybody = [spec] if reward.people == "all" else []
    return [*trained, *everybody, *(spec for spec in specs if spec.label in reward.others)]


def list_dependencies(judges: Judges, det_size: int) -> dict[str, str]:
    """Return all that the figures depend on: digests of networks, settings, versions."""
    parts: dict[str, str] = {}
    for name, identity in judges.faces.items():
        parts |= {f"{name}'s {file}": digest[:16] for file, digest in file_hashes(identity.files).items()}
    parts |= {term.key: str(term.reward.fingerprint()) for term in judges.terms}
    return parts | {"--periods": " ".join(map(str, judges.periods)), "reward.det_size": str(det_size)}


def find_pools(judges: Judges, row: data.Row, reference: Tensor) -> dict[str, face.FacePool]:
    """Return the recognisers' pools of a row's real clip. Raise DataError if one finds no face."""
    pools = {name: pool for name, identity in judges.faces.items() if (pool := identity.pool(reference)) is not None}
    if len(pools) < len(judges.faces):
        raise data.DataError(f"no face was found in {row.reference}")
    return pools


def prepare_row(
    judges: Judges, row: data.Row, example: data.Example, *, skip: bool
) -> tuple[References, dict[str, face.FacePool], str]:
    """Return what a row's videos are compared with, the pools of its real clip, if any, and why photos are left out."""
    reference = example.reference.to(judges.device)
    photos, of_photos, note = pool_photos(judges, row, skip=skip) if row.pictures else ([], {}, "")
    terms: dict[str, Reference] = {}
    for term in judges.terms:
        if term.reward.compares_with in row.offers:
            compared, _ = clip_scan.make_reference(term.reward, row, reference, photos)
            terms[term.label] = compared and protocol.move_to(dict(compared), "cpu")
    references = References(size=example.size, image=example.image, terms=terms, pools=of_photos)
    if not judges.faces or example.video is None:
        return references, {}, note
    pools = find_pools(judges, row, reference)
    patches = cut_patches(reference.transpose(0, 1), pools[judges.main].landmarks)
    embeddings = {name: pool.embeddings.cpu() for name, pool in pools.items()}
    mouth = mouth_movement(patches["mouth"])
    return replace(references, photos=of_photos, pools=embeddings, patches=patches, mouth=mouth), pools, note


def pool_photos(judges: Judges, row: data.Row, *, skip: bool) -> tuple[list[Tensor], dict[str, Tensor], str]:
    """Return the pictures (3, H, W) that show a face to each recogniser, its pools, and why others are left out.

    The first, which training uses, also looks for other people. Raise DataError without any, for an unusable one unless
    `skip`, and if the model's input is one.
    """
    photos = [photo.to(judges.device) for photo in data.load_pictures(row)]
    pools, problems, count = dict[str, dict[int, Tensor]](), dict[int, str](), len(row.pictures)
    for name, identity in judges.faces.items():
        checked, same_person = (photos[:count], -1.0) if pools else (photos, SAME_PERSON)
        pools[name], bad = identity.photo_pool(checked, same_person=same_person)
        problems |= bad
    note = "; ".join(f"{row.checked_pictures[i]}: {why}" for i, why in sorted(problems.items()))
    usable = [i for i in range(count) if i not in problems]
    if note and not (skip and usable and max(problems) < count):
        raise data.DataError(note)
    pooled = {name: torch.stack([pool[i] for i in usable]).cpu() for name, pool in pools.items()}
    return [photos[i] for i in usable], pooled, note


def embed_person(
    judges: Judges, row: data.Row, clips: DataConfig, through_vae: VaePass | None
) -> tuple[dict[str, PersonFaces], str]:
    """Return the faces of the row's pictures, or of its clip's frames, by recogniser, and why photos are left out."""
    if not row.pictures:
        of_clip = find_pools(judges, row, clip_scan.load_sized_example(clips, row).reference.to(judges.device))
        return {name: PersonFaces(pool.embeddings.cpu()) for name, pool in of_clip.items()}, ""
    photos, pools, note = pool_photos(judges, row, skip=clips.skip_bad_rows)
    if through_vae is None:
        return {name: PersonFaces(pool) for name, pool in pools.items()}, note
    stills, faces = [], {}
    for photo in photos:  # at the size of the run's clips, as a still clip
        size = data.clip_size((photo.shape[1], photo.shape[2]), clips.height, clips.width, clips.max_pixels)
        still = data.to_float(data.fit(data.to_uint8(photo[:, None]), *size)).repeat(1, STILL, 1, 1)
        stills.append(through_vae(still, still[:, 0])[:, -1])
    for name, pool in pools.items():
        drawn = judges.faces[name].photo_pool(stills, same_person=-1.0)[0]
        vectors = [drawn[i].cpu() if i in drawn else torch.zeros_like(pool[0]) for i in range(len(stills))]
        faces[name] = PersonFaces(pool, torch.stack(vectors))
    return faces, note


def measure_motion(judges: Judges, references: References, video: Tensor, prompt: str) -> dict[str, Tensor]:
    """Return the motion of a base's video for `with_motion`: mouth, and LABEL/NAME of a reward's reference."""
    score = judges.faces[judges.main].score(video, references.pools[judges.main])
    patches = None if score is None else cut_patches(video.transpose(0, 1), score.landmarks)
    motion = {} if patches is None else {"mouth": torch.tensor(mouth_movement(patches["mouth"]))}
    for term in judges.terms:
        if term.reward.measures_motion:
            parts = clip_scan.average_motion(term.reward, references.terms.get(term.label), [video], prompt)
            motion |= {f"{term.label}/{name}": value for name, value in (parts or {}).items()}
    return motion


def with_motion(references: References, motion: Mapping[str, Tensor]) -> References:
    """Return the references of a row without a clip with the motion of the base's video."""
    terms = dict(references.terms)
    for key, value in motion.items():
        label, _, name = key.partition("/")
        if name:
            terms[label] = {**(terms.get(label) or {}), name: value}
    return replace(references, terms=terms, mouth=float(motion["mouth"]) if "mouth" in motion else None)


def judge_real(
    judges: Judges, example: data.Example, references: References, pools: Mapping[str, face.FacePool]
) -> Record:
    """Return the record of a row's real clip. pools: of `prepare_row`."""
    assert example.video is not None
    record = judge_video(judges, example.video.to(judges.device), references)
    record["figures"] |= {f"{name}/cap": pool.cap for name, pool in pools.items()}
    for name, pool in pools.items() if example.reference is example.video else ():  # its own frames are in the pool
        curve = leave_one_out(record["curves"][name], record["detected"][name][1:], len(pool.embeddings))
        record["curves"][name] = curve
        record["figures"][f"{name}/face_sim"] = float(np.mean(curve))
    return record | {"face_width": float(pools[judges.main].width.median())}


def leave_one_out(curve: Sequence[float], detected: Sequence[bool], pool: int) -> list[float]:
    """Return FaceSim of a real clip's frames with the pool of so many detected frames, each without itself."""
    if pool == 1:
        return list(curve)
    return [(pool * s - 1) / (pool - 1) if seen else s for s, seen in zip(curve, detected, strict=True)]


def finite(figures: Figures) -> Figures:
    """Return the figures with None for NaN and infinity, which JSON lacks."""
    return {name: None if v is None or not math.isfinite(v) else float(v) for name, v in figures.items()}


@torch.no_grad()
def judge_video(judges: Judges, video: Tensor, references: References, *, keep_vectors: bool = False) -> Record:
    """Return figures, curves and detections (see `records`) of a clip (3, F, H, W) in [-1, 1] on the judges' device.

    Without recognisers there are only the rewards' scores and parts. FaceSim, coverage and motion of a clip without any
    face are 0. keep_vectors: add two vectors by recogniser, whose product is FaceSim: the mean embedding of the face in
    frames 1 .. F - 1, zeros if no face is found, and the mean embedding of the row's pool. Raise RewardError when a
    reward fails.
    """
    rewards = _reward_figures(judges.terms, video, references, parts=not judges.faces)
    record: Record = {"figures": finite(rewards), "curves": {}, "detected": {}}
    if not judges.faces:
        return record
    figures: Figures = {}
    frames = data.to_uint8(video).contiguous().cpu().numpy()
    vectors: dict[str, dict[str, list[float]]] = {"embedding": {}, "pool": {}}
    scores = {name: identity.score(video, references.pools[name]) for name, identity in judges.faces.items()}
    for name, score in scores.items():
        values = (0.0,) * 4 if score is None else (float(score.mean), score.coverage, score.speed, score.nonrigid)
        figures |= dict(zip((f"{name}/{key}" for key in FACE), values, strict=True))
        curve = torch.zeros(len(frames) - 1) if score is None else score.per_frame
        record["curves"][name] = [round(value, 6) for value in curve.tolist()]
        record["detected"][name] = [False] * len(frames) if score is None else score.detected.tolist()
        pool = references.pools[name].mean(0)
        embedding = torch.zeros_like(pool) if score is None else score.embedding.cpu()
        vectors["embedding"][name], vectors["pool"][name] = embedding.tolist(), pool.tolist()
        if (photos := references.photos.get(name)) is not None:
            figures[f"{name}/face_sim_photos"] = float(embedding @ photos.mean(0))
    main = scores[judges.main]
    figures["look/face"] = 0.0 if references.patches else None
    patches = {} if main is None else cut_patches(video.transpose(0, 1), main.landmarks)
    if patches and references.patches:
        figures["look/face"] = compare_look(patches, references.patches)
    if patches and references.mouth is not None:
        name = "mouth" if references.mouth >= MOUTH_MOVES else "silent_mouth"
        figures[f"motion/{name}"] = mouth_movement(patches["mouth"])
    motion = video_motion(frames, None if main is None else main.boxes.numpy())
    figures |= {f"motion/{name}": value for name, value in motion.items()}
    figures["motion/lk_flow"] = damped_flow(video)
    figures |= {f"canary/{name}": value for name, value in measure_artifacts(frames, judges.periods).items()}
    return record | {"figures": finite(figures | rewards)} | (vectors if keep_vectors else {})


def _reward_figures(terms: Sequence[Term], video: Tensor, references: References, *, parts: bool) -> Figures:
    figures: Figures = {}
    for term in terms:
        result = score_safely(term.reward, video[None], [references.terms.get(term.label)])
        if result.failed.any():
            raise RewardError(f"{term.key}: {result.problems[0]}")
        valid = bool(result.output.valid[0])
        figures[f"rewards/{term.label}"] = float(result.output.score[0]) if valid else None
        if parts:
            named = {name: float(part[0]) for name, part in result.output.parts.items() if name != NONFINITE}
            figures |= {f"rewards/{term.label}/{name}": value for name, value in named.items()}
    return figures
