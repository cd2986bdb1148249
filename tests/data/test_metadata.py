import ctypes
import math
import os
import random
import re
import tracemalloc
import zlib
from collections import Counter, defaultdict
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image

from rewardfl import data, epoch_order
from rewardfl.data import DataError, clips, order
from rewardfl.evaluation import generation
from rewardfl.noise import draw_noise, noise_seed, stable_hash, training_noise_seed


def clip(num_frames=9, height=48, width=64):
    """Smooth colour gradients that move: (F, H, W, 3) uint8."""
    t, y, x = torch.meshgrid(*(torch.linspace(0, 1, n) for n in (num_frames, height, width)), indexing="ij")
    channels = [(x + t) / 2, (y + 1 - t) / 2, (x + y) / 2]
    return (torch.stack(channels, dim=-1) * 255).round().to(torch.uint8)


def numbered(num_frames, height=32, width=48):
    """Grey frames, of which shown_numbers knows the number after compression: (F, H, W, 3) uint8."""
    return (torch.arange(num_frames, dtype=torch.uint8) * 6 + 3).view(-1, 1, 1, 1).repeat(1, height, width, 3)


def shown_numbers(frames):
    return [round((frame.float().mean().item() - 3) / 6) for frame in frames]


def film(path, frames, milliseconds, **settings):
    """An mp4 whose frames have these times. settings: of `encode`."""
    encode(path, ("libx264", settings.pop("pixels", "yuv420p"), frames, 0), times=milliseconds, **settings)


def row_of(video, image=None):
    return data.Row(index=0, line=2, id="a", video=video, prompt="x", image=image)


def problem_of(row, num_frames, **settings):
    """Why reading a row fails; its look and its content agree."""
    with pytest.raises(DataError) as error:
        data.load_example(row, 32, 32, num_frames, **settings)
    return str(error.value)


def encode(path, *streams, times=None, curve=2, options=clips.X264):
    """A file of streams (codec, pixel format, frames, disposition); frames of four channels are RGBA.

    times: of the frames in milliseconds. curve: transfer function by ITU-T H.273, 2 where the file does not say.
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


def turn(path, *matrix):
    """Put a display matrix a, b, c, d into the track header of a file of write_video, as phones do."""
    content = path.read_bytes()
    numbers = [[0x10000, 0, 0, 0, 0x10000, 0, 0, 0, 0x40000000], [*matrix[:2], 0, *matrix[2:], 0, 0, 0, 0x40000000]]
    identity, turned = (b"".join(n.to_bytes(4, "big", signed=True) for n in one) for one in numbers)
    header = content.index(b"tkhd")
    path.write_bytes(content[:header] + content[header:].replace(identity, turned, 1))


def psnr(a, b):
    return 10 * math.log10(255**2 / (a.float() - b.float()).square().mean().item())


# ---- video files


def test_video_round_trip(tmp_path):
    frames = clip()
    data.write_video(tmp_path / "a.mp4", frames, fps=16)
    again = data.read_video(tmp_path / "a.mp4")
    assert again.shape == frames.shape and again.dtype == torch.uint8
    assert psnr(frames, again) > 34  # measured 38; 4:2:0 and crf 18 allow no more on this content
    assert psnr(frames.flip(-1), again) < 20  # the channels are in order
    assert psnr(frames.flip(0), again) < 25  # the frames are in order
    data.write_video(tmp_path / "b.mp4", data.to_float(frames), fps=16)
    assert (tmp_path / "b.mp4").read_bytes() == (tmp_path / "a.mp4").read_bytes()
    data.write_video(tmp_path / "a.mp4", frames, fps=23.976)
    assert sorted(os.listdir(tmp_path)) == ["a.mp4", "b.mp4"]
    with av.open(str(tmp_path / "a.mp4")) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.pix_fmt, stream.frames) == ("h264", "yuv420p", 9)
        assert float(stream.average_rate) == pytest.approx(23.976, abs=1e-3)
        # BT.601: players take 720 lines for BT.709 where a file says nothing
        assert stream.codec_context.colorspace == 6


def test_the_same_frames_are_the_same_bytes(tmp_path):
    """Whatever memory held before: 48 x 64 is an odd number of macroblocks, of which libx264 reads one too many."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        pytest.skip("glibc alone can be told what fresh memory holds")
    M_PERTURB, found = -6, set()
    try:
        for value in (1, 77, 200, 254):
            libc.mallopt(M_PERTURB, value)
            data.write_video(tmp_path / "a.mp4", clip(), fps=16)
            found.add((tmp_path / "a.mp4").read_bytes())
    finally:
        libc.mallopt(M_PERTURB, 0)
    assert len(found) == 1 and b" threads=1 " in found.pop()  # bits that depend on the number of cores are not the same


def test_lossless_files_hold_the_pixels(tmp_path):
    (tmp_path / "a.npy").write_bytes(generation.encode(data.to_float(clip()), ".npy", 16))
    assert np.array_equal(np.load(tmp_path / "a.npy"), clip().numpy())
    (tmp_path / "a.png").write_bytes(generation.encode(data.to_float(clip(1)), ".png", 16))
    assert np.array_equal(np.asarray(Image.open(tmp_path / "a.png")), clip(1)[0].numpy())


SKEWED = "is shown turned, skewed or scaled, by the matrix"
ORIENTATIONS = {  # a, b, c, d of the display matrix: ffmpeg's autorotate of rows and columns, or the refusal
    (1, 0, 0, 1): lambda frames: frames,
    (-1, 0, 0, 1): lambda frames: frames.flip(2),  # hflip
    (1, 0, 0, -1): lambda frames: frames.flip(1),  # vflip
    (-1, 0, 0, -1): lambda frames: frames.flip(1, 2),
    (0, 1, -1, 0): lambda frames: frames.rot90(-1, (1, 2)),  # clock, as phones store portrait clips
    (0, -1, 1, 0): lambda frames: frames.rot90(1, (1, 2)),  # cclock
    (0, 1, 1, 0): lambda frames: frames.transpose(1, 2),  # cclock_flip
    (0, -1, -1, 0): lambda frames: frames.transpose(1, 2).flip(1, 2),  # clock_flip
    (0.7071, 0.7071, -0.7071, 0.7071): f"{SKEWED} 0.707",
    (2, 0, 0, 2): f"{SKEWED} 2, 0, 0, 2; re-encode it upright",
    (1, 0.5, 0, 1): "pixels are .* as wide as high",
    (1, 0, 0, 0.75): "pixels are 4/3 as wide as high; make them square with ffmpeg -i IN",
}


