"""One video from an image and a prompt: the work of tools/generate.py."""

import argparse
import io
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from rewardfl import backbones, command_line, data, lora, outputs, reward_flow
from rewardfl.backbones.protocol import Source, Velocity
from rewardfl.evaluation.arms import load_model
from rewardfl.noise import draw_noise


def generate_videos(args: argparse.Namespace) -> int:
    """Generate and write one video; return the exit code."""
    args.device = command_line.resolve_device(args.device)
    paths = [args.image, args.model, args.tokenizer, args.distill_lora_high, args.distill_lora_low]
    inputs = tuple(Path(path) for path in (*paths, *(args.adapter or ())[:1]) if path)
    target = outputs.Target(
        option="--out", path=args.out, overwrite=args.overwrite, inputs=inputs, is_folder=not args.out.suffix
    )
    if args.out.suffix not in ("", ".mp4", ".npy", ".png"):
        raise ValueError(
            f"--out: {args.out}: give NAME.mp4, NAME.npy, for an image NAME.png, or for PNG files of all frames a "
            "folder without a dot in its name"
        )
    target.check()
    video = generate(args)
    if args.out.suffix:
        target.write(encode(video, args.out.suffix, args.fps))
    else:
        with target.fill() as folder:
            for i, frame in enumerate(video.unbind(1)):
                data.write_picture(folder / f"{i:04d}.png", frame[:, None])
    print(args.out)
    return 0


def encode(video: torch.Tensor, suffix: str, fps: float) -> bytes:
    """Encode a video (3, F, H, W) in [-1, 1] as .mp4, or losslessly as one .png or as .npy, uint8 (F, H, W, 3)."""
    if suffix == ".mp4":
        return data.encode_video(video, fps)
    frames, content = data.to_uint8(video).cpu().numpy(), io.BytesIO()
    if suffix == ".png":
        Image.fromarray(frames[0]).save(content, "png")
    else:
        np.save(content, frames)
    return content.getvalue()


@torch.no_grad()
def generate(args: argparse.Namespace) -> torch.Tensor:
    """Generate a video (3, F, H, W) in [-1, 1]; args.fps None becomes the model's."""
    source = Source(
        model_paths=args.model,
        tokenizer_path=args.tokenizer,
        dtype=args.dtype,
        embedded_guidance=args.embedded_guidance,
        distilled=(args.distill_lora_high, args.distill_lora_low),
    )
    backbone, device = backbones.open(args.model_name, source), torch.device(args.device)
    args.fps = args.fps or backbone.frame_rate
    outputs.check_inputs("--out", args.out, [file for files in backbone.weight_files.values() for file in files])
    backbone.check_clips(args.height, args.width, args.num_frames)
    if args.out.suffix == ".png" and args.num_frames != 1:
        raise ValueError(f"--out: {args.out} is one image, and --num-frames {args.num_frames} are more; give NAME.mp4")
    if backbone.takes_image != (args.image is not None):
        needs = "needs one" if backbone.takes_image else "takes none; remove it"
        raise ValueError(f"--image: {args.model_name} {needs}")
    image = None
    if args.image:
        fitted = data.fit(data.read_picture(args.image)[None], args.height, args.width)  # resized to cover, cropped
        image = data.to_float(fitted)[:, 0]
    encode_text = backbone.text_encoder(device)
    conditioning = encode_text(args.prompt) | backbone.image_encoder(device)(image, args.num_frames)
    negative = encode_text(args.negative_prompt) if args.guidance != 1 else None
    del encode_text  # 11 GB
    path, strength = args.adapter or (None, 1.0)
    experts, decoder = load_model(backbone, path and Path(path), args.experts, device)
    lora.set_strength(experts, strength)
    shape = backbone.latent_shape(args.height, args.width, args.num_frames)
    noise = draw_noise((1, *shape), args.seed, device)
    schedule = backbone.schedule(args.steps, args.shift, shape)
    velocity = Velocity(
        backbone=backbone, model=experts, conditioning=conditioning, schedule=schedule, negative=negative,
        guidance=args.guidance,
    )  # fmt: skip
    x0 = reward_flow.rollout(velocity, noise, schedule.sigmas, keep=()).x0
    if not x0.isfinite().all():  # a decoder may clamp infinity
        raise ValueError("the latents are not finite, so the video would be black; look for NaN in model and adapter")
    return decoder.decode(x0, conditioning)[0].float().cpu()
