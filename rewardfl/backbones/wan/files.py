"""Which files a Wan model is made of, and what their headers tell, before any weight is read.

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

from rewardfl.backbones.stock import read_json
from rewardfl.backbones.wan.model import empty_expert
from rewardfl.backbones.wan.variants import VARIANTS, Variant, variant_of
from rewardfl.weights import lora_files, merge, shards, wan_names
from rewardfl.weights.shards import Checkpoint, Refused

# configurations of the published models, for files that come without any: pipeline folders without weights
PUBLISHED = Path(__file__).parent / "published"
TOKENIZER_FILES = ("tokenizer.json", "spiece.model")  # either is a tokenizer


@dataclass(frozen=True)
class Layout:
    """Where the parts of a model are. `configs`: a folder with model_index.json, transformer/config.json, and so on.

    In a diffusers folder everything is in `configs`. `opened`: the experts' tensors, as open_files finds them in the
    files' headers.
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


# Which files


def published(variant: Variant) -> Path:
    """The folder with the published model's configurations."""
    return PUBLISHED / variant.published


def source_of(variant: Variant, model_paths: str) -> Path:
    """The folder that says the model's shape: the model's own where its configurations are there, else `published`."""
    folder = Path(model_paths)
    if folder.suffix == ".json" and folder.is_file():
        given = json.loads(folder.read_text(encoding="utf-8"))
        if not isinstance(given, dict) or not given.get("configs"):
            return published(variant)
        folder = folder.parent / given["configs"]
    parts = [*variant.parts.values(), "vae", "text_encoder"]
    whole = model_paths and all((folder / part / "config.json").is_file() for part in parts)
    return folder if whole else published(variant)


def find_files(
    variant: Variant, model_paths: str, tokenizer_path: str = "", origin_paths: str = "", allow_download: bool = False
) -> Layout:
    """The files of the model that the configuration names. Refused, with the key and the way out, for what is missing.

    model_paths: a diffusers folder, or a wan22_paths.json (an object with the variant's original_parts, or a list in
    their order; each entry a file, a folder of shards, an index.json or a list of shards; relative to the json file).
    origin_paths: "repository:pattern,..." as DiffSynth and ROLL write it, looked up in the local hub cache, or
    downloaded.
    """
    if origin_paths:
        return _from_hub(variant, origin_paths, tokenizer_path, allow_download)
    path = Path(model_paths)
    if path.suffix == ".json" and path.is_file():
        return _from_json(variant, path, tokenizer_path)
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
    _check_index(variant, path, index)
    experts = {expert: [path / part] for expert, part in variant.parts.items()}
    tokenizer = _tokenizer(tokenizer_path, path / "tokenizer")
    clip = (path / "image_encoder", path / "image_processor") if variant.clip else ()
    return Layout(variant, path, experts, path / "text_encoder", path / "vae", tokenizer, *clip)


def _check_index(variant: Variant, path: Path, index: Mapping[str, Any]) -> None:
    """Refused for a pipeline folder of another model."""
    second = index.get("transformer_2")
    config = read_json(path / "transformer" / "config.json")
    kind = config.get("_class_name")
    if kind != "WanTransformer3DModel":  # SD3's has channels like a text-to-video Wan's
        raise Refused(_another(variant, path, f"no Wan: transformer/config.json says _class_name {kind!r}"))
    found = variant_of(
        two_experts=isinstance(second, list) and second[0] is not None,
        expand_timesteps=bool(index.get("expand_timesteps")),
        text_alone=config["in_channels"] == config["out_channels"],
    )
    if found.published != variant.published:
        raise Refused(_another(variant, path, found.published))
    if variant.experts != ("transformer",):
        boundary_ratio(path)


def _another(variant: Variant, path: Path, what: str) -> str:
    """Why the files at a path are refused; what: a model, or what they are, in words."""
    names = {one.published: name for name, one in reversed(VARIANTS.items())}  # the first name of several
    asked = next(name for name, one in VARIANTS.items() if one is variant)
    way = f"set model.model_name: {names[what]}" if what in names else f"give the files of {variant.published}"
    return f"model.model_name: {asked} is {variant.published}, but {path} (model.model_paths) is {what}; {way}"


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


