"""Write, find and verify checkpoints."""

import json
import math
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, FiniteFloat, NonNegativeInt, ValidationError

from rewardfl.config import AnyConfig
from rewardfl.files import atomic_directory, sha256, temporary_path

AFTER_EARLY_STOP = "to go on, set train.early_stop=null or raise its patience"


def describe_best(cfg: AnyConfig) -> str:
    """Which checkpoint checkpoints/best is, in words."""
    best = Path(cfg.run.output_dir) / "checkpoints" / "best"
    return f"{best} is {best.resolve().name}" if best.exists() else f"no checkpoint became {best}"


class CheckpointError(ValueError):
    """A run folder or checkpoint that cannot be used. The message names the path and the way out."""


class WriteError(CheckpointError):
    """The disk is full, or may not be written. What was there before is as it was."""


@contextmanager
def as_write_error(path: Path, kept: str) -> Iterator[None]:
    """OSErrors of the block as WriteErrors. kept: in words, what is not lost."""
    try:
        yield
    except OSError as error:
        why = f"{error.strerror}: {error.filename}" if error.strerror and error.filename else error.strerror or error
        raise WriteError(
            f"{path} could not be written ({why}); {kept}; free space there (run.keep_last: n keeps n checkpoints) or "
            "make it writable, then the same command goes on"
        ) from error


@contextmanager
def warn_on_write_error(say: Callable[[str], None], step: int, last: bool) -> Iterator[None]:
    """A WriteError of the block is said and training goes on; `last`: nothing later could make up for it, it stops."""
    try:
        yield
    except WriteError as error:
        if last:
            raise
        say(f"warning: step {step}: {error}")


def load_metrics(folder: Path) -> str:
    """Return metrics.jsonl as it was when the checkpoint was saved."""
    try:
        return (folder / METRICS).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} was not written by this version of rewardfl; resume with the version that wrote it, or start a "
            f"new run in another run.output_dir from its adapter: lora.init_from={folder}"
        ) from None


# Checkpoints

MANIFEST = "manifest.json"

STATE = Path("state") / "state.pt"

METRICS = Path("state") / "metrics.jsonl"  # a copy, of the lines up to the checkpoint


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
    """Write checkpoints/step-<step> atomically, point `latest` and `best` at what they mean, and return its path.

    write_adapter: puts the adapter's files into the folder it is given; OSError when it cannot. state: optimizer,
    scheduler, position and so on, as tensors, numbers, strings, and dicts and lists of them: `load_state` reads no
    more. score: larger is better; None or nan never becomes `best`. keep_last: older checkpoints than the last that
    many are deleted, `latest` and `best` excepted; None keeps all. metrics: the lines of metrics.jsonl. WriteError when
    the disk does not take it: the checkpoints before are as they were, and nothing of this one is left.
    """
    path = checkpoint_dir(output_dir, step)
    record = {"step": step, "score": score if score is not None and math.isfinite(score) else None}
    with as_write_error(path, "the checkpoints before it are as they were"):
        with atomic_directory(path) as folder:
            write_adapter(folder)
            _save_state(state, folder / STATE)
            (folder / METRICS).write_text(metrics, encoding="utf-8")
            listing = {
                str(file.relative_to(folder)): {"bytes": file.stat().st_size, "sha256": sha256(file)}
                for file in _files(folder)
            }
            (folder / MANIFEST).write_text(json.dumps(record | {"files": listing}, indent=2) + "\n")
        _point_links(Path(output_dir), path)
        _rotate(Path(output_dir), keep_last)
    return path


def _save_state(state: dict[str, Any], path: Path) -> None:
    """Without a second copy in memory. OSError when the disk does not take it.

    CheckpointError now, at the first save, rather than on the day the state is needed, for what cannot be read back.
    """
    path.parent.mkdir()
    try:
        with path.open("wb") as file:
            torch.save(state, file)
    except RuntimeError as error:  # torch says "unexpected pos" of whatever ended its writing
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
    try:
        torch.load(path, map_location="meta", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"state holds something that load_state refuses to read: {error}") from error


def load_state(path: str | Path) -> dict[str, Any]:
    """The state given to save_checkpoint, on the CPU. Nothing in the file is executed."""
    return torch.load(Path(path) / STATE, map_location="cpu", weights_only=True)


