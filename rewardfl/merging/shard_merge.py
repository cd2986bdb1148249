"""Join, split, cast or rename a sharded checkpoint in one pass: the work of tools/merge_shards.py."""

import argparse
from collections import Counter

from rewardfl import command_line
from rewardfl.merging.writing import Output, Part, TensorFile, copy_entry
from rewardfl.weights import shards, wan_names
from rewardfl.weights.shards import Checkpoint

_TOOL = "rewardfl merge_shards 1"


def merge_shards(args: argparse.Namespace) -> None:
    """Merge the shards. Raise InputError with nothing written."""
    model = shards.open_checkpoint(args.input[0] if len(args.input) == 1 else args.input)
    config = model.files[0].with_name("config.json")
    output = Output(args, [*args.input, *model.files, config])
    weights = TensorFile(
        plan_parts(model, args.dtype, args.rename), {"format": "pt", **model.metadata, "rewardfl": _TOOL}
    )
    dtypes = sorted(Counter(part.dtype for part in weights.parts).items())
    listing = ", ".join(f"{count} {dtype}" for dtype, count in dtypes)
    size = command_line.format_bytes(weights.nbytes)
    print(f"{len(model.files)} files, {len(weights.parts)} tensors ({listing}), {size}")
    output.finish(output.model_files(weights, config))
    if output.is_file and not args.dry_run:
        print(
            "diffusers: WanTransformer3DModel.from_single_file needs config= (without it, a Wan2.2 file is taken for "
            "Wan2.1), and casts all tensors; a folder with config.json loads through from_pretrained"
        )


def plan_parts(model: Checkpoint, dtype: str, rename: str) -> list[Part]:
    """Return the tensors to write. Raise InputError for new names or dtypes of a model that is no Wan transformer."""
    if dtype == "keep" and rename == "keep":
        return [copy_entry(entry) for entry in model.tensors.values()]
    if dtype == "keep":
        _, commons = wan_names.detect_naming(model)
        names = {name: wan_names.output_name(commons[name], name, rename) for name in model.tensors}
        return [copy_entry(entry, names[name]) for name, entry in model.tensors.items()]
    from rewardfl.merging.lora_merge import plan_merge

    shards.check_unquantised(model, "its values cannot be cast; give --dtype keep, or the fp32, fp16 or bf16 files")
    return plan_merge(model, [], dtype, rename).parts
