"""One video from an image and a prompt: the work of tools/generate.py."""

import argparse
import io
import os
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from rewardfl import backbones, command_line, data, lora, reward_flow
from rewardfl.backbones.protocol import Experts, Source, Velocity
from rewardfl.files import atomic_directory
from rewardfl.memory import offload
from rewardfl.merging import output
from rewardfl.noise import draw_noise


def run(args: argparse.Namespace) -> int:
    """One video from an image and a prompt: the exit code."""
    args.device = command_line.device(args.device)
    named = [args.image, args.model, args.tokenizer, args.distill_lora_high, args.distill_lora_low]
    inputs = tuple(Path(path) for path in (*named, *(args.adapter or ())[:1]) if path)
    file = output.File(option="--out", path=args.out, tool="rewardfl generate", inputs=inputs)
    check_out(file)
    video = generate(args)
    if not video.isfinite().all():
        raise ValueError("the video is not finite, so it would be black; look for NaN in the model and the adapter")
    if args.out.suffix:
        file.write(encode_prompt(video, args.out.suffix, args.fps))
    else:
        write_pngs(args.out, video)
    print(args.out)
    return 0


def check_out(file: output.File) -> None:
    """Raise ValueError for another suffix, a folder that is not new, and a file that this tool did not write."""
    if file.path.suffix not in ("", ".mp4", ".npy", ".png"):
        raise ValueError(
            f"--out: {file.path}: give NAME.mp4, NAME.npy, for an image NAME.png, or for PNG files of all frames a "
            "folder without a dot in its name"
        )
    if not file.path.suffix and os.path.lexists(file.path):
        raise ValueError(f"--out: {file.path} is there already; name a new folder")
    file.check()


def encode_prompt(video: torch.Tensor, suffix: str, fps: float) -> bytes:
    """Return a video (3, F, H, W) in [-1, 1] as .mp4, as .png of its one frame, or as .npy.

    The latter two keep the pixels: numpy's array is uint8 (F, H, W, 3) in RGB.
    """
    if suffix == ".mp4":
        return data.encode_video(video, fps)
    frames, content = data.to_uint8(video).cpu().numpy(), io.BytesIO()
    if suffix == ".png":
        Image.fromarray(frames[0]).save(content, "png")
    else:
        np.save(content, frames)
    return content.getvalue()


def write_pngs(folder: str | Path, video: torch.Tensor) -> None:
    """Write a video (3, F, H, W) in [-1, 1] as `folder`/0000.png, 0001.png, ...: all of them or none, losslessly.

    Raises FileExistsError where there is something at `folder`, which is never replaced.
    """
    if Path(folder).exists():
        raise FileExistsError(f"{folder} is there already")
    with atomic_directory(folder) as new:
        for i, frame in enumerate(data.to_uint8(video).cpu().numpy()):
            Image.fromarray(frame).save(new / f"{i:04d}.png")


@torch.no_grad()
def generate(args: argparse.Namespace) -> torch.Tensor:
    """The video (3, F, H, W) in [-1, 1]; ValueError or FileNotFoundError for what cannot work, before weights load."""
    source = Source(
        model_paths=args.model,
        tokenizer_path=args.tokenizer,
        dtype=args.dtype,
        embedded_guidance=args.embedded_guidance,
        distilled=(args.distill_lora_high, args.distill_lora_low, "fuse"),
    )
    backbone, device = backbones.open(args.model_name, source), torch.device(args.device)
    backbone.check_clips(args.height, args.width, args.num_frames)
    if args.out.suffix == ".png" and args.num_frames != 1:
        raise ValueError(f"--out: {args.out} is one image, and --num-frames {args.num_frames} are more; give NAME.mp4")
    if backbone.takes_image != (args.image is not None):
        raise ValueError(
            f"--image: {args.model_name} {'needs one' if backbone.takes_image else 'takes none; remove it'}"
        )
    image = read_image(args.image, args.height, args.width) if args.image else None
    encode_text = backbone.text_encoder(device)
    conditioning = encode_text(args.prompt) | backbone.image_encoder(device)(image, args.num_frames)
    negative = encode_text(args.negative_prompt) if args.guidance != 1 else None
    del encode_text  # 11 GB
    decoder = backbone.load_decoder(device)
    loaded = {name: backbone.load_expert(name) for name in backbone.experts}
    if args.adapter:
        path, strength = args.adapter
        backbone.attach_adapters(loaded, Path(path))
        for expert in loaded.values():
            lora.set_strength(expert, strength)
    placed = {
        name: offload.move_expert(expert, args.experts, device, backbone.block_classes)
        for name, expert in loaded.items()
    }
    experts = Experts(placed)
    shape = backbone.latent_shape(args.height, args.width, args.num_frames)
    noise = draw_noise((1, *shape), args.seed, device)
    schedule = backbone.schedule(args.steps, args.shift, shape)
    velocity = Velocity(backbone, experts, conditioning, schedule, negative, args.guidance)
    x0 = reward_flow.rollout(velocity, noise, schedule.sigmas, keep=()).x0
    return decoder.decode(x0, conditioning)[0].float().cpu()


def read_image(path: Path, height: int, width: int) -> torch.Tensor:
    """(3, height, width) in [-1, 1]: upright, resized to cover and cropped at the centre, as the training clips are."""
    if not path.is_file():
        raise FileNotFoundError(f"--image: no such file: {path}")
    return data.to_float(data.fit(data.read_picture(path)[None], height, width))[:, 0]
