"""Curves of metrics.jsonl as runs leave it."""

import pytest
from matplotlib import pyplot as plt

from rewardfl.evaluation import metric_curves
from rewardfl.training.checkpoint import CheckpointError
from rewardfl.training.metrics_file import MetricsFile


def test_curves_of_two_runs(monkeypatch, tmp_path):
    """Steps without the metric are left out. Runs with one folder name are labelled by their paths."""
    runs = [tmp_path / name / "run" for name in "ab"]
    for offset, run in enumerate(runs):
        run.mkdir(parents=True)
        for step in range(4):
            values = {"lr": step + offset} | ({"eval/score": step / 2} if step % 2 else {})
            MetricsFile(run / "metrics.jsonl").append(step, values)
    names = metric_curves.run_labels(runs)
    assert names == [str(run) for run in runs] and metric_curves.run_labels([runs[0], tmp_path / "c"]) == ["run", "c"]
    lines = dict(zip(names, map(metric_curves.read_metrics, runs), strict=True))
    drawn = []
    monkeypatch.setattr(plt.Axes, "plot", lambda axis, x, y, **how: drawn.append((how["label"], x, y)))
    monkeypatch.setattr(plt.Axes, "legend", lambda *_, **how: None)
    panels = {
        key: [metric_curves.metric_curve(name, lines[name], key) for name in names] for key in ("lr", "eval/score")
    }
    assert metric_curves.draw_curves(panels, "step").startswith(b"\x89PNG")
    assert drawn == [
        (names[0], [0, 1, 2, 3], [0, 1, 2, 3]), (names[1], [0, 1, 2, 3], [1, 2, 3, 4]),
        (names[0], [1, 3], [0.5, 1.5]), (names[1], [1, 3], [0.5, 1.5]),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "line",
    [
        "[]", "{", '{"step": -1}', '{"lr": 1}', '{"step": 1, "lr": "a"}', "[" * 100_000, '{"step": 1, "lr": 1e308}',
        '{"step": 1' + "0" * 400 + "}",
    ],
)  # fmt: skip
def test_a_damaged_file_is_refused(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(line + "\n")
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl, line 1 is not a line of metrics"):
        metric_curves.read_metrics(tmp_path)
