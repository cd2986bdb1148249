"""Which files a Wan2.2-I2V-A14B model is made of, and what their headers tell, before any weight is read.

A model is a diffusers folder, or the original files that Wan-AI, ComfyUI and Lightning ship. Nothing is downloaded
unless `model.allow_download` says so.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from rewardfl.backbones.wan.model import PARTS, empty_expert
from rewardfl.weights import lora_files, merge, shards, wan_names
from rewardfl.weights.shards import Checkpoint, Refused

# configurations of the published model, for files that come without any; a pipeline folder without weights
PUBLISHED = Path(__file__).parent / "published"
TOKENIZER_FILES = ("tokenizer.json", "spiece.model")  # either is a tokenizer
KEYS = ("high_noise_model", "low_noise_model", "text_encoder", "vae")  # of a wan22_paths.json, in its list form's order


@dataclass(frozen=True)
class Layout:
    """Where the parts of a model are. `configs`: a folder with model_index.json, transformer/config.json, and so on.

    In a diffusers folder everything is in `configs`. `opened`: the experts' tensors, as open_files finds them in the
    files' headers.
    """

    configs: Path
    experts: Mapping[str, list[Path]]  # high_noise, low_noise -> a file, a folder, an index, or shards
    text_encoder: Path | None = None
    vae: Path | None = None
    tokenizer: Path | None = None
    opened: Mapping[str, Checkpoint] | None = None


# ------------------------------------------------------------------------------------------------------------
# Which files


def source_of(model_paths: str) -> Path:
    """The folder that says the model's shape: the model's own where its configurations are there, else PUBLISHED."""
    folder = Path(model_paths)
    if folder.suffix == ".json" and folder.is_file():
        given = json.loads(folder.read_text(encoding="utf-8"))
        if not isinstance(given, dict) or not given.get("configs"):
            return PUBLISHED
        folder = folder.parent / given["configs"]
    parts = [*PARTS.values(), "vae", "text_encoder"]
    return folder if model_paths and all((folder / part / "config.json").is_file() for part in parts) else PUBLISHED


def find_files(
    model_paths: str, tokenizer_path: str = "", origin_paths: str = "", allow_download: bool = False
) -> Layout:
    """The files of the model that the configuration names. Refused, with the key and the way out, for what is missing.

    model_paths: a diffusers folder, or a wan22_paths.json (an object with KEYS, or a list in their order; each entry a
    file, a folder of shards, an index.json or a list of shards; relative to the json file). origin_paths:
    "repository:pattern,..." as DiffSynth and ROLL write it, looked up in the local hub cache, or downloaded.
    """
    if origin_paths:
        return _from_hub(origin_paths, tokenizer_path, allow_download)
    path = Path(model_paths)
    if path.suffix == ".json" and path.is_file():
        return _from_json(path, tokenizer_path)
    if not (path / "model_index.json").is_file():
        raise Refused(
            f"model.model_paths: {model_paths} is neither a diffusers pipeline folder (no model_index.json in it) nor "
            "a wan22_paths.json with the original files"
        )
    given = {"tokenizer"} if tokenizer_path else set()
    index = read_json(path / "model_index.json")
    for name, kind in index.items():
        # transformers would make an empty tokenizer of a missing folder
        if isinstance(kind, list) and kind[0] and name not in given and not (path / name).is_dir():
            raise Refused(f"model.model_paths: {path} has no {name} folder")
    if not isinstance(index.get("transformer_2"), list) or index["transformer_2"][0] is None:
        raise Refused(_not_i2v(path, "it has one transformer"))
    boundary_ratio(path)
    experts = {expert: [path / part] for expert, part in PARTS.items()}
    tokenizer = _tokenizer(tokenizer_path, path / "tokenizer")
    return Layout(path, experts, path / "text_encoder", path / "vae", tokenizer)


def _not_i2v(path: Path, why: str) -> str:
    return (
        f"model.model_paths: {path} is not Wan2.2-I2V-A14B: {why}. TI2V-5B, Wan2.1 and text-to-video models are not "
        "supported"
    )


def _tokenizer(tokenizer_path: str, default: Path | None) -> Path:
    """The folder of the tokenizer. Refused when it holds none: transformers would make an empty one of it."""
    path = Path(tokenizer_path) if tokenizer_path else default
    if path is None:
        why = "is empty, and these original files come without a tokenizer"
    elif not any((path / name).is_file() for name in TOKENIZER_FILES):
        why = f"{path} has no {' or '.join(TOKENIZER_FILES)}"
    else:
        return path
    raise Refused(f"model.tokenizer_path: {why}; give the folder google/umt5-xxl that Wan-AI ships beside the model")


def read_json(path: Path) -> Any:
    """Refused when the file is missing or no JSON."""
    if not path.is_file():
        raise Refused(f"{path} is missing; the folder must have diffusers' layout")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise Refused(f"{path} is not JSON: {error}") from None


def _from_json(path: Path, tokenizer_path: str) -> Layout:
    given = read_json(path)
    if isinstance(given, list):
        if len(given) != len(KEYS):
            raise Refused(f"{path} lists {len(given)} parts; it must list {', '.join(KEYS)}, in this order")
        given = dict(zip(KEYS, given, strict=True))
    if not isinstance(given, dict):
        raise Refused(f"{path} must be an object with {', '.join(KEYS)}, or a list in their order")
    unknown = sorted(given.keys() - {*KEYS, "tokenizer", "configs"})
    given = {key: value for key, value in given.items() if value}
    missing = [key for key in KEYS if key not in given]
    if unknown or missing:
        raise Refused(
            f"{path}: " + "; ".join([f"no {key}" for key in missing] + [f"unknown key {key!r}" for key in unknown])
            + f"; it takes {', '.join(KEYS)} and optionally tokenizer, configs"
        )  # fmt: skip
    parts = {key: [path.parent / one for one in _listed(value)] for key, value in given.items()}
    for key, files in parts.items():
        absent = [file for file in files if not file.exists()]
        if absent:
            raise Refused(f"{path}: {key}: {absent[0]} does not exist")
        if len(files) != 1 and key not in KEYS[:2]:
            raise Refused(f"{path}: {key} must be one path, it lists {len(files)}")
    (configs,), (tokenizer,) = parts.get("configs", [PUBLISHED]), parts.get("tokenizer", [None])
    return _of_originals(parts, configs, _tokenizer(tokenizer_path, tokenizer))


def _of_originals(parts: Mapping[str, list[Path]], configs: Path, tokenizer: Path) -> Layout:
    """The layout of files by KEYS."""
    high, low, (text_encoder,), (vae,) = (parts[key] for key in KEYS)
    return Layout(configs, {"high_noise": high, "low_noise": low}, text_encoder, vae, tokenizer)


def _listed(value: Any) -> list[str]:
    listed = value if isinstance(value, list) else [value]
    if not all(isinstance(one, str) for one in listed):
        raise Refused(f"{value!r} in the list of model files must be a path, or a list of paths")
    return listed


def _from_hub(origin_paths: str, tokenizer_path: str, allow_download: bool) -> Layout:
    """Parts by what their patterns say: high_noise, low_noise, t5, VAE; the tokenizer from beside the t5 file."""
    found: dict[str, list[Path]] = {}
    words = {"high_noise": KEYS[0], "low_noise": KEYS[1], "t5": KEYS[2], "vae": KEYS[3]}
    for item in filter(None, (part.strip() for part in origin_paths.split(","))):
        repository, _, pattern = item.partition(":")
        key = next((key for word, key in words.items() if word in pattern.lower()), None)
        if key is None or not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
            raise Refused(
                f"model.model_id_with_origin_paths: {item!r} must be owner/repository:pattern with one of "
                f"{', '.join(words)} in the pattern"
            )
        if key in found:
            raise Refused(f"model.model_id_with_origin_paths names {key} twice, the second is {item!r}")
        patterns = [pattern] if tokenizer_path or key != KEYS[2] else [pattern, "google/umt5-xxl/*"]
        found[key] = sorted(_snapshot(repository, patterns, allow_download).glob(pattern))
        if not found[key] or (len(found[key]) > 1 and key not in KEYS[:2]):
            raise Refused(f"model.model_id_with_origin_paths: {item!r} matches {len(found[key])} files")
    if missing := [key for key in KEYS if key not in found]:
        raise Refused(f"model.model_id_with_origin_paths names no {', '.join(missing)}")
    tokenizer = found[KEYS[2]][0].parent / "google" / "umt5-xxl"
    tokenizer = _tokenizer(tokenizer_path, tokenizer if tokenizer.is_dir() else None)
    return _of_originals(found, PUBLISHED, tokenizer)


def _snapshot(repository: str, patterns: list[str], allow_download: bool) -> Path:
    """The repository's folder in the hub cache; the network is not touched unless allow_download says so."""
    try:
        return Path(snapshot_download(repository, allow_patterns=patterns, local_files_only=not allow_download))
    except LocalEntryNotFoundError as error:
        why = (
            f" and could not be fetched: {error}"
            if allow_download
            else "; set model.allow_download: true to fetch it (126 GB for the official model), or give "
            "model.model_paths"
        )
        raise Refused(f"model.model_id_with_origin_paths: {repository} is not in the local hub cache{why}") from None


