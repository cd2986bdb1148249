"""Loading Wan2.2-I2V-A14B: a diffusers folder, or the original files that Wan-AI, ComfyUI and Lightning ship.

Nothing is downloaded unless `model.allow_download` says so. The experts are read tensor by tensor, whatever the
layout: the host holds one expert in its target precision and one tensor in the file's. They come out as
diffusers' `from_pretrained` would give them: in the wanted dtype, except for the modules that diffusers keeps
in float32.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate import init_empty_weights
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanImageToVideoPipeline, WanTransformer3DModel
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from torch import Tensor
from transformers import AutoTokenizer, UMT5Config, UMT5EncoderModel

from rewardfl import lora_files, merge, shards, wan_names
from rewardfl.lora_files import Lora
from rewardfl.shards import Checkpoint, Refused
from rewardfl.wan import PARTS

# configurations of the published model, for files that come without any; a pipeline folder without weights
PUBLISHED = Path(__file__).parent.parent / "configs" / "wan22_i2v_a14b"
KEYS = ("high_noise_model", "low_noise_model", "text_encoder", "vae")  # of a wan22_paths.json, in its list form's order


@dataclass(frozen=True)
class Layout:
    """Where the parts of a model are. `configs`: a folder with model_index.json, transformer/config.json, and so on.

    In a diffusers folder everything is in `configs`; the other paths name original files then absent.
    """

    configs: Path
    experts: Mapping[str, list[Path]]  # high_noise, low_noise -> a file, a folder, an index, or shards
    text_encoder: Path | None = None
    vae: Path | None = None
    tokenizer: Path | None = None
    notes: tuple[str, ...] = field(default=())


# ------------------------------------------------------------------------------------------------------------
# Which files


def find(model_paths: str, tokenizer_path: str = "", origin_paths: str = "", allow_download: bool = False) -> Layout:
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
    index = json.loads((path / "model_index.json").read_text())
    for name, kind in index.items():
        # transformers would make an empty tokenizer of a missing folder
        if isinstance(kind, list) and kind[0] and name not in given and not (path / name).is_dir():
            raise Refused(f"model.model_paths: {path} has no {name} folder")
    if not isinstance(index.get("transformer_2"), list) or index["transformer_2"][0] is None:
        raise Refused(_not_i2v(path, "it has one transformer"))
    if index.get("boundary_ratio") is None or index.get("expand_timesteps"):
        raise Refused(_not_i2v(path, "it has no boundary_ratio between two experts"))
    experts = {expert: [path / part] for expert, part in PARTS.items()}
    return Layout(path, experts, tokenizer=_tokenizer(tokenizer_path, path / "tokenizer"))


def _not_i2v(path: Path, why: str) -> str:
    return (
        f"model.model_paths: {path} is not Wan2.2-I2V-A14B: {why}. TI2V-5B, Wan2.1 and text-to-video models are not "
        "supported"
    )


def _tokenizer(tokenizer_path: str, default: Path | None) -> Path:
    path = Path(tokenizer_path) if tokenizer_path else default
    if path is None or not path.is_dir():
        where = f"{path} is not a folder" if path else "is empty, and original files come without a tokenizer"
        raise Refused(
            f"model.tokenizer_path: {where}; give the folder of google/umt5-xxl (Wan-AI ships it beside the model)"
        )
    return path


def _from_json(path: Path, tokenizer_path: str) -> Layout:
    given = json.loads(path.read_text())
    if isinstance(given, list):
        if len(given) != len(KEYS):
            raise Refused(f"{path} lists {len(given)} parts; it must list {', '.join(KEYS)}, in this order")
        given = dict(zip(KEYS, given, strict=True))
    unknown = sorted(given.keys() - {*KEYS, "tokenizer", "configs"})
    missing = [key for key in KEYS if not given.get(key)]
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
        if len(files) > 1 and key not in KEYS[:2]:
            raise Refused(f"{path}: {key} must be one path, it lists {len(files)}")
    tokenizer = parts["tokenizer"][0] if "tokenizer" in parts else None
    return Layout(
        parts["configs"][0] if "configs" in parts else PUBLISHED,
        {"high_noise": parts[KEYS[0]], "low_noise": parts[KEYS[1]]},
        parts["text_encoder"][0], parts["vae"][0], _tokenizer(tokenizer_path, tokenizer),
    )  # fmt: skip


def _listed(value: str | list[str]) -> list[str]:
    return value if isinstance(value, list) else [value]


def _from_hub(origin_paths: str, tokenizer_path: str, allow_download: bool) -> Layout:
    """Parts by what their patterns say: high_noise, low_noise, t5, VAE; the tokenizer from the same repository."""
    found: dict[str, list[Path]] = {}
    words = {"high_noise": KEYS[0], "low_noise": KEYS[1], "t5": KEYS[2], "vae": KEYS[3]}
    for item in filter(None, (part.strip() for part in origin_paths.split(","))):
        repository, _, pattern = item.partition(":")
        key = next((key for word, key in words.items() if word in pattern.lower()), None)
        if not repository or key is None:
            raise Refused(
                f"model.model_id_with_origin_paths: {item!r} must be repository:pattern with one of "
                f"{', '.join(words)} in the pattern"
            )
        patterns = [pattern] if tokenizer_path else [pattern, "google/umt5-xxl/*"]
        try:
            folder = Path(snapshot_download(repository, allow_patterns=patterns, local_files_only=not allow_download))
        except LocalEntryNotFoundError:
            raise Refused(
                f"model.model_id_with_origin_paths: {repository} is not in the local hub cache; set "
                "model.allow_download: true to fetch it (126 GB for the official model), or give model.model_paths"
            ) from None
        found[key] = sorted(folder.glob(pattern))
        if not found[key]:
            raise Refused(f"model.model_id_with_origin_paths: nothing matches {pattern} in {folder}")
    if missing := [key for key in KEYS if key not in found]:
        raise Refused(f"model.model_id_with_origin_paths names no {', '.join(missing)}")
    tokenizer = found[KEYS[2]][0].parent / "google" / "umt5-xxl"
    return Layout(
        PUBLISHED, {"high_noise": found[KEYS[0]], "low_noise": found[KEYS[1]]}, found[KEYS[2]][0], found[KEYS[3]][0],
        _tokenizer(tokenizer_path, tokenizer if tokenizer.is_dir() else None),
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------
# Checks that need headers only


def open_experts(layout: Layout) -> dict[str, Checkpoint]:
    """Both experts' files, checked as far as headers tell.

    Refused: damaged or incomplete shards, quantised files, other models of the family, one file for both experts, and
    an expert whose name says that it is the other one.
    """
    opened = {}
    for expert, paths in layout.experts.items():
        checkpoint = shards.open_checkpoint(paths[0] if len(paths) == 1 else paths)
        shards.check_unquantised(checkpoint)
        _check_i2v(checkpoint, config_of(layout, PARTS[expert]))
        named = lora_files.expert_in_path(checkpoint.files[0].absolute())
        if named not in (None, expert):
            raise Refused(f"{checkpoint.path} is given as the {expert} expert, its name says {named}; swap them")
        opened[expert] = checkpoint
    high, low = opened["high_noise"], opened["low_noise"]
    if {file.resolve() for file in high.files} & {file.resolve() for file in low.files} or _same_weights(high, low):
        raise Refused(
            f"{high.path} and {low.path} are the same weights; Wan2.2 has a high-noise and a low-noise expert"
        )
    return opened


def _check_i2v(checkpoint: Checkpoint, config: Mapping[str, object]) -> None:
    names = list(checkpoint.tensors)
    try:
        naming, prefix = wan_names.naming(names)
    except ValueError as error:
        raise Refused(f"{checkpoint.path}: {error}") from None
    common = {wan_names.common_name(name, naming, prefix): entry for name, entry in checkpoint.tensors.items()}
    if any(name.startswith("condition_embedder.image_embedder") for name in common):
        raise Refused(_not_i2v(checkpoint.path, "it has an image encoder's projection, as Wan2.1-I2V"))
    if "patch_embedding.weight" in common:
        shape = common["patch_embedding.weight"].shape
        kinds = {16: "a text-to-video model", 48: "TI2V-5B"}
        if shape[1] != config["in_channels"]:
            raise Refused(
                _not_i2v(
                    checkpoint.path,
                    f"its patch_embedding takes {shape[1]} channels, not {config['in_channels']}"
                    + (f" ({kinds[shape[1]]})" if shape[1] in kinds else ""),
                )
            )


def _same_weights(one: Checkpoint, other: Checkpoint) -> bool:
    """Whether the experts' first block modulations are the same bytes: two trainings never agree in one."""
    tables = []
    for checkpoint in (one, other):
        name = next(
            name for name in checkpoint.tensors if name.endswith(("blocks.0.modulation", "blocks.0.scale_shift_table"))
        )
        tables.append(merge.read_rows(checkpoint.tensors[name], 0, 1))
    return torch.equal(*tables)


