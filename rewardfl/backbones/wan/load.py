"""Loading a Wan model from a layout of files (rewardfl/backbones/wan/files.py).

The experts are read tensor by tensor in every layout: the host holds one expert in its target precision and a few rows
in the file's. The result equals diffusers' `from_pretrained`: modules that diffusers keeps in float32 stay so.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanTransformer3DModel
from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers
from torch import Tensor, nn
from transformers import (
    AutoImageProcessor,
    AutoTokenizer,
    CLIPVisionConfig,
    CLIPVisionModel,
    UMT5Config,
    UMT5EncoderModel,
)

from rewardfl import lora
from rewardfl.backbones.stock import LOCAL, complete, pipeline_class, read_json
from rewardfl.backbones.wan.files import Layout, open_files, read_part_config, sources
from rewardfl.backbones.wan.model import empty_expert
from rewardfl.weights import lora_files, merge, shards, wan_names
from rewardfl.weights.lora_files import Lora
from rewardfl.weights.shards import Checkpoint, InputError

if TYPE_CHECKING:
    from diffusers import WanImageToVideoPipeline


def load_pipeline(
    layout: Layout,
    dtype: torch.dtype,
    distilled: Sequence[Lora] = (),
    distill_mode: str = "fuse",
    parts: Sequence[str] | None = None,
) -> "WanImageToVideoPipeline":
    """Load the pipeline, frozen and in eval mode, on the CPU; a text-to-video model's, too: it encodes prompts equally.

    distilled: LoRAs (with their experts), by distill_mode either fused in the files' precision before the one rounding
    to `dtype`, or attached as adapters that stay on. parts: those to load, None for all; the other components are None.
    The tokenizer comes with the text encoder. vae_decoder is the VAE without its encoder.
    """
    checkpoints, variant = open_files(layout).opened, layout.variant
    parts = ("text_encoder", "image_encoder", "vae", *variant.experts) if parts is None else parts
    loaded = dict.fromkeys(
        ("tokenizer", "text_encoder", "vae", "image_encoder", "image_processor", "transformer", "transformer_2")
    )
    for name in variant.parts.keys() & parts:
        loras = [adapter for adapter in distilled if adapter.expert == name]
        config = read_part_config(layout, variant.parts[name])
        expert = load_expert(checkpoints[name], config, dtype, loras if distill_mode == "fuse" else ())
        for adapter in loras if distill_mode == "adapter" else ():
            lora.attach_frozen(expert, adapter)
        loaded[variant.parts[name]] = expert
    if "text_encoder" in parts:
        loaded["tokenizer"] = AutoTokenizer.from_pretrained(layout.tokenizer, local_files_only=True)
        loaded["text_encoder"] = _load_text_encoder(layout, dtype)
    if "vae" in parts or "vae_decoder" in parts:
        loaded["vae"] = _load_vae(layout, dtype)
    if "vae_decoder" in parts:
        loaded["vae"].encoder = loaded["vae"].quant_conv = None
    if variant.clip and "image_encoder" in parts:
        loaded["image_encoder"] = _load_image_encoder(layout, dtype)
        loaded["image_processor"] = AutoImageProcessor.from_pretrained(layout.image_processor, local_files_only=True)
    index = read_json(layout.configs / "model_index.json")
    pipe = pipeline_class("WanImageToVideoPipeline")(
        scheduler=UniPCMultistepScheduler.from_pretrained(layout.configs / "scheduler", local_files_only=True),
        boundary_ratio=index.get("boundary_ratio"),
        expand_timesteps=variant.image == "frame",
        **loaded,
    )
    for module in (pipe.transformer, pipe.transformer_2, pipe.text_encoder, pipe.vae, pipe.image_encoder):
        if module is not None:
            module.requires_grad_(False).eval()
    return pipe


def load_expert(
    checkpoint: Checkpoint, config: Mapping[str, Any], dtype: torch.dtype, distilled: Sequence[Lora] = ()
) -> WanTransformer3DModel:
    """Load one expert from files of either naming, equal to diffusers' `from_pretrained(torch_dtype=dtype)`.

    distilled: LoRAs added in float32 before the one rounding.
    Raise InputError as in `sources`, and for LoRAs that do not
    fit.
    """
    merged = merge.updates_by_tensor(checkpoint, [(adapter, 1.0) for adapter in distilled])
    state = {}
    for target, name in sources(checkpoint, config).items():
        stored = torch.float32 if wan_names.stays_float32(target) else dtype
        state[target] = merge.merge_tensor(checkpoint.tensors[name], merged.get(name, []), stored)
    model = empty_expert(config)
    model.load_state_dict(state, assign=True)
    return model


def _load_vae(layout: Layout, dtype: torch.dtype) -> AutoencoderKLWan:
    path = layout.vae
    if path.is_dir():
        return complete(path, *AutoencoderKLWan.from_pretrained(path, torch_dtype=dtype, **LOCAL))
    with torch.device("meta"):
        model = AutoencoderKLWan.from_config(read_part_config(layout, "vae"))
    state = _read_state(path)
    _fill(model, state if "quant_conv.weight" in state else vae_state(state), dtype, path)
    return model


def _load_text_encoder(layout: Layout, dtype: torch.dtype) -> UMT5EncoderModel:
    path = layout.text_encoder
    if path.is_dir():
        return complete(path, *UMT5EncoderModel.from_pretrained(path, dtype=dtype, **LOCAL))
    config = UMT5Config.from_pretrained(layout.configs / "text_encoder", local_files_only=True)
    with torch.device("meta"):
        model = UMT5EncoderModel(config)
    _fill(model, text_encoder_state(_read_state(path), config.num_layers), dtype, path)
    model.tie_weights()
    return model


def _load_image_encoder(layout: Layout, dtype: torch.dtype) -> CLIPVisionModel:
    path = layout.image_encoder
    if path.is_dir():
        return complete(path, *CLIPVisionModel.from_pretrained(path, dtype=dtype, **LOCAL))
    config = CLIPVisionConfig.from_pretrained(layout.configs / "image_encoder", local_files_only=True)
    with torch.device("meta"):
        model = CLIPVisionModel(config)
    _fill(model, image_encoder_state(_read_state(path)), dtype, path)
    positions = torch.arange(model.embeddings.num_positions)[None]  # in no file
    model.embeddings.register_buffer("position_ids", positions, persistent=False)
    return model


def _read_state(path: Path) -> dict[str, Tensor]:
    """Map the tensors of a .safetensors or torch file. Raise InputError for damage or code in a pickle."""
    if path.suffix == ".safetensors":
        shards.read_header(path)
        return safetensors.torch.load_file(path)
    return lora_files.read_torch(path)


def _fill(model: nn.Module, state: Mapping[str, Tensor], dtype: torch.dtype, path: Path) -> None:
    """Fill a model on the meta device. Raise InputError where names or shapes differ. Tied weights count once."""
    expected = dict(model.named_parameters())
    if differing := sorted(state.keys() ^ expected.keys()):
        side = "has no" if differing[0] in expected else "has a surplus"
        raise InputError(
            f"{path} is not the {type(model).__name__} that its config.json describes: it {side} {differing[0]} "
            f"({len(differing)} names differ)"
        )
    for name, value in state.items():
        if value.shape != expected[name].shape:
            raise InputError(f"{path}: {name} is {tuple(value.shape)}, the model's is {tuple(expected[name].shape)}")
    # always a copy: mapped tensors are not aligned, and change with their file
    copies = {name: value.to(dtype, copy=True) for name, value in state.items()}
    model.load_state_dict(copies, strict=False, assign=True)


def text_encoder_state(state: Mapping[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Rename models_t5_umt5-xxl-enc-bf16.pth (Wan-AI's T5 code) to transformers' names; other tensors keep theirs."""
    names = {"token_embedding": "shared", "norm": "encoder.final_layer_norm"}
    inside = {f"attn.{part}": f"layer.0.SelfAttention.{part}" for part in "qkvo"} | {
        "norm1": "layer.0.layer_norm",
        "pos_embedding.embedding": "layer.0.SelfAttention.relative_attention_bias",
        "norm2": "layer.1.layer_norm",
        "ffn.gate.0": "layer.1.DenseReluDense.wi_0",
        "ffn.fc1": "layer.1.DenseReluDense.wi_1",
        "ffn.fc2": "layer.1.DenseReluDense.wo",
    }
    for layer in range(layers):
        names |= {f"blocks.{layer}.{old}": f"encoder.block.{layer}.{new}" for old, new in inside.items()}
    renamed = {f"{old}.weight": f"{new}.weight" for old, new in names.items()}
    return {renamed.get(name, name): value for name, value in state.items()}


