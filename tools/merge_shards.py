"""Join a sharded checkpoint into one file, split it again, cast it or rename its tensors, in one pass.

    python tools/merge_shards.py --input wan/low_noise_model --out wan2.2_i2v_low_noise_14B.safetensors
    python tools/merge_shards.py --input transformer_2 --out comfy.safetensors --rename comfy --dtype fp16
    python tools/merge_shards.py --input low.safetensors --out transformer_2 --rename diffusers --max-shard-size 10GB

The input is a folder, an index.json, a file, or all shards by name; every byte of it is accounted for or the tool
refuses: missing, cut-off, doubled and surplus shards. A copy in the same dtype needs no torch and 30 MiB of memory.
Exit codes: 0 written, 2 refused with nothing written.
"""

from pathlib import Path

from rewardfl import command_line


def main() -> int:
    parser = command_line.Parser(__doc__)
    parser.add_argument("--input", type=Path, nargs="+", required=True, help="folder, index.json, file or all shards")
    command_line.add_layout_options(parser)
    command_line.add_output_options(parser)
    return command_line.run("rewardfl.merging.shard_merge:merge_shards", parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
