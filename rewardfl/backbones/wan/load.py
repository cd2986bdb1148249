"""Loading a Wan model from a layout of files, equal to diffusers' `from_pretrained`.

The experts are read tensor by tensor: the host holds one in its target precision and a few rows in the file's.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanTransformer3DModel
from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers
from torch import Tensor, nn
from transformers import AutoTokenizer, CLIPVisionModel, UMT5EncoderModel

from rewardfl import lora
from rewardfl.backbones import stock
from rewardfl.backbones.wan.files import Layout, common_names
from rewardfl.backbones.wan.model import empty_expert
from rewardfl.backbones.wan.variants import TWO_EXPERTS
from rewardfl.weights import lora_files, merge, shards, wan_names
from rewardfl.weights.lora_files import Lora
from rewardfl.weights.shards import Checkpoint, InputError

State = dict[str, Tensor]


def load_pipeline(
    layout: Layout,
    experts: Mapping[str, Checkpoint],
    dtype: torch.dtype,
    distilled: Sequence[Lora] = (),
    distill_mode: Literal["fuse", "adapter"] = "fuse",
    parts: Sequence[str] | None = None,
) -> Any:
    """Load a WanImageToVideoPipeline, frozen and in eval mode, on the CPU; it encodes text-to-video prompts, too.

    experts: of files.open_experts. distilled: LoRAs (with their experts), by distill_mode either fused in the files'
    precision before the one rounding to `dtype`, or attached as adapters that stay on. parts: those to load, None for
    all. The tokenizer comes with the text encoder. vae_decoder is the VAE without its encoder.
    """
    variant, loaded = layout.variant, dict[str, Any]()
    fuses = {"fuse": True, "adapter": False}[distill_mode]
    parts = ("text_encoder", "image_encoder", "vae", *variant.experts) if parts is None else parts
    for name in variant.parts.keys() & parts:
        loras = [adapter for adapter in distilled if adapter.expert == name]
        config = stock.read_config(layout.configs, variant.parts[name])
        expert = load_expert(experts[name], config, dtype, loras if fuses else ())
        for adapter in () if fuses else loras:
            lora.attach_frozen(expert, adapter)
        loaded[variant.parts[name]] = expert
    if "text_encoder" in parts:
        loaded["tokenizer"] = AutoTokenizer.from_pretrained(layout.tokenizer, local_files_only=True)
        loaded["text_encoder"] = _load_part(layout, "text_encoder", UMT5EncoderModel, text_encoder_state, dtype)
        loaded["text_encoder"].tie_weights()
    if "vae" in parts or "vae_decoder" in parts:
        loaded["vae"] = _load_part(layout, "vae", AutoencoderKLWan, vae_state, dtype)
    if "vae_decoder" in parts:
        loaded["vae"].encoder = loaded["vae"].quant_conv = None
    if variant.clip and "image_encoder" in parts:
        vision = _load_part(layout, "image_encoder", CLIPVisionModel, image_encoder_state, dtype)
        positions = torch.arange(vision.embeddings.num_positions)[None]  # in no file
        vision.embeddings.register_buffer("position_ids", positions, persistent=False)
        processor = stock.import_class("transformers", "CLIPImageProcessor").from_dict(
            stock.read_config(layout.configs, "image_processor")
        )
        loaded |= {"image_encoder": vision, "image_processor": processor}
    for name in ("tokenizer", "text_encoder", "vae", "image_encoder", "image_processor", *TWO_EXPERTS.values()):
        module = loaded.setdefault(name, None)
        if isinstance(module, nn.Module):
            module.requires_grad_(requires_grad=False).eval()
    return stock.import_class("diffusers", "WanImageToVideoPipeline")(
        scheduler=UniPCMultistepScheduler.from_config(stock.read_config(layout.configs, "scheduler")),
        boundary_ratio=stock.read_config(layout.configs, "model_index").get("boundary_ratio"),
        expand_timesteps=variant.image == "frame",
        **loaded,
    )


def load_expert(
    checkpoint: Checkpoint, config: Mapping[str, Any], dtype: torch.dtype, distilled: Sequence[Lora] = ()
) -> WanTransformer3DModel:
    """Load one expert from files of either naming. distilled: LoRAs added in float32 before the one rounding."""
    merged = merge.updates_by_tensor(checkpoint, [(adapter, 1.0) for adapter in distilled])
    state = {}
    for target, name in common_names(checkpoint).items():
        stored = torch.float32 if wan_names.stays_float32(target) else dtype
        state[target] = merge.merge_tensor(checkpoint.tensors[name], merged.get(name, []), stored)
    model = empty_expert(config)
    model.load_state_dict(state, assign=True)
    return model


def _load_part(
    layout: Layout, part: str, cls: type[stock.Model], rename: Callable[[State], State], dtype: torch.dtype
) -> Any:
    """Load a part from its folder, or from its original file: .safetensors, or a pickle without code."""
    path: Path = getattr(layout, part)
    if path.is_dir():
        return stock.load_pretrained(cls, path, dtype)
    if path.suffix == ".safetensors":
        shards.read_header(path)
        state = safetensors.torch.load_file(path)
    else:
        state = lora_files.read_torch(path)
    state, model = rename(state), stock.new_on_meta(cls, stock.read_config(layout.configs, part))
    shapes = {name: value.shape for name, value in state.items()}
    stock.check_tensors(path, shapes, dict(model.named_parameters()), f"the config.json of {part}")
    # always a copy: mapped tensors are not aligned, and change with their file
    copies = {name: value.to(dtype, copy=True) for name, value in state.items()}
    model.load_state_dict(copies, strict=False, assign=True)
    return model


# patterns in the original names, and what replaces them one after another in transformers' and diffusers' names
T5_NAMES = {
    r"^token_embedding\.": "shared.", r"^norm\.": "encoder.final_layer_norm.",
    r"^blocks\.(\d+)\.": r"encoder.block.\1.layer.", r"\.norm1\.": ".0.layer_norm.", r"\.norm2\.": ".1.layer_norm.",
    r"\.attn\.": ".0.SelfAttention.", r"\.pos_embedding\.embedding\.": ".0.SelfAttention.relative_attention_bias.",
    r"\.ffn\.gate\.0\.": ".1.DenseReluDense.wi_0.", r"\.ffn\.fc1\.": ".1.DenseReluDense.wi_1.",
    r"\.ffn\.fc2\.": ".1.DenseReluDense.wo.",
}  # fmt: skip
CLIP_NAMES = {
    r"^visual\.": "", r"^transformer\.": "encoder.layers.", r"\.norm(\d)\.": r".layer_norm\1.",
    r"\.attn\.": ".self_attn.", r"\.proj\.": ".out_proj.", r"\.mlp\.0\.": ".mlp.fc1.", r"\.mlp\.2\.": ".mlp.fc2.",
    r"^pre_norm\.": "pre_layrnorm.", r"^post_norm\.": "post_layernorm.",
    r"^patch_embedding\.": "embeddings.patch_embedding.", r"^cls_embedding$": "embeddings.class_embedding",
    r"^pos_embedding$": "embeddings.position_embedding.weight",
}  # fmt: skip
# Wan2.2_VAE.pth: the blocks of a level, and after them its resampling
LEVEL = r"^(encoder|decoder)\.(down|up)samples\.(\d+)\.(?:down|up)samples\.(\d+)\."
VAE_NAMES = {
    f"{LEVEL}(resample|time_conv)": r"\1.\2_blocks.\3.\2sampler.\5", LEVEL: r"\1.\2_blocks.\3.resnets.\4.",
    r"(resnets\.\d+)\.residual\.0\.": r"\1.norm1.", r"(resnets\.\d+)\.residual\.2\.": r"\1.conv1.",
    r"(resnets\.\d+)\.residual\.3\.": r"\1.norm2.", r"(resnets\.\d+)\.residual\.6\.": r"\1.conv2.",
    r"(resnets\.\d+)\.shortcut\.": r"\1.conv_shortcut.",
}  # fmt: skip


def _rename(name: str, patterns: Mapping[str, str]) -> str:
    for old, new in patterns.items():
        name = re.sub(old, new, name)
    return name


def text_encoder_state(state: State) -> State:
    """Rename models_t5_umt5-xxl-enc-bf16.pth (Wan-AI's T5 code) to transformers' names; other tensors keep theirs."""
    return {_rename(name, T5_NAMES): value for name, value in state.items()}


def image_encoder_state(state: State) -> State:
    """Rename models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth to transformers' names, vision part only."""
    renamed: State = {}
    for name, value in state.items():
        new = _rename(name, CLIP_NAMES)
        if ".to_qkv." in name:
            for letter, third in zip("qkv", value.chunk(3), strict=True):
                renamed[new.replace("to_qkv", f"{letter}_proj")] = third
        elif name.startswith("visual.") and name != "visual.head":
            renamed[new] = value.squeeze() if name.endswith("s_embedding") else value
    return renamed


def vae_state(state: State) -> State:
    """Rename Wan2.1_VAE.pth, or the residual Wan2.2_VAE.pth, to diffusers' names; other tensors keep theirs."""
    if "quant_conv.weight" in state:
        return state
    renamed = {_rename(name, VAE_NAMES): value for name, value in state.items()}
    levels = {name: value for name, value in renamed.items() if "_blocks." in name}
    plain = {name: value for name, value in renamed.items() if "_blocks." not in name}
    return convert_wan_vae_to_diffusers(plain) | levels


def read_distilled(experts: Sequence[str], first: str, second: str) -> list[Lora]:
    """Read the distillation LoRAs at two paths (empty: none). Raise InputError for other files."""
    loras, crossed = [], 0
    for expert, path in zip(experts, (first, second), strict=False):
        adapters = lora_files.read_lora(path, base={lora_files.WAN: ()}) if path else []
        if len(adapters) > 1:
            adapters = [adapter for adapter in adapters if adapter.expert == expert]
        crossed += any(adapter.expert_by_name and adapter.expert != expert for adapter in adapters)
        loras += lora_files.assign_expert(adapters, expert)
    if crossed == 2:
        raise InputError(f"model.distill_lora: {first} and {second} have each other's names; swap or rename them")
    return loras


def check_distilled(loras: Sequence[Lora], checkpoints: Mapping[str, Checkpoint]) -> None:
    """Raise InputError for a distillation LoRA that does not fit its expert, or is merged into it."""
    for adapter in loras:
        checkpoint = checkpoints[str(adapter.expert)]
        merge.updates_by_tensor(checkpoint, [(adapter, 1.0)])
        if lora_files.is_merged(adapter, checkpoint.metadata):
            raise InputError(f"{adapter.path} is merged into {checkpoint.path} already; remove it from the settings")