# ------------------------------------------------------------------------------------------------------------
# Checks that need headers only


def open_files(layout: Layout) -> Layout:
    """The layout with both experts' files `opened`, checked as far as headers tell; one that is opened, as it is.

    A diffusers folder's other parts are checked too.

    Refused: damaged or incomplete shards, quantised files, other models of the family, tensors that are missing, of
    another shape or too many, one file for both experts, and an expert whose name says that it is the other one.
    """
    if layout.opened is not None:
        return layout
    _check_configs(layout)
    opened = {}
    for expert, paths in layout.experts.items():
        checkpoint = shards.open_checkpoint(paths[0] if len(paths) == 1 else paths)
        shards.check_unquantised(
            checkpoint, "it cannot be trained on as it is; give the fp32, fp16 or bf16 files of the same model"
        )
        named = lora_files.expert_in_path(checkpoint.files[0].absolute())
        if named not in (None, expert):
            raise Refused(
                f"{checkpoint.files[0]} is given as the {expert} expert, its name or folder says {named}; swap the "
                "two, or rename it"
            )
        sources(checkpoint, config_of(layout, PARTS[expert]))
        opened[expert] = checkpoint
    high, low = opened["high_noise"], opened["low_noise"]
    if {file.resolve() for file in high.files} & {file.resolve() for file in low.files} or _same_weights(high, low):
        raise Refused(
            f"{high.path} and {low.path} are the same weights; Wan2.2 has a high-noise and a low-noise expert"
        )
    for folder in (layout.text_encoder, layout.vae):
        if folder.is_dir():
            shards.open_checkpoint(folder)
    return replace(layout, opened=opened)


