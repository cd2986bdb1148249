"""The folder of one run: its lock, run.json, and the configuration keys that may change on resume."""

import contextlib
import json
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ValidationError

import rewardfl
from rewardfl.config import ConfigError, read_saved, resuming, shown
from rewardfl.files import TEMPORARY, atomic_write, lock, remove, temporary_path
from rewardfl.outputs import check_writable
from rewardfl.training import checkpoint
from rewardfl.training.checkpoint import CheckpointError, as_write_error, find_checkpoint, list_checkpoints, new_run
from rewardfl.training.state import ResumePoint


class RunFolder(contextlib.ExitStack):
    """A run's folder, locked from `take` to the end of the `with`, or until the process dies."""

    path: Path  # from `take` on

    def take(self, path: Path) -> None:
        """Create the folder and lock it. Raise CheckpointError if another process has it."""
        self.path = path
        with as_write_error(path, "nothing was changed"):
            path.mkdir(parents=True, exist_ok=True)
            try:
                self.enter_context(lock(path / "run.lock"))
            except BlockingIOError:
                why = "is in use by another process; wait until it has ended, or take another folder"
                raise CheckpointError(f"run.output_dir {path} {why}") from None

    def write_run_json(self, record: Mapping[str, Any]) -> None:
        """Write run.json. A resumed run compares config, base_model and changes; the other keys are for people."""
        path = self.path / RUN_JSON
        with as_write_error(path, "checkpoints and metrics are as they were"):
            atomic_write(path, json.dumps(record, indent=2) + "\n")


RUN_JSON = "run.json"
# temporary files of a killed process, safe to delete for the holder of the lock
STRAYS = [name + TEMPORARY for name in (RUN_JSON, "metrics.jsonl", "checkpoints/*", "samples/*/*")]


def prepare_output_dir(
    run_folder: RunFolder | None, config: dict[str, dict], base_model: Mapping[str, str]
) -> ResumePoint:
    """Create and lock the run's folder, remove temporary files of a killed run, and return where to resume.

    run_folder: None for a dry run, which makes the same checks and changes nothing. config: of config.to_dict.
    base_model: {part: digest of its weights}. Raise CheckpointError for a folder that is locked or damaged, or holds
    a run that is not to be resumed, or has other settings or another base model, InputError if it cannot be written.
    """
    output_dir, resume = Path(config["run"]["output_dir"]), config["run"]["resume_from_checkpoint"]
    if run_folder is None:
        check_writable(f"run.output_dir {output_dir}", output_dir)
    else:
        run_folder.take(output_dir)
        _remove_strays(output_dir)
    metrics = output_dir / "metrics.jsonl"
    holds_run = bool(list_checkpoints(output_dir)) or (metrics.is_file() and metrics.stat().st_size > 0)
    if resume is False and holds_run:
        ways = "take another folder, delete it, or resume: run.resume_from_checkpoint=auto"
        raise CheckpointError(f"run.output_dir {output_dir} already holds a run; {ways}")
    path = find_checkpoint(output_dir, resume) if resume else None
    earlier: list[dict[str, Any]] = []
    changed: list[dict[str, Any]] = []
    for run_dir in [*([output_dir] if holds_run else []), *([path.parent.parent] if path else [])]:
        earlier, changed = _compare_run_json(run_dir, config, base_model)
    if holds_run and resume == "auto" and run_folder is not None:
        # the links may be old: a kill came between a checkpoint and its links, or the last checkpoint is damaged
        with as_write_error(output_dir / "checkpoints" / "latest", "the checkpoints are as they were"):
            checkpoint.point_links(output_dir, path)
    if path is None:
        return ResumePoint()
    step = checkpoint.Manifest.model_validate_json((path / checkpoint.CHECKPOINT_MANIFEST).read_bytes()).step
    return ResumePoint(path=path, step=step, changes=(*earlier, *(change | {"step": step} for change in changed)))


def _remove_strays(output_dir: Path) -> None:
    """Check that the folder can be written, and delete the temporary files of a killed run, but none behind a link."""
    with as_write_error(output_dir, "nothing was changed"):
        (output_dir / "checkpoints").mkdir(exist_ok=True)
        with temporary_path(output_dir / RUN_JSON).open("xb") as probe:
            probe.write(b"x" * 4096)  # fails now, not after the weights are loaded
        inside = output_dir.resolve()
        for stray in [path for pattern in STRAYS for path in inside.glob(pattern)]:
            if stray.parent.resolve() == stray.parent:
                remove(stray)


def _compare_run_json(
    run_dir: Path, config: dict[str, dict], base_model: Mapping[str, str]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return (changes in run.json, new changes: key, old, new). Raise CheckpointError for those not allowed."""
    path, restart = run_dir / RUN_JSON, new_run(run_dir / "checkpoints" / "latest")
    try:
        record = _RunRecord.model_validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError) as error:
        raise CheckpointError(f"{path} is missing or damaged; put it back as the run wrote it, or {restart}") from error
    try:
        old, new = resuming.comparable(read_saved(record.config)), resuming.comparable(config)
    except ConfigError as error:
        version = f"another version of rewardfl ({str(error).splitlines()[0]})"
        raise CheckpointError(f"{path} was written by {version}; resume with that version, or {restart}") from error
    may_change = resuming.FREE | resuming.BY_CONTENT
    if "cosine" in (old["train.lr_scheduler_type"], new["train.lr_scheduler_type"]):
        may_change -= {"train.max_steps"}  # the learning rate depends on the length of the run
    old |= {f"base_model.{part}": digest for part, digest in record.base_model.items()}
    new |= {f"base_model.{part}": digest for part, digest in base_model.items()}
    differing = [
        {"key": key, "old": old.get(key), "new": new.get(key)}
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and key not in may_change
    ]
    if refused := [change for change in differing if change["key"] not in new.get("run.resume_with_changes", ())]:
        keys = sorted(str(change["key"]) for change in refused)
        can_accept = set(keys) <= resuming.NAMED
        accept = f"accept this with run.resume_with_changes=[{','.join(keys)}], or " if can_accept else ""
        base = " (of what model.model_paths leads to)" if any(key.startswith("base_model.") for key in keys) else ""
        words = f"{describe_changes(refused)}{base}; set them back, or {accept}{restart}"
        raise CheckpointError(f"{run_dir} holds a run with other settings: {words}")
    return record.changes, differing


def describe_changes(changes: Sequence[Mapping[str, Any]]) -> str:
    """Describe changes (key, old, new) in words."""
    return ", ".join(f"{change['key']} {shown(change['old'])} -> {shown(change['new'])}" for change in changes)


class _RunRecord(BaseModel):
    """The part of run.json that a resumed run reads."""

    config: dict[str, dict[str, Any]]
    base_model: dict[str, str]
    changes: list[dict[str, Any]]


def library_versions(names: Sequence[str]) -> dict[str, str]:
    """Return {distribution: version} of the installed ones; torch's build, and the version of the imported rewardfl."""
    imported = {"torch": str(torch.__version__), "rewardfl": rewardfl.__version__}
    versions = {}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = imported.get(name) or metadata.version(name)
    return versions


def git_commit(folder: str | Path) -> str | None:
    """Return the commit of the checkout around `folder`, with "-dirty" where files differ; None without one."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    with contextlib.suppress(FileNotFoundError, subprocess.CalledProcessError):  # no git, no checkout
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True).strip()
    return None
