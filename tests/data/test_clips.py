import ctypes
import math
import random
import re
import zlib

import av
import numpy as np
import pytest
import torch
from diffusers.utils import make_image_grid
from films import damage, encode, gradients, numbered, numbers_of, turn, turned_picture
from PIL import Image

from rewardfl import data
from rewardfl.data import DataError, clips


def psnr(a, b):
    return 10 * math.log10(255**2 / (a.float() - b.float()).square().mean().item())


# ---- video files


def test_a_video_is_written_and_read(tmp_path):
    frames = gradients()
    data.write_video(tmp_path / "a.mp4", frames, fps=23.976)
    read = data.read_video(tmp_path / "a.mp4")
    assert read.shape == frames.shape and read.dtype == torch.uint8
    assert psnr(frames, read) > 34  # measured 38; 4:2:0 and crf 18 allow no more on this content
    assert psnr(frames.flip(-1), read) < 20  # the channels are in order
    assert psnr(frames.flip(0), read) < 25  # the frames are in order
    data.write_video(tmp_path / "b.mp4", data.to_float(frames), fps=23.976)
    assert (tmp_path / "b.mp4").read_bytes() == (tmp_path / "a.mp4").read_bytes()
    with av.open(str(tmp_path / "a.mp4")) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.pix_fmt, stream.frames) == ("h264", "yuv420p", 9)
        assert float(stream.average_rate) == pytest.approx(23.976, abs=1e-3)
        # BT.601: players take 720 lines for BT.709 if a file names no matrix
        assert stream.codec_context.colorspace == 6


def test_the_same_frames_are_the_same_bytes(tmp_path):
    """Whatever memory held before: libx264 reads one macroblock too many of an odd number, as in 48 x 64."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        pytest.skip("only glibc sets what fresh memory holds")
    M_PERTURB, contents = -6, set()
    try:
        for value in (1, 77, 200, 254):
            libc.mallopt(M_PERTURB, value)
            contents.add(data.encode_video(gradients(), fps=16))
    finally:
        libc.mallopt(M_PERTURB, 0)
    assert len(contents) == 1 and b" threads=1 " in contents.pop()  # bits would depend on the number of cores


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
    (1, 0, 0, 0.75): "pixels are 4/3 as wide as high; make them square with ffmpeg -i IN",
}


def test_clips_come_as_players_show_them(tmp_path):
    """Turned by phones, mirrored by front cameras."""
    path = tmp_path / "a.mp4"
    for matrix, shown in ORIENTATIONS.items():
        data.write_video(path, gradients(2), fps=16)
        stored = data.read_video(path)
        turn(path, *(round(0x10000 * number) for number in matrix))
        if callable(shown):
            assert torch.equal(data.read_video(path), shown(stored)), matrix
        else:
            with pytest.raises(DataError, match=f"a.mp4: {shown}"):
                data.read_video(path)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("matrix, red, blue", [("smpte170m", 0.299, 0.114), ("bt709", 0.2126, 0.0722)])
def test_a_clip_names_the_matrix_and_range_of_its_colours(tmp_path, matrix, red, blue, full):
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
    ("a.mp4", "libx264", "yuv420p"), ("a.mkv", "ffv1", "yuv420p"), ("a.mov", "png", "rgb24"),
    ("a.mov", "prores_ks", "yuv422p10le"),
])  # fmt: skip
def test_damage_that_the_decoder_conceals_is_refused(tmp_path, name, codec, pixels):
    """Whichever way it shows: marked frames, an error, or only libav's log (ffv1), each time that it is read."""
    noise = torch.randint(0, 255, (9, 48, 64, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    encode(tmp_path / name, (codec, pixels, noise, 0))
    assert len(data.read_video(tmp_path / name)) == 9
    damage(tmp_path / name)
    assert len(data.read_video(tmp_path / name, 1)) == 1  # what lies before it can be used
    for _ in range(2):
        with pytest.raises(DataError, match="damaged"):
            data.read_clip(tmp_path / name, 32, 32, 9)


def test_a_packet_that_the_container_marks_is_refused(tmp_path, monkeypatch):
    data.write_video(tmp_path / "a.mp4", gradients(2), fps=16)
    monkeypatch.setattr(av.Packet, "is_corrupt", True)
    with pytest.raises(DataError, match="a.mp4: is damaged at frame 0 .a packet is marked"):
        data.read_video(tmp_path / "a.mp4")


@pytest.mark.parametrize("name, codec, pixels", [
    ("a.mov", "prores_ks", "yuva444p10le"), ("a.gif", "", ""), ("a.webm", "libvpx-vp9", "yuva420p"),
])  # fmt: skip
@pytest.mark.parametrize("alpha", [0, 255])
def test_transparent_clips_are_refused(tmp_path, name, codec, pixels, alpha):
    """Their hidden colour would be trained on. An alpha channel that is full everywhere hides nothing."""
    frames = torch.cat([gradients(3), torch.full((3, 48, 64, 1), 255, dtype=torch.uint8)], 3)
    frames[1:, :8, :8, 3] = alpha
    if codec:
        encode(tmp_path / name, (codec, pixels, frames, 0))
    else:
        first, *others = map(Image.fromarray, frames.numpy())
        first.save(tmp_path / name, save_all=True, append_images=others, duration=60, disposal=2)
    if alpha == 255 and name != "a.webm":  # VP9's alpha is next to the video, and the decoder drops it
        assert data.read_video(tmp_path / name).shape == (3, 48, 64, 3)
        return
    reads = [data.read_video, lambda path: clips.read_video_header(path, 1)]
    for read in reads if name == "a.webm" else reads[:1]:
        with pytest.raises(DataError, match="a.*: has transparent pixels; save it without an alpha channel"):
            read(tmp_path / name)


def test_the_video_that_ffmpeg_takes_is_read(tmp_path):
    """The default, though it comes last; never a cover picture."""
    usual, larger = ("libx264", "yuv420p", gradients(9, 32, 48)), ("libx264", "yuv420p", gradients(9, 64))
    encode(tmp_path / "default.mkv", (*larger, 0), (*usual, 1))
    encode(tmp_path / "cover.mkv", ("mjpeg", "yuvj420p", gradients(1, 64), 1024), (*usual, 1))
    for name in ("default.mkv", "cover.mkv"):
        assert data.read_video(tmp_path / name).shape == (9, 32, 48, 3)


def test_a_title_in_another_encoding_is_ignored(tmp_path):
    with av.open(tmp_path / "a.mkv", "w") as out:
        out.metadata["title"] = "FeteXXX"
        stream = out.add_stream("libx264", rate=16)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        out.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), format="rgb24")))
        out.mux(stream.encode())
    content = (tmp_path / "a.mkv").read_bytes()
    (tmp_path / "a.mkv").write_bytes(content.replace(b"FeteXXX", b"F\xeateXXX"[:7]))
    assert b"F\xeate" in (tmp_path / "a.mkv").read_bytes()
    assert clips.read_video(tmp_path / "a.mkv").shape == (1, 32, 32, 3)


