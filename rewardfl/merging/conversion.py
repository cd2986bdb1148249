"""Conversion of a LoRA to other names: the work of tools/convert_lora.py."""

import argparse
import json
import math

import torch
from torch import Tensor

from rewardfl import command_line
from rewardfl.files import sha256
from rewardfl.merging.writing import STORED_DTYPES, Output, OutputFiles, Part, TensorFile
from rewardfl.weights import lora_files, wan_names
from rewardfl.weights.lora_files import TORCH_DTYPES, Lora, Update, load_tensor
from rewardfl.weights.shards import InputError

_TOOL = "rewardfl convert_lora 1"


def convert_lora(args: argparse.Namespace) -> None:
    """Convert a LoRA to other names. Raise InputError with nothing written."""
    loras = lora_files.read_lora(args.lora, args.alpha)
    output = Output(args, [args.lora, *(path for lora in loras for path in lora.files)])
    if output.is_file and len(loras) > 1:
        raise InputError(f"{args.lora} holds both experts; give a folder as --out, it gets a file for each")
    if not output.is_file and any(lora.expert is None and lora.is_wan for lora in loras):
        raise InputError(f"{args.lora} does not say which expert it is for; give a file as --out")
    dtype = TORCH_DTYPES[STORED_DTYPES[args.dtype]]
    files: OutputFiles = {}
    for lora in loras:
        name = file_name(args, lora)
        path = args.out if output.is_file else args.out / name
        lines = [f"{lora.path} -> {path}: {len(lora.updates)} modules, alpha from {lora.alpha_source}"]
        lines += [f"note: {note}" for note in conversion_notes(lora, args.to)]
        print(*map(command_line.one_line, lines), sep="\n")
        state, metadata = convert(lora, args.to, dtype)
        files[name] = TensorFile([make_part(*item) for item in state.items()], metadata)
    output.finish(files)


def conversion_notes(lora: Lora, to: str) -> list[str]:
    """Return messages for the user on the LoRA in other tools."""
    notes = list(lora.notes)
    if to == "comfy" and not lora.is_wan:
        notes.append(f"ComfyUI reads diffusers' names of {' and '.join(lora.models)}; they are written")
    dora = [update for update in lora.updates.values() if update.magnitude is not None and update.wd_on_output]
    if to == "comfy" and dora:
        notes.append(
            f"{dora[0].module} is a DoRA of the outputs: ComfyUI divides it by the length of the base's rows, peft and "
            "LyCORIS by the length of the moved rows; merge it with tools/merge_lora.py to have what was trained"
        )
    return notes


def file_name(args: argparse.Namespace, lora: Lora) -> str:
    """Return the file of a LoRA below the output folder."""
    if args.to == "comfy":
        return f"{args.out.name}_{lora.expert}.safetensors" if lora.expert else f"{args.out.name}.safetensors"
    return f"{'transformer_2' if lora.expert == 'low_noise' else 'transformer'}/{lora_files.WEIGHTS_NAME}"


