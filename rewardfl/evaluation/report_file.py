"""report.json of an evaluation of videos, as other commands read it. It may be damaged or come from anybody."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError, model_validator

from rewardfl.evaluation.figures import is_ratio
from rewardfl.evaluation.records import FORMAT, Bounded, problem_words

COMPARED_BLOCKS = ("data", "sampling", "judges")  # of the settings, in which compared evaluations must agree

ArmName = Annotated[str, Field(max_length=300)]  # charts draw it


class Ends(BaseModel):
    mean: Bounded
    low: Bounded
    high: Bounded


class Change(BaseModel):
    difference: Ends
    people_with_more: Bounded
    ratio: Ends | None = None


class RealClips(BaseModel):
    model_config = ConfigDict(extra="allow")

    per_frame: dict[ArmName, list[Bounded]] = Field(min_length=1)


class ArmReport(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: ArmName
    against: ArmName | None
    clips: NonNegativeInt
    decoded: bool
    figures: dict[str, Ends | None]
    per_frame: dict[str, list[Bounded]]
    compared: dict[str, Change | None] = {}
    over_start: dict[str, Change | None] = {}
    frozen_share: Ends | None = None
    colour_shift: Ends | None = None


class Report(BaseModel):
    model_config = ConfigDict(extra="allow")

    people: NonNegativeInt
    version: str
    command: list[str]
    settings: dict[str, dict[str, str]]
    real: RealClips
    arms: list[ArmReport]

    @model_validator(mode="after")
    def _is_consistent(self) -> "Report":
        """Raise ValueError unless each arm has the figures of all recognisers, and its base is an arm."""
        if self.settings.get("records") != {"format": str(FORMAT)} or not self.settings.keys() >= {*COMPARED_BLOCKS}:
            raise ValueError("another version of evaluate.py wrote it")
        judges, names = self.real.per_frame, {arm.name for arm in self.arms}
        if len(names) < len(self.arms):
            raise ValueError("two arms have one name")
        for arm in self.arms:
            changes = ([arm.compared] if arm.against else []) + ([arm.over_start] if arm.over_start else [])
            lacks_figures = any(not {f"{judge}/face_sim" for judge in judges} <= change.keys() for change in changes)
            if not judges.keys() <= arm.per_frame.keys() or lacks_figures:
                raise ValueError(f"arm {arm.name} lacks figures of a recogniser")
            if arm.against is not None and arm.against not in names:
                raise ValueError(f"arm {arm.name} is compared with a missing arm")
            if any(change and is_ratio(name) and not change.ratio for name, change in arm.compared.items()):
                raise ValueError(f"arm {arm.name} lacks a ratio")
        return self


def find_report(folder: Path) -> Path:
    """Return the file of an evaluation's report. Raise FileNotFoundError if the folder holds none."""
    for path in (folder / "report.json", folder / "evaluation" / "report.json"):
        if path.is_file():
            return path
    raise FileNotFoundError(f"{folder}: holds no report.json; name a run that was evaluated, or evaluate's --out")


def read_report(folder: Path) -> dict[str, Any]:
    """Read the report of an evaluation of videos. Raise ValueError for another file or version."""
    path = find_report(folder)
    try:
        return Report.model_validate_json(path.read_bytes()).model_dump(exclude_unset=True)
    except ValidationError as error:
        words = problem_words(error)
        raise ValueError(f"{path}: is not a report on videos by this evaluate.py ({words}); evaluate again") from None