def test_a_size_that_changes_is_refused(tmp_path):
    """Recorded video calls do that. Raw H.264 can be put end to end, and has no times."""
    content = b""
    for height in (48, 96):
        data.write_video(tmp_path / "a.mp4", gradients(3, height), fps=16)
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
    with pytest.raises(DataError, match="a.h264: frame 0 has no valid time; re-encode it, or set data.fps: null"):
        data.read_video(tmp_path / "a.h264", 3, fps=16)


# ---- frame rates


@pytest.mark.parametrize("stored, fps, expected", [
    (30, 16, [0, 2, 4, 6, 7, 9, 11, 13, 15, 17]),  # k * 1.875 to the nearest
    (24, 16, [0, 1, 3, 4, 6, 7, 9, 10, 12, 13]),  # halfway: the earlier
    (32, 16, list(range(0, 20, 2))), (24000 / 1001, 24, list(range(10))),
])  # fmt: skip
def test_frames_at_a_rate(tmp_path, stored, fps, expected):
    data.write_video(tmp_path / "a.mp4", numbered(36), fps=stored)
    count = len(expected)
    assert numbers_of(data.read_video(tmp_path / "a.mp4", count, fps)) == expected
    assert numbers_of(data.read_video(tmp_path / "a.mp4", count)) == list(range(count))
    complete = numbers_of(data.read_video(tmp_path / "a.mp4", None, fps))
    assert complete[:count] == expected and len(complete) == math.ceil(36 / stored * fps - 0.01)


