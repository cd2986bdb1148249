import math
import os
import subprocess
import sys

import av
import pytest
import torch

from rewardfl import data
from rewardfl.data import DataError


def clip(num_frames=9, height=48, width=64):
    """Smooth colour gradients that move: (F, H, W, 3) uint8."""
    t, y, x = torch.meshgrid(*(torch.linspace(0, 1, n) for n in (num_frames, height, width)), indexing="ij")
    channels = [(x + t) / 2, (y + 1 - t) / 2, (x + y) / 2]
    return (torch.stack(channels, dim=-1) * 255).round().to(torch.uint8)


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
    assert os.listdir(tmp_path) == ["a.mp4"]


def test_written_format(tmp_path):
    data.write_video(tmp_path / "a.mp4", clip(), fps=23.976)
    with av.open(str(tmp_path / "a.mp4")) as container:
        stream = container.streams.video[0]
        assert stream.codec_context.name == "h264" and stream.pix_fmt == "yuv420p"
        assert float(stream.average_rate) == pytest.approx(23.976, abs=1e-3)
        assert data.frame_rate(tmp_path / "a.mp4") == float(stream.average_rate)
        assert stream.frames == 9


def test_float_video_is_written_as_its_uint8_frames(tmp_path):
    frames = clip(height=64)  # at 48 x 64, an odd number of macroblocks, libx264 is not deterministic
    data.write_video(tmp_path / "a.mp4", frames, fps=16)
    data.write_video(tmp_path / "b.mp4", data.to_float(frames), fps=16)
    assert torch.equal(data.read_video(tmp_path / "a.mp4"), data.read_video(tmp_path / "b.mp4"))


def test_read_takes_the_first_frames(tmp_path):
    data.write_video(tmp_path / "a.mp4", clip(), fps=16)
    whole = data.read_video(tmp_path / "a.mp4")
    assert torch.equal(data.read_video(tmp_path / "a.mp4", 5), whole[:5])
    assert torch.equal(data.read_video(tmp_path / "a.mp4", 9), whole)
    with pytest.raises(DataError, match="a.mp4: holds 9 frames, 10 are needed"):
        data.read_video(tmp_path / "a.mp4", 10)


def test_rotated_clips_come_upright(tmp_path):
    """Phones store portrait clips lying down with a display matrix in the track header."""
    path = tmp_path / "a.mp4"
    data.write_video(path, clip(), fps=16)
    lying = data.read_video(path)
    content = path.read_bytes()
    numbers = [
        [0x10000, 0, 0, 0, 0x10000, 0, 0, 0, 0x40000000],
        [0, 0x10000, 0, -0x10000, 0, 0, 0, 0, 0x40000000],
    ]
    identity, quarter = (b"".join(n.to_bytes(4, "big", signed=True) for n in matrix) for matrix in numbers)
    header = content.index(b"tkhd")
    path.write_bytes(content[:header] + content[header:].replace(identity, quarter, 1))
    assert torch.equal(data.read_video(path), lying.rot90(-1, (1, 2)))  # this matrix shows it turned clockwise


def test_odd_sizes_are_refused(tmp_path):
    with pytest.raises(ValueError, match="H.264 needs an even height and width, got 47 x 64"):
        data.write_video(tmp_path / "a.mp4", clip(height=47), fps=16)


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    data.write_video(tmp_path / "a.mp4", clip(), fps=16)
    old = (tmp_path / "a.mp4").read_bytes()

    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(KeyboardInterrupt):
        data.write_video(tmp_path / "a.mp4", clip(5), fps=16)
    assert os.listdir(tmp_path) == ["a.mp4"] and (tmp_path / "a.mp4").read_bytes() == old


def test_float_and_back():
    frames = torch.arange(256, dtype=torch.uint8).repeat(3).reshape(2, 8, 16, 3)
    video = data.to_float(frames)
    assert video.shape == (3, 2, 8, 16) and video.dtype == torch.float32
    assert video.min() == -1 and video.max() == 1
    assert video[1, 0, 2, 3] == frames[0, 2, 3, 1] / 127.5 - 1
    assert torch.equal(data.to_uint8(video), frames)
    outside = torch.tensor([-1.2, 1.3, 0.001]).reshape(3, 1, 1, 1)
    assert data.to_uint8(outside).flatten().tolist() == [0, 255, 128]


def test_fit():
    frames = clip(height=48, width=64)
    assert data.fit(frames, 48, 64) is frames
    small = data.fit(frames, 24, 24)
    assert small.shape == (9, 24, 24, 3) and small.dtype == torch.uint8
    centre = frames[:, :, 8:56].float().mean((1, 2))  # a square takes the middle 48 of 64 columns
    assert torch.allclose(small.float().mean((1, 2)), centre, atol=1)
    wide = data.fit(frames, 16, 64)
    assert torch.equal(wide, frames[:, 16:32])  # already covers: no resize, only the middle rows
    assert data.fit(frames, 96, 50).shape == (9, 96, 50, 3)


