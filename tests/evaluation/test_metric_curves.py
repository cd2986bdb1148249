"""Curves of metrics.jsonl as runs leave it."""

from rewardfl.evaluation import metric_curves
from rewardfl.training.metrics_file import MetricsFile


def test_curves_of_two_runs(tmp_path):
    """Steps without the metric are left out. Runs with one folder name are labelled by their paths."""
    runs = [tmp_path / name / "run" for name in "ab"]
    for offset, run in enumerate(runs):
        run.mkdir(parents=True)
        for step in range(4):
            values = {"lr": step + offset} | ({"eval/score": step / 2} if step % 2 else {})
            MetricsFile(run / "metrics.jsonl").append(step, values)
    names = metric_curves.run_labels(runs)
    assert names == [str(run) for run in runs] and metric_curves.run_labels([runs[0], tmp_path / "c"]) == ["run", "c"]
    lines = [metric_curves.read_metrics(run) for run in runs]
    curves = [metric_curves.metric_curve("a", each, key) for each in lines for key in ("lr", "eval/score")]
    assert [curve.points for curve in curves[1::2]] == [[(1, 0.5), (3, 1.5)]] * 2
    assert [curve.points for curve in curves[::2]] == [[(i, i + offset) for i in range(4)] for offset in (0, 1)]
    assert metric_curves.draw_curves({"lr": curves[::2]}, "step").startswith(b"\x89PNG")
