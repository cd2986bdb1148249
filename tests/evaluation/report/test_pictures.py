"""The grid of frames, and FaceSim along the clip."""

import torch
from evaluation_records import JUDGE, pair, real, summary
from matplotlib.figure import Figure

from rewardfl import data
from rewardfl.evaluation.report import pictures


def test_the_grid_shows_other_tools_videos_as_they_were_judged(tmp_path):
    records = [line for name in "ab" for seed in (0, 1) for line in pair(name, seed, 0.5, 0.6)]
    shown = [line | {"file": "clip.mp4", "decoded": line["seed"] != 1} for line in (*map(real, "ab"), *records)]
    data.write_video(tmp_path / "clip.mp4", torch.zeros(3, 9, 16, 16), 16)
    paths, frames = [], data.read_video(tmp_path / "clip.mp4")
    pictures.draw_grid(summary(*records), tmp_path, shown, lambda path: paths.append(path) or frames)
    assert len(paths) == 4
    grid = data.read_picture(tmp_path / "grid.png")
    assert grid.shape == (2 * (96 + 34), 3 * (4 * 96 + 8), 3)  # two clips; the real one and two arms


def test_charts_take_any_name(monkeypatch):
    report = summary(*pair("a", 0, 0.5, 0.6))
    report["arms"].append(report["arms"][0] | {"name": "same"})
    report["arms"][1]["name"] = name = "_latest $\\frac$"  # to matplotlib no entry of a legend, and a formula
    figures, save = [], Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *to, **how: figures.append(figure) or save(figure, *to, **how)
    )
    assert pictures.draw_face_sim(report, JUDGE).startswith(b"\x89PNG")
    axis = figures[0].axes[0]
    assert [text.get_text() for text in axis.get_legend().get_texts()] == ["base\nsame", name, "real clips"]
    assert axis.get_title() == "FaceSim by the held-out judge" and axis.get_ylim() == (0, 1)
    assert [*axis.lines[1].get_ydata()] == report["arms"][1]["per_frame"][JUDGE]