def config_of(layout: Layout, part: str) -> dict[str, object]:
    """A part's configuration from its config.json, without loading it."""
    return json.loads((layout.configs / part / "config.json").read_text())


def differences(layout: Layout, boundary: float, shift: float) -> list[str]:
    """A line for each of boundary and shift where the run differs from what the checkpoint says of itself."""
    index = json.loads((layout.configs / "model_index.json").read_text())
    scheduler = json.loads((layout.configs / "scheduler" / "scheduler_config.json").read_text())
    stated = {"model.min_timestep_boundary": (boundary, index.get("boundary_ratio"))}
    # the converted official pipeline says flow_shift 3, Wan's own configuration and Lightning's 5
    stated["sample.shift"] = (shift, scheduler.get("flow_shift", scheduler.get("shift")))
    return [
        f"{key} is {ours:g}, the checkpoint says {theirs:g}"
        for key, (ours, theirs) in stated.items()
        if theirs is not None and ours != theirs
    ]


def read_distilled(high_noise: str, low_noise: str) -> list[Lora]:
    """The distillation LoRAs at two paths (empty: none), each checked to be for its expert and finite."""
    loras = []
    for expert, path in (("high_noise", high_noise), ("low_noise", low_noise)):
        if not path:
            continue
        found = lora_files.read_lora(path)
        mine = [lora for lora in found if lora.expert == expert] if len(found) > 1 else found
        loras += lora_files.assign(mine, expert)
    for lora in loras:
        merge.check_finite(lora)
    return loras