def _from_json(variant: Variant, path: Path, tokenizer_path: str) -> Layout:
    keys = variant.original_parts
    given = read_json(path)
    if isinstance(given, list):
        if len(given) != len(keys):
            raise Refused(f"{path} lists {len(given)} parts; it must list {', '.join(keys)}, in this order")
        given = dict(zip(keys, given, strict=True))
    if not isinstance(given, dict):
        raise Refused(f"{path} must be an object with {', '.join(keys)}, or a list in their order")
    unknown = sorted(given.keys() - {*keys, "tokenizer", "configs"})
    given = {key: value for key, value in given.items() if value}
    missing = [key for key in keys if key not in given]
    if unknown or missing:
        raise Refused(
            f"{path}: " + "; ".join([f"no {key}" for key in missing] + [f"unknown key {key!r}" for key in unknown])
            + f"; {variant.published} takes {', '.join(keys)} and optionally tokenizer, configs"
        )  # fmt: skip
    parts = {key: [path.parent / one for one in _listed(value)] for key, value in given.items()}
    for key, files in parts.items():
        absent = [file for file in files if not file.exists()]
        if absent:
            raise Refused(f"{path}: {key}: {absent[0]} does not exist")
        if len(files) != 1 and key not in keys[: len(variant.parts)]:
            raise Refused(f"{path}: {key} must be one path, it lists {len(files)}")
    (tokenizer,) = parts.get("tokenizer", [None])
    configs = parts["configs"][0] if "configs" in parts else published(variant)
    return _of_originals(variant, parts, configs, _tokenizer(tokenizer_path, tokenizer))


def _of_originals(variant: Variant, parts: Mapping[str, list[Path]], configs: Path, tokenizer: Path) -> Layout:
    """The layout of files by the variant's original_parts."""
    experts = {name: parts[key] for name, key in zip(variant.experts, variant.original_parts, strict=False)}
    (text_encoder,), (vae,) = parts["text_encoder"], parts["vae"]
    clip = (parts["image_encoder"][0], configs / "image_processor") if variant.clip else ()
    return Layout(variant, configs, experts, text_encoder, vae, tokenizer, *clip)


def _listed(value: Any) -> list[str]:
    listed = value if isinstance(value, list) else [value]
    if not all(isinstance(one, str) for one in listed):
        raise Refused(f"{value!r} in the list of model files must be a path, or a list of paths")
    return listed


def _from_hub(variant: Variant, origin_paths: str, tokenizer_path: str, allow_download: bool) -> Layout:
    """Parts by the words in their patterns, such as high_noise, t5 and vae; the tokenizer from beside the t5 file."""
    found: dict[str, list[Path]] = {}
    keys, several = variant.original_parts, variant.original_parts[: len(variant.parts)]
    of_experts = variant.experts if len(several) > 1 else ("diffusion_pytorch_model",)
    words = dict(zip((*of_experts, "t5", "vae", *(["clip"] if variant.clip else [])), keys, strict=True))
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
        patterns = [pattern] if tokenizer_path or key != "text_encoder" else [pattern, "google/umt5-xxl/*"]
        found[key] = sorted(_snapshot(repository, patterns, allow_download).glob(pattern))
        if not found[key] or (len(found[key]) > 1 and key not in several):
            raise Refused(f"model.model_id_with_origin_paths: {item!r} matches {len(found[key])} files")
    if missing := [key for key in keys if key not in found]:
        raise Refused(f"model.model_id_with_origin_paths names no {', '.join(missing)}")
    tokenizer = found["text_encoder"][0].parent / "google" / "umt5-xxl"
    tokenizer = _tokenizer(tokenizer_path, tokenizer if tokenizer.is_dir() else None)
    return _of_originals(variant, found, published(variant), tokenizer)


def _snapshot(repository: str, patterns: list[str], allow_download: bool) -> Path:
    """The repository's folder in the hub cache; the network is not touched unless allow_download says so."""
    try:
        return Path(snapshot_download(repository, allow_patterns=patterns, local_files_only=not allow_download))
    except LocalEntryNotFoundError as error:
        why = (
            f" and could not be fetched: {error}"
            if allow_download
            else "; set model.allow_download: true to fetch it (126 GB for Wan2.2-I2V-A14B), or give model.model_paths"
        )
        raise Refused(f"model.model_id_with_origin_paths: {repository} is not in the local hub cache{why}") from None


# Checks that need headers only


