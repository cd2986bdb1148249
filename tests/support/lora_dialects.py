"""One LoRA, written in the exact keys of every tool that writes them (reference: docs in each function's line)."""

import json

import torch
from safetensors.torch import load_file, save_file

from rewardfl.weights import lora_files

# (original name, diffusers name) of the modules that the LoRA changes
MODULES = [
    ("blocks.0.self_attn.q", "blocks.0.attn1.to_q"),
    ("blocks.1.cross_attn.o", "blocks.1.attn2.to_out.0"),
    ("blocks.1.ffn.0", "blocks.1.ffn.net.0.proj"),
    ("blocks.0.ffn.2", "blocks.0.ffn.net.2"),
]
RANK, ALPHA = 4, 2.0
SCALE = ALPHA / RANK
DOWN_UP, AB, ROLL = ("lora_down", "lora_up"), ("lora_A", "lora_B"), ("lora_A.default", "lora_B.default")


def factors(model, seed=0):
    """Return {diffusers name: (down, up)} for the modules above, in the sizes of `model`, a transformer."""
    generator = torch.Generator().manual_seed(seed)
    pairs = {}
    for _, name in MODULES:
        out_features, in_features = model.get_submodule(name).weight.shape
        down = torch.randn(RANK, in_features, generator=generator) / in_features**0.5
        pairs[name] = (down, torch.randn(out_features, RANK, generator=generator))
    return pairs


def lora_tensors(halves, *, prefix="", ends=DOWN_UP, scale=1.0, alpha=None, flat=False):
    """Return the tensors of {name: (down, up)} by key: `prefix` before the name, `flat` with underscores for dots."""
    state = {}
    for name, (down, up) in halves.items():
        stem = prefix + (name.replace(".", "_") if flat else name)
        state |= {f"{stem}.{ends[0]}.weight": down.clone(), f"{stem}.{ends[1]}.weight": up * scale}
        if alpha is not None:
            state[f"{stem}.alpha"] = torch.tensor(alpha)
    return state


def peft_metadata(alpha=ALPHA, **more):
    """Return peft's configuration as diffusers saves it."""
    config = {"r": RANK, "lora_alpha": alpha} | more
    return {"lora_adapter_metadata": json.dumps({f"transformer.{key}": value for key, value in config.items()})}


def weights(folder):
    """Return the tensors of all files in a folder."""
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def read_adapter(path):
    """Return the tensors of a checkpoint's adapter, without the pipeline's prefix."""
    return {name.removeprefix("transformer."): value for name, value in load_file(path).items()}


def products(path):
    """Return {module: scale * up @ down} by the reader."""
    (lora,) = lora_files.read_lora(path)
    return {
        name: update.scale * lora_files.load_tensor(update.up) @ lora_files.load_tensor(update.down)
        for name, update in lora.updates.items()
    }


KOHYA = {"ss_network_alpha": str(ALPHA), "ss_network_dim": str(RANK)}

# {dialect: (file, its metadata, how the keys are written)}; without alpha the scale is in `up`
FORMS = {
    # diffusers' save_lora_weights: alpha in the metadata
    "d1": ("pytorch_lora_weights.safetensors", peft_metadata(), {"prefix": "transformer.", "ends": AB}),
    # finetrainers: no metadata
    "d1_folded": ("folded.safetensors", None, {"prefix": "transformer.", "ends": AB, "scale": SCALE}),
    # peft's adapter folder
    "d3": ("peft/adapter_model.safetensors", None, {"prefix": "base_model.model.", "ends": AB}),
    # get_peft_model_state_dict, bare
    "d4": ("bare.safetensors", None, {"prefix": "", "ends": AB, "scale": SCALE}),
    # ComfyUI, Lightning, LightX2V
    "d5": ("comfy.safetensors", None, {"prefix": "diffusion_model.", "original": True, "alpha": ALPHA}),
    # diffusion-pipe, ai-toolkit, musubi --target other
    "d6": ("pipe.safetensors", None, {"prefix": "diffusion_model.", "original": True, "ends": AB, "scale": SCALE}),
    # Lightning, non-native
    "d7": ("lightning.safetensors", None, {"prefix": "", "original": True, "alpha": ALPHA}),
    # DiffSynth
    "d8": ("diffsynth.safetensors", None, {"prefix": "", "original": True, "ends": ROLL, "scale": SCALE}),
    # ROLL: a torch file
    "d9": ("roll.pth", None, {"prefix": "base_model.model.", "original": True, "ends": ROLL, "scale": SCALE}),
    # musubi, kohya; kohya without alpha keys
    "d10": ("musubi.safetensors", None, {"prefix": "lora_unet_", "original": True, "alpha": ALPHA, "flat": True}),
    "d10_metadata": ("kohya.safetensors", KOHYA, {"prefix": "lora_unet_", "original": True, "flat": True}),
    # VideoX-Fun: two underscores; the same with diffusers' names
    "d11": ("videox.safetensors", None, {"prefix": "lora_unet__", "original": True, "alpha": ALPHA, "flat": True}),
    "d11_diffusers": ("videox2.safetensors", None, {"prefix": "lora_unet__", "alpha": ALPHA, "flat": True}),
    # the hybrid: ComfyUI's prefix, diffusers' names
    "d12": ("hybrid.safetensors", None, {"prefix": "diffusion_model.", "ends": AB, "scale": SCALE}),
    # extracted from a full ComfyUI checkpoint
    "model_prefix": ("model.safetensors", None, {"prefix": "model.diffusion_model.", "original": True, "alpha": ALPHA}),
}


def _writer(name, metadata, form):
    names = {old if form.get("original") else new: new for old, new in MODULES}
    form = {key: value for key, value in form.items() if key != "original"}

    def write(folder, values):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        state = lora_tensors({name: values[new] for name, new in names.items()}, **form)
        if path.suffix == ".pth":
            torch.save(state, path)
            return path
        save_file(state, path, metadata)
        if path.parent == folder:
            return path
        (folder / "peft" / "adapter_config.json").write_text(
            json.dumps({"r": RANK, "lora_alpha": ALPHA, "peft_type": "LORA"})
        )
        return path.parent

    return write


DIALECTS = {dialect: _writer(*form) for dialect, form in FORMS.items()}