# ------------------------------------------------------------------------------------------------------------
# Loading


def load_pipeline(
    layout: Layout,
    dtype: torch.dtype,
    distilled: Sequence[Lora] = (),
    experts: Sequence[str] = ("high_noise", "low_noise"),
) -> WanImageToVideoPipeline:
    """The pipeline, frozen and in eval mode, on the CPU.

    distilled: LoRAs (with their experts) fused into the experts in the files' precision before the one rounding to
    `dtype`. experts: those to load; the others' components are None.
    """
    opened = open_experts(layout)
    loaded = dict.fromkeys(PARTS.values())
    for name in experts:
        fused = [lora for lora in distilled if lora.expert == name]
        loaded[PARTS[name]] = load_expert(opened[name], config_of(layout, PARTS[name]), dtype, fused)
    tokenizer = AutoTokenizer.from_pretrained(layout.tokenizer)
    index = json.loads((layout.configs / "model_index.json").read_text())
    pipe = WanImageToVideoPipeline(
        tokenizer=tokenizer,
        text_encoder=_load_text_encoder(layout, dtype),
        vae=_load_vae(layout, dtype),
        scheduler=UniPCMultistepScheduler.from_pretrained(layout.configs / "scheduler"),
        boundary_ratio=index["boundary_ratio"],
        image_encoder=None,
        image_processor=None,
        **loaded,
    )
    for module in (pipe.transformer, pipe.transformer_2, pipe.text_encoder, pipe.vae):
        if module is not None:
            module.requires_grad_(False).eval()
    return pipe