def test_fit_is_antialiased():
    checker = (torch.arange(66)[:, None] + torch.arange(66)).remainder(2) * 255
    frames = checker.to(torch.uint8)[None, :, :, None].expand(1, 66, 66, 3)
    inner = data.fit(frames, 22, 22)[:, 4:18, 4:18].float()
    assert (inner - 127.5).abs().max() < 20  # every third pixel alone is 0 or 255


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
    rows = data.load_metadata(write_csv(folder, *lines))
    assert [row.index for row in rows] == [0, 1, 2] and [row.line for row in rows] == [2, 4, 5]
    assert [row.prompt for row in rows] == ["a person speaks", "one, two\nand three", "a person speaks"]
    assert all(row.video == folder / "a.mp4" and row.problem == "" for row in rows)


def test_other_columns_and_a_byte_order_mark(folder):
    path = write_csv(folder, "a.mp4,train,ann,smiles", header="\ufeffvideo,split,person,prompt")
    (row,) = data.load_metadata(path)
    assert row.video == folder / "a.mp4" and row.prompt == "smiles"


def test_ids_do_not_depend_on_the_other_rows(folder):
    first = data.load_metadata(write_csv(folder, "a.mp4,one", "a.mp4,two", "b.mp4,one"))
    other = data.load_metadata(write_csv(folder, "b.mp4,one", "a.mp4,two"))
    assert len({row.id for row in first}) == 3
    assert [row.id for row in other] == [first[2].id, first[1].id]
    again = data.load_metadata(write_csv(folder, "a.mp4,one", "a.mp4,one", "a.mp4,one"))
    assert again[0].id == first[0].id and len({row.id for row in again}) == 3


def test_missing_file_and_column(folder):
    with pytest.raises(DataError, match="data.file_name: no such file: .*none.csv"):
        data.load_metadata(folder / "none.csv")
    with pytest.raises(DataError, match="must name the column 'prompt', it names video, text"):
        data.load_metadata(write_csv(folder, "a.mp4,x", header="video,text"))
    (folder / "metadata.csv").write_text("")
    with pytest.raises(DataError, match="must name the column 'video', it names nothing"):
        data.load_metadata(folder / "metadata.csv")


BAD = {
    ",a prompt": "no video",
    "a.mp4,": "empty prompt for a.mp4",
    "a.mp4": "empty prompt for a.mp4",
    "a.mp4,smiles, then laughs": "more cells than columns; put a prompt that holds commas in double quotes",
    "gone.mp4,x": "{folder}/gone.mp4: no such file",
    "text.mp4,x": "{folder}/text.mp4: cannot be decoded (Invalid data found when processing input)",
    "cut.mp4,x": "{folder}/cut.mp4: cannot be decoded (Invalid data found when processing input)",
    "short.mp4,x": "{folder}/short.mp4: holds 4 frames, 5 are needed",
}


def test_every_bad_row_is_named(folder):
    rows = data.load_metadata(write_csv(folder, "a.mp4,good", *BAD, "a.mp4,good too"))
    expected = [f"line {i}: {text.format(folder=folder)}" for i, text in enumerate(BAD.values(), start=3)]
    with pytest.raises(DataError) as error:
        data.check_rows(rows, 5, skip_bad_rows=False)
    first, *lines = str(error.value).splitlines()
    assert first == ("data.file_name: 8 of 10 rows cannot be used; mend them or set data.skip_bad_rows: true")
    assert lines == expected
    good, problems = data.check_rows(rows, 5, skip_bad_rows=True)
    assert [row.prompt for row in good] == ["good", "good too"] and problems == expected


def test_good_rows_pass_and_none_is_an_error(folder):
    rows = data.load_metadata(write_csv(folder, "a.mp4,x"))
    assert data.check_rows(rows, 9, skip_bad_rows=False) == (rows, [])
    with pytest.raises(DataError, match="data.file_name: no usable row\nline 2: .*a.mp4: holds 9 frames, 13"):
        data.check_rows(rows, 13, skip_bad_rows=True)
    with pytest.raises(DataError, match="data.file_name: no usable row"):
        data.check_rows([], 9, skip_bad_rows=False)


def test_a_file_without_video(folder):
    with av.open(str(folder / "sound.wav"), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000, layout="mono")
        samples = torch.zeros(1, 800, dtype=torch.int16).numpy()
        frame = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
        frame.rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    with pytest.raises(DataError, match="sound.wav: holds no video"):
        data.read_video(folder / "sound.wav")


