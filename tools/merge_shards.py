"""Join a sharded checkpoint into one file, split it anew, cast it or rename its tensors, in one pass.

    python tools/merge_shards.py --input wan/low_noise_model --out wan2.2_i2v_low_noise_14B.safetensors
    python tools/merge_shards.py --input transformer_2 --out comfy.safetensors --rename comfy --dtype fp16
    python tools/merge_shards.py --input low.safetensors --out transformer_2 --rename diffusers --max-shard-size 10GB

The input is a folder, an index.json, a file, or all shards by name; every byte of it is accounted for or the tool
refuses: missing, cut-off, doubled and surplus shards, a total_size that is wrong. A copy in the same dtype needs no
torch and 30 MiB of memory. Exit codes: 0 written, 2 refused with nothing written.
"""

import argparse
import sys
from pathlib import Path

from rewardfl.weights import shards, wan_names
from rewardfl.weights.shards import Checkpoint, Refused
from rewardfl_tools import _common
from rewardfl_tools._output import Output
from rewardfl_tools._writing import Part, copy_of

TOOL = "rewardfl merge_shards 1"


def main() -> int:
    parser = _common.Parser(__doc__)
    parser.add_argument("--input", type=Path, nargs="+", required=True, help="folder, index.json, file or all shards")
    _common.add_layout_options(parser)
    _common.add_output_options(parser)
    return _common.run("merge_shards", parser.parse_args())


def run(args: argparse.Namespace) -> None:
    """Raise Refused with nothing written."""
    source = args.input[0] if len(args.input) == 1 else args.input
    model = shards.open_checkpoint(source)
    output = Output(args.out, args.json, args.force, TOOL)
    config = model.files[0].with_name("config.json")
    output.check([*args.input, *model.files, config])
    parts = plan(model, args.dtype, args.rename)
    total = sum(part.nbytes for part in parts)
    output.make_room(total, args.dry_run)

    dtypes = {dtype: sum(part.dtype == dtype for part in parts) for dtype in sorted({part.dtype for part in parts})}
    report = {
        "input": [str(path) for path in model.files],
        "tensors": len(parts),
        "bytes_in": model.nbytes,
        "bytes_out": total,
        "dtypes": dtypes,
        "notes": list(model.notes),
    }
    listing = ", ".join(f"{count} {dtype}" for dtype, count in dtypes.items())
    print(f"{len(model.files)} files, {len(parts)} tensors ({listing}), {_common.gigabytes(total)}")
    for note in model.notes:
        print(_common.one_line(f"note: {note}"))
    if args.dry_run:
        print("dry run: nothing written")
        output.write_report(report)
        return

    metadata = {"format": "pt", **model.metadata, "rewardfl": TOOL}
    with _common.progress_bar(parts, str(args.out)) as bar:
        output.write_model(
            parts, metadata, args.max_shard_size, bar.update,
            config if args.rename == "keep" and config.is_file() else None,
        )  # fmt: skip
    if args.verify:
        with _common.progress_bar(parts, "verifying") as bar:
            verify(model, parts, shards.open_checkpoint(args.out), bar.update)
        print("verified: every tensor equals the input's")
    print(_common.one_line(f"written: {args.out}"))
    output.write_report(report)
    if output.is_file:
        print(
            "diffusers: WanTransformer3DModel.from_single_file needs config= (without it, a Wan2.2 file is taken for "
            "Wan2.1), and casts all tensors; a folder with config.json loads through from_pretrained"
        )


def plan(model: Checkpoint, dtype: str, rename: str) -> list[Part]:
    """The tensors to write. Refused where names or dtypes are to change and the model is not a Wan transformer."""
    if dtype == "keep" and rename == "keep":
        return [copy_of(entry) for entry in model.tensors.values()]
    if dtype == "keep":
        _, commons = wan_names.naming(model)
        return [
            copy_of(entry, wan_names.output_name(commons[name], name, rename)) for name, entry in model.tensors.items()
        ]
    from rewardfl_tools import _merging

    shards.check_unquantised(model, "its values cannot be cast; give --dtype keep, or the fp32, fp16 or bf16 files")
    return _merging.plan_merge(model, [], dtype, rename).parts


def verify(model: Checkpoint, parts: list[Part], written: Checkpoint, progress) -> None:
    """Refused (the output is wrong) unless it holds exactly the planned tensors with the planned bytes."""
    if len(written.tensors) != len(parts):
        raise Refused(f"{written.path} has {len(written.tensors)} tensors of {len(parts)}")
    for part in parts:
        output = written.tensors.get(part.name)
        if output is None or (output.dtype, output.shape) != (part.dtype, part.shape):
            raise Refused(f"{written.path}: {part.name} is missing or of another kind")
        with output.file.open("rb") as file:
            file.seek(output.offset)
            if any(file.read(len(content)) != content for content in part.pieces()):
                raise Refused(f"{written.path}: {part.name} differs from the input")
        progress(part.nbytes)


if __name__ == "__main__":
    sys.exit(main())
