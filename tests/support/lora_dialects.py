"""One LoRA, written in the exact keys of every tool that writes them (reference: docs in each function's line)."""

import json

import torch
from safetensors.torch import save_file

# (original name, diffusers name) of the modules that the LoRA changes
MODULES = [
    ("blocks.0.self_attn.q", "blocks.0.attn1.to_q"),
    ("blocks.1.cross_attn.o", "blocks.1.attn2.to_out.0"),
    ("blocks.1.ffn.0", "blocks.1.ffn.net.0.proj"),
    ("blocks.0.ffn.2", "blocks.0.ffn.net.2"),
]
RANK, ALPHA = 4, 2.0
SCALE = ALPHA / RANK


def factors(model, seed=0):
    """{diffusers name: (down, up)} for the modules above, of the sizes that `model` (a transformer) has."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for _, name in MODULES:
        out_features, in_features = model.get_submodule(name).weight.shape
        down = torch.randn(RANK, in_features, generator=generator) / in_features**0.5
        found[name] = (down, torch.randn(out_features, RANK, generator=generator))
    return found


def names(original):
    return [(old if original else new, new) for old, new in MODULES]


def _down_up(prefix, values, original, scale=1.0, alpha=None, flat=False):
    state = {}
    for name, key in names(original):
        down, up = values[key]
        stem = prefix + (name.replace(".", "_") if flat else name)
        state[f"{stem}.lora_down.weight"] = down.clone()
        state[f"{stem}.lora_up.weight"] = up * scale
        if alpha is not None:
            state[f"{stem}.alpha"] = torch.tensor(alpha)
    return state


def _a_b(prefix, values, original, scale=1.0, adapter=""):
    state = {}
    for name, key in names(original):
        down, up = values[key]
        state[f"{prefix}{name}.lora_A{adapter}.weight"] = down.clone()
        state[f"{prefix}{name}.lora_B{adapter}.weight"] = up * scale
    return state


def peft_metadata(component="transformer", alpha=ALPHA):
    return {"lora_adapter_metadata": json.dumps({f"{component}.r": RANK, f"{component}.lora_alpha": alpha})}


def write_d1(folder, values):  # diffusers' save_lora_weights: alpha in the metadata
    path = folder / "pytorch_lora_weights.safetensors"
    save_file(_a_b("transformer.", values, False), path, peft_metadata())
    return path


def write_d1_folded(folder, values):  # finetrainers: scale folded, no metadata
    path = folder / "folded.safetensors"
    save_file(_a_b("transformer.", values, False, SCALE), path)
    return path


def write_d3(folder, values):  # peft adapter folder
    path = folder / "peft"
    path.mkdir()
    save_file(_a_b("base_model.model.", values, False), path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps({"r": RANK, "lora_alpha": ALPHA, "peft_type": "LORA"}))
    return path


def write_d4(folder, values):  # get_peft_model_state_dict, bare
    path = folder / "bare.safetensors"
    save_file(_a_b("", values, False, SCALE), path)
    return path


def write_d5(folder, values):  # ComfyUI, Lightning, LightX2V
    path = folder / "comfy.safetensors"
    save_file(_down_up("diffusion_model.", values, True, alpha=ALPHA), path)
    return path


def write_d6(folder, values):  # diffusion-pipe, ai-toolkit, musubi --target other
    path = folder / "pipe.safetensors"
    save_file(_a_b("diffusion_model.", values, True, SCALE), path)
    return path


def write_d7(folder, values):  # Lightning, non-native
    path = folder / "lightning.safetensors"
    save_file(_down_up("", values, True, alpha=ALPHA), path)
    return path


def write_d8(folder, values):  # DiffSynth
    path = folder / "diffsynth.safetensors"
    save_file(_a_b("", values, True, SCALE, ".default"), path)
    return path


def write_d9(folder, values):  # ROLL: a torch file
    path = folder / "diffusion_module.pth"
    torch.save(_a_b("base_model.model.", values, True, SCALE, ".default"), path)
    return path


def write_d10(folder, values):  # musubi, kohya
    path = folder / "musubi.safetensors"
    save_file(_down_up("lora_unet_", values, True, alpha=ALPHA, flat=True), path)
    return path


def write_d10_metadata(folder, values):  # kohya without alpha keys
    path = folder / "kohya.safetensors"
    metadata = {"ss_network_alpha": str(ALPHA), "ss_network_dim": str(RANK)}
    save_file(_down_up("lora_unet_", values, True, flat=True), path, metadata)
    return path


def write_d11(folder, values):  # VideoX-Fun: two underscores
    path = folder / "videox.safetensors"
    save_file(_down_up("lora_unet__", values, True, alpha=ALPHA, flat=True), path)
    return path


def write_d11_diffusers(folder, values):  # the same with diffusers' names
    path = folder / "videox2.safetensors"
    save_file(_down_up("lora_unet__", values, False, alpha=ALPHA, flat=True), path)
    return path


def write_d12(folder, values):  # the hybrid: ComfyUI's prefix, diffusers' names
    path = folder / "hybrid.safetensors"
    save_file(_a_b("diffusion_model.", values, False, SCALE), path)
    return path


def write_model_prefix(folder, values):  # extracted from a full ComfyUI checkpoint
    path = folder / "model.safetensors"
    save_file(_down_up("model.diffusion_model.", values, True, alpha=ALPHA), path)
    return path


DIALECTS = {
    function.__name__.removeprefix("write_"): function
    for function in (
        write_d1, write_d1_folded, write_d3, write_d4, write_d5, write_d6, write_d7, write_d8, write_d9, write_d10,
        write_d10_metadata, write_d11, write_d11_diffusers, write_d12, write_model_prefix,
    )
}  # fmt: skip
