"""The two names of every tensor of Wan's transformer: Wan-AI's original code's and diffusers'. No torch here.

The map is one to one and needs no reshape, so files and LoRAs can be renamed exactly in both directions.
"""

import re

from rewardfl.weights.shards import Checkpoint, InputError

# original module -> diffusers module, inside a block; the affine norm before cross-attention is norm3 and norm2
BLOCK = {
    "modulation": "scale_shift_table",
    "norm3": "norm2",
    "ffn.0": "ffn.net.0.proj",
    "ffn.2": "ffn.net.2",
    "cross_attn.k_img": "attn2.add_k_proj",
    "cross_attn.v_img": "attn2.add_v_proj",
    "cross_attn.norm_k_img": "attn2.norm_added_k",
}

for _original, _diffusers in (("self_attn", "attn1"), ("cross_attn", "attn2")):
    for _a, _b in (("q", "to_q"), ("k", "to_k"), ("v", "to_v"), ("o", "to_out.0")):
        BLOCK[f"{_original}.{_a}"] = f"{_diffusers}.{_b}"
    for _norm in ("norm_q", "norm_k"):
        BLOCK[f"{_original}.{_norm}"] = f"{_diffusers}.{_norm}"

TOP = {
    "patch_embedding": "patch_embedding",
    "text_embedding.0": "condition_embedder.text_embedder.linear_1",
    "text_embedding.2": "condition_embedder.text_embedder.linear_2",
    "time_embedding.0": "condition_embedder.time_embedder.linear_1",
    "time_embedding.2": "condition_embedder.time_embedder.linear_2",
    "time_projection.1": "condition_embedder.time_proj",
    "img_emb.proj.0": "condition_embedder.image_embedder.norm1",
    "img_emb.proj.1": "condition_embedder.image_embedder.ff.net.0.proj",
    "img_emb.proj.3": "condition_embedder.image_embedder.ff.net.2",
    "img_emb.proj.4": "condition_embedder.image_embedder.norm2",
    "img_emb.emb_pos": "condition_embedder.image_embedder.pos_embed",
    "head.head": "proj_out",
    "head.modulation": "scale_shift_table",
}

_BLOCK_BACK = {new: old for old, new in BLOCK.items()}
_TOP_BACK = {new: old for old, new in TOP.items()}

# prefixes of a tensor's name in files
PREFIXES = ("model.diffusion_model.", "diffusion_model.", "")

# modules that diffusers keeps in float32 when a model is loaded in a lower precision
# (WanTransformer3DModel._keep_in_fp32_modules; the intent: diffusers issue 10992)
FLOAT32_MODULES = frozenset({"rope", "time_embedder", "scale_shift_table", "norm1", "norm2", "norm3"})


def to_diffusers(name: str) -> str | None:
    """Return diffusers' name of a module or tensor by its original name; None for a name the original lacks."""
    return _rename(name, TOP, BLOCK)


def to_original(name: str) -> str | None:
    """Return the original name of a module or tensor by diffusers' name; None for a name diffusers lacks."""
    return _rename(name, _TOP_BACK, _BLOCK_BACK)


def _rename(name: str, top: dict[str, str], block: dict[str, str]) -> str | None:
    stem, _, leaf = name.rpartition(".")
    if leaf not in ("weight", "bias"):
        stem, leaf = name, ""
    head, module, table = "", stem, top
    if match := re.fullmatch(r"(blocks\.\d+\.)(.+)", stem):
        head, module, table = match[1], match[2], block
    if module not in table:
        return None
    return head + table[module] + ("." + leaf if leaf else "")


def detect_naming(checkpoint: Checkpoint) -> tuple[str, dict[str, str]]:
    """Return (diffusers | original, {tensor: its diffusers' name}). Raise InputError for other names than Wan's."""
    names = list(checkpoint.tensors)
    prefix = next(prefix for prefix in PREFIXES if all(name.startswith(prefix) for name in names))
    bare = {name: name.removeprefix(prefix) for name in names}
    for naming, rename in (("diffusers", to_original), ("original", to_diffusers)):
        renamed = {name: new for name, stem in bare.items() if (new := rename(stem)) is not None}
        unknown = [name for name in names if name not in renamed]
        if not unknown:
            return naming, bare if naming == "diffusers" else renamed
        if len(unknown) < len(bare) / 2:
            raise InputError(
                f"{checkpoint.path}: tensor {unknown[0]} has no place in a Wan transformer with {naming} names "
                f"({len(unknown)} such of {len(bare)})"
            )
    raise InputError(f"{checkpoint.path}: tensors such as {names[0]} are not those of a Wan transformer")


def output_name(common: str, name: str, rename: str) -> str:
    """Return a tensor's name in a tool's output, by --rename. common: its diffusers name; name: in the input."""
    if rename in ("keep", "diffusers"):
        return name if rename == "keep" else common
    original = to_original(common)
    assert original is not None
    return f"model.diffusion_model.{original}" if rename == "comfy" else original


def stays_float32(diffusers_name: str) -> bool:
    """Return whether diffusers keeps this tensor in float32 in a model of lower precision."""
    return not FLOAT32_MODULES.isdisjoint(diffusers_name.split("."))