RESIDUAL = {
    "residual.0": "norm1", "residual.2": "conv1", "residual.3": "norm2", "residual.6": "conv2",
    "shortcut": "conv_shortcut",
}  # fmt: skip
# Wan2.2_VAE.pth: the blocks of a level, and after them its resampling
NESTED = re.compile(r"(encoder|decoder)\.(?:down|up)samples\.(\d+)\.(?:down|up)samples\.(\d+)\.(.+)")


def vae_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename Wan2.1_VAE.pth, or the residual Wan2.2_VAE.pth, to diffusers' names; other tensors keep theirs."""
    nested, plain = {}, {}
    for name, value in state.items():
        if (match := NESTED.fullmatch(name)) is None:
            plain[name] = value
            continue
        side, level, block, layer = match.groups()
        direction = "down" if side == "encoder" else "up"
        prefix = f"{side}.{direction}_blocks.{level}"
        old = next((old for old in RESIDUAL if layer.startswith(f"{old}.")), None)
        if old is not None:
            nested[f"{prefix}.resnets.{block}.{RESIDUAL[old]}{layer.removeprefix(old)}"] = value
        else:  # resample.1, time_conv
            nested[f"{prefix}.{direction}sampler.{layer}"] = value
    return convert_wan_vae_to_diffusers(plain) | nested


