"""Conversion of a LoRA to other names: the work of tools/convert_lora.py."""

import argparse
import json
import math
from typing import Any

import torch
from torch import Tensor

from rewardfl import command_line
from rewardfl.files import sha256
from rewardfl.merging import writing
from rewardfl.merging.merge_tensors import MergeLoss
from rewardfl.merging.output import Output
from rewardfl.merging.writing import Part
from rewardfl.weights import lora_files, merge, wan_names
from rewardfl.weights.lora_files import Lora, Update, load_tensor
from rewardfl.weights.shards import InputError

TOOL = "rewardfl convert_lora 1"

DOWN = (".lora_down.weight", ".lora_A.weight")

UP = (".lora_up.weight", ".lora_B.weight")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def run(args: argparse.Namespace) -> None:
    """Convert a LoRA to other names. Raise InputError with nothing written."""
    output = Output(path=args.out, report=args.json, force=args.force, tool=TOOL)
    loras = lora_files.read_lora(args.lora, args.alpha)
    output.check([args.lora, *(path for lora in loras for path in lora.files)])
    if output.is_file and len(loras) > 1:
        raise InputError(f"{args.lora} holds both experts; give a folder as --out, it gets a file for each")
    if not output.is_file and any(lora.expert is None and is_wan(lora) for lora in loras):
        raise InputError(f"{args.lora} does not say which expert it is for; give a file as --out")
    report: dict[str, Any] = {"input": str(args.lora), "files": {}}
    for lora in loras:
        merge.check_finite(lora)
        name = args.out if output.is_file else args.out / file_name(args, lora)
        line = f"{lora.path} -> {name}: {len(lora.updates)} modules, alpha from {lora.alpha_source}"
        for message in (line, *(f"note: {note}" for note in conversion_notes(lora, args.to))):
            print(command_line.one_line(message))
        report["files"][str(name)] = line
    states = []
    for lora in loras:
        state, metadata, loss = convert(lora, args.to, DTYPES[args.dtype])
        states.append((lora, state, metadata))
        if args.dtype != "fp32" and loss.intended:
            line = f"{lora.path}: update kept {loss.share:.1%}, error {loss.relative_error:.2%} of it"
            print(command_line.one_line(line))
            if loss.relative_error > 0.01:
                print(f"WARNING: {args.dtype} loses part of the update; use --dtype fp32")
    output.make_room(sum(value.nbytes for _, state, _ in states for value in state.values()))
    if args.dry_run:
        print("dry run: nothing written")
        output.write_report(report)
        return
    if output.is_file:
        ((_, state, metadata),) = states
        output.write_file(make_parts(state), metadata, lambda count: None)
    else:
        with output.folder() as folder:
            for lora, state, metadata in states:
                path = folder / file_name(args, lora)
                path.parent.mkdir(exist_ok=True)
                writing.write_file(path, make_parts(state), metadata, lambda count: None)
    if args.verify:
        verify_conversion(loras, lora_files.read_lora(args.out), DTYPES[args.dtype])
        print("verified: read back, every update equals the input's")
    print(command_line.one_line(f"written: {args.out}"))
    output.write_report(report)


def is_wan(lora: Lora) -> bool:
    return lora_files.WAN in lora.models


def conversion_notes(lora: Lora, to: str) -> list[str]:
    """Return messages for the user on the LoRA in other tools."""
    if to == "comfy" and not is_wan(lora):
        return [*lora.notes, f"ComfyUI reads diffusers' names of {' and '.join(lora.models)}; they are written"]
    dora = [update for update in lora.updates.values() if update.magnitude is not None and update.wd_on_output]
    if to != "comfy" or not dora:
        return list(lora.notes)
    return [
        *lora.notes,
        f"{dora[0].module} is a DoRA of the outputs: ComfyUI divides it by the length of the base's rows, peft and "
        "LyCORIS by that of the moved rows; merge it with tools/merge_lora.py to have what was trained",
    ]


def file_name(args: argparse.Namespace, lora: Lora) -> str:
    """Return the file of a LoRA below the output folder."""
    if args.to == "comfy":
        return f"{args.out.name}_{lora.expert}.safetensors" if lora.expert else f"{args.out.name}.safetensors"
    return f"{'transformer_2' if lora.expert == 'low_noise' else 'transformer'}/{lora_files.WEIGHTS_NAME}"


def convert(lora: Lora, to: str, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, str], MergeLoss]:
    """Return the tensors in the names of `to`, the metadata and the loss.

    Raise InputError for parts `to` cannot hold.
    """
    state: dict[str, Tensor] = {}
    for update in lora.updates.values():
        state |= comfy_tensors(update) if to == "comfy" and is_wan(lora) else diffusers_tensors(lora, update)
        if to == "comfy" and not is_wan(lora) and (update.magnitude is not None or update.biases()):
            raise InputError(
                f"{lora.path}: {update.module} has a bias or a DoRA magnitude, which ComfyUI does not read under "
                "diffusers' names; use --to diffusers, or merge it with tools/merge_lora.py"
            )
    source = command_line.one_line(lora.path.name)
    metadata = {"format": "pt", "rewardfl": TOOL, "rewardfl_source": f"{source} {sha256(lora.path)}"}
    if to == "diffusers":
        metadata["lora_adapter_metadata"] = json.dumps(diffusers_config(lora), indent=2, sort_keys=True)
    if dtype == torch.float16:
        balance(state)
    rounded = {name: value.to(dtype).contiguous() for name, value in state.items()}
    for name, value in rounded.items():
        if not bool(torch.isfinite(value).all()):
            raise InputError(f"{lora.path}: {name} does not fit into {dtype}; use --dtype fp32")
    return rounded, metadata, measure_loss(state, rounded)


