"""The files of a Wan model, and checks of their headers before any weight is read.

A model is a diffusers folder, or the original files that Wan-AI, ComfyUI and Lightning ship. Nothing is downloaded
unless `model.allow_download` is true.
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

from rewardfl.backbones.stock import read_json
from rewardfl.backbones.wan.model import empty_expert
from rewardfl.backbones.wan.variants import VARIANTS, Variant, find_variant
from rewardfl.weights import lora_files, merge, shards, wan_names
from rewardfl.weights.shards import Checkpoint, InputError

# configurations of the published models, for files that come without any: pipeline folders without weights
PUBLISHED = Path(__file__).parent / "published"

TOKENIZER_FILES = ("tokenizer.json", "spiece.model")  # a tokenizer has either


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The paths of a model's parts. `configs`: a folder with model_index.json, transformer/config.json, and so on.

    In a diffusers folder everything is in `configs`. `opened`: the experts' tensors, from the headers (open_files).
    """

    variant: Variant
    configs: Path
    experts: Mapping[str, list[Path]]  # by name -> a file, a folder, an index, or shards
    text_encoder: Path | None = None
    vae: Path | None = None
    tokenizer: Path | None = None
    image_encoder: Path | None = None  # a folder, as transformers writes it, or the original file
    image_processor: Path | None = None
    opened: Mapping[str, Checkpoint] | None = None


def published(variant: Variant) -> Path:
    """Return the folder with the published model's configurations."""
    return PUBLISHED / variant.published


def find_configs(variant: Variant, model_paths: str) -> Path:
    """Return the folder of the configurations: the model's own if it is complete, else `published`."""
    folder = Path(model_paths)
    if folder.suffix == ".json" and folder.is_file():
        paths = json.loads(folder.read_text(encoding="utf-8"))
        if not isinstance(paths, dict) or not paths.get("configs"):
            return published(variant)
        folder = folder.parent / paths["configs"]
    parts = [*variant.parts.values(), "vae", "text_encoder"]
    complete = model_paths and all((folder / part / "config.json").is_file() for part in parts)
    return folder if complete else published(variant)


def find_files(
    variant: Variant, model_paths: str, tokenizer_path: str = "", origin_paths: str = "", allow_download: bool = False
) -> Layout:
    """Find the files of the configured model. Raise InputError, with the key and the way out, for missing ones.

    model_paths: a diffusers folder, or a wan22_paths.json: an object with the variant's original_parts, or a list in
    their order. Each of its entries is a file, a folder of shards, an index.json or a list of shards, relative to the
    json file. origin_paths: "repository:pattern,..." as in DiffSynth and ROLL, from the local hub cache or downloaded.
    """
    if origin_paths:
        return _from_hub(variant, origin_paths, tokenizer_path, allow_download)
    path = Path(model_paths)
    if path.suffix == ".json" and path.is_file():
        return _from_json(variant, path, tokenizer_path)
    if not (path / "model_index.json").is_file():
        raise InputError(
            f"model.model_paths: {model_paths} is neither a diffusers pipeline folder (no model_index.json in it) nor "
            "a wan22_paths.json with the original files"
        )
    index = read_json(path / "model_index.json")
    for name, kind in index.items():
        if name == "tokenizer" and tokenizer_path:
            continue
        # transformers would make an empty tokenizer of a missing folder
        if isinstance(kind, list) and kind[0] and not (path / name).is_dir():
            raise InputError(f"model.model_paths: {path} has no {name} folder")
    _check_index(variant, path, index)
    experts = {expert: [path / part] for expert, part in variant.parts.items()}
    tokenizer = _tokenizer(tokenizer_path, path / "tokenizer")
    return Layout(
        variant=variant, configs=path, experts=experts, text_encoder=path / "text_encoder", vae=path / "vae",
        tokenizer=tokenizer, image_encoder=path / "image_encoder" if variant.clip else None,
        image_processor=path / "image_processor" if variant.clip else None,
    )  # fmt: skip


def _check_index(variant: Variant, path: Path, index: Mapping[str, Any]) -> None:
    """Raise InputError for a pipeline folder of another model."""
    second = index.get("transformer_2")
    config = read_json(path / "transformer" / "config.json")
    kind = config.get("_class_name")
    if kind != "WanTransformer3DModel":  # SD3's has channels like a text-to-video Wan's
        raise _wrong_model(variant, path, f"no Wan: transformer/config.json says _class_name {kind!r}")
    actual = find_variant(
        two_experts=isinstance(second, list) and second[0] is not None,
        expand_timesteps=bool(index.get("expand_timesteps")),
        text_alone=config["in_channels"] == config["out_channels"],
    )
    if actual.published != variant.published:
        raise _wrong_model(variant, path, actual.published)
    if variant.experts != ("transformer",):
        boundary_ratio(path)


