"""What a run leaves in its folder: run.json, metrics.jsonl and checkpoints, none of them ever half written.

Only one process writes, and it holds a lock on the folder. A run killed at any moment goes on from its last complete
checkpoint.
"""

import errno
import fcntl
import json
import math
import os
import pickle
import platform
import re
import shlex
import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

import psutil
import torch
from pydantic import BaseModel, ConfigDict, FiniteFloat, NonNegativeInt, ValidationError

import rewardfl
from rewardfl.config import BY_CONTENT, FREE, IF_NAMED, MARKS, Alike, shown
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


# The run folder

LOCK = "run.lock"
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # of a network file system that is mounted without


class RunFolder:
    """A run's folder, this process's alone from `take` to the end of the `with`, or until the process dies.

    The kernel's lock on the file LOCK says so; the file's text says whose it is, and stays behind without meaning.
    """

    def __init__(self):
        self.path: Path | None = None
        self._lock: TextIO | None = None

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_exception) -> None:
        if self._lock is not None:
            self._lock.close()

    def take(self, path: str | Path) -> None:
        """Create the folder and lock it. CheckpointError, and nothing is changed, while another process has it."""
        self.path = Path(path)
        with writing(self.path, "nothing was changed"):
            self.path.mkdir(parents=True, exist_ok=True)
            self._take_lock()

    def _take_lock(self) -> None:
        self._lock = (self.path / LOCK).open("a+", encoding="utf-8", errors="replace")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.seek(0)
            owner = self._lock.read(200).strip() or "a process that is just starting"
            raise CheckpointError(
                f"run.output_dir {self.path} is in use by {owner}; wait for its end, stop it, or take another folder"
            ) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            warnings.warn(
                f"run.output_dir {self.path} is on a file system without locks ({error.strerror}): nothing keeps a "
                "second start of the same command out of it",
                stacklevel=4,
            )
        self._lock.truncate(0)
        started = datetime.fromtimestamp(psutil.Process().create_time()).isoformat(" ", "seconds")
        self._lock.write(f"process {os.getpid()} on {platform.node()}, started {started}\n")
        self._lock.flush()

    def write_run_json(self, record: Mapping[str, Any]) -> None:
        """Write run.json: what it takes to repeat the run.

        config, base_model and changes are what a later start compares with; command, versions, git_commit, face_packs
        and init_from are for people.
        """
        path = self.path / RUN_JSON
        with writing(path, "checkpoints and metrics are as they were"):
            atomic_write(path, json.dumps(record, indent=2) + "\n")

    def check_present(self) -> None:
        """Raise CheckpointError unless the folder is still the one that was taken. Called before the run writes."""
        try:
            if os.path.samestat((self.path / LOCK).stat(), os.fstat(self._lock.fileno())):
                return
        except FileNotFoundError:
            pass
        raise CheckpointError(
            f"run.output_dir {self.path} was deleted, moved away or replaced during the run ({LOCK} is not this run's "
            "any more), so this run stops; move the folder back or take another one, and start the same command again"
        )


# Keys whose values are not compared when a run goes on, and those that run.resume_with_changes may name
FREE_KEYS = frozenset(key for key, marks in MARKS.items() if FREE in marks or BY_CONTENT in marks)
NAMED_KEYS = frozenset(key for key, marks in MARKS.items() if IF_NAMED in marks)
ALIKE = {key: mark.values for key, marks in MARKS.items() for mark in marks if isinstance(mark, Alike)}

RUN_JSON = "run.json"
# what a killed process leaves where only the holder of the lock writes
STRAYS = (f"{RUN_JSON}.tmp-*", "metrics.jsonl.tmp-*", "checkpoints/*.tmp-*", "samples/*/*.tmp-*")


@dataclass(frozen=True)
class Resumption:
    """What a run goes on from."""

    path: Path | None = None  # the checkpoint, None to start anew
    step: int = 0  # that it was saved after
    changes: tuple[dict[str, Any], ...] = ()  # key, old, new, step: of this resumption and of those before it
    base: Mapping[str, str] = field(default_factory=dict)  # {part of the base model: digest of its files}


def prepare_output_dir(
    run_folder: RunFolder | None, config: dict[str, dict], base_model: Mapping[str, str]
) -> Resumption:
    """Take and create the run's folder, or make sure that what it holds is this run; remove what a kill left behind.

    run_folder: None for a dry run, which is refused what a start is refused, and changes nothing.

    config: as config.to_dict gives it; base_model: {part: digest of its weights}. A run that never finished a step
    holds nothing and may be replaced. Raises CheckpointError for a folder that another process is using, for another
    run's folder, for this run's without resuming, for a checkpoint of a run with other settings or another base model,
    for damaged files, and for a folder that cannot be written.
    """
    output_dir, resume = Path(config["run"]["output_dir"]), config["run"]["resume_from_checkpoint"]
    if run_folder is None:
        _check_writable(output_dir)
    else:
        run_folder.take(output_dir)
        _clean(output_dir)
    named = resume not in (False, "auto")
    found = _resumption(find_checkpoint(output_dir, resume), config, base_model) if named else Resumption()
    metrics = output_dir / "metrics.jsonl"
    if not _steps(output_dir) and not (metrics.is_file() and metrics.stat().st_size > 0):
        return found
    if resume is False:
        raise CheckpointError(
            f"run.output_dir {output_dir} already holds a run; take another folder, delete it, or go on with "
            "it: run.resume_from_checkpoint=auto"
        )
    _changes(output_dir, config, base_model)
    path = found.path if named else find_checkpoint(output_dir, resume)
    if path is not None:
        _check_metrics(metrics, path)
    if not named:
        found = _resumption(path, config, base_model) if path else Resumption()
    if not named and run_folder is not None:
        # a kill may have come between a checkpoint and its links, and the last one may be damaged
        with writing(output_dir / "checkpoints" / "latest", "the checkpoints are as they were"):
            _point_links(output_dir, path)
    return found