def balance(state: dict[str, Tensor]) -> None:
    """Share a power of two between the factors of each product, so that neither underflows in float16. Exact."""
    for name, down in state.items():
        if name.endswith(DOWN):
            up = up_name(name)
            sizes = [float(state[key].abs().max()) for key in (name, up)]
            if min(sizes) > 0:
                factor = 2.0 ** round(math.log2(sizes[1] / sizes[0]) / 2)
                state[name], state[up] = down * factor, state[up] / factor


def up_name(name: str) -> str:
    """Return the name of the `up` factor of a `down` factor."""
    return name.replace(".lora_down.", ".lora_up.").replace(".lora_A.", ".lora_B.")


def measure_loss(state: dict[str, Tensor], rounded: dict[str, Tensor]) -> MergeLoss:
    """Measure the share of the products, differences and biases that the rounded tensors hold."""
    total = MergeLoss()
    for name, value in state.items():
        if name.endswith(DOWN):
            up = up_name(name)
            total.add_products((state[up], value), (rounded[up], rounded[name]))
        elif not name.endswith((*UP, ".alpha", "dora_scale", "lora_magnitude_vector")):
            total.add(torch.zeros_like(value), value, rounded[name].float())
    return total


def comfy_tensors(update: Update) -> dict[str, Tensor]:
    original = wan_names.to_original(update.module)
    name = f"diffusion_model.{original}"
    state = {}
    if update.down is not None:
        state[f"{name}.lora_down.weight"] = load_tensor(update.down)
        state[f"{name}.lora_up.weight"] = load_tensor(update.up) * update.scale
        state[f"{name}.alpha"] = torch.tensor(float(update.rank))
    if update.magnitude is not None:  # LyCORIS keeps the weight's dimensions: (out, 1, ...), or (1, in, ...)
        shape = [1] * len(update.down.shape)
        shape[0 if update.wd_on_output else 1] = -1
        state[f"{name}.dora_scale"] = load_tensor(update.magnitude).reshape(shape)
    if update.diff is not None:  # of a table, such as blocks.0.modulation, too: ComfyUI reads no diff_m
        state[f"{name}.diff"] = load_tensor(update.diff)
    if (bias := sum_biases(update)) is not None:
        state[f"{name}.diff_b"] = bias
    return state


def diffusers_tensors(lora: Lora, update: Update) -> dict[str, Tensor]:
    name = f"transformer.{update.module}"
    way_out = f"{'use --to comfy, or ' if is_wan(lora) else ''}merge it with tools/merge_lora.py"
    if update.diff is not None or (update.diff_b is not None and update.down is None):
        raise InputError(
            f"{lora.path}: {update.module} is changed by a full difference, which diffusers' LoRA loader drops without "
            f"a word; {way_out}"
        )
    if not update.wd_on_output:
        raise InputError(
            f"{lora.path}: the DoRA magnitude of {update.module} is of the inputs, which peft does not know; {way_out}"
        )
    state = {
        f"{name}.lora_A.weight": load_tensor(update.down),
        f"{name}.lora_B.weight": load_tensor(update.up) * update.scale,
    }
    if update.magnitude is not None:  # peft's for a convolution is (1, out, 1, 1, 1)
        ones = [1] * (len(update.down.shape) - 2)
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


def make_parts(state: dict[str, Tensor]) -> list[Part]:
    """Return the tensors as a file's parts."""
    names = {dtype: name for name, dtype in lora_files.TORCH_DTYPES.items()}

    def part(name: str, value: Tensor) -> Part:
        shape, dtype = tuple(value.shape), names[value.dtype]
        return Part(name=name, dtype=dtype, shape=shape, pieces=lambda: [lora_files.as_bytes(value)])

    return [part(*item) for item in state.items()]


def verify_conversion(before: list[Lora], after: list[Lora], dtype: torch.dtype) -> None:
    """Raise InputError (the output is wrong) unless each update is there with the same product up to rounding."""
    tolerance = 4 * torch.finfo(dtype).eps
    for old, new in zip(before, after, strict=True):
        if old.updates.keys() != new.updates.keys():
            raise InputError(f"{new.path} has other modules than {old.path}")
        for module, update in old.updates.items():
            for (kind, a), (new_kind, b) in zip(effects(update), effects(new.updates[module]), strict=True):
                if kind != new_kind or float((a - b).norm()) > tolerance * float(a.norm()):
                    raise InputError(f"{new.path}: {kind} of {module} is not that of {old.path}")


def effects(update: Update) -> list[tuple[str, Tensor]]:
    """Return the named tensors that an update adds or multiplies by, with all scales applied."""
    tensors = []
    if update.down is not None:
        product = update.scale * load_tensor(update.up).flatten(1) @ load_tensor(update.down).flatten(1)
        tensors.append(("the product", product))
    if update.magnitude is not None:
        axis = "outputs" if update.wd_on_output else "inputs"
        tensors.append((f"the magnitude of the {axis}", load_tensor(update.magnitude).flatten()))
    if update.diff is not None:
        tensors.append(("the difference", load_tensor(update.diff)))
    if (bias := sum_biases(update)) is not None:
        tensors.append(("the bias", bias))
    return tensors


def sum_biases(update: Update) -> Tensor | None:
    """Return the sum that an update adds to the bias; None where it adds nothing."""
    biases = [load_tensor(source) * factor for source, factor in update.biases()]
    return sum(biases[1:], biases[0]) if biases else None
