"""The files of a Wan model, and checks of their headers before any weight is read.

A model is a diffusers folder, or the original files that Wan-AI, ComfyUI and Lightning ship. Nothing is downloaded.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from rewardfl.backbones.protocol import Source
from rewardfl.backbones.stock import check_tensors, new_on_meta, open_network, read_config
from rewardfl.backbones.wan.variants import VARIANTS, Variant
from rewardfl.file_kinds import foreign_path_hint
from rewardfl.weights import lora_files, merge, shards, wan_names
from rewardfl.weights.shards import Checkpoint, InputError

Parts = dict[str, list[Path]]  # by the variant's original_parts, and tokenizer
TOKENIZER_FILES = ("tokenizer.json", "spiece.model")  # a tokenizer has either


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The paths of a model's parts. configs: as stock.read_config takes them; a diffusers folder holds all parts."""

    variant: Variant
    configs: Path
    experts: Mapping[str, list[Path]]  # by name -> a file, a folder, an index, or shards
    text_encoder: Path
    vae: Path
    tokenizer: Path
    image_encoder: Path  # a folder, as transformers writes it, or the original file; of variants with CLIP

    def weight_files(self, experts: Mapping[str, Checkpoint]) -> dict[str, list[Path]]:
        """Return the files and folders of each part (text_encoder, vae, image_encoder, the experts)."""
        processor = self.configs / "image_processor" if self.configs.is_dir() else self.configs
        clip = {"image_encoder": [self.image_encoder, processor]} if self.variant.clip else {}
        return {name: list(checkpoint.files) for name, checkpoint in experts.items()} | {
            "text_encoder": [self.text_encoder, self.tokenizer], "vae": [self.vae]
        } | clip  # fmt: skip


def published(variant: Variant) -> Path:
    """Return the file of the published model's configurations, for files that come without any."""
    return Path(__file__).parent / "published" / f"{variant.published}.json"


def find_configs(variant: Variant, model_paths: str) -> Path:
    """Return the place of the configurations: the model's own if there is one, else `published`."""
    path = Path(model_paths)
    if path.suffix == ".json" and path.is_file():
        folder = _read_entries(variant, path).get("configs")
        return path.parent / folder if folder else published(variant)
    return path if model_paths and (path / "transformer" / "config.json").is_file() else published(variant)


def find_files(variant: Variant, source: Source) -> Layout:
    """Find the files of the configured model. Raise InputError for missing ones.

    model_paths: a diffusers folder, or a wan22_paths.json: an object with the variant's original_parts, or a list in
    their order. Each of its entries is a file, a folder of shards, an index.json or a list of shards, relative to the
    json file. origin_paths: "repository:pattern,..." as in DiffSynth and ROLL, from the local hub cache.
    """
    path = Path(source.model_paths)
    if source.origin_paths:
        configs, parts = published(variant), _find_in_hub(variant, source)
    elif path.suffix == ".json" and path.is_file():
        configs, parts = find_configs(variant, source.model_paths), _read_paths(variant, path)
    else:
        configs, parts = path, _find_in_folder(variant, path)
    experts = {name: parts[key] for name, key in zip(variant.experts, variant.original_parts, strict=False)}
    return Layout(
        variant=variant, configs=configs, experts=experts, text_encoder=parts["text_encoder"][0], vae=parts["vae"][0],
        tokenizer=_tokenizer(source.tokenizer_path, *parts.get("tokenizer", [])),
        image_encoder=parts.get("image_encoder", [Path()])[0],
    )  # fmt: skip


def _tokenizer(tokenizer_path: str, default: Path | None = None) -> Path:
    """Return the tokenizer's folder. Raise InputError without one: transformers would make an empty tokenizer."""
    path = Path(tokenizer_path) if tokenizer_path else default
    if path is None:
        why = "is empty, and these original files come without a tokenizer"
    elif not any((path / name).is_file() for name in TOKENIZER_FILES):
        why = f"{path} has no {' or '.join(TOKENIZER_FILES)}"
    else:
        return path
    raise InputError(f"model.tokenizer_path: {why}; give the folder google/umt5-xxl of the model's download")


