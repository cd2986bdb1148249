"""The names of the layers of SD3, FLUX.1 and Qwen-Image: diffusers', and FLUX.1's original ones.

diffusers' own classes and its loader of LoRAs give them; torch is imported only for a file that is not Wan's.
"""

import re
from dataclasses import dataclass
from functools import cache

from rewardfl.weights.shards import Checkpoint, InputError

IMAGE_MODELS = ("SD3", "FLUX.1", "Qwen-Image")

# a layer in Black Forest Labs' code, or in a LoRA of XLabs
_FLUX_ORIGINAL = r"((double|single)_blocks|time_in|vector_in|guidance_in|final_layer)[._].+|(img|txt)_in"

ALL_ROWS = 21504  # assumed for a layer of unknown size: rows of FLUX.1's widest, which divides as all others do


@dataclass(frozen=True)
class ModuleSlice:
    """A module of diffusers, and its rows of a fused layer's outputs; empty for the entire layer."""

    module: str
    rows: tuple[int, ...] = ()


def _template(name: str) -> tuple[str, str]:
    """Return (transformer_blocks.N.attn.to_q, 7) of transformer_blocks.7.attn.to_q; underscores work, too."""
    if block := re.search(r"(?<=blocks[._])\d+(?=[._])", name):
        return f"{name[: block.start()]}N{name[block.end() :]}", block[0]
    return name, ""


def _module_template(tensor: str) -> str:
    return _template(re.sub(r"\.(weight|bias)$", "", tensor))[0]


@cache
def module_names() -> dict[str, dict[str, str]]:
    """Return {image model: {a module with underscores for its dots: its name}}, N for a block's number."""
    import torch
    from diffusers import FluxTransformer2DModel, QwenImageTransformer2DModel, SD3Transformer2DModel

    with torch.device("meta"):  # with all optional layers; the last block of SD3 lacks some
        transformers = (
            SD3Transformer2DModel(num_layers=2, dual_attention_layers=(0,), qk_norm="rms_norm"),
            FluxTransformer2DModel(num_layers=1, num_single_layers=1, guidance_embeds=True),
            QwenImageTransformer2DModel(num_layers=1),
        )
    modules = [{_module_template(tensor) for tensor in transformer.state_dict()} for transformer in transformers]
    flat = [{name.replace(".", "_"): name for name in names} for names in modules]
    return dict(zip(IMAGE_MODELS, flat, strict=True))


def find_modules(name: str, rows: int) -> dict[str, tuple[ModuleSlice, ...]]:
    """Return {image model: its modules that a LoRA calls `name`}, without models that have none. rows: outputs."""
    template, number = _template(name)
    flat = template.replace(".", "_")
    places: dict[str, tuple[ModuleSlice, ...]] = {
        model: (ModuleSlice(modules[flat].replace(".N.", f".{number}.")),)
        for model, modules in module_names().items()
        if flat in modules
    }
    if re.fullmatch(_FLUX_ORIGINAL, name) and (original := _flux_places(name, rows)):
        places["FLUX.1"] = original
    return places


@cache
def _flux_places(name: str, rows: int) -> tuple[ModuleSlice, ...]:
    """Return the modules that diffusers' LoRA loader splits an original layer into; empty where rows are left over.

    The loader gets a LoRA of rank 1 whose rows hold their own numbers, so dropped and doubled rows are visible.
    """
    import torch
    from diffusers.loaders import FluxLoraLoaderMixin

    stem, (down, up) = f"lora_unet_{name.replace('.', '_')}", ("lora_down", "lora_up")
    if "processor" in name:
        stem, (down, up) = name, ("down", "up")
    state = {f"{stem}.{down}.weight": torch.ones(1, 1), f"{stem}.{up}.weight": torch.arange(float(rows))[:, None]}
    try:
        converted = FluxLoraLoaderMixin.lora_state_dict(state)
    except (ValueError, AssertionError):  # a name, or a number of rows, that it does not know
        return ()
    numbers = {
        key.removeprefix("transformer.").removesuffix(".lora_B.weight"): value.flatten().int().tolist()
        for key, value in converted.items()
        if key.endswith(".lora_B.weight")
    }
    all_rows = list(range(rows))
    if sorted(number for part in numbers.values() for number in part) != all_rows:
        return ()
    if any(_template(module)[0] not in module_names()["FLUX.1"].values() for module in numbers):
        return ()
    return tuple(ModuleSlice(module, () if part == all_rows else tuple(part)) for module, part in numbers.items())


def match_models(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the image models that have all of the checkpoint's tensors, by diffusers' names; empty for others."""
    modules = {name: _module_template(name) for name in checkpoint.tensors}
    if any(re.search(r"(^|\.)blocks\.", name) for name in modules):  # Wan's
        return ()
    unknown = {
        model: [name for name, module in modules.items() if module not in names.values()]
        for model, names in module_names().items()
    }
    if models := tuple(model for model, names in unknown.items() if not names):
        return models
    if any(re.search(r"(^|\.)(double|single)_blocks\.", name) for name in modules):
        raise InputError(
            f"{checkpoint.path} has original names of FLUX, with fused layers; give the folder in diffusers' layout"
        )
    model, names = min(unknown.items(), key=lambda item: len(item[1]))
    if len(names) < len(modules) / 2:
        raise InputError(f"{checkpoint.path}: tensor {names[0]} has no place in {model}, whose names it has")
    return ()