def _check_writable(output_dir: Path) -> None:
    """WriteError for a folder that could not be made, or not be written to."""
    existing = next(path for path in (output_dir, *output_dir.parents) if os.path.lexists(path))
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        why = "may not be written" if existing.is_dir() else "is no folder"
        raise WriteError(f"run.output_dir {output_dir} could not be written ({existing} {why}); take another folder")


def _clean(output_dir: Path) -> None:
    """Try whether the folder takes a file, and remove what a kill left behind."""
    with writing(output_dir, "nothing was changed"):
        (output_dir / "checkpoints").mkdir(exist_ok=True)
        (output_dir / f"{RUN_JSON}.tmp-probe").write_bytes(b"x" * 4096)  # refused now, not after the weights are loaded
        for stray in [path for pattern in STRAYS for path in output_dir.glob(pattern)]:
            if stray.is_dir() and not stray.is_symlink():
                shutil.rmtree(stray)
            else:
                stray.unlink(missing_ok=True)


def _check_metrics(metrics: Path, folder: Path) -> None:
    """CheckpointError unless metrics.jsonl begins with the lines that the checkpoint was saved with.

    Early stop, alarms and `best` are computed from them. What comes after the checkpoint may be cut off.
    """
    saved = load_metrics(folder).encode()
    lines = metrics.read_bytes() if metrics.is_file() else b""
    if not lines.startswith(saved):
        number = saved.count(b"\n", 0, len(os.path.commonprefix([lines, saved]))) + 1
        raise CheckpointError(
            f"{metrics} has lost or changed lines: line {number} is not the one that {folder} was saved with; put the "
            f"checkpoint's copy back: {shlex.join(['cp', str(folder / METRICS), str(metrics)])}"
        )


def load_metrics(folder: Path) -> str:
    """Return metrics.jsonl as it was when the checkpoint was saved."""
    try:
        return (folder / METRICS).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} was not written by this version of rewardfl; resume with the version that wrote it, or start a "
            f"new run in another run.output_dir from its adapter: lora.init_from={folder}"
        ) from None


def _resumption(path: Path, config: dict[str, dict], base_model: Mapping[str, str]) -> Resumption:
    """How to go on from a complete checkpoint, whose run.json is beside the folder that it lies in."""
    earlier, changed = _changes(path.parent.parent, config, base_model)
    load_metrics(path)  # refused now, not after the weights are loaded
    step = _Manifest.model_validate_json((path / MANIFEST).read_bytes()).step
    # what was changed after a checkpoint that is gone is in force from this one on
    earlier = [change | {"step": min(change["step"], step)} for change in earlier]
    return Resumption(path, step, (*earlier, *({**change, "step": step} for change in changed)))