def _find_in_folder(variant: Variant, path: Path) -> Parts:
    if not (path / "model_index.json").is_file():
        raise InputError(
            f"model.model_paths: {path.absolute()} is neither a diffusers pipeline folder (no model_index.json in "
            "it) nor a wan22_paths.json with the original files"
        )
    experts = dict(zip(variant.original_parts, variant.parts.values(), strict=False))
    others = {name: name for name in ("text_encoder", "vae", "image_encoder", "tokenizer")}
    return {key: [path / part] for key, part in (experts | others).items()}


def _read_entries(variant: Variant, path: Path) -> dict[str, Any]:
    """Read the entries of a wan22_paths.json that are not empty; none of a list of another length."""
    shards.require_file(path, "text")
    entries, keys = shards.parse_json(path.read_bytes(), str(path)), variant.original_parts
    if isinstance(entries, list):
        entries = dict(zip(keys, entries, strict=True)) if len(entries) == len(keys) else {}
    return {key: value for key, value in entries.items() if value} if isinstance(entries, dict) else {}


def _read_paths(variant: Variant, path: Path) -> Parts:
    keys, entries = variant.original_parts, _read_entries(variant, path)
    differing = [f"no {key}" for key in keys if key not in entries]
    differing += [f"unknown key {key!r}" for key in sorted(entries.keys() - {*keys, "tokenizer", "configs"})]
    if differing:
        raise InputError(
            f"{path}: {'; '.join(differing)}; {variant.published} takes {', '.join(keys)}, as an object (also with "
            "tokenizer and configs) or as a list in this order"
        )
    parts = {
        key: [path.parent / str(name) for name in (value if isinstance(value, list) else [value])]
        for key, value in entries.items()
    }
    for key, files in parts.items():
        if absent := [file for file in files if not file.exists()]:
            raise InputError(f"{path}: {key}: {absent[0]} does not exist{foreign_path_hint(absent[0])}")
        if len(files) != 1 and key not in keys[: len(variant.parts)]:
            raise InputError(f"{path}: {key} must be one path, it lists {len(files)}")
    return parts


def _find_in_hub(variant: Variant, source: Source) -> Parts:
    """Find the files by patterns with words such as high_noise, t5 and vae; the tokenizer is next to the t5 file."""
    parts: Parts = {}
    keys, expert_keys = variant.original_parts, variant.original_parts[: len(variant.parts)]
    expert_words = variant.experts if len(expert_keys) > 1 else ("diffusion_pytorch_model",)
    words = dict(zip((*expert_words, "t5", "vae", *(["clip"] if variant.clip else [])), keys, strict=True))
    for item in filter(None, (part.strip() for part in source.origin_paths.split(","))):
        repository, _, pattern = item.partition(":")
        key = next((key for word, key in words.items() if word in pattern.lower()), None)
        if key is None or key in parts or not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
            raise InputError(
                f"model.model_id_with_origin_paths: {item!r} must be owner/repository:pattern with one of "
                f"{', '.join(words)} in the pattern, each once"
            )
        patterns = [pattern] if source.tokenizer_path or key != "text_encoder" else [pattern, "google/umt5-xxl/*"]
        parts[key] = sorted(_snapshot(repository, patterns).glob(pattern))
        if not parts[key] or (len(parts[key]) > 1 and key not in expert_keys):
            raise InputError(f"model.model_id_with_origin_paths: {item!r} matches {len(parts[key])} files")
    if missing := [key for key in keys if key not in parts]:
        raise InputError(f"model.model_id_with_origin_paths names no {', '.join(missing)}")
    tokenizer = parts["text_encoder"][0].parent / "google" / "umt5-xxl"
    return parts | ({"tokenizer": [tokenizer]} if tokenizer.is_dir() else {})


def _snapshot(repository: str, patterns: list[str]) -> Path:
    """Return the repository's folder in the hub cache."""
    try:
        return Path(snapshot_download(repository, allow_patterns=patterns, local_files_only=True))
    except LocalEntryNotFoundError:
        raise InputError(
            f"model.model_id_with_origin_paths: {repository} is not in the local hub cache; fetch it by `hf download`"
        ) from None


