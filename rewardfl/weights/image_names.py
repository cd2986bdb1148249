"""The names of the layers of SD3, FLUX.1 and Qwen-Image: diffusers', and FLUX.1's original ones. No torch here.

LoRAs of SD3 and Qwen-Image name layers as diffusers does. Those of FLUX.1 do that, or they name the layers of Black
Forest Labs' code, which holds in one layer what diffusers holds in several. diffusers has converters, too
(loaders/lora_conversion_utils.py), but they drop what they do not know: biases, DoRA's magnitudes, the alpha of the
last layers. So the names stand here, and tests/test_image_loras.py compares them with its converters.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from rewardfl.weights.shards import Checkpoint, Refused

_ATTENTION = "to_q to_k to_v to_out.0 norm_q norm_k"
_JOINT = f"{_ATTENTION} add_q_proj add_k_proj add_v_proj to_add_out norm_added_q norm_added_k"
_FEED_FORWARD = "norm1.linear norm1_context.linear ff.net.0.proj ff.net.2 ff_context.net.0.proj ff_context.net.2"


def _under(prefix: str, names: str) -> set[str]:
    return {f"{prefix}.{name}" for name in names.split()}


_SHARED = _under("transformer_blocks.N.attn", _JOINT) | {"norm_out.linear", "proj_out"}
_SHARED |= _under("time_text_embed.timestep_embedder", "linear_1 linear_2")
_POOLED = _under("time_text_embed.text_embedder", "linear_1 linear_2") | {"context_embedder"}

# what holds tensors in diffusers' transformers, N for the number of a block
MODULES = {
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


@dataclass(frozen=True)
class Place:
    """What a LoRA calls one module, in diffusers: `module`, which has those of the `of` equal parts of the outputs that
    `parts` names, in its order."""

    module: str
    parts: tuple[int, ...] = (0,)
    of: int = 1


def _thirds(prefix: str, names: str) -> tuple[Place, ...]:
    return tuple(Place(f"{prefix}.{name}", (part,), 3) for part, name in enumerate(names.split()))


def _flux_original() -> dict[str, tuple[Place, ...]]:
    """{module of Black Forest Labs' code, or of a LoRA of XLabs: where it is in diffusers}."""
    double, single = "transformer_blocks.N", "single_transformer_blocks.N"
    single_qkv = f"{single}.attn.to_q", f"{single}.attn.to_k", f"{single}.attn.to_v"
    table = {
        "img_in": "x_embedder",
        "txt_in": "context_embedder",
        "final_layer.linear": "proj_out",
        "single_blocks.N.linear2": f"{single}.proj_out",
        "single_blocks.N.modulation.lin": f"{single}.norm.linear",
        "single_blocks.N.processor.proj_lora": f"{single}.proj_out",
    }
    for old, new in (("time", "timestep"), ("vector", "text"), ("guidance", "guidance")):
        for layer, linear in (("in_layer", "linear_1"), ("out_layer", "linear_2")):
            table[f"{old}_in.{layer}"] = f"time_text_embed.{new}_embedder.{linear}"
    for old, new, out in (("img", "", "to_out.0"), ("txt", "_context", "to_add_out")):
        table[f"double_blocks.N.{old}_attn.proj"] = f"{double}.attn.{out}"
        table[f"double_blocks.N.{old}_mlp.0"] = f"{double}.ff{new}.net.0.proj"
        table[f"double_blocks.N.{old}_mlp.2"] = f"{double}.ff{new}.net.2"
        table[f"double_blocks.N.{old}_mod.lin"] = f"{double}.norm1{new}.linear"
    table["double_blocks.N.processor.proj_lora1"] = f"{double}.attn.to_out.0"
    table["double_blocks.N.processor.proj_lora2"] = f"{double}.attn.to_add_out"
    image = _thirds(f"{double}.attn", "to_q to_k to_v")
    text = _thirds(f"{double}.attn", "add_q_proj add_k_proj add_v_proj")
    return {old: (Place(new),) for old, new in table.items()} | {
        "double_blocks.N.img_attn.qkv": image,
        "double_blocks.N.processor.qkv_lora1": image,
        "double_blocks.N.txt_attn.qkv": text,
        "double_blocks.N.processor.qkv_lora2": text,
        "single_blocks.N.linear1": (
            *(Place(name, (part,), 7) for part, name in enumerate(single_qkv)),
            Place(f"{single}.proj_mlp", (3, 4, 5, 6), 7),
        ),
        "single_blocks.N.processor.qkv_lora": _thirds(f"{single}.attn", "to_q to_k to_v"),
        "final_layer.adaLN_modulation.1": (Place("norm_out.linear", (1, 0), 2),),  # shift, scale -> scale, shift
    }


def _aliases(table: dict[str, tuple[Place, ...]]) -> dict[str, tuple[Place, ...]]:
    """The table, also by the names in which underscores stand for dots, as kohya and OneTrainer write them."""
    return table | {name.replace(".", "_"): found for name, found in table.items()}


_ORIGINAL = {"FLUX.1": _flux_original()}
_TABLES = {
    model: _aliases({name: (Place(name),) for name in names} | _ORIGINAL.get(model, {}))
    for model, names in MODULES.items()
}

# names that tell what a file is that is not read
_ELSEWHERE = {
    "FLUX.2": r"(double|single)_stream_modulation|to_qkv_mlp_proj|ff(_context)?[._]linear_(in|out)",
    "Z-Image or Lumina 2": r"(^|[._])layers[._]\d+[._](attention|feed_forward)|(noise|context)_refiner",
    "SD3 in its original names, which diffusers' LoRA loader does not read either": r"joint_blocks[._]",
    "a U-Net (Stable Diffusion 1, 2 or XL)": r"(^|[._])((down|up|input|output)_blocks|mid_block|middle_block)[._]",
    "a control LoRA of FLUX.1, which replaces norms": r"(query|key)_norm\.scale",
}


def elsewhere(names: Iterable[str]) -> str | None:
    """What the names speak of, where it is a model or a form that is known and not read; None otherwise."""
    names = list(names)
    return next((model for model, sign in _ELSEWHERE.items() if any(re.search(sign, name) for name in names)), None)


def _template(name: str) -> tuple[str, str]:
    """transformer_blocks.7.attn.to_q -> (transformer_blocks.N.attn.to_q, 7); underscores go, too."""
    if found := re.search(r"(?<=blocks[._])\d+(?=[._])", name):
        return f"{name[: found.start()]}N{name[found.end() :]}", found[0]
    return name, ""


def places_of(name: str) -> dict[str, tuple[Place, ...]]:
    """{image model: where the module is in it that a LoRA calls `name`}, of the models that have one of this name."""
    template, number = _template(name)
    return {
        model: tuple(replace(place, module=place.module.replace(".N.", f".{number}.")) for place in table[template])
        for model, table in _TABLES.items()
        if template in table
    }


def base_models(checkpoint: Checkpoint) -> tuple[str, ...]:
    """The image models that the checkpoint may be, all of whose tensors have diffusers' names; empty: it is of others.

    Refused for FLUX.1 in its original names, for models that are known by name alone, and for tensors that the image
    model that comes closest does not have.
    """
    modules = {name: _template(re.sub(r"\.(weight|bias)$", "", name))[0] for name in checkpoint.tensors}
    if found := tuple(model for model, names in MODULES.items() if names.issuperset(modules.values())):
        return found
    if any(re.search(r"(^|\.)(double|single)_blocks\.", name) for name in modules):
        raise Refused(
            f"{checkpoint.path} has the original names of FLUX.1, FLUX.2 or a model like them, with fused layers; "
            "merge into the folder in diffusers' layout (transformer/)"
        )
    if model := elsewhere(modules):
        raise Refused(f"{checkpoint.path} is {model}; only Wan, {', '.join(MODULES)} are merged")
    strange = {model: [name for name in modules if modules[name] not in known] for model, known in MODULES.items()}
    model = min(strange, key=lambda one: len(strange[one]))
    if len(strange[model]) < len(modules) / 2:
        raise Refused(f"{checkpoint.path}: tensor {strange[model][0]} has no place in {model}, whose names it has")
    return ()