@pytest.mark.parametrize("matrix", ORIENTATIONS)
def test_clips_come_as_players_show_them(tmp_path, matrix):
    """Turned by phones, mirrored by front cameras."""
    path, shown = tmp_path / "a.mp4", ORIENTATIONS[matrix]
    data.write_video(path, clip(2), fps=16)
    stored = data.read_video(path)
    turn(path, *(round(0x10000 * number) for number in matrix))
    if callable(shown):
        assert torch.equal(data.read_video(path), shown(stored))
    else:
        with pytest.raises(DataError, match=f"a.mp4: {shown}"):
            data.read_video(path)


def test_an_orientation_that_cannot_be_read_is_refused(tmp_path):
    """Motion JPEG of cameras: libav 8 hands its EXIF on as side data of a kind that PyAV does not know."""
    turned_picture(tmp_path / "a.jpg", 2)
    with av.open(str(tmp_path / "a.avi"), "w") as container:
        stream = container.add_stream("mjpeg", rate=16)
        stream.height, stream.width, stream.pix_fmt = 48, 64, "yuvj420p"
        for time in range(2):
            packet = av.Packet((tmp_path / "a.jpg").read_bytes())
            packet.pts, packet.dts, packet.time_base, packet.stream = time, time, Fraction(1, 16), stream
            container.mux(packet)
    with pytest.raises(DataError, match="a.avi: .* so its orientation cannot be read; re-encode it upright"):
        data.read_video(tmp_path / "a.avi")


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("matrix, red, blue", [("smpte170m", 0.299, 0.114), ("bt709", 0.2126, 0.0722)])
def test_colours_are_those_of_the_matrix_and_range_that_a_clip_names(tmp_path, matrix, red, blue, full):
    """By ITU-R BT.601 and BT.709. av 15 and 16 are off by up to 40 levels: `make lowest` guards the lower bound."""
    for colour in [(208, 32, 32), (32, 192, 64), (32, 64, 208)]:
        r, g, b = (level / 255 for level in colour)
        y = red * r + (1 - red - blue) * g + blue * b
        chroma = np.array([(b - y) / (1 - blue) / 2, (r - y) / (1 - red) / 2])
        luma, chroma = (255 * y, 128 + 255 * chroma) if full else (16 + 219 * y, 128 + 224 * chroma)
        planes = np.repeat(np.round([luma, *chroma]), [32 * 32, 256, 256]).astype(np.uint8).reshape(48, 32)
        with av.open(str(tmp_path / "a.mp4"), "w") as container:
            stream = container.add_stream("libx264", rate=16)
            stream.height, stream.width, stream.pix_fmt = 32, 32, "yuv420p"
            stream.options = {"qp": "0", "x264-params": f"colormatrix={matrix}:fullrange={'on' if full else 'off'}"}
            container.mux(stream.encode(av.VideoFrame.from_ndarray(planes, format="yuv420p")))
            container.mux(stream.encode())
        assert np.abs(data.read_video(tmp_path / "a.mp4")[0, 16, 16].numpy() - np.array(colour)).max() <= 3


# ---- damage, transparency, and what else a decoder would hide