def find_checkpoint(output_dir: str | Path, resume: str) -> Path | None:
    """The checkpoint to go on from, or None to start anew.

    resume: "auto" takes the last complete one, warning about incomplete ones after it; a path is taken if it is
    complete and, within output_dir, the last (later ones would mix two histories).
    """
    found = _steps(Path(output_dir))
    if resume == "auto":
        for path in reversed(found):
            damage = _damage(path)
            if not damage:
                return path
            warnings.warn(f"skipping checkpoint {path}: {damage}", stacklevel=2)
        return None
    path = Path(resume).resolve()
    if not path.is_dir():
        raise CheckpointError(f"run.resume_from_checkpoint: no such folder: {resume}")
    if _damage(path):
        raise CheckpointError(f"run.resume_from_checkpoint: {resume} is not complete: {_damage(path)}")
    resolved = [other.resolve() for other in found]
    after = resolved[resolved.index(path) + 1 :] if path in resolved else []
    later = ", ".join(other.name for other in after if not _damage(other))
    if later:
        raise CheckpointError(
            f"run.resume_from_checkpoint: {resume} is followed by {later} in the same run; delete or move "
            "them away, or set run.output_dir to a new folder"
        )
    return path


def _steps(output_dir: Path) -> list[Path]:
    """The checkpoint folders, complete or not, by step."""
    found = [path for path in (output_dir / "checkpoints").glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


class _FileRecord(BaseModel):
    bytes: int
    sha256: str


class _Manifest(BaseModel):
    step: NonNegativeInt
    score: FiniteFloat | None
    files: dict[str, _FileRecord]


def _damage(path: Path) -> str:
    """What is wrong with a checkpoint; empty if every file is there as it was written."""
    if not (path / MANIFEST).is_file():
        return f"{MANIFEST} is missing"
    manifest = _manifest(path)
    named = re.fullmatch(r"step-(\d+)", path.name)
    if manifest is None or str(STATE) not in manifest.files or (named and int(named[1]) != manifest.step):
        return f"{MANIFEST} is cut off or altered"
    for name, stated in manifest.files.items():
        if not (path / name).is_file():
            return f"{name} is missing"
        found = (path / name).stat().st_size
        if found != stated.bytes:
            return f"{name} has {found} bytes of {stated.bytes}"
        if sha256(path / name) != stated.sha256:
            return f"{name} was altered: its sha256 is not that of {MANIFEST}"
    return ""


def _manifest(path: Path) -> _Manifest | None:
    """Return a checkpoint's manifest; None when it is damaged."""
    try:
        return _Manifest.model_validate_json((path / MANIFEST).read_bytes(), strict=True)
    except (OSError, ValidationError):
        return None


def _score(path: Path) -> float:
    """That the checkpoint was saved with; -inf for none, and for a damaged one."""
    manifest = _manifest(path)
    return -math.inf if manifest is None or manifest.score is None else manifest.score


def _point_links(output_dir: Path, last: Path | None) -> None:
    """`latest` at `last`, `best` at the checkpoint with the highest score, the earlier of equals.

    Of what is there, not of what was remembered: a resumed run finds the same one.
    """
    best = max((path for path in _steps(output_dir) if _score(path) > -math.inf), key=_score, default=None)
    for name, path in (("latest", last), ("best", best)):
        if path is not None:
            _point(output_dir / "checkpoints" / name, path.name)


def _point(link: Path, name: str) -> None:
    temporary = temporary_path(link)
    try:
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(name)  # relative, so that the run's folder can be moved
        os.replace(temporary, link)
    finally:
        temporary.unlink(missing_ok=True)


def _rotate(output_dir: Path, keep_last: int | None) -> None:
    """Delete all but the last `keep_last` checkpoints, and those that a link points at."""
    if keep_last is None:
        return
    linked = {(output_dir / "checkpoints" / name).resolve().name for name in ("latest", "best")}
    for path in _steps(output_dir)[:-keep_last]:
        if path.name not in linked:
            gone = temporary_path(path)
            os.replace(path, gone)  # a kill in the middle leaves no half of a checkpoint
            shutil.rmtree(gone)