def open_experts(layout: Layout) -> dict[str, Checkpoint]:
    """Open all experts' files by their headers, and check the other parts'.

    Raise InputError for damaged, quantised or incomplete files, other models, and one file for two experts.
    """
    if layout.configs != published(layout.variant):
        check_configs(layout.variant, layout.configs)
    checkpoints = {}
    for expert, paths in layout.experts.items():
        checkpoint = open_network(paths[0] if len(paths) == 1 else paths)
        expert_in_name = lora_files.expert_in_path(checkpoint.files[0].absolute())
        if len(layout.experts) > 1 and expert_in_name not in (None, expert):
            raise InputError(
                f"{checkpoint.files[0]} is given as the {expert} expert, its name says {expert_in_name}; swap the two"
            )
        config = read_config(layout.configs, layout.variant.parts[expert])
        shapes = {name: checkpoint.tensors[stored].shape for name, stored in common_names(checkpoint).items()}
        model = new_on_meta(WanTransformer3DModel, config).state_dict()
        check_tensors(checkpoint.path, shapes, model, f"{layout.variant.published} (model.model_name)")
        checkpoints[expert] = checkpoint
    # two trainings never agree in the bytes of the first block's modulation
    tables = [c.tensors[common_names(c)["blocks.0.scale_shift_table"]] for c in checkpoints.values()]
    if len(tables) > 1 and torch.equal(*(merge.read_rows(table, 0, 1) for table in tables)):
        paths = " and ".join(str(checkpoint.path) for checkpoint in checkpoints.values())
        raise InputError(f"{paths} are the same weights; Wan2.2 has a high-noise and a low-noise expert")
    folders = [layout.tokenizer]
    for part in (layout.text_encoder, layout.vae, *([layout.image_encoder] if layout.variant.clip else [])):
        if part.is_dir():
            shards.open_checkpoint(part)
            folders.append(part)
        elif part.suffix == ".safetensors":
            shards.read_header(part)
        else:
            lora_files.check_torch(part)
    for folder in folders:
        shards.check_folder(folder)
    for part in ("scheduler", *(["image_processor"] if layout.variant.clip else [])):
        read_config(layout.configs, part)
    return checkpoints


def check_configs(variant: Variant, folder: Path) -> None:
    """Raise InputError for the configurations of another model, by all that tells the variants apart."""
    network, vae = read_config(folder, "transformer"), read_config(folder, "vae")
    second, clip = (folder / "transformer_2").is_dir(), network.get("image_dim") is not None
    expand = bool(read_config(folder, "model_index").get("expand_timesteps"))
    matching = [
        name
        for name, model in VARIANTS.items()
        if network.get("_class_name") == "WanTransformer3DModel"  # SD3's has channels like a text-to-video Wan's
        and (second, expand, clip) == (len(model.parts) > 1, model.token_times, model.clip)
        and network["in_channels"] == model.in_channels(network, vae.get("scale_factor_temporal", 4))
    ]
    configured = next(name for name, model in VARIANTS.items() if model is variant)
    if configured not in matching:
        actual = VARIANTS[matching[0]].published if matching else "another model"
        way = f"set model.model_name: {matching[0]}" if matching else f"give the files of {variant.published}"
        raise InputError(f"model.model_name: {configured} is {variant.published}, but {folder} is {actual}; {way}")


def common_names(checkpoint: Checkpoint) -> dict[str, str]:
    """Return {diffusers' name: the file's name} of all tensors. Raise InputError unless a Wan transformer has them."""
    return {common: name for name, common in wan_names.detect_naming(checkpoint)[1].items()}


def boundary_ratio(configs: Path) -> float:
    """Read the lowest sigma of the pipeline folder's high-noise expert from model_index.json."""
    index = read_config(configs, "model_index")
    if index.get("boundary_ratio") is None:
        raise InputError(f"model.model_paths: {configs}/model_index.json has no boundary_ratio between its two experts")
    return index["boundary_ratio"]