def _wrong_model(variant: Variant, path: Path, actual: str) -> InputError:
    """Return the error for files of another model; actual: its published name, or a description."""
    names = {model.published: name for name, model in reversed(VARIANTS.items())}  # the first name of several
    configured = next(name for name, model in VARIANTS.items() if model is variant)
    way = f"set model.model_name: {names[actual]}" if actual in names else f"give the files of {variant.published}"
    return InputError(
        f"model.model_name: {configured} is {variant.published}, but {path} (model.model_paths) is {actual}; {way}"
    )


def _tokenizer(tokenizer_path: str, default: Path | None) -> Path:
    """Return the tokenizer's folder.

    Raise InputError for a folder without one: transformers would make an empty one.
    """
    path = Path(tokenizer_path) if tokenizer_path else default
    if path is None:
        why = "is empty, and these original files come without a tokenizer"
    elif not any((path / name).is_file() for name in TOKENIZER_FILES):
        why = f"{path} has no {' or '.join(TOKENIZER_FILES)}"
    else:
        return path
    raise InputError(f"model.tokenizer_path: {why}; give the folder google/umt5-xxl that Wan-AI ships beside the model")


def _from_json(variant: Variant, path: Path, tokenizer_path: str) -> Layout:
    keys = variant.original_parts
    entries = read_json(path)
    if isinstance(entries, list):
        if len(entries) != len(keys):
            raise InputError(f"{path} lists {len(entries)} parts; it must list {', '.join(keys)}, in this order")
        entries = dict(zip(keys, entries, strict=True))
    if not isinstance(entries, dict):
        raise InputError(f"{path} must be an object with {', '.join(keys)}, or a list in their order")
    unknown = sorted(entries.keys() - {*keys, "tokenizer", "configs"})
    entries = {key: value for key, value in entries.items() if value}
    missing = [key for key in keys if key not in entries]
    if unknown or missing:
        raise InputError(
            f"{path}: " + "; ".join([f"no {key}" for key in missing] + [f"unknown key {key!r}" for key in unknown])
            + f"; {variant.published} takes {', '.join(keys)} and optionally tokenizer, configs"
        )  # fmt: skip
    parts = {key: [path.parent / name for name in _as_list(value)] for key, value in entries.items()}
    for key, files in parts.items():
        absent = [file for file in files if not file.exists()]
        if absent:
            raise InputError(f"{path}: {key}: {absent[0]} does not exist")
        if len(files) != 1 and key not in keys[: len(variant.parts)]:
            raise InputError(f"{path}: {key} must be one path, it lists {len(files)}")
    (tokenizer,) = parts.get("tokenizer", [None])
    configs = parts["configs"][0] if "configs" in parts else published(variant)
    return _from_originals(variant, parts, configs, _tokenizer(tokenizer_path, tokenizer))


def _from_originals(variant: Variant, parts: Mapping[str, list[Path]], configs: Path, tokenizer: Path) -> Layout:
    """Make the layout of files by the variant's original_parts."""
    experts = {name: parts[key] for name, key in zip(variant.experts, variant.original_parts, strict=False)}
    (text_encoder,), (vae,) = parts["text_encoder"], parts["vae"]
    return Layout(
        variant=variant, configs=configs, experts=experts, text_encoder=text_encoder, vae=vae, tokenizer=tokenizer,
        image_encoder=parts["image_encoder"][0] if variant.clip else None,
        image_processor=configs / "image_processor" if variant.clip else None,
    )  # fmt: skip


def _as_list(value: Any) -> list[str]:
    names = value if isinstance(value, list) else [value]
    if not all(isinstance(name, str) for name in names):
        raise InputError(f"{value!r} in the list of model files must be a path, or a list of paths")
    return names


