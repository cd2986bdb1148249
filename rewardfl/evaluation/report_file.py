"""report.json of an evaluation of videos, as other commands read it."""

from pathlib import Path
from typing import Any

from rewardfl.evaluation.records import FORMAT, parse_object

COMPARED_BLOCKS = ("data", "sampling", "judges")  # blocks of the settings in which compared evaluations must agree


def find_report(folder: Path) -> Path:
    """Return the file of an evaluation's report. Raise FileNotFoundError if the folder holds none."""
    for path in (folder / "report.json", folder / "evaluation" / "report.json"):
        if path.is_file():
            return path
    raise FileNotFoundError(f"{folder}: holds no report.json; name a run that was evaluated, or evaluate's --out")


def read_report(folder: Path) -> dict[str, Any]:
    """Read the report of an evaluation of videos. Raise ValueError for another file or version."""
    path = find_report(folder)
    report = parse_object(path.read_bytes())
    settings = report.get("settings") if "people" in report else None
    if not isinstance(settings, dict) or settings.get("records") != {"format": str(FORMAT)}:
        raise ValueError(f"{path}: is not a report on videos by this version of evaluate.py; evaluate again")
    return report