def _check_configs(layout: Layout) -> None:
    """Refused unless the experts take noisy latents, the mask and the image's latents, as image-to-video does."""
    temporal = config_of(layout, "vae").get("scale_factor_temporal", 4)
    for part in PARTS.values():
        config = config_of(layout, part)
        wanted = 2 * config["out_channels"] + temporal
        if config["in_channels"] != wanted:
            what = " (a text-to-video model)" if config["in_channels"] == config["out_channels"] else ""
            why = f"{part}/config.json says {config['in_channels']} in_channels, not {wanted}{what}"
            raise Refused(_not_i2v(layout.configs, why))


def _common_names(checkpoint: Checkpoint) -> dict[str, str]:
    """{diffusers' name: the file's name} of all tensors. Refused when they are not those of a Wan transformer."""
    return {common: name for name, common in wan_names.naming(checkpoint)[1].items()}


def sources(checkpoint: Checkpoint, config: Mapping[str, Any]) -> dict[str, str]:
    """{name in the model: name in the files} of every tensor of an expert.

    Refused for files of Wan2.1, TI2V-5B and text-to-video models, by what tells them apart, and when the files lack a
    tensor, have one too many, or one of another shape.
    """
    names, wanted = _common_names(checkpoint), _shapes(json.dumps(config))
    if any(name.startswith("condition_embedder.image_embedder") for name in names):
        raise Refused(_not_i2v(checkpoint.path, "it has an image encoder's projection, as Wan2.1-I2V"))
    if "patch_embedding.weight" in names:
        channels = checkpoint.tensors[names["patch_embedding.weight"]].shape[1]
        kinds = {config["out_channels"]: " (a text-to-video model)", 48: " (TI2V-5B)"}
        if channels != config["in_channels"]:
            why = f"its patch_embedding takes {channels} channels, not {config['in_channels']}{kinds.get(channels, '')}"
            raise Refused(_not_i2v(checkpoint.path, why))
    if missing := [name for name in wanted if name not in names]:
        raise Refused(f"{checkpoint.path} lacks {missing[0]} ({len(missing)} of {len(wanted)} tensors missing)")
    for target, name in names.items():
        if target not in wanted:
            raise Refused(f"{checkpoint.path}: {name} has no place in a model of {config['num_layers']} layers")
        given = checkpoint.tensors[name].shape
        if given != wanted[target]:
            raise Refused(f"{checkpoint.path}: {name} is {given}, the model's is {wanted[target]}")
    return names


