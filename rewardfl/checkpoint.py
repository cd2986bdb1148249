"""What a run leaves in its folder: run.json, metrics.jsonl and checkpoints, none of them ever half written.

Only one process writes. A run killed at any moment goes on from its last complete checkpoint.
"""

import io
import json
import math
import os
import pickle
import re
import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from rewardfl.files import atomic_directory, atomic_write, sha256, temporary_path


class CheckpointError(ValueError):
    """A run folder or checkpoint that cannot be used. The message names the path and the way out."""


class WriteError(CheckpointError):
    """The disk is full, or may not be written. What was there before is as it was."""


@contextmanager
def writing(path: Path, kept: str) -> Iterator[None]:
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
def tolerant(say: Callable[[str], None], step: int, last: bool) -> Iterator[None]:
    """A WriteError of the block is said and training goes on; `last`: nothing later could make up for it, it stops."""
    try:
        yield
    except WriteError as error:
        if last:
            raise
        say(f"warning: step {step}: {error}")


# ------------------------------------------------------------------------------------------------------------
# The run folder

# Keys that may change when a run goes on: they say where, how long and how loudly, not what is learned.
FREE_KEYS = {
    "run.output_dir",
    "run.resume_from_checkpoint",
    "run.save_steps",
    "run.keep_last",
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


STRAYS = ("run.json.tmp-*", "metrics.jsonl.tmp-*", "checkpoints/*.tmp-*", "samples/*/*.tmp-*", "cache/*/*/*.tmp-*")


def prepare_output_dir(
    output_dir: str | Path, config: dict[str, dict], resume: str | bool, base_model: Mapping[str, str]
) -> None:
    """Create the run's folder, or make sure that what it holds is this run; remove what a kill left behind.

    config: as config.to_dict gives it; resume: run.resume_from_checkpoint ("auto", a checkpoint's path or
    False); base_model: {part: digest of its weights}. A run that never finished a step holds nothing and may be
    replaced. Raises CheckpointError for another run's folder, for this run's without resuming, for a checkpoint of a
    run with other settings or another base model, and for a folder that cannot be written.
    """
    output_dir = Path(output_dir)
    with writing(output_dir, "nothing was changed"):
        (output_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
        (output_dir / "run.json.tmp-probe").write_bytes(b"x" * 4096)  # refused now, not after the weights are loaded
        for stray in [path for pattern in STRAYS for path in output_dir.glob(pattern)]:
            _remove(stray)
    if resume not in (False, "auto"):
        _check_same_run(find_checkpoint(output_dir, resume).parent.parent, config, base_model)
    if not _holds_steps(output_dir):
        return
    if resume is False:
        raise CheckpointError(
            f"run.output_dir {output_dir} already holds a run; take another folder, delete it, or go on with "
            "it: run.resume_from_checkpoint=auto"
        )
    _check_same_run(output_dir, config, base_model)
    if resume == "auto":  # a kill may have come between a checkpoint and its links, and the last one may be damaged
        with writing(output_dir / "checkpoints" / "latest", "the checkpoints are as they were"):
            _point_links(output_dir, find_checkpoint(output_dir, resume))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _holds_steps(output_dir: Path) -> bool:
    metrics = output_dir / "metrics.jsonl"
    return bool(_steps(output_dir)) or (metrics.is_file() and metrics.stat().st_size > 0)


def _check_same_run(run_dir: Path, config: dict[str, dict], base_model: Mapping[str, str]) -> None:
    path = run_dir / "run.json"
    if not path.is_file():
        raise CheckpointError(
            f"{path} is missing, so nothing says whether this is the same run; put it back or use another folder"
        )
    record = json.loads(path.read_text(encoding="utf-8"))
    old = _flat(record["config"] | {"base_model": record.get("base_model", {})})
    new = _flat(config | {"base_model": base_model})
    changed = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    listing = ", ".join(f"{key} {old.get(key)!r} -> {new.get(key)!r}" for key in changed if key not in FREE_KEYS)
    if listing:
        raise CheckpointError(
            f"{run_dir} holds a run with other settings: {listing}; set them back or use another folder"
            + (" (base_model: the weights that model.model_paths leads to)" if "base_model." in listing else "")
        )


def _flat(config: Mapping[str, Mapping]) -> dict[str, Any]:
    return {f"{section}.{key}": value for section, keys in config.items() for key, value in keys.items()}


def write_run_json(
    output_dir: str | Path,
    config: dict[str, dict],
    command: Sequence[str],
    versions: Mapping[str, str],
    git_commit: str | None,
    face_packs: Mapping[str, Mapping[str, str]],
    base_model: Mapping[str, str],
) -> None:
    """Write run.json: what it takes to repeat the run.

    face_packs: {setting: {file name: sha256}} of the networks that gave the reward. base_model: {part: digest}.
    """
    record = {
        "config": config,
        "command": list(command),
        "versions": dict(versions),
        "git_commit": git_commit,
        "face_packs": {setting: dict(files) for setting, files in face_packs.items()},
        "base_model": dict(base_model),
    }
    path = Path(output_dir) / "run.json"
    with writing(path, "checkpoints and metrics are as they were"):
        atomic_write(path, json.dumps(record, indent=2) + "\n")


def library_versions(names: Sequence[str]) -> dict[str, str]:
    """{distribution name: installed version}, leaving out what is not installed; of torch the build (2.13.0+cu130)."""
    versions = {}
    for name in names:
        try:
            versions[name] = str(torch.__version__) if name == "torch" else metadata.version(name)
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
        self.waiting = ""  # lines that could not be written yet

    def append(self, step: int, values: Mapping[str, float]) -> None:
        """Add a line {"step": step, **values}; nan and inf, which JSON cannot say, are written as null.

        WriteError when that fails; the line then waits, and is written with the next one that can be.
        """
        line = {"step": step} | {key: value if math.isfinite(value) else None for key, value in values.items()}
        self.waiting += json.dumps(line) + "\n"
        with writing(self.path, "the lines since then are kept in memory and written when they can be"):
            length = self.path.stat().st_size if self.path.exists() else 0
            try:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(self.waiting)
            except OSError:
                if self.path.exists():  # half a line would spoil the next one
                    os.truncate(self.path, length)
                raise
        self.waiting = ""

    def cut_back(self, step: int) -> None:
        """Drop the lines after `step` and a last line that a kill cut off."""
        kept = [json.dumps(line) + "\n" for line in self.read() if line["step"] <= step]
        with writing(self.path, "it is as it was"):
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


def folder_of(output_dir: str | Path, step: int) -> Path:
    return Path(output_dir) / "checkpoints" / f"step-{step:06d}"


def save_checkpoint(
    output_dir: str | Path,
    step: int,
    write_adapter: Callable[[Path], None],
    state: dict[str, Any],
    score: float | None = None,
    keep_last: int | None = None,
) -> Path:
    """Write checkpoints/step-<step> atomically, point `latest` and `best` at what they mean, and return its path.

    write_adapter: puts the adapter's files into the folder it is given; OSError when it cannot. state: optimizer,
    scheduler, position and so on, as tensors, numbers, strings, and dicts and lists of them: `load_state` reads no
    more. score: larger is better; None or nan never becomes `best`. keep_last: older checkpoints than the last that
    many are deleted, `latest` and `best` excepted; None keeps all. WriteError when the disk does not take it:
    the checkpoints before are as they were, and nothing of this one is left.
    """
    path = folder_of(output_dir, step)
    content = io.BytesIO()
    torch.save(state, content)  # to memory first: into a file, torch says of a full disk "unexpected pos"
    _check_loadable(content)
    record = {"step": step, "score": score if score is not None and math.isfinite(score) else None}
    with writing(path, "the checkpoints before it are as they were"):
        with atomic_directory(path) as folder:
            write_adapter(folder)
            (folder / STATE).parent.mkdir()
            with (folder / STATE).open("wb") as file:
                # no frame may keep the view: Python 3.12.1 crashes when it collects one that an OSError holds on to
                file.write(content.getbuffer())
            listing = {
                str(file.relative_to(folder)): {"bytes": file.stat().st_size, "sha256": sha256(file)}
                for file in _files(folder)
            }
            (folder / MANIFEST).write_text(json.dumps(record | {"files": listing}, indent=2) + "\n")
        _point_links(Path(output_dir), path)
        _rotate(Path(output_dir), keep_last)
    return path


def _check_loadable(content: io.BytesIO) -> None:
    """CheckpointError now, at the first save, rather than on the day the state is needed."""
    content.seek(0)
    try:
        torch.load(content, map_location="meta", weights_only=True)
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
    """What is wrong with a checkpoint; empty if every file is there as it was written."""
    if not (path / MANIFEST).is_file():
        return f"{MANIFEST} is missing"
    try:
        listing = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["files"].items()
        stated = [(name, int(file["bytes"]), str(file["sha256"])) for name, file in listing]
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is cut off or altered"
    for name, size, digest in stated:
        if not (path / name).is_file():
            return f"{name} is missing"
        found = (path / name).stat().st_size
        if found != size:
            return f"{name} has {found} bytes of {size}"
        if sha256(path / name) != digest:
            return f"{name} was altered: its sha256 is not that of {MANIFEST}"
    return ""


def _score(path: Path) -> float:
    """That the checkpoint was saved with; -inf for none."""
    try:
        score = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["score"]
    except (OSError, ValueError, KeyError):  # a damaged checkpoint
        return -math.inf
    return score if isinstance(score, int | float) else -math.inf


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
    linked = {
        os.readlink(output_dir / "checkpoints" / name)
        for name in ("latest", "best")
        if (output_dir / "checkpoints" / name).is_symlink()
    }
    for path in _steps(output_dir)[:-keep_last]:
        if path.name not in linked:
            gone = temporary_path(path)
            os.replace(path, gone)  # a kill in the middle leaves no half of a checkpoint
            shutil.rmtree(gone)