def image_encoder_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth to transformers' names, vision part only."""
    top = {"pre_norm": "pre_layrnorm", "post_norm": "post_layernorm", "patch_embedding": "embeddings.patch_embedding"}
    inside = {
        "norm1": "layer_norm1", "norm2": "layer_norm2", "attn.proj": "self_attn.out_proj", "mlp.0": "mlp.fc1",
        "mlp.2": "mlp.fc2",
    }  # fmt: skip
    renamed: dict[str, Tensor] = {}
    for name, value in state.items():
        if not name.startswith("visual.") or name == "visual.head":
            continue
        name = name.removeprefix("visual.")
        module, _, leaf = name.rpartition(".")
        _, _, part = module.removeprefix("transformer.").partition(".")
        layer = f"encoder.layers.{module.split('.')[1]}" if module.startswith("transformer.") else ""
        if part == "attn.to_qkv":
            for letter, third in zip("qkv", value.chunk(3), strict=True):
                renamed[f"{layer}.self_attn.{letter}_proj.{leaf}"] = third
        elif name == "cls_embedding":
            renamed["embeddings.class_embedding"] = value.flatten()
        elif name == "pos_embedding":
            renamed["embeddings.position_embedding.weight"] = value[0]
        elif layer:
            renamed[f"{layer}.{inside.get(part, part)}.{leaf}"] = value
        else:
            renamed[f"{top.get(module, module)}.{leaf}"] = value
    return renamed


def read_distilled(experts: Sequence[str], first: str, second: str) -> list[Lora]:
    """Read the distillation LoRAs at two paths (empty: none). Raise InputError unless they fit and are finite."""
    loras, crossed = [], 0
    if second and len(experts) == 1:
        raise InputError(f"model.distill_lora_low {second}: this model has one expert, whose LoRA is distill_lora_high")
    for expert, path in zip(experts, (first, second), strict=False):
        if not path:
            continue
        adapters = lora_files.read_lora(path)
        if len(adapters) > 1:
            adapters = [adapter for adapter in adapters if adapter.expert == expert]
        crossed += any(adapter.expert_by_name and adapter.expert != expert for adapter in adapters)
        if len(experts) == 1:  # then a file's name cannot mean another expert
            adapters = [replace(adapter, expert=None) for adapter in adapters]
        loras += lora_files.assign_expert(adapters, expert)
    if crossed == 2:
        raise InputError(
            f"model.distill_lora_high {first} and model.distill_lora_low {second} have each other's names; swap them, "
            "or rename the files"
        )
    if len(loras) == 2 and loras[0].expert != loras[1].expert and _same_lora(*loras):
        raise InputError(
            f"model.distill_lora_high {first} and model.distill_lora_low {second} are the same LoRA; each "
            "expert has its own"
        )
    for adapter in loras:
        merge.check_finite(adapter)
    return loras


def _same_lora(first: Lora, second: Lora) -> bool:
    if first.updates.keys() != second.updates.keys():
        return False
    name = next(iter(first.updates))
    a, b = (adapter.updates[name].sources() for adapter in (first, second))
    return a.keys() == b.keys() and all(
        torch.equal(lora_files.load_tensor(a[role]), lora_files.load_tensor(b[role])) for role in a
    )