@lru_cache(maxsize=4)
def _shapes(config: str) -> dict[str, tuple[int, ...]]:
    """{name: shape} of every tensor of an expert of this configuration, as JSON: a start asks several times."""
    return {name: tuple(value.shape) for name, value in empty_expert(json.loads(config)).state_dict().items()}


def linear_layers(checkpoint: Checkpoint) -> list[str]:
    """diffusers' names of an expert's linear layers, by the file's headers: those whose weight has two axes."""
    weights = {name: checkpoint.tensors[stored] for name, stored in _common_names(checkpoint).items()}
    suffix = ".weight"
    return [name.removesuffix(suffix) for name, w in weights.items() if name.endswith(suffix) and len(w.shape) == 2]


def _same_weights(one: Checkpoint, other: Checkpoint) -> bool:
    """Whether the experts' first block modulations are the same bytes: two trainings never agree in one."""
    tables = [
        merge.read_rows(checkpoint.tensors[_common_names(checkpoint)["blocks.0.scale_shift_table"]], 0, 1)
        for checkpoint in (one, other)
    ]
    return torch.equal(*tables)


def config_of(layout: Layout, part: str) -> dict[str, Any]:
    """A part's configuration from its config.json, without loading it."""
    return read_json(layout.configs / part / "config.json")


def differences(layout: Layout, boundary: float, shift: float) -> list[str]:
    """A line for each of boundary and shift where the run differs from what the checkpoint says of itself."""
    index = read_json(layout.configs / "model_index.json")
    scheduler = read_json(layout.configs / "scheduler" / "scheduler_config.json")
    stated = {"model.min_timestep_boundary": (boundary, index.get("boundary_ratio"))}
    # the converted official pipeline says flow_shift 3, Wan's own configuration and Lightning's 5
    stated["sample.shift"] = (shift, scheduler.get("flow_shift", scheduler.get("shift")))
    return [
        f"{key} is {ours:g}, the checkpoint says {theirs:g}"
        for key, (ours, theirs) in stated.items()
        if theirs is not None and ours != theirs
    ]


def files(layout: Layout) -> dict[str, list[Path]]:
    """Files and folders by part (text_encoder, vae, high_noise, low_noise): what identifies the weights."""
    opened = open_files(layout).opened
    return {name: list(checkpoint.files) for name, checkpoint in opened.items()} | {
        "text_encoder": [layout.text_encoder, layout.tokenizer], "vae": [layout.vae]
    }  # fmt: skip


def boundary_ratio(configs: Path) -> float:
    """The sigma at or above which the pipeline folder's high-noise expert answers, from model_index.json."""
    index = read_json(configs / "model_index.json")
    if index.get("boundary_ratio") is None or index.get("expand_timesteps"):
        raise Refused(_not_i2v(configs, "it has no boundary_ratio between two experts"))
    return index["boundary_ratio"]
