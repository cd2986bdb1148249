"""What a run leaves in its folder: run.json, metrics.jsonl and checkpoints, none of them ever half written.

Only one process writes. A run killed at any moment goes on from its last complete checkpoint.
"""

import json
import math
import os
import pickle
import re
import shutil
import subprocess
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from rewardfl.files import atomic_directory, atomic_write, temporary_path


class CheckpointError(ValueError):
    """A run folder or checkpoint that cannot be used. The message names the path and the way out."""


# ------------------------------------------------------------------------------------------------------------
# The run folder

# Keys that may change when a run goes on: they say where, how long and how loudly, not what is learned.
FREE_KEYS = {
    "run.output_dir",
    "run.resume_from_checkpoint",
    "run.save_steps",
    "run.logging_steps",
    "run.log_with",
    "run.sample_videos",
    "run.cpu_threads",
    # how an update is divided among processes and passes; its size is in the state, see setup.load_state
    "train.gradient_accumulation_steps",
    "train.per_device_train_batch_size",
    "train.max_steps",
    "train.num_train_epochs",
}


def prepare_output_dir(output_dir: str | Path, config: dict[str, dict], resume: str | bool) -> None:
    """Create the run's folder, or make sure that what it holds is this run; remove what a kill left behind.

    config: as config.to_dict gives it; resume: run.resume_from_checkpoint ("auto", a checkpoint's path or
    False). A run that never finished a step holds nothing and may be replaced. Raises CheckpointError for
    another run's folder, for this run's without resuming, and for a checkpoint of a run with other settings.
    """
    output_dir = Path(output_dir)
    (output_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
    for pattern in ("run.json.tmp-*", "metrics.jsonl.tmp-*", "checkpoints/*.tmp-*"):
        for stray in output_dir.glob(pattern):
            _remove(stray)
    if resume not in (False, "auto"):
        _check_same_run(find_checkpoint(output_dir, resume).parent.parent, config)
    if not _holds_steps(output_dir):
        return
    if resume is False:
        raise CheckpointError(
            f"run.output_dir {output_dir} already holds a run; take another folder, delete it, or go on with "
            "it: run.resume_from_checkpoint=auto"
        )
    _check_same_run(output_dir, config)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _holds_steps(output_dir: Path) -> bool:
    metrics = output_dir / "metrics.jsonl"
    return bool(_steps(output_dir)) or (metrics.is_file() and metrics.stat().st_size > 0)


def _check_same_run(run_dir: Path, config: dict[str, dict]) -> None:
    path = run_dir / "run.json"
    if not path.is_file():
        raise CheckpointError(
            f"{path} is missing, so nothing says whether this is the same run; put it back or use another folder"
        )
    old = _flat(json.loads(path.read_text(encoding="utf-8"))["config"])
    new = _flat(config)
    changed = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    listing = ", ".join(f"{key} {old.get(key)!r} -> {new.get(key)!r}" for key in changed if key not in FREE_KEYS)
    if listing:
        raise CheckpointError(
            f"{run_dir} holds a run with other settings: {listing}; set them back or use another folder"
        )


def _flat(config: dict[str, dict]) -> dict[str, Any]:
    return {f"{section}.{key}": value for section, keys in config.items() for key, value in keys.items()}


def write_run_json(
    output_dir: str | Path,
    config: dict[str, dict],
    command: Sequence[str],
    versions: Mapping[str, str],
    git_commit: str | None,
    face_packs: Mapping[str, Mapping[str, str]],
) -> None:
    """Write run.json: what it takes to repeat the run.

    face_packs: {setting: {file name: sha256}} of the networks that gave the reward.
    """
    record = {
        "config": config,
        "command": list(command),
        "versions": dict(versions),
        "git_commit": git_commit,
        "face_packs": {setting: dict(files) for setting, files in face_packs.items()},
    }
    atomic_write(Path(output_dir) / "run.json", json.dumps(record, indent=2) + "\n")


def library_versions(names: Sequence[str]) -> dict[str, str]:
    """{distribution name: installed version}, leaving out what is not installed."""
    versions = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def git_commit(folder: str | Path) -> str | None:
    """Commit of the checkout that `folder` is in, "-dirty" added when files differ; None without one."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        found = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:  # no git on this machine
        return None
    return found.stdout.strip() if found.returncode == 0 else None


# ------------------------------------------------------------------------------------------------------------
# metrics.jsonl


class MetricsFile:
    """metrics.jsonl: one JSON object per step. Call `cut_back` before the first `append` of a process."""

    def __init__(self, path: str | Path):
        self.path = Path(path)

    def append(self, step: int, values: Mapping[str, float]) -> None:
        """Add a line {"step": step, **values}; nan and inf, which JSON cannot say, are written as null."""
        line = {"step": step} | {key: value if math.isfinite(value) else None for key, value in values.items()}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def cut_back(self, step: int) -> None:
        """Drop the lines after `step` and a last line that a kill cut off."""
        kept = [json.dumps(line) + "\n" for line in self.read() if line["step"] <= step]
        atomic_write(self.path, "".join(kept))

    def read(self) -> list[dict[str, Any]]:
        """All lines, without a last one that is cut off; none when there is no file yet."""
        if not self.path.is_file():
            return []
        *lines, _cut_off = self.path.read_text(encoding="utf-8").split("\n")
        return [json.loads(line) for line in lines]


# ------------------------------------------------------------------------------------------------------------
# Checkpoints

MANIFEST = "manifest.json"
STATE = Path("state") / "state.pt"


def save_checkpoint(
    output_dir: str | Path, step: int, write_adapter: Callable[[Path], None], state: dict[str, Any]
) -> Path:
    """Write checkpoints/step-<step> atomically, point checkpoints/latest at it, and return its path.

    write_adapter: puts the adapter's files into the folder it is given. state: optimizer, scheduler,
    position and so on, as tensors, numbers, strings, and dicts and lists of them: `load_state` reads no more.
    """
    path = Path(output_dir) / "checkpoints" / f"step-{step:06d}"
    with atomic_directory(path) as folder:
        write_adapter(folder)
        (folder / STATE).parent.mkdir()
        torch.save(state, folder / STATE)
        _check_loadable(folder / STATE)
        sizes = {str(file.relative_to(folder)): file.stat().st_size for file in _files(folder)}
        (folder / MANIFEST).write_text(json.dumps({"step": step, "files": sizes}, indent=2) + "\n")
    _point_latest_at(path)
    return path


def _check_loadable(path: Path) -> None:
    """CheckpointError now, at the first save, rather than on the day the state is needed."""
    try:
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)  # mmap: tensors are not read
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"state holds something that load_state refuses to read: {error}") from error


def load_state(path: str | Path) -> dict[str, Any]:
    """The state given to save_checkpoint, on the CPU. Nothing in the file is executed."""
    return torch.load(Path(path) / STATE, map_location="cpu", weights_only=True)


def find_checkpoint(output_dir: str | Path, resume: str | bool) -> Path | None:
    """The checkpoint to go on from, or None to start anew.

    resume: "auto" takes the last complete one, warning about incomplete ones after it; False takes none; a
    path is taken if it is complete and, within output_dir, the last (later ones would mix two histories).
    """
    if resume is False:
        return None
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


def _damage(path: Path) -> str:
    """What is missing from a checkpoint; empty if it is complete."""
    if not (path / MANIFEST).is_file():
        return f"{MANIFEST} is missing"
    try:
        sizes = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["files"]
    except json.JSONDecodeError:
        return f"{MANIFEST} is cut off"
    for name, size in sizes.items():
        if not (path / name).is_file():
            return f"{name} is missing"
        found = (path / name).stat().st_size
        if found != size:
            return f"{name} has {found} bytes of {size}"
    return ""


def _point_latest_at(path: Path) -> None:
    latest = path.with_name("latest")
    temporary = temporary_path(latest)
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(path.name)  # relative, so that the run's folder can be moved
    os.replace(temporary, latest)
