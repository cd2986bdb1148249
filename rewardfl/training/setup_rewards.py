"""Find the rewards of a configuration and check each on a first clip before the model loads."""

from collections.abc import Sequence

import torch

from rewardfl import config as configuration
from rewardfl import data
from rewardfl.backbones.protocol import Backbone
from rewardfl.config import AnyConfig
from rewardfl.noise import draw_noise
from rewardfl.rewards import FaceIdentityReward, registry
from rewardfl.rewards.face import parity as face_parity
from rewardfl.rewards.face.pack import describe_packs, file_hashes
from rewardfl.rewards.scoring import RewardError, Term, check_reward
from rewardfl.training.clip_scan import load_sized_example
from rewardfl.training.distributed import Distributed
from rewardfl.training.samples import Sample


def find_rewards(cfg: AnyConfig, backbone: Backbone, here: bool = True) -> list[registry.Chosen]:
    """The rewards by their classes alone, before anything is read or written.

    RewardError for one that is not there, does not take its settings, or has no gradient to be trained on; ConfigError
    for one that the clips are too short for. here: whether the files that settings name must exist.
    """
    found = registry.find_terms(configuration.wanted_rewards(cfg, backbone.pixels_per_token), here)
    check_frames(cfg, found)
    if isinstance(cfg, configuration.RewardFlConfig) and not configuration.is_supervised(cfg):
        registry.check_trainable(found)
    return found


def check_frames(cfg: AnyConfig, found: Sequence[registry.Chosen]) -> None:
    """ConfigError where a reward looks at what changes from frame to frame, and the frames are too few."""
    for one, cls in found:
        if cfg.data.num_frames < cls.fewest_frames:
            raise configuration.ConfigError(
                f"{one.key} judges at least {cls.fewest_frames} frames, and data.num_frames is {cfg.data.num_frames}; "
                "take a reward that judges each picture (docs/rewards.md), or remove it"
            )


def missing_references(cfg: AnyConfig, row: data.Row, terms: Sequence[Term]) -> list[str]:
    """What a trained reward, or the first one, needs of the row and does not find, in words."""
    needs = {term.key: term.reward.compares_with for term in terms if term.weight > 0 or term is terms[0]}
    return missing_columns(cfg, row, needs)


def missing_columns(cfg: AnyConfig, row: data.Row, needs: dict[str, str]) -> list[str]:
    """What the row lacks of the needs, {key of a reward: what it compares with}, in words."""
    if isinstance(cfg, configuration.FlowGrpoConfig) and "motion" in configuration.part_weights(cfg):
        needs = needs | {"reward.motion_weight": "clip"}
    columns = {"clip": "video or reference_video", "picture": "video, reference_video or image"}
    lacks = [
        f"{key} compares with a {what}, and the row names none ({columns[what]})"
        for key, what in needs.items()
        if what not in row.offers
    ]
    if configuration.is_supervised(cfg) and row.video is None:
        lacks.append("supervised fine-tuning fits the clip of a row, and the row names none (video)")
    return lacks


def _check_face_packs(
    cfg: AnyConfig, terms: Sequence[Term], samples: Sequence[Sample], job: Distributed
) -> tuple[dict[str, dict[str, str]], list[str]]:
    """({configuration key: {file: sha256}}, what is said of them) of the face rewards, on every process.

    The first process asks, on the first sample's real clip. Raised on all of them: FaceParityError when a pack does not
    answer on the device as onnxruntime does, DataError when that clip cannot be read any more.
    """
    packs = {term.key: term.reward.identity for term in terms if isinstance(term.reward, FaceIdentityReward)}
    if not packs:
        return {}, []

    def ask() -> tuple[dict[str, dict[str, str]], list[str]]:
        hashes = {key: file_hashes(identity.files) for key, identity in packs.items()}
        for key, identity in packs.items():
            if identity.second_file is not None:
                hashes[configuration.second_pack_key(key)] = file_hashes([identity.second_file])
        clip = load_sized_example(cfg, samples[0].row).reference.to(job.device)
        return hashes, describe_packs(hashes) + face_parity.check_packs(packs, clip)

    return job.by_main(ask, (face_parity.FaceParityError, data.DataError))


def check_rewards(cfg: AnyConfig, job: Distributed, terms: Sequence[Term], samples: Sequence[Sample]) -> None:
    """Let each reward judge a video before there is a model to make one: the first sample's clip, or noise.

    RewardError for one that breaks its contract (rewards.checked). Whatever else it raises is said: training goes on
    without what it cannot judge, or ends there by the same error. One that waits for somebody else (concurrent) is not
    asked: it would be waited for here.
    """

    def judge() -> list[str]:
        first = samples[0]
        video = load_sized_example(cfg, first.row).video
        if video is None:
            video = draw_noise((3, cfg.data.num_frames, *first.size), cfg.run.seed, torch.device("cpu")).clamp(-1, 1)
        by_gradient = isinstance(cfg, configuration.RewardFlConfig)
        count = min(2, cfg.train.per_device_train_batch_size)  # two tell a mean over the batch from one over a video
        found = {
            term.key: check_reward(term, video.to(job.device), reference, count, by_gradient and term.weight > 0)
            for term, reference in zip(terms, first.references, strict=True)
            if not term.reward.concurrent
        }
        return [f"note: {key} does not judge the first clip: {why}" for key, why in found.items() if why]

    for line in job.by_main(judge, (RewardError, data.DataError)):
        job.say(line)
