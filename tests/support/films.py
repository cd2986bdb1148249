"""Clips for tests: frames that tell their number, files of any codec, display matrices, turned pictures."""

from fractions import Fraction

import av
import numpy as np
import torch
from PIL import Image

from rewardfl.data import clips


def gradients(num_frames=9, height=48, width=64):
    """Smooth colour gradients that move: (F, H, W, 3) uint8."""
    t, y, x = torch.meshgrid(*(torch.linspace(0, 1, n) for n in (num_frames, height, width)), indexing="ij")
    channels = [(x + t) / 2, (y + 1 - t) / 2, (x + y) / 2]
    return (torch.stack(channels, dim=-1) * 255).round().to(torch.uint8)


def numbered(num_frames, height=32, width=48):
    """Grey frames whose number numbers_of reads after compression: (F, H, W, 3) uint8."""
    return (torch.arange(num_frames, dtype=torch.uint8) * 6 + 3).view(-1, 1, 1, 1).repeat(1, height, width, 3)


def numbers_of(frames):
    return [round((frame.float().mean().item() - 3) / 6) for frame in frames]


def encode(path, *streams, times=None, curve=2, options=clips.X264):
    """Write streams (codec, pixel format, frames, disposition); frames of four channels are RGBA.

    times: of the frames in milliseconds. curve: transfer function by ITU-T H.273, 2 if the file does not name one.
    """
    with av.open(str(path), "w") as container:
        outputs = [container.add_stream(codec, rate=16) for codec, *_ in streams]
        for stream, (codec, pixels, frames, disposition) in zip(outputs, streams, strict=True):
            stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], pixels
            stream.disposition = av.stream.Disposition(disposition)
            stream.options = dict(options) if codec == "libx264" else {}
            stream.codec_context.color_trc = curve
            stream.codec_context.time_base = Fraction(1, 1000 if times else 16)
        for stream, (_, pixels, frames, _) in zip(outputs, streams, strict=True):
            for i, picture in enumerate(frames.numpy()):
                frame = av.VideoFrame.from_ndarray(picture, format="rgba" if picture.shape[2] == 4 else "rgb24")
                frame.pts, frame.time_base = times[i] if times else i, stream.codec_context.time_base
                container.mux(stream.encode(frame.reformat(format=pixels)))
            container.mux(stream.encode())


def damage(path):
    """Flip bits in the third quarter of a file."""
    content = bytearray(path.read_bytes())
    for place in range(len(content) // 2, len(content) * 3 // 4, 97):
        content[place] ^= 0x55
    path.write_bytes(content)


def turn(path, *matrix):
    """Put a display matrix a, b, c, d into the track header of a file of write_video, as phones do."""
    content = path.read_bytes()
    numbers = [[0x10000, 0, 0, 0, 0x10000, 0, 0, 0, 0x40000000], [*matrix[:2], 0, *matrix[2:], 0, 0, 0, 0x40000000]]
    identity, turned = (b"".join(n.to_bytes(4, "big", signed=True) for n in row) for row in numbers)
    header = content.index(b"tkhd")
    path.write_bytes(content[:header] + content[header:].replace(identity, turned, 1))


def turned_picture(path, orientation):
    """Write an upright 64 x 48 picture as a camera that is held otherwise stores it; return its pixels."""
    upright, exif = Image.fromarray(gradients(1)[0].numpy()), Image.Exif()
    undo = {2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_90}
    exif[0x0112] = orientation
    upright.transpose(undo[orientation]).save(path, exif=exif, quality=95)
    return torch.from_numpy(np.array(upright))
