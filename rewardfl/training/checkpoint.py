"""Write, find and verify checkpoints."""

import json
import math
import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, FiniteFloat, NonNegativeInt, ValidationError

from rewardfl.files import atomic_directory, remove, temporary_path


def after_early_stop(output_dir: str) -> str:
    """Describe in words which checkpoint checkpoints/best is, and how the run resumes."""
    best = Path(output_dir) / "checkpoints" / "best"
    which = f"{best} is {best.resolve().name}" if best.exists() else f"no checkpoint became {best}"
    return f"{which}; to go on, set train.early_stop=null or raise its patience"


def new_run(folder: Path) -> str:
    """Describe the way out of a run that cannot resume."""
    return f"start a new run in another run.output_dir from its adapter: lora.init_from={folder}"


class CheckpointError(ValueError):
    """A run folder or checkpoint that cannot be used. The message names the path and the way out."""


class WriteError(CheckpointError):
    """The disk is full or read-only. The files of before are unchanged."""


@contextmanager
def as_write_error(path: Path, kept: str) -> Iterator[None]:
    """Raise the block's OSErrors as WriteErrors. kept: in words, which data is not lost."""
    try:
        yield
    except FileExistsError as error:
        raise WriteError(f"{error.filename}: {error.strerror}; {kept}") from error
    except OSError as error:
        why = f"{error.strerror}: {error.filename}" if error.strerror and error.filename else error.strerror or error
        way_out = "free space there (run.keep_last: n keeps n checkpoints), or make it writable, and start again"
        raise WriteError(f"{path} could not be written ({why}); {kept}; {way_out}") from error


@contextmanager
def warn_on_write_error(say: Callable[[str], None], step: int, *, last: bool) -> Iterator[None]:
    """Print a WriteError of the block with `say`; raise it with `last`, where no later save could replace this one."""
    try:
        yield
    except WriteError as error:
        if last:
            raise
        say(f"warning: step {step}: {error}")


def load_metrics(folder: Path) -> str:
    """Return metrics.jsonl as it was when the checkpoint was saved."""
    return (folder / METRICS).read_text(encoding="utf-8")


CHECKPOINT_MANIFEST = "manifest.json"
STATE = Path("state") / "state.pt"
METRICS = Path("state") / "metrics.jsonl"  # a copy of the lines up to the checkpoint


def checkpoint_dir(output_dir: str | Path, step: int) -> Path:
    return Path(output_dir) / "checkpoints" / f"step-{step:06d}"


def save_checkpoint(
    output_dir: str | Path,
    step: int,
    write_adapter: Callable[[Path], None],
    state: dict[str, Any],
    score: float | None = None,
    keep_last: int | None = None,
    metrics: str = "",
) -> Path:
    """Write checkpoints/step-<step> atomically, update the links `latest` and `best`, and return its path.

    write_adapter: writes the adapter's files into a folder. score: larger is better; None or nan never becomes `best`.
    keep_last: number of checkpoints to keep besides `latest` and `best`; None keeps all. metrics: the lines of
    metrics.jsonl. Raise WriteError if the disk fails: nothing of this checkpoint is left.
    """
    path = checkpoint_dir(output_dir, step)
    record = {"step": step, "score": score if score is not None and math.isfinite(score) else None}
    with as_write_error(path, "the checkpoints before it are as they were"):
        with atomic_directory(path) as folder:
            write_adapter(folder)
            _save_state(state, folder / STATE)
            (folder / METRICS).write_text(metrics, encoding="utf-8")
            files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
            listing = {str(file.relative_to(folder)): {"bytes": file.stat().st_size} for file in files}
            (folder / CHECKPOINT_MANIFEST).write_text(json.dumps(record | {"files": listing}, indent=2) + "\n")
        point_links(Path(output_dir), path)
        _rotate(Path(output_dir), keep_last)
    return path


def _save_state(state: dict[str, Any], path: Path) -> None:
    """Write the state without a copy in memory."""
    path.parent.mkdir()
    try:
        with path.open("wb") as file:
            torch.save(state, file)
    except RuntimeError as error:  # torch raises "unexpected pos" for any failure to write
        raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None


