"""A Markdown table of the runs of benchmarks/ablation/points.sh, for docs/results/reward_ablation.md.

    python benchmarks/ablation/table.py outputs/ablation [another folder of runs]

Means over the seeds, in brackets the worst seed's; by the held-out judge, its canaries and optical flow, after over
before, of reversals after minus before, of colour the larger shift of a channel. `trained`: by the pack that trains.
"""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

Report = dict
COLUMNS: dict[str, tuple[str, Callable[[Report], float], Callable[..., float]]] = {
    "trained": ("{:+.1f} %", lambda report: _gain(report, "reward"), min),
    "judge": ("{:+.1f} %", lambda report: _gain(report, "held_out"), min),
    "coverage": ("{:.3f}", lambda report: _after(report)["held_out/coverage"]["mean"], min),
    "landmark speed": ("{:.3f}", lambda report: _faces(report, "speed"), min),
    "non-rigid": ("{:.3f}", lambda report: _faces(report, "nonrigid"), min),
    "flow": ("{:.3f}", lambda report: _over(report, "motion/flow"), min),
    "in the face": ("{:.3f}", lambda report: _over(report, "motion/face_flow"), min),
    "sharpness": ("{:.3f}", lambda report: _over(report, "motion/sharpness"), min),
    "reversals": ("{:+.3f}", lambda report: report["motion"]["reversals"]["after_minus_before"]["mean"], max),
    "grid": ("{:.3f}", lambda report: _over(report, "canary/grid"), max),
    "saturation": ("{:.3f}", lambda report: _over(report, "canary/saturation"), min),
    "colour": ("{:.3f}", lambda report: report["arms"][1]["colour_shift"]["mean"], max),
    "frozen": ("{:.2f}", lambda report: report["arms"][1]["frozen_share"]["mean"], max),
}


def _gain(report: Report, judge: str) -> float:
    found = report["recognisers"].get(judge)
    return 100 * found["gain"]["relative"]["mean"] if found else math.nan


def _after(report: Report) -> dict:
    return report["arms"][1]["figures"]


def _faces(report: Report, name: str) -> float:
    return report["recognisers"]["held_out"]["motion_after_to_before"][name]["mean"]


def _over(report: Report, name: str) -> float:
    return _after(report)[name]["mean"] / report["arms"][0]["figures"][name]["mean"]


def main() -> None:
    print(f"| changed | {' | '.join(COLUMNS)} |\n{'|---' * (1 + len(COLUMNS))}|")
    for point in (folder for root in sys.argv[1:] for folder in sorted(Path(root).iterdir())):
        reports = [json.loads(path.read_text()) for path in sorted(point.glob("seed*/evaluation/report.json"))]
        if not reports:
            continue
        cells = []
        for shape, of, worst in COLUMNS.values():
            values = [of(report) for report in reports]
            mean, several = sum(values) / len(values), len(values) > 1
            shown = shape.format(mean) + (f" ({shape.format(worst(values))})" if several else "")
            cells.append("" if math.isnan(mean) else shown)
        print(f"| {point.name} ({len(reports)}) | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