@pytest.mark.parametrize("name, codec, pixels", [
    ("a.mp4", "libx264", "yuv420p"), ("a.ts", "libx264", "yuv420p"), ("a.avi", "mpeg4", "yuv420p"),
    ("a.mkv", "ffv1", "yuv420p"), ("a.mov", "png", "rgb24"), ("a.mov", "prores_ks", "yuv422p10le"),
])  # fmt: skip
def test_damage_that_the_decoder_conceals_is_found(tmp_path, name, codec, pixels):
    """Whichever way it shows: marked frames, an error, or nothing but libav's log (ffv1), each time that it is read."""
    noise = torch.randint(0, 255, (9, 48, 64, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    encode(tmp_path / name, (codec, pixels, noise, 0))
    assert len(data.read_video(tmp_path / name)) == 9
    content = bytearray((tmp_path / name).read_bytes())
    for place in range(len(content) // 2, len(content) * 3 // 4, 97):
        content[place] ^= 0x55
    (tmp_path / name).write_bytes(content)
    assert len(data.read_video(tmp_path / name, 1)) == 1  # what lies before it can be used
    for _ in range(2):
        assert "damaged" in problem_of(row_of(tmp_path / name), 9)


def test_a_packet_that_the_container_marks_is_found(tmp_path, monkeypatch):
    data.write_video(tmp_path / "a.mp4", clip(2), fps=16)
    monkeypatch.setattr(av.Packet, "is_corrupt", True)
    with pytest.raises(DataError, match="a.mp4: is damaged at frame 0 .a packet is marked"):
        data.read_video(tmp_path / "a.mp4")


@pytest.mark.parametrize("name, codec, pixels", [
    ("a.mov", "qtrle", "argb"), ("a.mov", "png", "rgba"), ("a.mkv", "ffv1", "bgra"),
    ("a.mov", "prores_ks", "yuva444p10le"), ("a.gif", "", ""), ("a.webm", "libvpx-vp9", "yuva420p"),
])  # fmt: skip
@pytest.mark.parametrize("alpha", [0, 255])
def test_transparent_clips_are_refused(tmp_path, name, codec, pixels, alpha):
    """Their hidden colour would be trained on. An alpha channel that is full everywhere hides nothing."""
    frames = torch.cat([clip(3), torch.full((3, 48, 64, 1), 255, dtype=torch.uint8)], 3)
    frames[1:, :8, :8, 3] = alpha
    if codec:
        encode(tmp_path / name, (codec, pixels, frames, 0))
    else:
        first, *others = map(Image.fromarray, frames.numpy())
        first.save(tmp_path / name, save_all=True, append_images=others, duration=60, disposal=2)
    in_header = name == "a.webm"  # VP8's and VP9's alpha is next to the video, and the decoder drops it
    if alpha == 255 and not in_header:
        assert data.read_video(tmp_path / name).shape == (3, 48, 64, 3)
        return
    with pytest.raises(DataError, match="a.*: has transparent pixels; save it without an alpha channel"):
        data.read_video(tmp_path / name)
    assert not in_header or "has transparent pixels" in data.inspect_row(row_of(tmp_path / name), 1).problems[0]


def test_of_several_videos_the_one_that_ffmpeg_takes(tmp_path):
    """The default, though it comes last; never a cover picture."""
    usual, larger, cover = ("libx264", "yuv420p", clip(9, 32, 48)), ("libx264", "yuv420p", clip(9, 64)), clip(1, 64)
    encode(tmp_path / "default.mkv", (*larger, 0), (*usual, 1))
    encode(tmp_path / "cover.mkv", ("mjpeg", "yuvj420p", cover, 1024), (*usual, 1))
    for name in ("default.mkv", "cover.mkv"):
        assert data.read_video(tmp_path / name).shape == (9, 32, 48, 3)


def test_names_of_files_and_a_video_without_a_decoder(tmp_path, monkeypatch):
    """A colon is no protocol."""
    monkeypatch.chdir(tmp_path)
    data.write_video("take:1.mp4", clip(2), fps=16)
    assert len(data.read_video("take:1.mp4")) == 2
    Path("a.mp4").write_bytes(Path("take:1.mp4").read_bytes().replace(b"avc1", b"abcd"))
    for read, path, message in (
        (data.read_video, "a.mp4", "a.mp4: holds no video that can be decoded"),
        (data.read_video, tmp_path, "is a folder; name a file"),
        (data.read_picture, tmp_path, "is a folder; name a file"),
    ):
        with pytest.raises(DataError, match=message):
            read(path)


def test_a_size_that_changes_is_refused(tmp_path):
    """Recorded video calls do that. Raw H.264 can be put end to end, and has no times."""
    content = b""
    for height in (48, 96):
        data.write_video(tmp_path / "a.mp4", clip(3, height), fps=16)
        with av.open(str(tmp_path / "a.mp4")) as mp4, av.open(str(tmp_path / "a.h264"), "w") as raw:
            stream = raw.add_stream_from_template(mp4.streams.video[0])
            to_raw = av.BitStreamFilterContext("h264_mp4toannexb", mp4.streams.video[0])
            for packet in mp4.demux(video=0):
                for piece in to_raw.filter(packet):
                    piece.stream = stream
                    raw.mux(piece)
        content += (tmp_path / "a.h264").read_bytes()
    (tmp_path / "a.h264").write_bytes(content)
    assert data.read_video(tmp_path / "a.h264", 3).shape == (3, 48, 64, 3)
    with pytest.raises(DataError, match="a.h264: goes from 48 x 64 to 96 x 64 .height x width. at frame 3"):
        data.read_video(tmp_path / "a.h264", 4)
    with pytest.raises(DataError, match="a.h264: frame 0 has no time of its own; re-encode it, or set data.fps: null"):
        data.read_video(tmp_path / "a.h264", 3, fps=16)


# ---- frame rates


@pytest.mark.parametrize("stored, fps, expected", [
    (30, 16, [0, 2, 4, 6, 7, 9, 11, 13, 15, 17]),  # k * 1.875 to the nearest
    (24, 16, [0, 1, 3, 4, 6, 7, 9, 10, 12, 13]),  # halfway: the earlier
    (32, 16, list(range(0, 20, 2))), (16, 16, list(range(10))), (24000 / 1001, 24, list(range(10))),
    (50, 8, [0, 6, 12, 19, 25, 31]),
])  # fmt: skip
def test_frames_at_a_rate(tmp_path, stored, fps, expected):
    data.write_video(tmp_path / "a.mp4", numbered(36), fps=stored)
    count = len(expected)
    assert shown_numbers(data.read_video(tmp_path / "a.mp4", count, fps)) == expected
    assert shown_numbers(data.read_video(tmp_path / "a.mp4", count)) == list(range(count))
    whole = shown_numbers(data.read_video(tmp_path / "a.mp4", None, fps))
    assert whole[:count] == expected and len(whole) == math.ceil(36 / stored * fps - 0.01)


@pytest.mark.parametrize("pause", [100, 700])
@pytest.mark.parametrize("rate", [16, 60])
def test_a_pause_is_not_filled(tmp_path, rate, pause):
    """The average rate is high enough; where nothing was filmed, frames would be repeated."""
    times = [round(1000 * i / rate) + pause * (i > rate // 2) for i in range(rate + 20)]
    film(tmp_path / "a.mp4", numbered(1).expand(len(times), -1, -1, -1), times)
    near = math.ceil(16 * (times[rate // 2] + 47) / 1000) / 16
    with pytest.raises(DataError, match=f"a.mp4: has no frame near {near:.4g} s, where it pauses|has .* per second"):
        data.read_video(tmp_path / "a.mp4", 16, 16)
    assert len(data.read_video(tmp_path / "a.mp4", rate // 2 * 16 // rate, 16)) == rate // 2 * 16 // rate


def test_the_nearest_frame_whatever_the_times():
    generator = random.Random(0)
    for _ in range(200):
        fps = generator.uniform(5, 30)
        times = [generator.uniform(0, 3)]
        while len(times) < 60:
            times.append(times[-1] + generator.uniform(0.1, 1.4) / fps)
        chosen = list(clips._sample_at_rate("x", zip(times, times, strict=True), fps, 20))
        assert len(chosen) == 20 and chosen == sorted(chosen)
        for k, time in enumerate(chosen):
            off = [abs(t - times[0] - k / fps) for t in times]
            assert abs(time - times[0] - k / fps) <= min(off) + 2e-3  # a millisecond of slack


@pytest.mark.parametrize("num_frames, fps, problem", [
    (8, 8, ""), (9, 8, "holds 8 frames at 8 fps, 9 are needed"), (9, 20.1, ""),  # within 1 %
    (9, 24, "has 20 frames per second, data.fps is 24; lower it or leave the clip out"),
    (None, 24, "has 20 frames per second, data.fps is 24"),
])  # fmt: skip
def test_too_few_and_too_slow_at_a_rate(tmp_path, num_frames, fps, problem):
    data.write_video(tmp_path / "a.mp4", numbered(20), fps=20)
    if problem:
        with pytest.raises(DataError, match=f"a.mp4: {problem}"):
            data.read_video(tmp_path / "a.mp4", num_frames, fps)
    else:
        assert len(data.read_video(tmp_path / "a.mp4", num_frames, fps)) == num_frames
    data.write_video(tmp_path / "b.mp4", numbered(1), fps=20)
    assert len(data.read_video(tmp_path / "b.mp4", 1, 16)) == 1


# ---- sizes


def test_odd_sizes_are_refused(tmp_path):
    with pytest.raises(ValueError, match="H.264 needs an even height and width, got 47 x 64"):
        data.write_video(tmp_path / "a.mp4", clip(height=47), fps=16)


def test_float_and_back():
    frames = torch.arange(256, dtype=torch.uint8).repeat(3).reshape(2, 8, 16, 3)
    video = data.to_float(frames)
    assert video.shape == (3, 2, 8, 16) and video.dtype == torch.float32
    assert video.min() == -1 and video.max() == 1
    assert video[1, 0, 2, 3] == frames[0, 2, 3, 1] / 127.5 - 1
    assert torch.equal(data.to_uint8(video), frames)
    outside = torch.tensor([-1.2, 1.3, 0.001]).reshape(3, 1, 1, 1)
    assert data.to_uint8(outside).flatten().tolist() == [0, 255, 128]


@pytest.mark.parametrize("source, size", [((270, 480), (96, 160)), ((200, 120), (64, 64)), ((40, 56), (64, 80))])
def test_fit_is_what_pillow_does(source, size):
    frames = clip(1, *source)
    noise = torch.randint(-20, 20, frames.shape, generator=torch.Generator().manual_seed(0))
    frames = (frames / 2 + 60 + noise).to(torch.uint8)  # Pillow clips at 0 and 255 between rows and columns
    scale = max(size[0] / source[0], size[1] / source[1])
    height, width = (max(new, round(old * scale)) for new, old in zip(size, source, strict=True))
    left, top = (width - size[1]) // 2, (height - size[0]) // 2
    resized = Image.fromarray(frames[0].numpy()).resize((width, height), Image.Resampling.BICUBIC)
    expected = np.asarray(resized.crop((left, top, left + size[1], top + size[0]))).astype(int)
    assert np.abs(data.fit(frames, *size)[0].numpy() - expected).max() <= 1


def test_fit_size_is_the_best_of_all():
    """Against all sizes there are: the least scaled down, then the least cropped."""
    generator = random.Random(0)
    for _ in range(150):
        height, width = generator.randint(8, 400), generator.randint(8, 400)
        max_pixels = generator.randint(256, 40000)
        pixels = max(256, min(max_pixels, height * width))
        sizes = [(h, w) for h in range(16, pixels // 16 + 1, 16) for w in range(16, pixels // h + 1, 16)]

        def loss(size, source=(height, width)):
            scales = [new / old for new, old in zip(size, source, strict=True)]
            return -min(scales), max(scales)

        assert clips.fit_size(height, width, max_pixels) == min(sizes, key=loss)


def test_read_clip_is_fit_of_read_video(tmp_path):
    data.write_video(tmp_path / "a.mp4", clip(9, 48, 112), fps=32)
    frames = data.read_video(tmp_path / "a.mp4")
    assert torch.equal(data.read_clip(tmp_path / "a.mp4", 32, 32, 5), data.fit(frames[:5], 32, 32))
    kept = data.read_clip(tmp_path / "a.mp4", 32, 32, 4, max_pixels=48 * 112 - 1, fps=16)
    assert torch.equal(kept, data.fit(frames[:8:2], 48, 96))
    assert len(data.read_clip(tmp_path / "a.mp4", 32, 32, 40, at_least=9)) == 9
    turn(tmp_path / "a.mp4", 0, 0x10000, -0x10000, 0)
    assert data.read_clip(tmp_path / "a.mp4", 32, 32, 4, max_pixels=48 * 112).shape == (4, 112, 48, 3)


def test_large_clips_are_not_held(tmp_path):
    """40 frames of 640 x 480 are 37 MB, and four times that as floats."""
    data.write_video(tmp_path / "a.mp4", clip(1, 480, 640).expand(40, -1, -1, -1), fps=16)
    tracemalloc.start()  # sees numpy's arrays, of which one is made of every frame
    data.read_clip(tmp_path / "a.mp4", 48, 64, 40)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5e6


# ---- pictures


def turned_picture(path, orientation):
    """An upright 64 x 48 picture as a camera held otherwise would store it."""
    upright, exif = Image.fromarray(clip(1)[0].numpy()), Image.Exif()
    undo = {2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_90}
    exif[0x0112] = orientation
    upright.transpose(undo[orientation]).save(path, exif=exif, quality=95)
    return torch.from_numpy(np.array(upright))


@pytest.mark.parametrize("orientation", [2, 3, 6])
def test_pictures_come_upright(tmp_path, orientation):
    upright = turned_picture(tmp_path / "a.jpg", orientation)
    read = data.read_picture(tmp_path / "a.jpg")
    assert read.shape == (48, 64, 3) and read.dtype == torch.uint8 and psnr(read, upright) > 30


def test_picture_modes(tmp_path):
    pixels = clip(1)[0].numpy()
    for mode in ("L", "P", "RGBA", "LA"):
        Image.fromarray(pixels).convert(mode).save(tmp_path / "a.png")  # opaque
        expected = np.array(Image.fromarray(pixels).convert(mode).convert("RGB"))
        assert np.array_equal(data.read_picture(tmp_path / "a.png").numpy(), expected)


def bad_pictures(folder):
    """{file: message}; writes the files."""
    pixels = clip(1)[0].numpy()
    Image.fromarray(np.concatenate([pixels, pixels[..., :1]], -1)).save(folder / "glass.png")
    Image.fromarray(pixels[..., 0].astype(np.uint16) * 257).save(folder / "deep.png")
    Image.fromarray(pixels).save(folder / "whole.png")
    content = (folder / "whole.png").read_bytes()
    (folder / "cut.png").write_bytes(content[: len(content) // 2])
    (folder / "text.png").write_text("no picture")
    header = b"IHDR" + (20_000).to_bytes(4, "big") * 2 + bytes([8, 2, 0, 0, 0])
    start = b"\x89PNG\r\n\x1a\n\0\0\0\x0d" + header
    (folder / "large.png").write_bytes(start + zlib.crc32(header).to_bytes(4, "big") + b"\0\0\0\x64IDAT")
    return {
        "glass.png": "has transparent pixels; save it without an alpha channel",
        "deep.png": "has pixels of Pillow's mode I;16; save it with 8 bits per channel",
        "cut.png": "cannot be decoded as a picture (image file is truncated",
        "text.png": "cannot be decoded as a picture (cannot identify image file",
        "gone.png": "no such file",
        "large.png": "cannot be decoded as a picture (Image size (400000000 pixels) exceeds",  # by its header
    }


def test_pictures_that_cannot_be_used(tmp_path):
    for name, message in bad_pictures(tmp_path).items():
        with pytest.raises(DataError, match=re.escape(f"{tmp_path / name}: {message}")):
            data.read_picture(tmp_path / name)
    (_, problem) = data.inspect_row(row_of(tmp_path / "gone.mp4", image=tmp_path / "large.png"), 5).problems
    assert "exceeds" in problem


# ---- metadata.csv


@pytest.fixture
def folder(tmp_path):
    data.write_video(tmp_path / "a.mp4", clip(), fps=16)
    data.write_video(tmp_path / "short.mp4", clip(4), fps=16)
    (tmp_path / "text.mp4").write_text("not a video" * 100)
    content = (tmp_path / "a.mp4").read_bytes()
    (tmp_path / "cut.mp4").write_bytes(content[: len(content) // 2])
    return tmp_path


def write_csv(folder, *lines, header="video,prompt"):
    path = folder / "metadata.csv"
    path.write_text("\n".join([header, *lines]) + "\n")
    return path


def test_load_metadata(folder):
    lines = ["a.mp4,a person speaks", 'a.mp4,"one, two\nand three"', f"{folder / 'a.mp4'}, a person speaks "]
    # spreadsheets write rows of empty cells, and a byte order mark
    rows = data.load_metadata(write_csv(folder, *lines, ",", " , ,", header="\ufeffvideo,prompt"))
    assert [row.index for row in rows] == [0, 1, 2] and [row.line for row in rows] == [2, 4, 5]
    assert [row.prompt for row in rows] == ["a person speaks", "one, two\nand three", "a person speaks"]
    assert all(row.video == folder / "a.mp4" and row.problem == "" for row in rows)


@pytest.mark.parametrize("content, message", [
    *((f"video,prompt,{name}\na.mp4,x,b", f"unknown column '{name}', did you mean '{meant}'") for name, meant in (
        ("Video", "video"), ("PROMPT", "prompt"), ("reference_vid", "reference_video"), ("heigth", "height"),
        ("reference video", "reference_video"), ("images", "image"), ("negative-prompt", "negative_prompt"))),
    *((f"video,prompt,{name}\na.mp4,x,b", "") for name in
      ("video_id", "split", "person", "weight", "prompt_source", "")),
    ("video,prompt,image,image\na.mp4,x,,", "the first line names the column 'image' twice; remove one"),
    ('video,prompt\na.mp4,"never closed\nb.mp4,x', r"metadata.csv: line 3: .*close every double quote up to there"),
    ("video,prompt\na.mp4,Zoë\n", "metadata.csv: line .*'utf-8' codec.*; save it as UTF-8"),
    ("video,text\na.mp4,x", "must name the column 'prompt', it names video, text"),
    ("", "must name the column 'prompt', it names nothing"),
    ("video,prompt\n", r"data.file_name \(.*metadata.csv\): no usable row"),
])  # fmt: skip
def test_what_a_table_may_hold(folder, content, message):
    """Other columns than ours pass; nearly ours are typing errors."""
    (folder / "metadata.csv").write_bytes(content.encode("latin-1"))
    if not message:
        assert len(data.load_metadata(folder / "metadata.csv")) == 1
        return
    with pytest.raises(DataError, match=message):
        data.load_metadata(folder / "metadata.csv")


def test_ids_do_not_depend_on_the_other_rows(folder):
    first = data.load_metadata(write_csv(folder, "a.mp4,one", "a.mp4,two", "b.mp4,one"))
    other = data.load_metadata(write_csv(folder, "b.mp4,one", "a.mp4,two"))
    assert len({row.id for row in first}) == 3
    assert [row.id for row in other] == [first[2].id, first[1].id]
    again = data.load_metadata(write_csv(folder, "a.mp4,one", "a.mp4,one", "a.mp4,one"))
    assert again[0].id == first[0].id and len({row.id for row in again}) == 3
    (old,) = data.load_metadata(write_csv(folder, "a.mp4,x"))
    assert old.id == "a.mp4#b1ba07e5"  # blake2b of the prompt only; runs that resume know it
    (same,) = data.load_metadata(write_csv(folder, "a.mp4,x,anna", header="video,prompt,person"))
    assert same.id == old.id
    header = "video,prompt,image,reference_video"
    rows = data.load_metadata(
        write_csv(folder, "a.mp4,x,,", "a.mp4,x,b.png,", "a.mp4,x,,b.png", "a.mp4,x,,", header=header)
    )
    assert rows[0].id == old.id and rows[3].id == f"{old.id}-2"
    assert len({row.id for row in rows}) == 4 and not any(row.id.startswith(old.id) for row in rows[1:3])


def test_optional_columns(folder):
    header = "prompt, image ,video,reference_video,negative_prompt"
    path = write_csv(folder, "x,b.png,a.mp4,r.mp4,ugly", f"x,{folder}/b.png,a.mp4,,", "x,,a.mp4", header=header)
    full, image, plain = data.load_metadata(path)
    assert (full.image, full.reference_video, full.negative_prompt) == (folder / "b.png", folder / "r.mp4", "ugly")
    assert full.reference == folder / "r.mp4" and plain.reference == folder / "a.mp4"
    assert image.image == folder / "b.png" and image.reference_video is None and image.negative_prompt == ""
    assert (plain.image, plain.reference_video, plain.negative_prompt) == (None, None, "")
    assert data.notes([full, image, plain]) == [
        "1 of 3 rows have a negative_prompt, which has no effect: sample.negative_prompt is that of all rows"
    ]
    assert data.notes([image, plain]) == []


def test_a_prompt_on_each_line(folder):
    """Whatever it holds; the rows are those of a table with the one column."""
    prompts = ["a red ball, left of a blue one", 'a sign that says "stop', "prompt"]
    (folder / "prompts.txt").write_text("\ufeff" + "\n\n".join(prompts) + "\n", encoding="utf-8")
    rows = data.load_metadata(folder / "prompts.txt")
    assert [(row.prompt, row.line) for row in rows] == [(prompts[0], 1), (prompts[1], 3), (prompts[2], 5)]
    (same,) = data.load_metadata(write_csv(folder, f'"{prompts[0]}"', header="prompt"))
    assert same.id == rows[0].id and rows[0].offers == ("nothing",)
    (folder / "prompts.txt").write_text("\n \n")
    with pytest.raises(DataError, match=r"data.file_name \(.*prompts.txt\): no usable row"):
        data.load_metadata(folder / "prompts.txt")


def test_a_missing_table_is_named(folder):
    with pytest.raises(DataError, match="data.file_name: is a folder, not a file of rows"):
        data.load_metadata(folder)
    with pytest.raises(DataError, match=r"evaluation.eval_clips: .*none\.csv"):
        data.load_metadata(folder / "none.csv", "evaluation.eval_clips")


NO_VIDEO = "cannot be decoded (Invalid data found when processing input); it is damaged, or no video"
BAD = {
    ",a prompt": "no video, and no image that this model could start from",
    "a.mp4,": "empty prompt for a.mp4",
    "a.mp4": "empty prompt for a.mp4",
    "a.mp4,smiles, then laughs": "more cells than columns; put a prompt that holds commas in double quotes",
    "gone.mp4,x": "{folder}/gone.mp4: no such file",
    "text.mp4,x": f"{{folder}}/text.mp4: {NO_VIDEO}",
    "cut.mp4,x": f"{{folder}}/cut.mp4: {NO_VIDEO}",
    "short.mp4,x": "{folder}/short.mp4: holds 4 frames, 5 are needed",
}


def test_rows_of_a_prompt_alone_and_of_a_picture(folder):
    Image.new("RGB", (48, 64)).save(folder / "who.png")
    path = write_csv(folder, "a cat", "a dog", "a cat", "a face,who.png", header="prompt,image")
    rows = data.load_metadata(path)
    assert len({row.id for row in rows}) == 4 and all(row.video is None for row in rows)
    assert [row.offers for row in rows[2:]] == [("nothing",), ("nothing", "picture")]
    assert [data.inspect_row(row, 5, takes_image=False).problems for row in rows] == [()] * 4
    problem = "no video, and no image that this model could start from"
    assert [data.inspect_row(row, 5).problems for row in rows] == [(problem,)] * 3 + [()]
    alone, picture = (data.load_example(row, 32, 48, 5) for row in (rows[0], rows[3]))
    assert alone.size == picture.size == (32, 48) and alone.video is picture.video is None
    assert alone.image is None and alone.reference.shape == (3, 0, 32, 48)
    assert picture.reference.shape == (3, 2, 32, 48)  # the face of its second frame is pooled
    assert torch.equal(picture.reference, picture.image[:, None].repeat(1, 2, 1, 1))
    height, width = data.read_picture(folder / "who.png").shape[:2]
    kept = data.load_example(rows[3], 32, 48, 5, max_pixels=32 * 32).size  # the picture's own shape
    assert kept == data.clip_size((height, width), 32, 48, 32 * 32) != (32, 48)
    with pytest.raises(DataError, match="neither a video nor an image whose shape data.max_pixels could keep"):
        data.load_example(rows[0], 32, 48, 5, max_pixels=32 * 32)


def problems_of(rows, num_frames):
    return [(row.line, problem) for row in rows for problem in data.inspect_row(row, num_frames).problems]


def test_every_bad_row_is_named(folder, monkeypatch):
    monkeypatch.setattr(clips, "_decode_frames", lambda path: pytest.fail("decoded"))
    rows = data.load_metadata(write_csv(folder, "a.mp4,good", *BAD, "a.mp4,good too"))
    expected = [f"line {i}: {text.format(folder=folder)}" for i, text in enumerate(BAD.values(), start=3)]
    expected[1:3] = [expected[1].replace("line 4", "lines 4, 5 (2 rows)")]  # one line for one problem
    with pytest.raises(DataError) as error:
        data.usable_rows(rows, problems_of(rows, 5), skip_bad_rows=False)
    first, *lines = str(error.value).splitlines()
    file = folder / "metadata.csv"
    assert first == (f"data.file_name ({file}): 8 of 10 rows cannot be used; mend them or set data.skip_bad_rows: true")
    assert lines == expected
    good, problems = data.usable_rows(rows, problems_of(rows, 5), skip_bad_rows=True)
    assert [row.prompt for row in good] == ["good", "good too"] and problems == expected
    with pytest.raises(DataError, match=r"data.file_name \(.*metadata.csv\): no usable row\nline 2: .*a.mp4: holds 9"):
        data.usable_rows(rows[:1], problems_of(rows[:1], 13), skip_bad_rows=True)
    with pytest.raises(DataError, match=r"evaluation.eval_clips \(.*metadata\.csv\).*\nline 2: "):
        rows = data.load_metadata(write_csv(folder, "gone.mp4,x"), "evaluation.eval_clips")
        data.usable_rows(rows, [(2, "gone")], skip_bad_rows=False)


def cut_off(path, keep):
    """The index of an mp4 before its frames, of which only the first part is kept."""
    with (
        av.open(str(path)) as whole,
        av.open(f"{path}.new", "w", format="mp4", options={"movflags": "faststart"}) as new,
    ):
        stream = new.add_stream_from_template(whole.streams.video[0])
        for packet in whole.demux(video=0):
            if packet.dts is not None:
                packet.stream = stream
                new.mux(packet)
    os.replace(f"{path}.new", path)
    os.truncate(path, int(keep * path.stat().st_size))


@pytest.mark.parametrize("num_frames, fps", [(9, 16), (10, 16), (9, 30), (5, 8), (6, 8), (10, None), (9, None)])
def test_a_look_says_what_reading_says(folder, num_frames, fps):
    look = data.inspect_row(row_of(folder / "a.mp4"), num_frames, fps)
    if look.problems:
        assert look.problems == (problem_of(row_of(folder / "a.mp4"), num_frames, fps=fps),)
    else:
        assert len(data.read_video(folder / "a.mp4", num_frames, fps)) == num_frames
        assert look.header.size == (48, 64) and look.header.rate == 16


def test_a_file_that_is_cut_off_is_found_by_its_index(folder):
    data.write_video(folder / "a.mp4", torch.randint(0, 255, (9, 48, 64, 3), dtype=torch.uint8), fps=16)
    cut_off(folder / "a.mp4", 0.5)
    (problem,) = data.inspect_row(row_of(folder / "a.mp4"), 9).problems
    assert "a.mp4: is damaged: the file ends before its index does" in problem
    assert problem_of(row_of(folder / "a.mp4"), 9) == problem


HD, SMALL = (480, 832), (16, 16)
MIXED = [(HD, 30.0), (HD, None), (HD, 16.0)]


@pytest.mark.parametrize("clips_of, max_pixels, fps, rate, words", [
    ([(HD, 24.0)] * 3 + [(HD, 23.976)], None, None, 24, ()),
    ([(HD, 24.0)] * 3 + [(SMALL, 24.0), ((400, 400), 24.0)], None, None, 24,
     ("2 of 5 clips", "line 5, 3.mp4: 16 x 16")),
    ([(HD, 24.0)] * 3 + [(SMALL, 24.0)], 480 * 832, None, 24, ()),  # none is enlarged
    (MIXED, None, None, 24, ("2 of 3 clips", "16 (line 4", "30 (line 2", "data.fps: 24")),
    (MIXED, None, None, 16,
     ("1 of 3 clips are trained on at 30 (line 2, 0.mp4) frames per second, the model's videos have 16",)),
    (MIXED, None, 16, 16, ()), (MIXED, None, 16, 24, ("3 of 3 clips are trained on at 16 (line 2",)),
    (MIXED, None, None, 1, ()),  # an image model takes one frame
    ([], 480 * 832, None, 16, ()),
])  # fmt: skip
def test_notes_of_clips(clips_of, max_pixels, fps, rate, words):
    """Much smaller ones, and rates that are not the model's."""
    rows = [data.Row(index=i, line=i + 2, id=str(i), video=Path(f"{i}.mp4"), prompt="x") for i in range(len(clips_of))]
    looks = [data.HeaderInfo(header=clips.Header(size, stored, ())) for size, stored in clips_of]
    notes = data.clip_notes(rows, looks, *HD, max_pixels, fps, rate)
    assert len(notes) == bool(words) and all(word in note for note in notes for word in words)


@pytest.mark.parametrize("settings, words", [
    ({}, []), ({"curve": 1}, []), ({"pixels": "yuv420p10le", "curve": 16}, ["HDR"]), ({"curve": 18}, ["HDR"]),
    ({"options": {"flags": "+ildct+ilme", "x264-params": "tff=1"}}, ["interlaced", "bwdif"]),
    ({"height": 720}, ["BT.601", "BT.709"]),
    ({"height": 720, "options": {"x264-params": "colormatrix=bt709"}}, []),
])  # fmt: skip
def test_what_is_odd_about_a_clip_is_noted(folder, settings, words):
    """HDR is read as SDR, interlaced frames as they are, and an unnamed matrix as BT.601: nothing else says it."""
    film(folder / "odd.mp4", clip(9, settings.pop("height", 48)), range(0, 90, 10), **settings)
    rows = data.load_metadata(write_csv(folder, "a.mp4,x", "odd.mp4,x"))
    looks = [data.inspect_row(row, 5) for row in rows]
    assert not any(look.problems for look in looks)
    notes = data.clip_notes(rows, looks, 48, 64, None, 10, 10)
    assert len(notes) == bool(words)
    assert all(word in note for note in notes for word in [*words, "line 3, odd.mp4", "1 of 2"])


def test_every_problem_of_a_row_is_named(folder):
    header = "video,prompt,image,reference_video"
    path = write_csv(folder, "short.mp4,,gone.png,text.mp4", "a.mp4,x,whole.png,short.mp4", header=header)
    bad_pictures(folder)
    bad, good = data.load_metadata(path)
    assert data.inspect_row(bad, 5).problems == (
        "empty prompt for short.mp4",
        f"{folder}/short.mp4: holds 4 frames, 5 are needed",
        f"{folder}/gone.png: no such file",
        f"{folder}/text.mp4: {NO_VIDEO}",
    )
    assert data.inspect_row(good, 5).problems == ()  # a reference may be shorter
    data.write_video(folder / "still.mp4", clip(1), fps=16)
    (row,) = data.load_metadata(write_csv(folder, "a.mp4,x,,still.mp4", header=header))
    assert data.inspect_row(row, 5).problems == (f"{folder}/still.mp4: holds 1 frames, 2 are needed",)
    slow = [f"{folder}/{name}: has 16 frames per second, data.fps is 30" for name in ("a.mp4", "short.mp4")]
    assert [problem.split(";")[0] for problem in data.inspect_row(good, 5, 30).problems] == slow


def test_load_example_with_an_image_and_a_reference(folder):
    turned_picture(folder / "b.jpg", 6)
    data.write_video(folder / "wide.mp4", clip(3, 48, 96), fps=16)
    header = "video,prompt,image,reference_video"
    (row,) = data.load_metadata(write_csv(folder, "a.mp4,smiles,b.jpg,wide.mp4", header=header))
    example = data.load_example(row, 32, 32, 5)
    picture = data.read_picture(folder / "b.jpg")
    assert torch.equal(example.image, data.to_float(data.fit(picture[None], 32, 32))[:, 0])
    assert torch.equal(example.video, data.to_float(data.read_clip(folder / "a.mp4", 32, 32, 5)))
    assert torch.equal(example.reference, data.to_float(data.fit(data.read_video(folder / "wide.mp4"), 32, 32)))
    shaped = data.load_example(row, 32, 32, 5, max_pixels=48 * 96, fps=8)
    assert shaped.video.shape == (3, 5, 48, 64) and shaped.image.shape == (3, 48, 64)
    assert shaped.reference.shape == (3, 2, 48, 96)  # of its own shape and length
    (plain,) = data.load_metadata(write_csv(folder, "a.mp4,smiles"))
    example = data.load_example(plain, 32, 32, 5)
    assert example.reference is example.video and torch.equal(example.image, example.video[:, 0])
    (gone,) = data.load_metadata(write_csv(folder, "a.mp4,x,gone.jpg,short.mp4", header=header))
    assert problem_of(gone, 12) == "; ".join(data.inspect_row(gone, 12).problems)
    assert len(data.inspect_row(gone, 12).problems) == 2


# ---- order


SHAPES = {"two": "aabababbaab", "a rare one": "aaaaaaabaaa", "one": "aaaaaaaaaaa"}


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_batches_of_one_shape_are_those_of_a_queue(shapes, batch_size):
    """Against samples that really queue up, and leave when batch_size of a shape are there."""
    queues, expected = defaultdict(list), []
    for position in range(40 * len(shapes)):
        epoch, row = epoch_order.sample_at(position, len(shapes), seed=3)
        queues[shapes[row]].append((epoch, row))
        if len(queues[shapes[row]]) == batch_size:
            expected.append(queues.pop(shapes[row]))
    assert [order.one_shape_batch(i, batch_size, shapes, seed=3) for i in range(len(expected))] == expected
    used = Counter(sample for batch in expected for sample in batch)
    assert set(used.values()) == {1}  # none comes twice
    visits = Counter(row for _, row in used)
    assert max(visits.values()) - min(visits.values()) <= batch_size  # and none is left behind


def test_the_order_is_shuffled_and_depends_on_seed_and_epoch():
    orders = {epoch_order.visit_order(50, seed, epoch) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9 and tuple(range(50)) not in orders
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert epoch_order.visit_order(6, 42, 0) == (0, 2, 3, 5, 4, 1)  # the same in every process and version


# ---- noise


def test_seeds_are_distinct():
    cells = [(s, e, i, m) for s in range(4) for e in range(12) for i in ("a", "b", "1/a") for m in range(4)]
    seeds = {noise_seed(*cell) for cell in cells}
    assert len(seeds) == len(cells) and all(0 <= seed < 2**63 for seed in seeds)
    assert noise_seed(42, 1, "clip#1", 2) == 8305654411088914815  # the same in every process
    assert not any(stable_hash(f"order/{s}/{e}") in seeds for s in range(4) for e in range(12))


def test_noise_does_not_depend_on_the_global_generator_or_the_batch():
    torch.manual_seed(0)
    first = draw_noise((16, 3, 4, 4), 11)
    torch.manual_seed(1)
    assert torch.equal(draw_noise((16, 3, 4, 4), 11), first)
    assert first.dtype == torch.float32 and first.shape == (16, 3, 4, 4)
    assert not torch.equal(draw_noise((16, 3, 4, 4), 12), first)
    assert abs(first.mean()) < 0.1 and abs(first.std() - 1) < 0.1


def test_noises_per_sample():
    def seeds(n):
        return [training_noise_seed(42, epoch, "a", n) for epoch in range(6)]

    assert len(set(seeds("fresh"))) == 6
    assert len(set(seeds(2))) == 2 and seeds(2)[:2] * 3 == seeds(2)
    assert len(set(seeds(1))) == 1 and len(set(seeds(6))) == 6


def save_pictures(folder, *names, size=(40, 30)):
    for i, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((*size, 3), 20 * i + 20, dtype=np.uint8)).save(folder / name)


def test_photos_are_a_folder_or_pictures(tmp_path):
    save_pictures(tmp_path, "anna/2.png", "anna/1.JPG", "b.png", "c.webp", "odd;name.png")
    (tmp_path / "anna" / "notes.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    lines = ["x,,anna", "x,,b.png", "x,b.png,b.png; c.webp;anna", "x,,odd;name.png", "x,,empty", "x,,gone"]
    (tmp_path / "metadata.csv").write_text("\n".join(["prompt,input_image,photos", *lines]))
    rows = data.load_metadata(tmp_path / "metadata.csv")
    names = [[str(path.relative_to(tmp_path)) for path in row.photos] for row in rows]
    anna = ["anna/1.JPG", "anna/2.png"]
    assert names == [anna, ["b.png"], ["b.png", "c.webp", *anna], ["odd;name.png"], [], ["gone"]]
    assert rows[2].image == tmp_path / "b.png" and rows[2].pictures == rows[2].photos[1:]
    formats = ".bmp, .gif, .jpeg, .jpg, .png, .tif, .tiff, .webp"
    assert rows[4].problem == f"photos: no picture in {tmp_path / 'empty'} ({formats})"
    problems = data.inspect_row(rows[5], 5, takes_image=False).problems
    assert len(problems) == 1 and "gone" in problems[0]
    assert rows[0].who == rows[0].who != rows[1].who
    (tmp_path / "metadata.csv").write_text("prompt,image,input_image\nx,b.png,b.png")
    with pytest.raises(DataError, match="names the column 'image' twice"):
        data.load_metadata(tmp_path / "metadata.csv")


def test_the_rows_of_a_person_start_from_the_photos_in_turn(tmp_path):
    """The seed draws the first one, and a row's own first frame is not in its pool if two others are there."""
    save_pictures(tmp_path, "a/0.png", "a/1.png", "a/2.png", "b/0.png", "b/1.png")
    lines = ["x,a,anna", "y,b,", "y,a,anna", "z,a,anna", "x,b,", "again,a,anna"]
    (tmp_path / "metadata.csv").write_text("\n".join(["prompt,photos,person", *lines]))
    rows = data.load_metadata(tmp_path / "metadata.csv")
    starts = {
        seed: [row.image.parent.name + row.image.stem for row in data.assign_images(rows, seed)] for seed in range(9)
    }
    for names in starts.values():
        anna = [names[i] for i in (0, 2, 3, 5)]
        assert {*anna} == {"a0", "a1", "a2"} and anna[3] == anna[0] and {names[1], names[4]} == {"b0", "b1"}
    assert len({names[0] for names in starts.values()}) == 3
    assigned = data.assign_images(rows, 0)
    assert [len(row.pictures) for row in assigned] == [2, 2, 2, 2, 2, 2]
    assert all((row.image in row.pictures) == (row.photos[0].parent.name == "b") for row in assigned)
    assert [row.id for row in assigned] == [row.id for row in rows]


def test_photos_keep_their_sizes(tmp_path, monkeypatch):
    save_pictures(tmp_path, "a/0.png", "a/1.png", size=(40, 30))
    save_pictures(tmp_path, "a/2.png", size=(60, 90))
    (tmp_path / "metadata.csv").write_text("prompt,photos\nx,a")
    monkeypatch.setattr("rewardfl.data.metadata.LONGEST_PHOTO", 60)
    photos = data.load_pictures(data.load_metadata(tmp_path / "metadata.csv")[0])
    assert [tuple(photo.shape) for photo in photos] == [(3, 40, 30), (3, 40, 30), (3, 40, 60)]
    assert photos[1].unique().tolist() == [pytest.approx(40 / 127.5 - 1)]
