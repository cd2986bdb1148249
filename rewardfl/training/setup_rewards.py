"""Check the rewards: the columns that they need, face packs, and each on a first clip before the model loads."""

from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from rewardfl import data
from rewardfl.config import DataConfig
from rewardfl.config.schema import second_pack_key
from rewardfl.noise import draw_noise
from rewardfl.rewards import FaceIdentityReward, Reward
from rewardfl.rewards.face import parity as face_parity
from rewardfl.rewards.face.pack import describe_packs, file_hashes
from rewardfl.rewards.face.reward import ONE_PHOTO
from rewardfl.rewards.registry import ResolvedReward
from rewardfl.rewards.scoring import RewardError, Term, check_reward
from rewardfl.training.clip_scan import load_sized_example
from rewardfl.training.distributed import Distributed
from rewardfl.training.plan import RewardFlPlan, RunPlan
from rewardfl.training.samples import Sample


def missing_references(row: data.Row, terms: Sequence[Term]) -> list[str]:
    """Return in words which references of the deciding rewards, or of the first one, the row lacks, and bad prompts."""
    needs = {term.key: term.reward.compares_with for term in terms if term.decides or term is terms[0]}
    return missing_columns(row, needs) + unusable_prompts(row, {term.key: term.reward for term in terms})


def unusable_prompts(row: data.Row, rewards: Mapping[str, Reward | type[Reward]]) -> list[str]:
    """Return in words why rewards, by configuration key, cannot use the row's prompt."""
    problems = {key: reward.prompt_problem(row.prompt) for key, reward in rewards.items()}
    return [f"{key}: {problem}" for key, problem in problems.items() if problem]


def missing_columns(row: data.Row, needs: Mapping[str, str]) -> list[str]:
    """Return in words which `needs`, {key of a reward: Reward.comparison}, the row lacks."""
    columns = {"clip": "video or reference_video", "picture": "photos, image, video or reference_video"}
    return [
        f"{key} compares with a {source}, and the row names none ({columns[source]})"
        for key, source in needs.items()
        if source in columns and source not in row.offers
    ]


def reference_notes(plan: RunPlan, rows: Sequence[data.Row]) -> list[str]:
    """Return notes on rows without a clip: the pictures of the face, and whose motion theirs is compared with."""
    comparisons = {cls.comparison(spec.settings) for spec, cls in plan.rewards}
    counts = Counter(len(row.pictures) for row in rows if row.pictures)
    listed = ", ".join(f"{number} rows with {count}" for count, number in sorted(counts.items()))
    notes = [f"faces are compared with the row's pictures: {listed}"] if counts and "picture" in comparisons else []
    if counts[1] and "picture" in comparisons and plan.reward.cap == "self_similarity":
        notes.append(f"{counts[1]} rows have one picture, and the median cap of the other rows (reward.cap)")
    if without := rows_without_motion(plan, rows):
        videos = f"{plan.base_noises} videos of the base model"
        notes.append(f"motion is compared with {videos} for each of {len(without)} rows (reward.motion_reference)")
    return notes


def rows_without_motion(plan: RunPlan, rows: Sequence[data.Row]) -> list[data.Row]:
    """Return the rows whose motion is compared with the base model's, where a reward measures motion."""
    if not any(cls.measures_motion is True or cls.comparison(spec.settings) == "motion" for spec, cls in plan.rewards):
        return []
    return [row for row in rows if takes_base_motion(plan, row)]


def takes_base_motion(plan: RunPlan, row: data.Row) -> bool:
    """Return whether the row's motion is compared with the base model's."""
    return {"clip": "clip" not in row.offers, "base": row.rejected is None}[plan.reward.motion_reference]


def takes_base_latents(plan: RunPlan, row: data.Row) -> bool:
    """Return whether the data anchor takes the base model's video in the place of the row's clip."""
    to_reference = plan.anchor.weight > 0 and plan.anchor.target == "reference"
    return to_reference and takes_base_motion(plan, row) and row.video is None


def check_caps(rows: Sequence[data.Row], rewards: Sequence[ResolvedReward]) -> None:
    """Raise DataError if a face reward's cap is the self-similarity, and each row has only one picture."""
    measured = [
        spec
        for spec, cls in rewards
        if issubclass(cls, FaceIdentityReward) and spec.settings.get("cap", "self_similarity") == "self_similarity"
    ]
    if measured and all(len(row.pictures) == 1 and "clip" not in row.offers for row in rows):
        raise data.DataError(ONE_PHOTO)


def check_face_packs(
    clips: DataConfig, terms: Sequence[Term], samples: Sequence[Sample], job: Distributed
) -> tuple[dict[str, dict[str, str]], list[str]]:
    """Return ({configuration key: {file: sha256}}, messages) of the face rewards, on every process.

    The main process compares the packs with onnxruntime on the first sample's clip or photo. Raise FaceParityError on
    all processes where they differ, DataError where the clip cannot be read.
    """
    packs = {term.key: term.reward.identity for term in terms if isinstance(term.reward, FaceIdentityReward)}
    if not packs:
        return {}, []

    def check() -> tuple[dict[str, dict[str, str]], list[str]]:
        hashes = {key: file_hashes(identity.files) for key, identity in packs.items()}
        for key, identity in packs.items():
            if identity.second is not None:
                hashes[second_pack_key(key)] = file_hashes([identity.second.file])
        clip = load_sized_example(clips, samples[0].row).reference
        if not clip.shape[1] and samples[0].row.pictures:
            clip = data.load_pictures(samples[0].row)[0][:, None]
        return hashes, describe_packs(hashes) + face_parity.check_packs(packs, clip.to(job.device))

    return job.run_on_main(check, (face_parity.FaceParityError, data.DataError))


def check_rewards(plan: RunPlan, job: Distributed, terms: Sequence[Term], samples: Sequence[Sample]) -> None:
    """Check each reward on the first sample's clip, or on noise, before the model loads.

    Raise RewardError if one breaks its contract (rewards.checked). Other errors are printed. Concurrent rewards
    are skipped: start-up would block on them.
    """

    def judge() -> list[str]:
        first = samples[0]
        video = load_sized_example(plan.data, first.row).video
        if video is None:
            video = draw_noise((3, plan.data.num_frames, *first.size), plan.run.seed, torch.device("cpu")).clamp(-1, 1)
        by_gradient = isinstance(plan, RewardFlPlan)
        count = min(2, plan.train.per_device_train_batch_size)  # two detect a mean over the batch
        errors = {
            term.key: check_reward(
                term, video.to(job.device), reference, count, with_gradient=by_gradient and term.weight > 0
            )
            for term, reference in zip(terms, first.references, strict=True)
            if not term.reward.concurrent
        }
        return [f"note: {key} does not judge the first clip: {why}" for key, why in errors.items() if why]

    for line in job.run_on_main(judge, (RewardError, data.DataError)):
        job.print(line)
