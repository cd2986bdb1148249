"""Measurements of one video, real or generated, as a record (see `records`)."""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rewardfl import data
from rewardfl.config import DataConfig, RewardSpec
from rewardfl.config.schema import SharedRewardConfig
from rewardfl.evaluation.records import FACE, Record
from rewardfl.evaluation.verification import PersonFaces
from rewardfl.rewards import RewardError, build_terms, face
from rewardfl.rewards.base import NONFINITE, Reference
from rewardfl.rewards.face.look import MOUTH_MOVES, compare_look, cut_patches, mouth_movement
from rewardfl.rewards.face.pack import file_hashes
from rewardfl.rewards.face.track import SAME_PERSON
from rewardfl.rewards.pixels.artifacts import measure_artifacts
from rewardfl.rewards.pixels.optical_flow import damped_flow
from rewardfl.rewards.pixels.video_motion import video_motion
from rewardfl.rewards.registry import ResolvedReward
from rewardfl.rewards.scoring import Term, score_safely
from rewardfl.training import base_videos, clip_scan

References = dict[str, Tensor]  # references of a row; name/part for a judge with several tensors

Figures = dict[str, float | None]

VaePass = Callable[[Tensor, Tensor | None], Tensor]  # a video (3, F, H, W) and its image -> the decoded video

STILL = 5  # frames of a photo that goes through a VAE; the last one counts, which is of a second latent frame


class NoFaceError(ValueError):
    """A real clip shows no face, so its row cannot be judged."""


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
    """Return the rewards that are measured next to the faces: all terms, without face_identity as score.

    specs: of the configuration. With reward.people: all add `everybody`: the mean identity similarity of all people by
    the pack that judges.
    """
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
    """Return the recognisers' pools of a row's real clip. Raise NoFaceError if one finds no face."""
    pools = {name: pool for name, identity in judges.faces.items() if (pool := identity.pool(reference)) is not None}
    if len(pools) < len(judges.faces):
        raise NoFaceError(f"no face was found in {row.reference}")
    return pools


def prepare_row(
    judges: Judges, row: data.Row, example: data.Example, fps: float, *, skip: bool
) -> tuple[References, Record, str]:
    """Return what a row's videos are compared with, a real clip's part of the record, and why photos are left out.

    The record is {} without a clip. Raise NoFaceError for a clip without a face, DataError as `pool_photos`.
    """
    reference, video = example.reference.to(judges.device), example.video
    photos, pools, note = pool_photos(judges, row, skip=skip) if judges.faces and row.pictures else ([], {}, "")
    references = {f"{'photos' if video is not None else 'pool'}/{name}": pool for name, pool in pools.items()}
    for term in judges.terms:
        if term.reward.compares_with in row.offers:
            references |= label_reference(term, clip_scan.make_reference(term.reward, row, reference, photos)[0])
    if not judges.faces or video is None:
        return references, {}, note
    of_clip = find_pools(judges, row, reference)
    references |= {f"pool/{name}": pool.embeddings for name, pool in of_clip.items()}
    patches = cut_patches(reference.transpose(0, 1), of_clip[judges.main].landmarks)
    references |= {f"look/{name}": patch for name, patch in patches.items()}
    references["mouth"] = torch.tensor(mouth_movement(patches["mouth"]))
    record = judge_video(judges, video.to(judges.device), references)
    record["figures"] |= {f"{name}/cap": pool.cap for name, pool in of_clip.items()}
    for name, pool in of_clip.items() if example.reference is video else ():  # its own frames are in the pool
        curve = without_itself(record["curves"][name], record["detected"][name][1:], len(pool.embeddings))
        record["curves"][name] = curve
        record["figures"][f"{name}/face_sim"] = float(np.mean(curve))
    width = float(of_clip[judges.main].width.median())
    return references, record | {"size": list(example.size), "face_width": width, "fps": fps}, note


