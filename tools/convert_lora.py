"""Rewrite a LoRA of any tool in the names that other tools load.

    python tools/convert_lora.py --lora outputs/face/checkpoints/latest --to comfy --out face_comfy
    python tools/convert_lora.py --lora lightning_low_noise.safetensors --to diffusers --out lightning

LoRAs of Wan, SD3, FLUX.1 and Qwen-Image are read. `comfy` (diffusion_model.<original name>.lora_down / lora_up / alpha)
loads in ComfyUI, DiffSynth, LightX2V, VideoX-Fun and diffusers; for image models it is diffusers' names, which ComfyUI
reads. `diffusers` is what pipe.load_lora_weights and tools/generate.py read. The scale is folded into the weights, so
that readers without alpha are right, too. --out is a .safetensors file or a folder; of both experts a folder.
Exit codes: 0 written, 2 refused with nothing written.
"""

from pathlib import Path

from rewardfl import command_line


def main() -> int:
    parser = command_line.Parser(__doc__)
    parser.add_argument("--lora", type=Path, required=True, help="file, peft folder or checkpoint, of any tool")
    parser.add_argument("--to", choices=("comfy", "diffusers"), required=True)
    dtypes = ("fp32", "bf16", "fp16")
    parser.add_argument("--dtype", choices=dtypes, default="fp32", help="of the output (default: fp32)")
    parser.add_argument("--alpha", type=float, help="alpha of a LoRA that does not tell its own (default: its rank)")
    command_line.add_output_options(parser)
    return command_line.run("rewardfl.merging.conversion:convert_lora", parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