def convert(lora: Lora, to: str, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors in the names of `to`, and the metadata. Print a warning for a tensor that loses 1 %."""
    state: dict[str, Tensor] = {}
    for update in lora.updates.values():
        if to == "comfy" and not lora.is_wan and (update.magnitude is not None or update.biases()):
            raise InputError(
                f"{lora.path}: {update.module} has a bias or a DoRA magnitude, which ComfyUI does not read; use "
                "--to diffusers, or merge it with tools/merge_lora.py"
            )
        is_comfy = to == "comfy" and lora.is_wan
        state |= comfy_tensors(update, dtype) if is_comfy else diffusers_tensors(lora, update, dtype)
    for name, value in state.items():
        state[name] = value.to(dtype).contiguous()
        if not bool(torch.isfinite(state[name]).all()):
            raise InputError(f"{lora.path}: {name} does not fit into {dtype}; use --dtype fp32")
        if (state[name].float() - value).norm() > 0.01 * value.norm():
            print(command_line.one_line(f"WARNING: {dtype} loses part of {name}; use --dtype fp32"))
    source = command_line.one_line(lora.path.name)
    metadata = {"format": "pt", "rewardfl": _TOOL, "rewardfl_source": f"{source} {sha256(lora.path)}"}
    if to == "diffusers":
        metadata["lora_adapter_metadata"] = json.dumps(diffusers_config(lora), indent=2, sort_keys=True)
    return state, metadata


def load_factors(update: Update, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return (scale * up, down), in float16 with a power of two shared between them so that neither underflows."""
    up, down = (load_tensor(factor) for factor in update.factors)
    up = up * update.scale
    sizes = [float(factor.abs().max()) for factor in (up, down)]
    if dtype == torch.float16 and min(sizes) > 0:
        power = 2.0 ** round(math.log2(sizes[0] / sizes[1]) / 2)
        up, down = up / power, down * power
    return up, down


def comfy_tensors(update: Update, dtype: torch.dtype) -> dict[str, Tensor]:
    name = f"diffusion_model.{wan_names.to_original(update.module)}"
    state = {}
    if update.down is not None:
        up, down = load_factors(update, dtype)
        state = {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up}
        state[f"{name}.alpha"] = torch.tensor(float(update.rank))
        if update.magnitude is not None:  # LyCORIS keeps the weight's dimensions: (out, 1, ...), or (1, in, ...)
            shape = [1] * len(down.shape)
            shape[0 if update.wd_on_output else 1] = -1
            state[f"{name}.dora_scale"] = load_tensor(update.magnitude).reshape(shape)
    if update.diff is not None:  # also a table's, such as blocks.0.modulation: ComfyUI reads no diff_m
        state[f"{name}.diff"] = load_tensor(update.diff)
    if (bias := sum_biases(update)) is not None:
        state[f"{name}.diff_b"] = bias
    return state


def diffusers_tensors(lora: Lora, update: Update, dtype: torch.dtype) -> dict[str, Tensor]:
    name = f"transformer.{update.module}"
    way_out = f"{'use --to comfy, or ' if lora.is_wan else ''}merge it with tools/merge_lora.py"
    if update.diff is not None or update.down is None:
        raise InputError(
            f"{lora.path}: {update.module} has a full difference, which diffusers' LoRA loader drops; {way_out}"
        )
    if not update.wd_on_output:
        raise InputError(
            f"{lora.path}: the DoRA magnitude of {update.module} is of the inputs, which peft does not know; {way_out}"
        )
    up, down = load_factors(update, dtype)
    state = {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
    if update.magnitude is not None:  # peft's for a convolution is (1, out, 1, 1, 1)
        ones = [1] * (len(down.shape) - 2)
        state[f"{name}.lora_magnitude_vector"] = load_tensor(update.magnitude).reshape([1, -1, *ones] if ones else [-1])
    if (bias := sum_biases(update)) is not None:
        state[f"{name}.lora_B.bias"] = bias
    return state


def diffusers_config(lora: Lora) -> dict[str, object]:
    """Return peft's configuration as diffusers stores it, with alpha = rank everywhere."""
    ranks = {module: update.rank for module, update in lora.updates.items()}
    common = max(set(ranks.values()), key=list(ranks.values()).count)
    patterns = {module: rank for module, rank in ranks.items() if rank != common}
    config = {
        "r": common,
        "lora_alpha": common,
        "rank_pattern": patterns,
        "alpha_pattern": patterns,
        "target_modules": sorted(ranks),
        "use_dora": any(update.magnitude is not None for update in lora.updates.values()),
        "lora_bias": any(update.up_bias is not None or update.diff_b is not None for update in lora.updates.values()),
    }
    return {f"transformer.{key}": value for key, value in config.items()}


def make_part(name: str, value: Tensor) -> Part:
    dtypes = {dtype: stored for stored, dtype in TORCH_DTYPES.items()}
    return Part(
        name=name, dtype=dtypes[value.dtype], shape=tuple(value.shape), pieces=lambda: [lora_files.as_bytes(value)]
    )


def sum_biases(update: Update) -> Tensor | None:
    """Return the sum that an update adds to the bias; None where it adds nothing."""
    biases = [load_tensor(source) * factor for source, factor in update.biases()]
    return sum(biases[1:], biases[0]) if biases else None
