"""The names of the layers of SD3, FLUX.1 and Qwen-Image: diffusers', and FLUX.1's original ones. No torch at import.

LoRAs of SD3 and Qwen-Image name layers as diffusers does. Those of FLUX.1 do that, or they name the layers of Black
Forest Labs' code, which holds in one layer what diffusers holds in several. diffusers' loader of LoRAs places these.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

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


# a layer in Black Forest Labs' code, or in a LoRA of XLabs
_FLUX_ORIGINAL = r"((double|single)_blocks|time_in|vector_in|guidance_in|final_layer)[._].+|(img|txt)_in"
_FLAT = {model: {name.replace(".", "_"): name for name in names} for model, names in MODULES.items()}
ALL_ROWS = 21504  # of a layer whose rows are not given: those of FLUX.1's widest, which can be divided as every other


@dataclass(frozen=True)
class Place:
    """A module of diffusers, with the rows that it has of a layer's outputs; no ranges: it is the whole layer."""

    module: str
    rows: tuple[range, ...] = ()


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


def places_of(name: str, rows: int) -> dict[str, tuple[Place, ...]]:
    """Return {image model: its modules that a LoRA calls `name`} of the models that have such. rows: of its outputs."""
    template, number = _template(name)
    places: dict[str, tuple[Place, ...]] = {}
    for model, flat in _FLAT.items():
        if module := flat.get(template.replace(".", "_")):
            places[model] = (Place(module.replace(".N.", f".{number}.")),)
    if re.fullmatch(_FLUX_ORIGINAL, name) and (original := _flux_places(name, rows)):
        places["FLUX.1"] = original
    return places


@cache
def _flux_places(name: str, rows: int) -> tuple[Place, ...]:
    """Return where diffusers' LoRA loader puts each row of an original layer; empty where it does not place all.

    The loader gets a LoRA of rank 1 whose rows hold their own numbers: so what it drops or doubles is seen, and biases
    and DoRA magnitudes, which it would drop, can follow the same rows.
    """
    import torch  # here, as no other names need them
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
    if any(_template(module)[0] not in MODULES["FLUX.1"] for module in numbers):
        return ()
    whole = list(range(rows))
    if sorted(number for part in numbers.values() for number in part) != whole:
        return ()
    return tuple(Place(module, () if part == whole else _ranges(part)) for module, part in numbers.items())


def _ranges(numbers: list[int]) -> tuple[range, ...]:
    """Return the numbers, in their order, as ranges."""
    breaks = [i for i in range(1, len(numbers)) if numbers[i] != numbers[i - 1] + 1]
    ends = zip([0, *breaks], [*breaks, len(numbers)], strict=True)
    return tuple(range(numbers[first], numbers[last - 1] + 1) for first, last in ends)


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