def load_expert(
    checkpoint: Checkpoint, config: Mapping[str, object], dtype: torch.dtype, distilled: Sequence[Lora] = ()
) -> WanTransformer3DModel:
    """One expert from files of either naming, equal to diffusers' `from_pretrained(torch_dtype=dtype)`.

    Refused when the files lack a tensor of the model, or have one more or of another shape.
    """
    with init_empty_weights(include_buffers=False):  # rope's buffers are not in the files
        model = WanTransformer3DModel.from_config(dict(config))
    plan = merge.plan(checkpoint, [(lora, 1.0) for lora in distilled], "keep", "diffusers")
    wanted = model.state_dict()
    renamed = {part.name: name for name, part in zip(checkpoint.tensors, plan.parts, strict=True)}
    if missing := [name for name in wanted if name not in renamed]:
        raise Refused(f"{checkpoint.path} lacks {missing[0]} ({len(missing)} of {len(wanted)} tensors missing)")
    for target, name in renamed.items():
        entry = checkpoint.tensors[name]
        if target not in wanted:
            raise Refused(f"{checkpoint.path}: {name} has no place in a model of {config['num_layers']} layers")
        if entry.shape != tuple(wanted[target].shape):
            raise Refused(f"{checkpoint.path}: {name} is {entry.shape}, the model's is {tuple(wanted[target].shape)}")
        value = merge.merged_tensor(entry, plan.merged.get(name, []))
        value = value.to(torch.float32 if wan_names.stays_float32(target) else dtype)
        model.load_state_dict({target: value}, strict=False, assign=True)
    return model


def _load_vae(layout: Layout, dtype: torch.dtype) -> AutoencoderKLWan:
    if layout.vae is None:
        return AutoencoderKLWan.from_pretrained(layout.configs / "vae", torch_dtype=dtype)
    return AutoencoderKLWan.from_single_file(
        str(layout.vae), config=str(layout.configs / "vae"), torch_dtype=dtype, local_files_only=True
    )


def _load_text_encoder(layout: Layout, dtype: torch.dtype) -> UMT5EncoderModel:
    if layout.text_encoder is None or layout.text_encoder.is_dir():
        folder = layout.text_encoder or layout.configs / "text_encoder"
        return UMT5EncoderModel.from_pretrained(folder, dtype=dtype, local_files_only=True)
    config = UMT5Config.from_pretrained(layout.configs / "text_encoder")
    with init_empty_weights(include_buffers=False):
        model = UMT5EncoderModel(config)
    state = torch.load(layout.text_encoder, map_location="cpu", weights_only=True, mmap=True)
    converted = text_encoder_state(state, config.num_layers)
    expected = model.state_dict().keys()
    if converted.keys() != expected:
        first = sorted(converted.keys() ^ expected)[0]
        raise Refused(
            f"text_encoder: {layout.text_encoder} is not the UMT5 encoder that {layout.configs / 'text_encoder'} "
            f"describes: {first} is on one side only"
        )
    model.load_state_dict({name: value.to(dtype) for name, value in converted.items()}, assign=True)
    model.tie_weights()
    return model


def text_encoder_state(state: Mapping[str, Tensor], layers: int) -> dict[str, Tensor]:
    """transformers' names for the tensors of models_t5_umt5-xxl-enc-bf16.pth (Wan-AI's own T5 code)."""
    converted = {}
    for name in ("shared", "encoder.embed_tokens"):
        converted[f"{name}.weight"] = state["token_embedding.weight"]
    converted["encoder.final_layer_norm.weight"] = state["norm.weight"]
    inside = {f"attn.{part}": f"layer.0.SelfAttention.{part}" for part in "qkvo"} | {
        "norm1": "layer.0.layer_norm",
        "pos_embedding.embedding": "layer.0.SelfAttention.relative_attention_bias",
        "norm2": "layer.1.layer_norm",
        "ffn.gate.0": "layer.1.DenseReluDense.wi_0",
        "ffn.fc1": "layer.1.DenseReluDense.wi_1",
        "ffn.fc2": "layer.1.DenseReluDense.wo",
    }
    for layer in range(layers):
        for old, new in inside.items():
            converted[f"encoder.block.{layer}.{new}.weight"] = state[f"blocks.{layer}.{old}.weight"]
    return converted
