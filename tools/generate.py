"""One image and a prompt -> one video, with or without a trained adapter, by the sampler that training uses.

Models of images take only a prompt, --num-frames 1 and --out NAME.png.

    python tools/generate.py --model assets/tiny_world/pipeline --image face.png --prompt "a person, talking" \\
        --adapter outputs/tiny_face/checkpoints/latest --height 64 --width 64 --num-frames 9 --out talking.mp4

--out NAME.mp4 is for looking at. Without loss are NAME.npy, an array of uint8 (frames, height, width, 3) in RGB, and
FOLDER with a PNG for each frame: 0000.png, 0001.png, and so on. Only --overwrite replaces a file or folder that exists.
"""

from pathlib import Path

from rewardfl import command_line
from rewardfl.config import schema


def main() -> int:
    parser = command_line.Parser(__doc__)
    parser.add_argument("--model-name", default="wan2_2", help="as model.model_name (default: wan2_2)")
    parser.add_argument("--model", required=True, help="diffusers folder, or a wan22_paths.json")
    parser.add_argument("--tokenizer", default="", help="tokenizer folder, for original files (default: the model's)")
    parser.add_argument("--image", type=Path, help="the first frame, for models that take one")
    parser.add_argument("--prompt", required=True)
    guidance, shift = (command_line.setting_type(schema.SampleConfig, key) for key in ("guidance_scale", "shift"))
    text = "classifier-free: 3.5 (with --steps 40) for the official model, 1 (none, the default) for distilled ones"
    parser.add_argument("--guidance", type=guidance, default=1.0, help=text)
    embedded = command_line.setting_type(schema.ModelConfig, "embedded_guidance")
    parser.add_argument("--embedded-guidance", type=embedded, help="as model.embedded_guidance, for FLUX.1-dev")
    parser.add_argument("--negative-prompt", default="", help="what --guidance above 1 leads away from")
    parser.add_argument("--out", type=Path, required=True, help="NAME.mp4, NAME.npy, NAME.png or a new folder")
    parser.add_argument("--distill-lora-high", default="", help="distillation LoRA fused into the high-noise expert")
    parser.add_argument("--distill-lora-low", default="", help="the same for the low-noise expert")
    text = "checkpoint folder of a run, e.g. outputs/x/checkpoints/latest, or outputs/x/checkpoints/latest:0.8"
    parser.add_argument("--adapter", type=command_line.parse_adapter, metavar="PATH[:strength]", help=text)
    default = "default: %(default)s"
    side, count = command_line.option_type(schema.Side), command_line.setting_type(schema.DataConfig, "num_frames")
    steps, seed, rate = map(command_line.option_type, (schema.Denoising, schema.Seed, schema.FrameRate))
    parser.add_argument("--height", type=side, default=480, help=default)
    parser.add_argument("--width", type=side, default=832, help=default)
    parser.add_argument("--num-frames", type=count, default=81, help=default)
    parser.add_argument("--steps", type=steps, default=8, help=f"denoising steps ({default})")
    parser.add_argument("--shift", type=shift, default=5.0, help=f"as sample.shift ({default})")
    parser.add_argument("--seed", type=seed, default=0, help=f"of the noise ({default})")
    parser.add_argument("--fps", type=rate, help="of NAME.mp4 (default: the model's)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help=default)
    command_line.add_overwrite_option(parser)
    command_line.add_device_options(parser)
    args = parser.parse_args()
    if args.negative_prompt and args.guidance == 1:
        parser.error("--negative-prompt: does nothing without guidance; give --guidance, or remove it")
    return command_line.run("rewardfl.evaluation.generation:generate_videos", args)


if __name__ == "__main__":
    raise SystemExit(main())
