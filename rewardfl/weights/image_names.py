"""The names of the layers of SD3, FLUX.1 and Qwen-Image: diffusers', and FLUX.1's original ones. No torch at import.

LoRAs of FLUX.1 may use the names of Black Forest Labs' code, whose fused layers diffusers' loader of LoRAs splits.
"""

import re
from dataclasses import dataclass
from functools import cache

from rewardfl.weights.shards import Checkpoint, InputError

_ATTENTION = "to_q to_k to_v to_out.0 norm_q norm_k"
_JOINT = f"{_ATTENTION} add_q_proj add_k_proj add_v_proj to_add_out norm_added_q norm_added_k"
_FEED_FORWARD = "norm1.linear norm1_context.linear ff.net.0.proj ff.net.2 ff_context.net.0.proj ff_context.net.2"


def _under(prefix: str, names: str) -> set[str]:
    return {f"{prefix}.{name}" for name in names.split()}


_SHARED = _under("transformer_blocks.N.attn", _JOINT) | {"norm_out.linear", "proj_out"}
_SHARED |= _under("time_text_embed.timestep_embedder", "linear_1 linear_2")
_POOLED = _under("time_text_embed.text_embedder", "linear_1 linear_2") | {"context_embedder"}

# the modules with tensors in diffusers' transformers, N for the number of a block
LORA_MODULES = {
    "SD3": _SHARED
    | _POOLED
    | _under("transformer_blocks.N", _FEED_FORWARD)
    | _under("transformer_blocks.N.attn2", _ATTENTION)
    | {"pos_embed.proj", "pos_embed.pos_embed"},
    "FLUX.1": _SHARED
    | _POOLED
    | _under("transformer_blocks.N", _FEED_FORWARD)
    | _under("single_transformer_blocks.N", "norm.linear proj_mlp proj_out attn.to_q attn.to_k attn.to_v")
    | _under("single_transformer_blocks.N.attn", "norm_q norm_k")
    | _under("time_text_embed.guidance_embedder", "linear_1 linear_2")
    | {"x_embedder"},
    "Qwen-Image": _SHARED
    | _under("transformer_blocks.N", "img_mod.1 img_mlp.net.0.proj img_mlp.net.2")
    | _under("transformer_blocks.N", "txt_mod.1 txt_mlp.net.0.proj txt_mlp.net.2")
    | {"img_in", "txt_in", "txt_norm"},
}

# a layer in Black Forest Labs' code, or in a LoRA of XLabs
_FLUX_ORIGINAL = r"((double|single)_blocks|time_in|vector_in|guidance_in|final_layer)[._].+|(img|txt)_in"

_FLAT = {model: {name.replace(".", "_"): name for name in names} for model, names in LORA_MODULES.items()}

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


def find_modules(name: str, rows: int) -> dict[str, tuple[ModuleSlice, ...]]:
    """Return {image model: its modules that a LoRA calls `name`}, without models that have none. rows: outputs."""
    template, number = _template(name)
    places: dict[str, tuple[ModuleSlice, ...]] = {}
    for model, flat in _FLAT.items():
        if module := flat.get(template.replace(".", "_")):
            places[model] = (ModuleSlice(module.replace(".N.", f".{number}.")),)
    if re.fullmatch(_FLUX_ORIGINAL, name) and (original := _flux_places(name, rows)):
        places["FLUX.1"] = original
    return places


@cache
def _flux_places(name: str, rows: int) -> tuple[ModuleSlice, ...]:
    """Return the modules that diffusers' LoRA loader splits an original layer into; empty where rows are left over.

    The loader gets a LoRA of rank 1 whose rows hold their own numbers. So dropped and doubled rows are visible. Biases
    and DoRA magnitudes, which the loader would drop, can follow the same rows.
    """
    import torch  # here, as no other names need these
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
    if any(_template(module)[0] not in LORA_MODULES["FLUX.1"] for module in numbers):
        return ()
    all_rows = list(range(rows))
    if sorted(number for part in numbers.values() for number in part) != all_rows:
        return ()
    return tuple(ModuleSlice(module, () if part == all_rows else tuple(part)) for module, part in numbers.items())


def match_models(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the image models that have all of the checkpoint's tensors, by diffusers' names; empty for other models.

    Raise InputError for FLUX.1 in its original names, and for single tensors that the closest image model lacks.
    """
    modules = {name: _template(re.sub(r"\.(weight|bias)$", "", name))[0] for name in checkpoint.tensors}
    if models := tuple(model for model, names in LORA_MODULES.items() if names.issuperset(modules.values())):
        return models
    if any(re.search(r"(^|\.)(double|single)_blocks\.", name) for name in modules):
        raise InputError(
            f"{checkpoint.path} has the original names of FLUX.1, FLUX.2 or a model like them, with fused layers; "
            "merge into the folder in diffusers' layout (transformer/)"
        )
    unknown = {model: [name for name in modules if modules[name] not in names] for model, names in LORA_MODULES.items()}
    model = min(unknown, key=lambda model: len(unknown[model]))
    if len(unknown[model]) < len(modules) / 2:
        raise InputError(f"{checkpoint.path}: tensor {unknown[model][0]} has no place in {model}, whose names it has")
    return ()
