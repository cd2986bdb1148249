"""tools/plot_metrics.py on files as runs leave them."""

import pytest
from conftest import ROOT, run_tool
from matplotlib import pyplot as plt
from PIL import Image

from rewardfl.evaluation import metric_curves
from rewardfl.training.metrics_file import MetricsFile
from rewardfl_tools import plot_metrics


def test_curves_of_two_runs(monkeypatch, tmp_path):
    for name, offset in (("a", 0), ("b", 1)):
        (tmp_path / name).mkdir()
        file = MetricsFile(tmp_path / name / "metrics.jsonl")
        for step in range(4):
            file.append(step, {"lr": step + offset} | ({"eval/score": step / 2} if step % 2 else {}))
    drawn = []
    monkeypatch.setattr(plt.Axes, "plot", lambda axis, x, y, **how: drawn.append((how["label"], x, y)))
    monkeypatch.setattr(plt.Axes, "legend", lambda *_, **how: None)
    runs = [tmp_path / "a", tmp_path / "b"]
    assert "c.png" in run_tool(plot_metrics.main, *runs, "--keys", "lr", "eval/score", "--out", tmp_path / "c.png")
    assert drawn == [
        ("a", [0, 1, 2, 3], [0, 1, 2, 3]), ("b", [0, 1, 2, 3], [1, 2, 3, 4]),
        ("a", [1, 3], [0.5, 1.5]), ("b", [1, 3], [0.5, 1.5]),
    ]  # fmt: skip
    with Image.open(tmp_path / "c.png") as picture:
        assert picture.width > 2 * picture.height


def test_a_key_that_no_run_has(tmp_path):
    MetricsFile(tmp_path / "metrics.jsonl").append(1, {"lr": 1.0})
    error = run_tool(plot_metrics.main, tmp_path, "--keys", "lrr", "--out", tmp_path / "c.png", expect=2)
    assert "no run has lrr; there are lr, step" in error and not (tmp_path / "c.png").exists()


def test_without_a_key_what_is_to_be_watched(monkeypatch, tmp_path):
    """Of two runs of one name, the keys to watch that one of them has, beside the first."""
    for name in ("a", "b"):
        (tmp_path / name / "run").mkdir(parents=True)
        values = {"grad_norm": 1.0, "lr": 1.0, "reward/mean": 0.5} | {key: 0.1 for key in ("policy/kl",) if name == "b"}
        MetricsFile(tmp_path / name / "run" / "metrics.jsonl").append(1, values)
    titles, legends = [], []
    monkeypatch.setattr(plt.Axes, "set_title", lambda axis, title: titles.append(title))
    monkeypatch.setattr(plt.Axes, "plot", lambda axis, *values, label, **how: legends.append(label))
    monkeypatch.setattr(plt.Axes, "legend", lambda *_, **how: None)
    runs = [tmp_path / name / "run" for name in ("a", "b")]
    out = run_tool(plot_metrics.main, *runs)
    assert out.strip() == str(runs[0] / "curves.png") and (runs[0] / "curves.png").is_file()
    assert titles == ["reward/mean", "policy/kl", "grad_norm"] and legends == [str(run) for run in runs] * 3


def test_the_watched_keys_are_those_of_the_documents():
    text = "".join((ROOT / name).read_text() for name in ("README.md", "docs/flow_grpo.md"))
    assert [key for key in metric_curves.WATCHED if f"`{key}`" not in text] == []


def test_no_run_and_nothing_to_watch(tmp_path):
    error = run_tool(plot_metrics.main, tmp_path / "gone", expect=2)
    assert str(tmp_path / "gone") in error and "metrics.jsonl" in error and "no run has" not in error
    MetricsFile(tmp_path / "metrics.jsonl").append(1, {"odd": 1.0})
    error = run_tool(plot_metrics.main, tmp_path, expect=2)
    assert "--keys" in error and "odd" in error
    (tmp_path / "metrics.jsonl").write_text("[]\n")
    error = run_tool(plot_metrics.main, tmp_path, expect=2)
    assert "metrics.jsonl" in error and len(error.splitlines()) == 1


@pytest.mark.parametrize("place", ["metrics.jsonl", "mine.png", "curves.jpg"])
def test_curves_replace_nothing_without_a_word(tmp_path, place):
    MetricsFile(tmp_path / "metrics.jsonl").append(1, {"grad_norm": 1.0})
    (tmp_path / "mine.png").write_text("mine")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    error = run_tool(plot_metrics.main, tmp_path, "--out", tmp_path / place, expect=2)
    assert error.startswith("error: --out") and error.count("\n") == 1
    assert before == {path: path.read_bytes() for path in tmp_path.iterdir()}
    for suffix in ("png", "svg", "pdf", "png", "svg", "pdf"):  # drawn again
        run_tool(plot_metrics.main, tmp_path, "--out", tmp_path / f"new/c.{suffix}", "--overwrite")
