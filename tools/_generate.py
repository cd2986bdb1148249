"""One video from an image and a prompt: the work of tools/generate.py."""

import argparse
import io
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from rewardfl import backbones, data, groups, lora, offload, reward_flow
from rewardfl.backbones.seam import Experts, Source, Velocity
from rewardfl.files import atomic_directory, atomic_write, printable
from rewardfl_tools import _common


def run(args: argparse.Namespace) -> int:
    """One video from an image and a prompt: the exit code."""
    args.device = _common.device(args.device)
    try:
        write = writer(args.out, args.fps)
        video = generate(args)
    except (ValueError, FileNotFoundError) as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return 2
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write(args.out, video)
    print(args.out)
    return 0


def writer(out: Path, fps: float) -> Callable[[Path, torch.Tensor], None]:
    """What writes a video to `out`, by its name. ValueError for another suffix, and for a folder that is not new."""
    if out.suffix == ".mp4":
        return partial(data.write_video, fps=fps)
    if out.suffix == ".npy":
        return write_npy
    if out.suffix == ".png":
        return data.write_picture
    if out.suffix:
        raise ValueError(
            f"--out: {out}: give NAME.mp4, NAME.npy, for an image NAME.png, or for PNG files of all frames a folder "
            "without a dot in its name"
        )
    if out.exists():
        raise ValueError(f"--out: {out} is there already; name a new folder")
    return write_pngs


def write_npy(path: str | Path, video: torch.Tensor) -> None:
    """Write a video (3, F, H, W) in [-1, 1] as numpy's uint8 array (F, H, W, 3) in RGB, atomically and losslessly."""
    content = io.BytesIO()
    np.save(content, data.to_uint8(video).cpu().numpy())
    atomic_write(path, content.getvalue())


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
        name: offload.place(expert, args.experts, device, backbone.block_classes) for name, expert in loaded.items()
    }
    experts = Experts(placed)
    shape = backbone.latent_shape(args.height, args.width, args.num_frames)
    noise = groups.noise((1, *shape), args.seed, device)
    schedule = backbone.schedule(args.steps, args.shift, shape)
    velocity = Velocity(backbone, experts, conditioning, schedule, negative, args.guidance)
    x0 = reward_flow.rollout(velocity, noise, schedule.sigmas, keep=()).x0
    return decoder.decode(x0, conditioning)[0].float().cpu()


def read_image(path: Path, height: int, width: int) -> torch.Tensor:
    """(3, height, width) in [-1, 1]: upright, resized to cover and cropped at the centre, as the training clips are."""
    if not path.is_file():
        raise FileNotFoundError(f"--image: no such file: {path}")
    return data.to_float(data.fit(data.read_picture(path)[None], height, width))[:, 0]