def _from_hub(variant: Variant, origin_paths: str, tokenizer_path: str, allow_download: bool) -> Layout:
    """Make the layout from patterns with words such as high_noise, t5 and vae; the tokenizer is next to the t5 file."""
    parts: dict[str, list[Path]] = {}
    keys, expert_keys = variant.original_parts, variant.original_parts[: len(variant.parts)]
    expert_words = variant.experts if len(expert_keys) > 1 else ("diffusion_pytorch_model",)
    words = dict(zip((*expert_words, "t5", "vae", *(["clip"] if variant.clip else [])), keys, strict=True))
    for item in filter(None, (part.strip() for part in origin_paths.split(","))):
        repository, _, pattern = item.partition(":")
        key = next((key for word, key in words.items() if word in pattern.lower()), None)
        if key is None or not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
            raise InputError(
                f"model.model_id_with_origin_paths: {item!r} must be owner/repository:pattern with one of "
                f"{', '.join(words)} in the pattern"
            )
        if key in parts:
            raise InputError(f"model.model_id_with_origin_paths names {key} twice, the second is {item!r}")
        patterns = [pattern] if tokenizer_path or key != "text_encoder" else [pattern, "google/umt5-xxl/*"]
        parts[key] = sorted(_snapshot(repository, patterns, allow_download).glob(pattern))
        if not parts[key] or (len(parts[key]) > 1 and key not in expert_keys):
            raise InputError(f"model.model_id_with_origin_paths: {item!r} matches {len(parts[key])} files")
    if missing := [key for key in keys if key not in parts]:
        raise InputError(f"model.model_id_with_origin_paths names no {', '.join(missing)}")
    tokenizer = parts["text_encoder"][0].parent / "google" / "umt5-xxl"
    tokenizer = _tokenizer(tokenizer_path, tokenizer if tokenizer.is_dir() else None)
    return _from_originals(variant, parts, published(variant), tokenizer)


def _snapshot(repository: str, patterns: list[str], allow_download: bool) -> Path:
    """Return the repository's folder in the hub cache; use the network only with allow_download."""
    try:
        return Path(snapshot_download(repository, allow_patterns=patterns, local_files_only=not allow_download))
    except LocalEntryNotFoundError as error:
        why = (
            f" and could not be fetched: {error}"
            if allow_download
            else "; set model.allow_download: true to fetch it (126 GB for Wan2.2-I2V-A14B), or give model.model_paths"
        )
        raise InputError(f"model.model_id_with_origin_paths: {repository} is not in the local hub cache{why}") from None


def open_files(layout: Layout) -> Layout:
    """Open all experts' files by their headers, unless they are open; check the other parts of a diffusers folder, too.

    Raise InputError for damaged or incomplete shards, quantised files and other models of the family. Raise it also for
    missing, surplus or misshapen tensors, one file for two experts, and an expert with the other one's name.
    """
    if layout.opened is not None:
        return layout
    _check_configs(layout)
    checkpoints = {}
    for expert, paths in layout.experts.items():
        checkpoint = shards.open_checkpoint(paths[0] if len(paths) == 1 else paths)
        shards.check_unquantised(
            checkpoint, "it cannot be trained on as it is; give the fp32, fp16 or bf16 files of the same model"
        )
        expert_in_name = lora_files.expert_in_path(checkpoint.files[0].absolute())
        if len(layout.experts) > 1 and expert_in_name not in (None, expert):
            raise InputError(
                f"{checkpoint.files[0]} is given as the {expert} expert, its name or folder says {expert_in_name}; "
                "swap the two, or rename it"
            )
        config = read_part_config(layout, layout.variant.parts[expert])
        _check_variant(layout.variant, checkpoint, config)
        sources(checkpoint, config)
        checkpoints[expert] = checkpoint
    _check_experts_differ(list(checkpoints.values()))
    for folder in (layout.text_encoder, layout.vae, layout.image_encoder):
        if folder is not None and folder.is_dir():
            shards.open_checkpoint(folder)
    return replace(layout, opened=checkpoints)


def _check_experts_differ(experts: list[Checkpoint]) -> None:
    for high, low in zip(experts, experts[1:], strict=False):
        shared = {file.resolve() for file in high.files} & {file.resolve() for file in low.files}
        # two trainings never agree in the bytes of the first block's modulation
        tables = [expert.tensors[_common_names(expert)["blocks.0.scale_shift_table"]] for expert in (high, low)]
        if shared or torch.equal(*(merge.read_rows(table, 0, 1) for table in tables)):
            raise InputError(
                f"{high.path} and {low.path} are the same weights; Wan2.2 has a high-noise and a low-noise expert"
            )


def _check_configs(layout: Layout) -> None:
    """Raise InputError unless the networks' inputs are the variant's."""
    variant = layout.variant
    temporal = read_part_config(layout, "vae").get("scale_factor_temporal", 4)
    for part in variant.parts.values():
        config = read_part_config(layout, part)
        expected, actual = variant.in_channels(config, temporal), config["in_channels"]
        if actual != expected:
            difference = f"in_channels {actual} (not {expected})"
        elif (config.get("image_dim") is not None) != variant.clip:
            difference = f"image_dim {config.get('image_dim')}"
        else:
            continue
        raise _wrong_model(variant, layout.configs, f"another model: {part}/config.json says {difference}")


