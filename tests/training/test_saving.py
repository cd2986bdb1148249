import os
from types import SimpleNamespace

import pytest
import torch

from rewardfl import config, data
from rewardfl.training import saving
from rewardfl.training.shard import Shard


def write_samples(folder, videos, count, process=0, clips=None, height=8):
    """Write the samples/ of step 3 as one of two processes; return its folder and the rows that are generated.

    videos: (3, F, H, W) that the rows give. clips: the rows' real clips.
    """
    settings = config.DataConfig(
        file_name="x", height=height, width=height, num_frames=videos[0].shape[1], max_pixels=32 * 48, fps=16
    )
    samples = [SimpleNamespace(row=data.Row(index=i, line=i, id=str(i), prompt="x", video=clip))
               for i, clip in enumerate(clips or [None] * len(videos))]  # fmt: skip
    rows = []

    def generate(row):
        rows.append(row)
        return row, videos[row], None

    job = SimpleNamespace(shard=Shard(process, 2), main=process == 0, wait=lambda: None)
    run = SimpleNamespace(output_dir=str(folder), sample_videos=count)
    return saving.sample_videos(run, settings, None, samples, generate, job, 3), rows


def test_a_step_has_a_grid_of_its_images(tmp_path):
    """The main process writes it, of the images of both."""
    shown = [torch.full((8, width, 3), 40 * width, dtype=torch.uint8) for width in (2, 6, 4, 2)]
    images = [data.to_float(picture[None]) for picture in shown]
    assert os.listdir(write_samples(tmp_path / "one", images[:2], 1)[0]) == ["00.png"]
    folder, _ = write_samples(tmp_path, images, 3, process=1)
    assert os.listdir(folder) == ["01.png"]
    write_samples(tmp_path, images, 3)
    assert sorted(os.listdir(folder)) == ["00.png", "01.png", "02.png", "grid.png"]
    assert torch.equal(data.read_picture(folder / "grid.png"), data.side_by_side(shown[:3]))


def test_a_full_disk_is_a_warning(tmp_path, monkeypatch, capsys):
    def write(path, video):
        if path.name == "grid.png":
            raise OSError(28, "No space left on device")
        write_picture(path, video)

    write_picture = data.write_picture
    monkeypatch.setattr(data, "write_picture", write)
    folder, _ = write_samples(tmp_path, [torch.zeros(3, 1, 8, 8)] * 3, 3)
    assert sorted(os.listdir(folder)) == ["00.png", "02.png"]
    assert "grid.png could not be written (No space left on device)" in capsys.readouterr().out


@pytest.mark.parametrize("process, warnings", [(0, ["00.mp4"]), (1, ["01.mp4"])])
def test_a_sample_whose_clip_is_lost_is_left_out(tmp_path, capsys, process, warnings):
    """Each process generates as often as before, and the other videos are written."""
    clips = [tmp_path / f"{i}.mp4" for i in range(3)]
    clips[0].write_text("not a video any more")
    data.write_video(clips[2], torch.zeros(5, 32, 48, 3, dtype=torch.uint8), fps=16)
    folder, rows = write_samples(tmp_path / "run", [torch.zeros(3, 5, 32, 48)] * 3, 3, process, clips, 32)
    assert folder == tmp_path / "run" / "samples" / "step-000003" and len(rows) == 2
    lines = capsys.readouterr().out.splitlines()
    assert [line.startswith(f"warning: step 3: {folder / name} ") for line, name in zip(lines, warnings, strict=True)]
    if process == 0:
        assert data.read_video(folder / "02.mp4").shape == (5, 32, 96, 3)
