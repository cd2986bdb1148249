"""The sample images of a step beside each other."""

import os
from types import SimpleNamespace

import av
import numpy as np
import pytest
import torch
from diffusers.utils import make_image_grid
from PIL import Image

from rewardfl import data
from rewardfl.data import clips
from rewardfl.training import saving
from rewardfl.training.shard import Shard


def pictures(*sizes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 256, (*size, 3), dtype=torch.uint8, generator=generator) for size in sizes]


@pytest.mark.parametrize("count, rows, columns", [(1, 1, 1), (2, 1, 2), (6, 2, 3), (12, 3, 4)])
def test_full_rows_of_one_size_are_diffusers_grid(count, rows, columns):
    shown = pictures(*[(5, 7)] * count)
    theirs = make_image_grid([Image.fromarray(picture.numpy()) for picture in shown], rows, columns)
    assert np.array_equal(data.side_by_side(shown), theirs)


def test_smaller_pictures_are_padded_with_white():
    wide, high, small = pictures((4, 8), (6, 2), (3, 3))
    sheet = data.side_by_side([wide, high, small])
    assert sheet.shape == (12, 16, 3)
    places = {(0, 0): wide, (0, 8): high, (6, 0): small}
    seen = torch.zeros(sheet.shape[:2], dtype=torch.bool)
    for (top, left), picture in places.items():
        height, width = picture.shape[:2]
        assert torch.equal(sheet[top : top + height, left : left + width], picture)
        seen[top : top + height, left : left + width] = True
    assert bool((sheet[~seen] == 255).all())


@pytest.mark.parametrize("count", [3, 12])
def test_what_is_written_can_be_read(tmp_path, monkeypatch, count):
    """A tracker reads the sheet again, and Pillow takes so many pixels."""
    monkeypatch.setattr(clips, "SHEET_PIXELS", 11 * 6 * 4)  # nine of these pictures, since a sheet is as high as wide
    shown = pictures(*[(6, 4)] * count)
    sheet = data.side_by_side(shown)
    data.write_picture(tmp_path / "grid.png", sheet[None])
    assert torch.equal(data.read_picture(tmp_path / "grid.png"), sheet)
    assert torch.equal(sheet[:6, :4], shown[0])


def sampled(folder, images, count, process=0):
    """samples/ of one step: each of `images` (3, 1, H, W) is what a row gives."""
    cfg = SimpleNamespace(
        run=SimpleNamespace(output_dir=str(folder), sample_videos=count), data=SimpleNamespace(fps=16)
    )
    rows = [SimpleNamespace(row=SimpleNamespace(video=None)) for _ in images]
    job = SimpleNamespace(shard=Shard(process, 2), main=process == 0, wait=lambda: None)
    return saving.sample_videos(cfg.run, cfg.data, None, rows, lambda row: (row, images[row], None), job, 3)


def test_a_step_has_a_grid_of_its_images(tmp_path):
    """Written by the main process of those that both have written."""
    sizes = [(8, 8), (8, 16), (16, 8), (8, 8)]
    images = [data.to_float(picture[None]) for picture in pictures(*sizes)]
    assert os.listdir(sampled(tmp_path / "one", images[:2], 1)) == ["00.png"]
    folder = sampled(tmp_path, images, 3, process=1)
    assert [path.name for path in folder.iterdir()] == ["01.png"]
    assert sampled(tmp_path, images, 3) == folder
    assert sorted(os.listdir(folder)) == ["00.png", "01.png", "02.png", "grid.png"]
    grid = data.read_picture(folder / "grid.png")
    assert torch.equal(grid, data.side_by_side(pictures(*sizes)[:3]))
    (folder / "grid.png").unlink()
    sampled(tmp_path, images, 3, process=1)
    assert not (folder / "grid.png").exists()


def test_a_full_disk_is_said_and_training_goes_on(tmp_path, monkeypatch, capsys):
    def full(path, video):
        if path.name == "grid.png":
            raise OSError(28, "No space left on device")
        write(path, video)

    write = data.write_picture
    monkeypatch.setattr(data, "write_picture", full)
    folder = sampled(tmp_path, [torch.zeros(3, 1, 8, 8)] * 3, 3)
    assert sorted(os.listdir(folder)) == ["00.png", "02.png"]
    assert "grid.png could not be written (No space left on device)" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["a.mkv", "a.mp4", "a.avi"])
def test_a_title_in_another_encoding_is_ignored(tmp_path, name):
    with av.open(tmp_path / name, "w") as out:
        out.metadata["title"] = "FeteXXX"
        stream = out.add_stream("mjpeg" if name.endswith("avi") else "libx264", rate=16)
        stream.width, stream.height = 32, 32
        stream.pix_fmt = "yuvj420p" if name.endswith("avi") else "yuv420p"
        for i in range(5):
            out.mux(stream.encode(av.VideoFrame.from_ndarray(np.full((32, 32, 3), 20 * i, np.uint8), format="rgb24")))
        out.mux(stream.encode())
    content = (tmp_path / name).read_bytes()
    assert b"FeteXXX" in content
    (tmp_path / name).write_bytes(content.replace(b"FeteXXX", b"F\xeateXXX"[:7]))
    assert clips.read_video_header(tmp_path / name, 5).size == (32, 32)
    assert clips.read_video(tmp_path / name).shape == (5, 32, 32, 3)


def test_postscript_is_no_picture(tmp_path):
    """Pillow would start Ghostscript on it."""
    (tmp_path / "a.png").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\nshowpage\n")
    for read in (clips.read_picture, clips.open_picture):
        with pytest.raises(clips.DataError, match="cannot be decoded as a picture"):
            read(tmp_path / "a.png")