def _changes(
    run_dir: Path, config: dict[str, dict], base_model: Mapping[str, str]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(the changes that run.json lists, those that it does not: key, old, new). CheckpointError for any other."""
    record = _read_run_json(run_dir / RUN_JSON)
    old = _flat(record.config | {"base_model": record.base_model})
    new = _flat(config | {"base_model": base_model})
    if other_keys := sorted(_flat(record.config).keys() ^ _flat(config).keys()):
        raise CheckpointError(
            f"{run_dir / RUN_JSON} was written by another version of rewardfl, whose settings are others "
            f"({', '.join(other_keys[:5])}); resume with that version, or start a new run in another folder from the "
            f"adapter: lora.init_from={run_dir}/checkpoints/latest"
        )
    free = FREE_KEYS
    if "cosine" in (old.get("train.lr_scheduler_type"), new.get("train.lr_scheduler_type")):
        # the learning rate depends on how long the run is
        by_epochs = None in (old.get("train.max_steps"), new.get("train.max_steps"))
        free -= {"train.max_steps", *(["train.num_train_epochs"] if by_epochs else [])}
    differing = [
        {"key": key, "old": old.get(key), "new": new.get(key)}
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and key not in free
        and not {str(old.get(key)), str(new.get(key))} <= set(ALIKE.get(key, ()))
    ]  # fmt: skip
    named = new.get("run.resume_with_changes", ())
    refused = [change for change in differing if change["key"] not in named]
    if refused:
        raise CheckpointError(_refusal(run_dir, refused))
    return [change.model_dump() for change in record.changes], differing


def _refusal(run_dir: Path, refused: Sequence[Mapping[str, Any]]) -> str:
    keys = [change["key"] for change in refused]
    ways = [f"set {'it' if len(keys) == 1 else 'them'} back"]
    if set(keys) <= NAMED_KEYS:
        ways.append(f"accept this with run.resume_with_changes=[{','.join(keys)}]")
    ways.append(f"use another folder (lora.init_from={run_dir}/checkpoints/latest starts a new run from the adapter)")
    base = (
        " (base_model: what model.model_paths leads to)" if any(key.startswith("base_model.") for key in keys) else ""
    )
    return f"{run_dir} holds a run with other settings: {listing(refused)}{base}; {', or '.join(ways)}"


def listing(changes: Sequence[Mapping[str, Any]]) -> str:
    """Changes (key, old, new) in words."""
    return ", ".join(f"{one['key']} {shown(one['old'])} -> {shown(one['new'])}" for one in changes)


class _Change(BaseModel):
    key: str
    old: Any
    new: Any
    step: NonNegativeInt


class _RunRecord(BaseModel):
    """What a later start reads of run.json."""

    config: dict[str, dict[str, Any]]
    base_model: dict[str, str]
    changes: list[_Change]


def _read_run_json(path: Path) -> _RunRecord:
    """Return the record of a run.json. CheckpointError when it is missing or damaged."""
    if not path.is_file():
        raise CheckpointError(
            f"{path} is missing, so nothing says whether this is the same run; put it back or use another folder"
        )
    try:
        return _RunRecord.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise CheckpointError(
            f"{path} is damaged, so nothing says whether this is the same run; put it back as the run wrote it, or use "
            f"another folder (lora.init_from={path.parent}/checkpoints/latest starts a new run from the adapter)"
        ) from error


def _flat(config: Mapping[str, Mapping]) -> dict[str, Any]:
    return {f"{section}.{key}": value for section, keys in config.items() for key, value in keys.items()}


def library_versions(names: Sequence[str]) -> dict[str, str]:
    """{distribution name: installed version}, leaving out what is not installed.

    Of torch it is the build (2.13.0+cu130), of rewardfl that of the files that run, which need not be installed.
    """
    imported = {"torch": str(torch.__version__), "rewardfl": rewardfl.__version__}
    versions = {}
    for name in names:
        try:
            versions[name] = imported.get(name) or metadata.version(name)
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


# metrics.jsonl


class _Line(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)
    __pydantic_extra__: dict[str, int | float | None]

    step: NonNegativeInt


class MetricsFile:
    """metrics.jsonl: one JSON object per step. Call `start` before the first `append` of a process.

    text: the lines up to the checkpoint that the run resumes from, then all of the run. Each checkpoint has a copy.
    """

    def __init__(self, path: str | Path, text: str = ""):
        self.path = Path(path)
        self.text = text
        self.waiting = ""  # lines that the disk did not take

    def start(self) -> None:
        """Drop what the file has after the checkpoint, and what a kill or a power cut left at its end."""
        with writing(self.path, "it is as it was"):
            atomic_write(self.path, self.text)

    def append(self, step: int, values: Mapping[str, float]) -> None:
        """Add a line {"step": step, **values}; nan and inf, which JSON cannot say, are written as null.

        WriteError when that fails; the line then waits, and is written with the next one that can be.
        """
        record = {"step": step} | {key: value if math.isfinite(value) else None for key, value in values.items()}
        line = json.dumps(record) + "\n"
        self.text += line
        self.waiting += line
        with writing(self.path, "the lines since then are kept in memory and written when they can be"):
            length = self.path.stat().st_size if self.path.exists() else 0
            try:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(self.waiting)
                    file.flush()
                    os.fsync(file.fileno())  # a power cut may not take lines that a checkpoint counts on
            except OSError:
                if self.path.exists():
                    os.truncate(self.path, length)  # half a line would spoil the next one
                raise
        self.waiting = ""

    def read(self) -> list[dict[str, Any]]:
        """All lines, without a last one that is cut off; none when there is no file yet.

        CheckpointError for one that `append` did not write.
        """
        if not self.path.is_file():
            return []
        *lines, _cut_off = self.path.read_text(encoding="utf-8", errors="replace").split("\n")
        return [self._parsed(number, line) for number, line in enumerate(lines, 1) if line.strip()]

    def _parsed(self, number: int, line: str) -> dict[str, Any]:
        try:
            return _Line.model_validate_json(line).model_dump()
        except ValidationError as error:
            raise CheckpointError(
                f"{self.path}, line {number} is no line of metrics ({shown(line)}); mend or delete it, then the same "
                "command goes on"
            ) from error


# Checkpoints

MANIFEST = "manifest.json"
STATE = Path("state") / "state.pt"
METRICS = Path("state") / "metrics.jsonl"  # a copy, of the lines up to the checkpoint


def folder_of(output_dir: str | Path, step: int) -> Path:
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
    path = folder_of(output_dir, step)
    record = {"step": step, "score": score if score is not None and math.isfinite(score) else None}
    with writing(path, "the checkpoints before it are as they were"):
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
