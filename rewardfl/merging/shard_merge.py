"""Join, split, cast or rename a sharded checkpoint in one pass: the work of tools/merge_shards.py."""

import argparse

from rewardfl import command_line
from rewardfl.merging import writing
from rewardfl.merging.output import Output
from rewardfl.merging.writing import Part, copy_entry
from rewardfl.weights import shards, wan_names
from rewardfl.weights.shards import Checkpoint

_TOOL = "rewardfl merge_shards 1"


def run(args: argparse.Namespace) -> None:
    """Merge the shards. Raise InputError with nothing written."""
    model = shards.open_checkpoint(args.input[0] if len(args.input) == 1 else args.input)
    output = Output(path=args.out, report=args.json, force=args.force, tool=_TOOL)
    config = model.files[0].with_name("config.json")
    output.check([*args.input, *model.files, config])
    parts = plan_parts(model, args.dtype, args.rename)
    total = sum(part.nbytes for part in parts)
    output.make_room(total)
    dtypes = {dtype: sum(part.dtype == dtype for part in parts) for dtype in sorted({part.dtype for part in parts})}
    report = {
        "input": [str(path) for path in model.files],
        "tensors": len(parts),
        "bytes_in": model.nbytes,
        "bytes_out": total,
        "dtypes": dtypes,
    }
    listing = ", ".join(f"{count} {dtype}" for dtype, count in dtypes.items())
    print(f"{len(model.files)} files, {len(parts)} tensors ({listing}), {command_line.format_bytes(total)}")
    if args.dry_run:
        print("dry run: nothing written")
        output.write_report(report)
        return
    metadata = {"format": "pt", **model.metadata, "rewardfl": _TOOL}
    copied_config = config if args.rename == "keep" and config.is_file() else None
    with writing.progress_bar(parts, str(args.out)) as bar:
        output.write_model(parts, metadata, args.max_shard_size, bar.update, copied_config)
    if args.verify:
        with writing.progress_bar(parts, "verifying") as bar:
            writing.verify(parts, shards.open_checkpoint(args.out), bar.update)
        print("verified: every tensor equals the input's")
    print(command_line.one_line(f"written: {args.out}"))
    output.write_report(report)
    if output.is_file:
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
    from rewardfl.merging import merge_tensors

    shards.check_unquantised(model, "its values cannot be cast; give --dtype keep, or the fp32, fp16 or bf16 files")
    return merge_tensors.plan_merge(model, [], dtype, rename).parts
