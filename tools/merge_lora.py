"""Merge LoRAs into a Wan, SD3, FLUX.1 or Qwen-Image checkpoint, in constant memory; say how much of them arrived.

    python tools/merge_lora.py --base Wan2.2-I2V-A14B-Diffusers --lora outputs/face/checkpoints/latest --out merged
    python tools/merge_lora.py --base wan/low_noise_model --lora face.safetensors:0.8 --out low.safetensors --dtype fp16
    python tools/merge_lora.py --base FLUX.1-dev --lora style.safetensors --lora outputs/my/checkpoints/latest --out my

The base is a pipeline folder (diffusers, or Wan-AI's with high_noise_model/ and low_noise_model/), an expert's folder,
an index.json or a single file, with diffusers' or the original names; of image models the pipeline or its transformer
in diffusers' names. A LoRA is PATH[@high|@low][:strength], with any tool's names. Each half goes to its expert, by what
you write, its keys or a published name (..._high_noise); what cannot be placed is refused, LoRAs of text encoders, too.
Exit codes: 0 merged and every key used, 2 refused with nothing written.
"""

from pathlib import Path

from rewardfl import command_line


def main() -> int:
    parser = command_line.Parser(__doc__)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--lora", action="append", required=True, metavar="PATH[@high|@low][:strength]")
    parser.add_argument("--expert", choices=("high", "low"), help="which the base is, where its name does not say")
    parser.add_argument("--alpha", type=float, help="alpha of LoRAs that do not tell theirs (default: their rank)")
    command_line.add_layout_options(parser)
    command_line.add_output_options(parser)
    return command_line.run("rewardfl.merging.lora_merge:merge_lora", parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