def pool_photos(judges: Judges, row: data.Row, *, skip: bool) -> tuple[list[Tensor], References, str]:
    """Return the row's usable pictures (3, H, W), the recognisers' pools of them, and why others are left out.

    A usable one shows a face to each recogniser, and no other person to the first, which training uses. Raise
    DataError without any, for an unusable one unless `skip`, and if the model's input is one.
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
    pooled = {name: torch.stack([pool[i] for i in usable]) for name, pool in pools.items()}
    return [photos[i] for i in usable], pooled, note


def embed_person(
    judges: Judges, row: data.Row, clips: DataConfig, through_vae: VaePass | None
) -> tuple[dict[str, PersonFaces], str]:
    """Return the faces of the row's pictures, or of its clip's frames, by recogniser, and why photos are left out.

    Raise NoFaceError or DataError without any.
    """
    if not row.pictures:
        of_clip = find_pools(judges, row, clip_scan.load_sized_example(clips, row).reference.to(judges.device))
        return {name: PersonFaces(pool.embeddings.cpu()) for name, pool in of_clip.items()}, ""
    photos, pools, note = pool_photos(judges, row, skip=clips.skip_bad_rows)
    if through_vae is None:
        return {name: PersonFaces(pool.cpu()) for name, pool in pools.items()}, note
    stills, faces = [draw_still(photo, clips, through_vae) for photo in photos], {}
    for name, pool in pools.items():
        drawn = judges.faces[name].photo_pool(stills, same_person=-1.0)[0]
        vectors = [drawn.get(i, torch.zeros_like(pool[0])) for i in range(len(stills))]
        faces[name] = PersonFaces(pool.cpu(), torch.stack(vectors).cpu())
    return faces, note


def draw_still(photo: Tensor, clips: DataConfig, through_vae: VaePass) -> Tensor:
    """Return a photo (3, H, W) at the size of the run's clips, encoded and decoded as a still clip."""
    size = data.clip_size((photo.shape[1], photo.shape[2]), clips.height, clips.width, clips.max_pixels)
    still = data.to_float(data.fit(data.to_uint8(photo[:, None]), *size)).repeat(1, STILL, 1, 1)
    return through_vae(still, still[:, 0])[:, -1]


def measure_motion(judges: Judges, references: References, video: Tensor, prompt: str) -> References:
    """Return what a base's video (3, F, H, W) gives the references of a row without a clip: motion and the mouth's."""
    score = judges.faces[judges.main].score(video, references[f"pool/{judges.main}"])
    patches = None if score is None else cut_patches(video.transpose(0, 1), score.landmarks)
    changed: References = {} if patches is None else {"mouth": torch.tensor(mouth_movement(patches["mouth"]))}
    for term in judges.terms:
        if term.reward.measures_motion:
            parts = base_videos.average_motion(term.reward, term_reference(term, references), [video], prompt)
            changed |= label_reference(term, parts or None)
    return changed


def judge_image(judges: Judges, image: Tensor, references: References) -> dict:
    """Return the scores of an image (3, 1, H, W) by all rewards, and their parts. Raise RewardError if one fails."""
    figures = _reward_figures(judges.terms, image, references, parts=True)
    return {"figures": finite(figures), "curves": {}, "detected": {}}


def finite(figures: Figures) -> Figures:
    """Return the figures with None for NaN and infinity, which JSON lacks."""
    return {name: None if v is None or not math.isfinite(v) else float(v) for name, v in figures.items()}


def without_itself(curve: Sequence[float], detected: Sequence[bool], pool: int) -> list[float]:
    """Remove from a real clip's FaceSim with its own pool of so many frames each frame's cosine of 1 with itself.

    The mean over the detected frames is then the pool's cap. Frames without a detection are not in the pool.
    """
    if pool == 1:
        return list(curve)
    return [(pool * s - 1) / (pool - 1) if seen else s for s, seen in zip(curve, detected, strict=True)]