def load_state(path: str | Path) -> dict[str, Any]:
    """Return the state of save_checkpoint, on the CPU. Nothing in the file is executed."""
    return torch.load(Path(path) / STATE, map_location="cpu", weights_only=True)


def find_checkpoint(output_dir: str | Path, resume: str) -> Path | None:
    """Return the checkpoint to resume from, or None for a new run.

    resume: "auto" takes the last complete checkpoint, and warns of others. A path must be complete and, within
    output_dir, the last: later ones would mix two histories. Raise CheckpointError otherwise.
    """
    checkpoints = list_checkpoints(Path(output_dir))
    if resume == "auto":
        for path in reversed(checkpoints):
            if not (damage := _damage(path)):
                return path
            warnings.warn(f"skipping checkpoint {path}: {damage}", stacklevel=2)
        return None
    path = Path(resume).resolve()
    if not path.is_dir():
        raise CheckpointError(f"run.resume_from_checkpoint: no such folder: {resume}")
    if damage := _damage(path):
        raise CheckpointError(f"run.resume_from_checkpoint: {resume} is not complete: {damage}")
    resolved = [folder.resolve() for folder in checkpoints]
    after = resolved[resolved.index(path) + 1 :] if path in resolved else []
    if later := ", ".join(folder.name for folder in after if not _damage(folder)):
        ways = "delete them or move them away, or set run.output_dir to a new folder"
        raise CheckpointError(f"run.resume_from_checkpoint: {resume} is followed by {later} in the same run; {ways}")
    return path


def list_checkpoints(output_dir: Path) -> list[Path]:
    """Return the checkpoint folders by step, complete or not."""
    folders = [path for path in (output_dir / "checkpoints").glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
    return sorted(folders, key=lambda path: int(path.name.removeprefix("step-")))


class Manifest(BaseModel):
    """manifest.json of a checkpoint: its step, its score for `best`, and its files."""

    step: NonNegativeInt
    score: FiniteFloat | None
    files: dict[str, dict[str, Any]]  # {name: {"bytes": size}}


def _damage(path: Path) -> str:
    """Return in words how a checkpoint is damaged; "" if every file has its size."""
    manifest = _manifest(path)
    if manifest is None:
        return f"{CHECKPOINT_MANIFEST} is missing or cut off"
    for name, stated in manifest.files.items():
        if not (path / name).is_file() or (path / name).stat().st_size != stated.get("bytes"):
            return f"{name} is missing or cut off"
    return ""


def _manifest(path: Path) -> Manifest | None:
    """Return a checkpoint's manifest; None when it is missing or damaged."""
    try:
        return Manifest.model_validate_json((path / CHECKPOINT_MANIFEST).read_bytes())
    except (OSError, ValidationError):
        return None


def point_links(output_dir: Path, last: Path | None) -> None:
    """Point `latest` at `last`, and `best` at the checkpoint with the highest score, the earlier of equals."""
    manifests = [(path, _manifest(path)) for path in list_checkpoints(output_dir)]
    scored = [(manifest.score, path) for path, manifest in manifests if manifest and manifest.score is not None]
    best = max(scored, key=lambda pair: pair[0], default=(0, None))[1]
    for name, path in (("latest", last), ("best", best)):
        if path is not None:
            link = output_dir / "checkpoints" / name
            temporary = temporary_path(link)
            temporary.symlink_to(path.name)  # relative, so that the run's folder can be moved
            os.replace(temporary, link)  # the next start removes what a failure leaves


def _rotate(output_dir: Path, keep_last: int | None) -> None:
    """Delete all but the last `keep_last` checkpoints, and those that a link points at."""
    linked = {(output_dir / "checkpoints" / name).resolve().name for name in ("latest", "best")}
    for path in list_checkpoints(output_dir)[:-keep_last] if keep_last else ():
        if path.name not in linked:
            doomed = temporary_path(path)
            os.replace(path, doomed)  # a kill in the middle leaves no half of a checkpoint
            remove(doomed)