def test_load_example(folder):
    (row,) = data.load_metadata(write_csv(folder, "a.mp4,smiles"))
    example = data.load_example(row, 32, 32, 5)
    assert example.id == row.id and example.prompt == "smiles"
    assert example.video.shape == (3, 5, 32, 32) and example.video.dtype == torch.float32
    assert torch.equal(example.image, example.video[:, 0])
    assert torch.equal(example.video, data.to_float(data.fit(data.read_video(folder / "a.mp4")[:5], 32, 32)))


# ---- order

GEOMETRIES = [(b, a, p) for b in (1, 2, 3, 4, 6, 12) for a in (1, 2, 3, 4, 6, 12) for p in (1, 2, 3, 4, 6, 12)]
GEOMETRIES = [geometry for geometry in GEOMETRIES if math.prod(geometry) == 12]


def global_batch(step, batch_size, accumulation, processes, num_rows, seed=3):
    """All samples of a step, in any order: [(epoch, row), ...]."""
    size = {"batch_size": batch_size, "accumulation": accumulation, "processes": processes}
    cells = [(micro, rank) for micro in range(accumulation) for rank in range(processes)]
    parts = [data.micro_batch(step, *cell, **size, num_rows=num_rows, seed=seed) for cell in cells]
    assert all(len(part) == batch_size for part in parts)
    return sorted(sample for part in parts for sample in part)


@pytest.mark.parametrize("num_rows", [5, 12, 17, 40])
def test_a_step_is_the_same_whatever_the_geometry(num_rows):
    assert len(GEOMETRIES) == 18
    for step in range(6):
        stream = [data.sample_at(step * 12 + i, num_rows, seed=3) for i in range(12)]
        for geometry in GEOMETRIES:
            assert global_batch(step, *geometry, num_rows) == sorted(stream)


def test_every_row_once_per_epoch_and_none_left_out():
    visits = [sample for step in range(7) for sample in global_batch(step, 1, 1, 5, num_rows=7)]
    assert sorted(visits) == [(epoch, row) for epoch in range(5) for row in range(7)]


def test_the_order_is_shuffled_and_depends_on_seed_and_epoch():
    orders = {data.epoch_order(50, seed, epoch) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9 and tuple(range(50)) not in orders
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert data.epoch_order(6, 42, 0) == (0, 2, 3, 5, 4, 1)  # the same in every process and version


def test_total_steps():
    assert data.total_steps(10, 4, 1, None) == 3  # 2.5 steps hold one epoch; the third takes 2 of the next
    assert data.total_steps(10, 5, 2, None) == 4
    assert data.total_steps(3, 8, 1, None) == 1
    assert data.total_steps(10, 4, 1, 100) == 100


# ---- noise


def test_seeds_are_distinct():
    cells = [(s, e, i, m) for s in range(4) for e in range(12) for i in ("a", "b", "1/a") for m in range(4)]
    seeds = {data.noise_seed(*cell) for cell in cells}
    assert len(seeds) == len(cells) and all(0 <= seed < 2**63 for seed in seeds)
    assert not any(data._stable_hash(f"order/{s}/{e}") in seeds for s in range(4) for e in range(12))


def test_noise_is_the_same_in_every_process():
    code = "from rewardfl.data import *; print(noise_seed(42, 1, 'clip#1', 2), noise((3,), 5).tolist())"
    here = f"{data.noise_seed(42, 1, 'clip#1', 2)} {data.noise((3,), 5).tolist()}"
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == here
    assert data.noise_seed(42, 1, "clip#1", 2) == 8305654411088914815


def test_noise_does_not_depend_on_the_global_generator_or_the_batch():
    torch.manual_seed(0)
    first = data.noise((16, 3, 4, 4), 11)
    torch.manual_seed(1)
    assert torch.equal(data.noise((16, 3, 4, 4), 11), first)
    assert first.dtype == torch.float32 and first.shape == (16, 3, 4, 4)
    assert not torch.equal(data.noise((16, 3, 4, 4), 12), first)
    assert abs(first.mean()) < 0.1 and abs(first.std() - 1) < 0.1


def test_noise_is_independent_of_the_geometry():
    def seeds(*geometry):
        visits = [sample for step in range(3) for sample in global_batch(step, *geometry, num_rows=7)]
        return sorted(data.training_noise_seed(42, epoch, f"row{row}", "fresh") for epoch, row in visits)

    reference = seeds(1, 1, 12)
    assert len(set(reference)) == 36
    assert all(seeds(*geometry) == reference for geometry in GEOMETRIES)


def test_noises_per_sample():
    def seeds(n):
        return [data.training_noise_seed(42, epoch, "a", n) for epoch in range(6)]

    assert len(set(seeds("fresh"))) == 6
    assert len(set(seeds(2))) == 2 and seeds(2)[:2] * 3 == seeds(2)
    assert len(set(seeds(1))) == 1 and len(set(seeds(6))) == 6
