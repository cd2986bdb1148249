"""Check the files that a configuration names: the model's, adapters, face packs."""

from collections.abc import Sequence
from pathlib import Path

from rewardfl.backbones.protocol import Source
from rewardfl.config import ConfigError, DataConfig, RewardSpec
from rewardfl.config.schema import LoraConfig, ModelConfig, SharedRewardConfig
from rewardfl.file_kinds import foreign_path_hint
from rewardfl.files import sha256
from rewardfl.rewards.face import pack as face_pack
from rewardfl.rewards.face.detect import FaceDetector


def model_source(model: ModelConfig) -> Source:
    """Return the settings of the model's files."""
    return Source(
        model_paths=model.model_paths,
        tokenizer_path=model.tokenizer_path,
        origin_paths=model.model_id_with_origin_paths,
        boundary=model.min_timestep_boundary,
        embedded_guidance=model.embedded_guidance,
        dtype=model.dtype,
        distilled=(model.distill_lora.high, model.distill_lora.low),
        distill_mode=model.distill_lora.mode,
    )


def check_files(data: DataConfig, model: ModelConfig, adapter: LoraConfig, reward: SharedRewardConfig) -> None:
    """Raise ConfigError for missing paths, and for damaged face packs."""
    paths = {
        "data.file_name": data.file_name,
        "model.model_paths": model.model_paths,
        "model.distill_lora.high": model.distill_lora.high,
        "model.distill_lora.low": model.distill_lora.low,
        "model.tokenizer_path": model.tokenizer_path,
        "lora.init_from": adapter.init_from,
    }
    problems = [
        f"{key}: no such file or folder: {Path(path).absolute()}{foreign_path_hint(path)}"
        for key, path in paths.items()
        if path and not Path(path).exists()
    ]
    for key in ("reward_model_path", "held_out_model_path", "second_model_path"):
        folder = getattr(reward, key)
        try:
            if folder is not None:
                detector, _ = face_pack.pack_files(folder)
                if key != "second_model_path":  # only its recogniser is used
                    FaceDetector(detector, reward.det_size)
        except (OSError, ValueError) as error:
            problems.append(f"reward.{key}: {error}")
    if problems:
        raise ConfigError("\n".join(problems))


def check_shared_networks(reward: SharedRewardConfig, specs: Sequence[RewardSpec]) -> None:
    """Raise ConfigError for one recogniser in both trained packs, or a network of theirs in the held-out judge's."""
    first, second, judge = reward.reward_model_path, reward.second_model_path, reward.held_out_model_path
    if first is not None and second is not None:
        network, other = (face_pack.pack_files(folder)[1] for folder in (second, first))
        if sha256(network) == sha256(other):
            why = f"the recogniser {network} is the same as {other} of reward.reward_model_path"
            raise ConfigError(f"reward.second_model_path: {why}; name a pack with another one, or leave it out")
    if judge is None:
        return
    trained = {"reward.reward_model_path": first, "reward.second_model_path": second}
    for term in specs:
        packs = {key: value for key, value in term.settings.items() if key.endswith("pack_dir") and value}
        trained |= {f"{term.key}.settings.{key}": str(value) for key, value in packs.items() if term.weight > 0}
    for key, folder in trained.items():
        try:
            shared = folder and face_pack.shared_file(judge, folder)
        except (OSError, ValueError):
            continue  # no pack: the reward itself reports that
        if shared:
            task, file, other = shared
            raise ConfigError(
                f"reward.held_out_model_path: the {task} {file} is the same as {other} of {key}, which is trained "
                "against; name a pack with two other networks. antelopev2 and buffalo_l have one detector: next to "
                "antelopev2, put buffalo_l's w600k_r50.onnx and buffalo_s's det_500m.onnx in a folder, and name that"
            )