def _check_variant(variant: Variant, checkpoint: Checkpoint, config: Mapping[str, Any]) -> None:
    """Raise InputError for the files of another variant, and name that one."""
    names = _common_names(checkpoint)
    clip = any(name.startswith("condition_embedder.image_embedder") for name in names)
    if clip != variant.clip:
        actual = "Wan2.1-I2V-14B" if clip else "another model: it has no image encoder's projection"
        raise _wrong_model(variant, checkpoint.path, actual)
    if "patch_embedding.weight" in names:
        channels = checkpoint.tensors[names["patch_embedding.weight"]].shape[1]
        kinds = {16: " (a text-to-video model)", 36: " (an image-to-video model)", 48: " (Wan2.2-TI2V-5B)"}
        if channels != config["in_channels"]:
            difference = f"its patch_embedding takes {channels} channels, not {config['in_channels']}"
            raise _wrong_model(variant, checkpoint.path, f"another model: {difference}{kinds.get(channels, '')}")


def _common_names(checkpoint: Checkpoint) -> dict[str, str]:
    """Return {diffusers' name: the file's name} of all tensors. Raise InputError unless a Wan transformer has them."""
    return {common: name for name, common in wan_names.detect_naming(checkpoint)[1].items()}


def sources(checkpoint: Checkpoint, config: Mapping[str, Any]) -> dict[str, str]:
    """Return {name in the model: name in the files} of every tensor of an expert.

    Raise InputError for missing and surplus tensors, and other shapes.
    """
    names, shapes = _common_names(checkpoint), _shapes(json.dumps(config))
    if missing := [name for name in shapes if name not in names]:
        raise InputError(f"{checkpoint.path} lacks {missing[0]} ({len(missing)} of {len(shapes)} tensors missing)")
    for target, name in names.items():
        if target not in shapes:
            raise InputError(f"{checkpoint.path}: {name} has no place in a model of {config['num_layers']} layers")
        shape = checkpoint.tensors[name].shape
        if shape != shapes[target]:
            raise InputError(f"{checkpoint.path}: {name} is {shape}, the model's is {shapes[target]}")
    return names


@lru_cache(maxsize=4)
def _shapes(config: str) -> dict[str, tuple[int, ...]]:
    """Return {name: shape} of every tensor of an expert of this configuration, given as JSON to be cached."""
    return {name: tuple(value.shape) for name, value in empty_expert(json.loads(config)).state_dict().items()}


def linear_layers(checkpoint: Checkpoint) -> list[str]:
    """Return diffusers' names of an expert's linear layers: by the headers, those whose weight has two axes."""
    weights = {name: checkpoint.tensors[stored] for name, stored in _common_names(checkpoint).items()}
    suffix = ".weight"
    return [name.removesuffix(suffix) for name, w in weights.items() if name.endswith(suffix) and len(w.shape) == 2]


def read_part_config(layout: Layout, part: str) -> dict[str, Any]:
    """Read a part's config.json."""
    return read_json(layout.configs / part / "config.json")


def config_mismatches(layout: Layout, boundary: float | None, shift: float | None) -> list[str]:
    """Return a line for each of boundary and shift where the run differs from the checkpoint."""
    index = read_json(layout.configs / "model_index.json")
    scheduler = read_json(layout.configs / "scheduler" / "scheduler_config.json")
    settings = {
        "model.min_timestep_boundary": (boundary, index.get("boundary_ratio")),
        # the converted official pipeline says flow_shift 3, Wan's own configuration and Lightning's 5
        "sample.shift": (shift, scheduler.get("flow_shift", scheduler.get("shift"))),
    }
    return [
        f"{key} is {configured:g}, the checkpoint says {stated:g}"
        for key, (configured, stated) in settings.items()
        if stated is not None and configured is not None and configured != stated
    ]


def files(layout: Layout) -> dict[str, list[Path]]:
    """Return the files and folders of each part (text_encoder, vae, image_encoder, the experts)."""
    checkpoints = open_files(layout).opened
    clip = {} if layout.image_encoder is None else {"image_encoder": [layout.image_encoder, layout.image_processor]}
    return {name: list(checkpoint.files) for name, checkpoint in checkpoints.items()} | {
        "text_encoder": [layout.text_encoder, layout.tokenizer], "vae": [layout.vae]
    } | clip  # fmt: skip


def boundary_ratio(configs: Path) -> float:
    """Read the lowest sigma of the pipeline folder's high-noise expert from model_index.json."""
    index = read_json(configs / "model_index.json")
    if index.get("boundary_ratio") is None:
        raise InputError(f"model.model_paths: {configs}/model_index.json has no boundary_ratio between its two experts")
    return index["boundary_ratio"]
