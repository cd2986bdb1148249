"""tools/plot_metrics.py on files as runs leave them."""

import sys

from matplotlib import pyplot as plt
from PIL import Image

from rewardfl.run.checkpoint import MetricsFile
from rewardfl_tools import plot_metrics


def call(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["plot_metrics.py", *map(str, arguments)])
    code = plot_metrics.main()
    return code, *capsys.readouterr()


def test_curves_of_two_runs(monkeypatch, capsys, tmp_path):
    for name, offset in (("a", 0), ("b", 1)):
        (tmp_path / name).mkdir()
        file = MetricsFile(tmp_path / name / "metrics.jsonl")
        for step in range(4):
            file.append(step, {"lr": step + offset} | ({"eval/score": step / 2} if step % 2 else {}))
    drawn = []
    monkeypatch.setattr(plt.Axes, "plot", lambda axis, x, y, **how: drawn.append((how["label"], x, y)))
    monkeypatch.setattr(plt.Axes, "legend", lambda axis: None)
    runs = [tmp_path / "a", tmp_path / "b"]
    code, out, _ = call(monkeypatch, capsys, *runs, "--keys", "lr", "eval/score", "--out", tmp_path / "c.png")
    assert code == 0 and "c.png" in out
    assert drawn == [
        ("a", [0, 1, 2, 3], [0, 1, 2, 3]), ("b", [0, 1, 2, 3], [1, 2, 3, 4]),
        ("a", [1, 3], [0.5, 1.5]), ("b", [1, 3], [0.5, 1.5]),
    ]  # fmt: skip
    with Image.open(tmp_path / "c.png") as picture:
        assert picture.width > 2 * picture.height


def test_a_key_that_no_run_has(monkeypatch, capsys, tmp_path):
    MetricsFile(tmp_path / "metrics.jsonl").append(1, {"lr": 1.0})
    code, _, error = call(monkeypatch, capsys, tmp_path, "--keys", "lrr", "--out", tmp_path / "c.png")
    assert code == 2 and "no run has lrr; there are lr, step" in error and not (tmp_path / "c.png").exists()