def open_files(layout: Layout) -> Layout:
    """The layout with all experts' files `opened`, checked as far as headers tell; one that is opened, as it is.

    A diffusers folder's other parts are checked too.

    Refused: damaged or incomplete shards, quantised files, other models of the family, tensors that are missing, of
    another shape or too many, one file for two experts, and an expert whose name says that it is the other one.
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
        if len(layout.experts) > 1 and named not in (None, expert):
            raise Refused(
                f"{checkpoint.files[0]} is given as the {expert} expert, its name or folder says {named}; swap the "
                "two, or rename it"
            )
        config = config_of(layout, layout.variant.parts[expert])
        _check_kind(layout.variant, checkpoint, config)
        sources(checkpoint, config)
        opened[expert] = checkpoint
    _check_two(list(opened.values()))
    for folder in (layout.text_encoder, layout.vae, layout.image_encoder):
        if folder is not None and folder.is_dir():
            shards.open_checkpoint(folder)
    return replace(layout, opened=opened)


def _check_two(experts: list[Checkpoint]) -> None:
    """Refused when two experts are one."""
    for high, low in zip(experts, experts[1:], strict=False):
        shared = {file.resolve() for file in high.files} & {file.resolve() for file in low.files}
        # two trainings never agree in the bytes of the first block's modulation
        first = [one.tensors[_common_names(one)["blocks.0.scale_shift_table"]] for one in (high, low)]
        if shared or torch.equal(*(merge.read_rows(entry, 0, 1) for entry in first)):
            raise Refused(
                f"{high.path} and {low.path} are the same weights; Wan2.2 has a high-noise and a low-noise expert"
            )


def _check_configs(layout: Layout) -> None:
    """Refused unless the networks take what the variant gives them."""
    variant = layout.variant
    temporal = config_of(layout, "vae").get("scale_factor_temporal", 4)
    for part in variant.parts.values():
        config = config_of(layout, part)
        wanted, given = variant.in_channels(config, temporal), config["in_channels"]
        clip = config.get("image_dim") is not None
        if given != wanted or clip != variant.clip:
            tells = f"in_channels {given} (not {wanted})" if given != wanted else f"image_dim {config.get('image_dim')}"
            raise Refused(_another(variant, layout.configs, f"another model: {part}/config.json says {tells}"))


def _check_kind(variant: Variant, checkpoint: Checkpoint, config: Mapping[str, Any]) -> None:
    """Refused for the files of another variant, by what tells them apart, in words that name it."""
    names = _common_names(checkpoint)
    clip = any(name.startswith("condition_embedder.image_embedder") for name in names)
    if clip != variant.clip:
        found = "Wan2.1-I2V-14B" if clip else "another model: it has no image encoder's projection"
        raise Refused(_another(variant, checkpoint.path, found))
    if "patch_embedding.weight" in names:
        channels = checkpoint.tensors[names["patch_embedding.weight"]].shape[1]
        kinds = {16: " (a text-to-video model)", 36: " (an image-to-video model)", 48: " (Wan2.2-TI2V-5B)"}
        if channels != config["in_channels"]:
            what = f"its patch_embedding takes {channels} channels, not {config['in_channels']}"
            raise Refused(_another(variant, checkpoint.path, f"another model: {what}{kinds.get(channels, '')}"))


def _common_names(checkpoint: Checkpoint) -> dict[str, str]:
    """{diffusers' name: the file's name} of all tensors. Refused when they are not those of a Wan transformer."""
    return {common: name for name, common in wan_names.naming(checkpoint)[1].items()}


def sources(checkpoint: Checkpoint, config: Mapping[str, Any]) -> dict[str, str]:
    """{name in the model: name in the files} of every tensor of an expert.

    Refused when the files lack a tensor, have one too many, or one of another shape.
    """
    names, wanted = _common_names(checkpoint), _shapes(json.dumps(config))
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


def config_of(layout: Layout, part: str) -> dict[str, Any]:
    """A part's configuration from its config.json, without loading it."""
    return read_json(layout.configs / part / "config.json")


def differences(layout: Layout, boundary: float | None, shift: float | None) -> list[str]:
    """A line for each of boundary and shift where the run differs from what the checkpoint says of itself."""
    index = read_json(layout.configs / "model_index.json")
    scheduler = read_json(layout.configs / "scheduler" / "scheduler_config.json")
    stated = {"model.min_timestep_boundary": (boundary, index.get("boundary_ratio"))}
    # the converted official pipeline says flow_shift 3, Wan's own configuration and Lightning's 5
    stated["sample.shift"] = (shift, scheduler.get("flow_shift", scheduler.get("shift")))
    return [
        f"{key} is {ours:g}, the checkpoint says {theirs:g}"
        for key, (ours, theirs) in stated.items()
        if theirs is not None and ours is not None and ours != theirs
    ]


def files(layout: Layout) -> dict[str, list[Path]]:
    """Files and folders by part (text_encoder, vae, image_encoder, the experts): what identifies the weights."""
    opened = open_files(layout).opened
    clip = {} if layout.image_encoder is None else {"image_encoder": [layout.image_encoder, layout.image_processor]}
    return {name: list(checkpoint.files) for name, checkpoint in opened.items()} | {
        "text_encoder": [layout.text_encoder, layout.tokenizer], "vae": [layout.vae]
    } | clip  # fmt: skip


def boundary_ratio(configs: Path) -> float:
    """The sigma at or above which the pipeline folder's high-noise expert answers, from model_index.json."""
    index = read_json(configs / "model_index.json")
    if index.get("boundary_ratio") is None:
        raise Refused(f"model.model_paths: {configs}/model_index.json has no boundary_ratio between its two experts")
    return index["boundary_ratio"]