def test_the_nearest_frame_is_taken_at_any_times():
    generator = random.Random(0)
    for _ in range(200):
        fps = generator.uniform(5, 30)
        times = [generator.uniform(0, 3)]
        while len(times) < 60:
            times.append(times[-1] + generator.uniform(0.1, 1.4) / fps)
        chosen = list(clips._sample_at_rate(zip(times, times, strict=True), fps, 20))
        assert len(chosen) == 20 and chosen == sorted(chosen)
        for k, time in enumerate(chosen):
            off = [abs(t - times[0] - k / fps) for t in times]
            assert abs(time - times[0] - k / fps) <= min(off) + 2e-3  # a millisecond of slack


@pytest.mark.parametrize("pause", [100, 700])
@pytest.mark.parametrize("rate", [16, 60])
def test_a_pause_is_refused_and_not_filled(tmp_path, rate, pause):
    """The average rate is high enough; frames would be repeated over a time without any."""
    times = [round(1000 * i / rate) + pause * (i > rate // 2) for i in range(rate + 20)]
    encode(tmp_path / "a.mp4", ("libx264", "yuv420p", numbered(1).expand(len(times), -1, -1, -1), 0), times=times)
    near = math.ceil(16 * (times[rate // 2] + 47) / 1000) / 16
    with pytest.raises(DataError, match=f"a.mp4: has no frame near {near:.4g} s, where it pauses|has .* per second"):
        data.read_video(tmp_path / "a.mp4", 16, 16)
    assert len(data.read_video(tmp_path / "a.mp4", rate // 2 * 16 // rate, 16)) == rate // 2 * 16 // rate


@pytest.mark.parametrize("num_frames, fps, problem", [
    (8, 8, ""), (9, 8, "holds 8 frames at 8 fps, 9 are needed"), (9, 20.1, ""),  # within 1 %
    (9, 24, "has 20 frames per second, data.fps is 24; lower it or leave the clip out"),
    (21, None, "holds 20 frames, 21 are needed"), (20, None, ""),
])  # fmt: skip
def test_the_header_and_reading_refuse_too_few_and_too_slow_frames(tmp_path, num_frames, fps, problem):
    data.write_video(tmp_path / "a.mp4", numbered(20), fps=20)
    if not problem:
        assert clips.read_video_header(tmp_path / "a.mp4", num_frames, fps) == ((32, 48), 20, (), 20)
        assert len(data.read_video(tmp_path / "a.mp4", num_frames, fps)) == num_frames
        return
    for read in (clips.read_video_header, data.read_video):
        with pytest.raises(DataError, match=f"a.mp4: {problem}"):
            read(tmp_path / "a.mp4", num_frames, fps)


# ---- sizes


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
def test_fit_is_pillows_resize_and_crop(source, size):
    frames = gradients(1, *source)
    noise = torch.randint(-20, 20, frames.shape, generator=torch.Generator().manual_seed(0))
    frames = (frames / 2 + 60 + noise).to(torch.uint8)  # Pillow clips at 0 and 255 between rows and columns
    scale = max(size[0] / source[0], size[1] / source[1])
    height, width = (max(new, round(old * scale)) for new, old in zip(size, source, strict=True))
    left, top = (width - size[1]) // 2, (height - size[0]) // 2
    resized = Image.fromarray(frames[0].numpy()).resize((width, height), Image.Resampling.BICUBIC)
    expected = np.asarray(resized.crop((left, top, left + size[1], top + size[0]))).astype(int)
    assert np.abs(data.fit(frames, *size)[0].numpy() - expected).max() <= 1


def test_clip_size_is_the_best_of_all():
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

        assert clips.clip_size((height, width), 1, 1, max_pixels) == min(sizes, key=loss)


def test_read_clip_is_fit_of_read_video(tmp_path):
    data.write_video(tmp_path / "a.mp4", gradients(9, 48, 112), fps=32)
    frames = data.read_video(tmp_path / "a.mp4")
    assert torch.equal(data.read_clip(tmp_path / "a.mp4", 32, 32, 5), data.fit(frames[:5], 32, 32))
    shaped = data.read_clip(tmp_path / "a.mp4", 32, 32, 4, max_pixels=48 * 112 - 1, fps=16)
    assert torch.equal(shaped, data.fit(frames[:8:2], 48, 96))
    assert len(data.read_clip(tmp_path / "a.mp4", 32, 32, 40, at_least=9)) == 9
    turn(tmp_path / "a.mp4", 0, 0x10000, -0x10000, 0)
    assert data.read_clip(tmp_path / "a.mp4", 32, 32, 4, max_pixels=48 * 112).shape == (4, 112, 48, 3)


# ---- pictures


def test_pictures_come_upright_in_rgb(tmp_path):
    for orientation in (2, 3, 6):
        upright = turned_picture(tmp_path / "a.jpg", orientation)
        read = data.read_picture(tmp_path / "a.jpg")
        assert read.shape == (48, 64, 3) and read.dtype == torch.uint8 and psnr(read, upright) > 30
    picture = Image.fromarray(gradients(1)[0].numpy())
    for mode in ("L", "P", "RGBA", "LA"):
        picture.convert(mode).save(tmp_path / "a.png")  # opaque
        expected = np.array(picture.convert(mode).convert("RGB"))
        assert np.array_equal(data.read_picture(tmp_path / "a.png").numpy(), expected)


REFUSED = {
    "glass.png": "has transparent pixels; save it without an alpha channel",
    "deep.png": "has pixels of Pillow's mode I;16; save it with 8 bits per channel",
    "cut.png": "cannot be decoded as a picture (image file is truncated",
    "text.png": "cannot be decoded as a picture (cannot identify image file",
    "script.png": "cannot be decoded as a picture (cannot identify image file",  # Pillow would start Ghostscript
    "gone.png": "no such file",
    "large.png": "cannot be decoded as a picture (Image size (400000000 pixels) exceeds",  # by its header
    "folder": "is a folder; name a file",
    "a.mp4": "holds no video that can be decoded",
    "folder/": "is a folder; name a file, make one clip of a folder's frames",
}


def test_what_cannot_be_read_is_refused(tmp_path):
    pixels = gradients(1)[0].numpy()
    (tmp_path / "folder").mkdir()
    Image.fromarray(np.concatenate([pixels, pixels[..., :1]], -1)).save(tmp_path / "glass.png")
    Image.fromarray(pixels[..., 0].astype(np.uint16) * 257).save(tmp_path / "deep.png")
    Image.fromarray(pixels).save(tmp_path / "good.png")
    content = (tmp_path / "good.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(content[: len(content) // 2])
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "script.png").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\nshowpage\n")
    header = b"IHDR" + (20_000).to_bytes(4, "big") * 2 + bytes([8, 2, 0, 0, 0])
    start = b"\x89PNG\r\n\x1a\n\0\0\0\x0d" + header
    (tmp_path / "large.png").write_bytes(start + zlib.crc32(header).to_bytes(4, "big") + b"\0\0\0\x64IDAT")
    data.write_video(tmp_path / "a.mp4", gradients(2), fps=16)
    (tmp_path / "a.mp4").write_bytes((tmp_path / "a.mp4").read_bytes().replace(b"avc1", b"abcd"))
    for name, message in REFUSED.items():
        read = data.read_video if name in ("a.mp4", "folder/") else data.read_picture
        with pytest.raises(DataError, match=re.escape(f"{tmp_path / name}: {message}")):
            read(tmp_path / name)
    for name in ("large.png", "text.png", "script.png", "deep.png"):  # by the header
        with pytest.raises(DataError, match=re.escape(REFUSED[name])):
            clips.open_picture(tmp_path / name)
    with pytest.raises(ValueError, match="H.264 needs an even height and width, got 47 x 64"):
        data.write_video(tmp_path / "a.mp4", gradients(height=47), fps=16)


# ---- sheets of pictures


def pictures(*sizes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 256, (*size, 3), dtype=torch.uint8, generator=generator) for size in sizes]


def test_a_sheet_is_diffusers_grid_padded_with_white(monkeypatch):
    for count, rows, columns in ((1, 1, 1), (2, 1, 2), (12, 3, 4)):
        shown = pictures(*[(5, 7)] * count)
        expected = make_image_grid([Image.fromarray(picture.numpy()) for picture in shown], rows, columns)
        assert np.array_equal(data.side_by_side(shown), expected)
    wide, high, small = pictures((4, 8), (6, 2), (3, 3))
    expected = torch.full((12, 16, 3), 255, dtype=torch.uint8)
    for (top, left), picture in {(0, 0): wide, (0, 8): high, (6, 0): small}.items():
        expected[top : top + picture.shape[0], left : left + picture.shape[1]] = picture
    assert torch.equal(data.side_by_side([wide, high, small]), expected)
    monkeypatch.setattr(clips, "SHEET_PIXELS", 11 * 6 * 4)  # Pillow reads only so many: nine, since a sheet is square
    assert data.side_by_side(pictures(*[(6, 4)] * 12)).shape == (18, 12, 3)