@torch.no_grad()
def judge_video(judges: Judges, video: Tensor, references: References, *, keep_vectors: bool = False) -> dict:
    """Return figures, curves and detections (see `records`) of a clip (3, F, H, W) in [-1, 1] on the judges' device.

    FaceSim, coverage and motion of a clip without any face are 0. keep_vectors: of a real clip through the VAE also
    return two vectors by recogniser, whose product is FaceSim. embedding: mean embedding of the face in frames
    1 .. F - 1, zeros where no face is found. pool: mean embedding of the row's pool. Raise RewardError when a reward
    fails.
    """
    scores = {name: identity.score(video, references[f"pool/{name}"]) for name, identity in judges.faces.items()}
    frames = data.to_uint8(video).contiguous().cpu().numpy()
    figures: Figures = {}
    record: dict = {"figures": {}, "curves": {}, "detected": {}}
    for name, score in scores.items():
        values = (0.0,) * 4 if score is None else (float(score.mean), score.coverage, score.speed, score.nonrigid)
        figures |= dict(zip((f"{name}/{key}" for key in FACE), values, strict=True))
        curve = torch.zeros(len(frames) - 1) if score is None else score.per_frame
        record["curves"][name] = [round(value, 6) for value in curve.tolist()]
        record["detected"][name] = [False] * len(frames) if score is None else score.detected.tolist()
        if (photos := references.get(f"photos/{name}")) is not None:  # next to a clip
            face_sim = 0.0 if score is None else float(score.embedding @ photos.to(score.embedding).mean(0))
            figures[f"{name}/face_sim_photos"] = face_sim
    main = scores[judges.main]
    has_look = any(name.startswith("look/") for name in references)  # there is a real clip
    figures["look/face"] = 0.0 if has_look else None
    patches = {} if main is None else cut_patches(video.transpose(0, 1), main.landmarks)
    if patches and has_look:
        figures["look/face"] = compare_look(patches, {name: references[f"look/{name}"] for name in patches})
    if patches and "mouth" in references:  # the real clip's, or the base's
        name = "mouth" if references["mouth"] >= MOUTH_MOVES else "silent_mouth"
        figures[f"motion/{name}"] = mouth_movement(patches["mouth"])
    motion = video_motion(frames, None if main is None else main.boxes.numpy())
    figures |= {f"motion/{name}": value for name, value in motion.items()}
    figures["motion/lk_flow"] = damped_flow(video)
    figures |= {f"canary/{name}": value for name, value in measure_artifacts(frames, judges.periods).items()}
    figures |= _reward_figures(judges.terms, video, references)
    record["figures"] = finite(figures)
    if keep_vectors:
        pools = {name: references[f"pool/{name}"].mean(0) for name in judges.faces}
        record["embedding"] = {
            name: (torch.zeros_like(pools[name]) if score is None else score.embedding).tolist()
            for name, score in scores.items()
        }
        record["pool"] = {name: pool.tolist() for name, pool in pools.items()}
    return record


def _reward_figures(terms: Sequence[Term], video: Tensor, references: References, *, parts: bool = False) -> Figures:
    figures: Figures = {}
    for term in terms:
        result = score_safely(term.reward, video[None], [term_reference(term, references)])
        if result.failed.any():
            raise RewardError(f"{term.key}: {result.problems[0]}")
        valid = bool(result.output.valid[0])
        figures[f"rewards/{term.label}"] = float(result.output.score[0]) if valid else None
        if parts:
            named = {name: float(part[0]) for name, part in result.output.parts.items() if name != NONFINITE}
            figures |= {f"rewards/{term.label}/{name}": value for name, value in named.items()}
    return figures


def label_reference(term: Term, reference: Reference) -> References:
    """Return a reward's reference with its label in the names; `term_reference` is the inverse."""
    head = f"term/{term.label}"
    named = {f"{head}/{name}": value for name, value in (reference or {}).items()}
    return {} if reference is None else {head: torch.ones(1), **named}


def term_reference(term: Term, references: References) -> Reference:
    """Return what a reward compares with, of the references of a row."""
    head = f"term/{term.label}"
    compared = {key.removeprefix(f"{head}/"): x for key, x in references.items() if key.startswith(f"{head}/")}
    return compared if head in references else None
