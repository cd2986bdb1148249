"""Where tools write: a new path, or what --overwrite may replace, and never an input of the tool. No torch here."""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from rewardfl.files import atomic_directory, atomic_file, atomic_write, lock
from rewardfl.weights.shards import InputError

MARK = "rewardfl_files.json"  # in the folder of an evaluation: the names of the files that it may replace and remove
_LOCK = "rewardfl.lock"  # in the same folder; the process that fills it holds the lock


def check_inputs(option: str, path: Path, inputs: Iterable[Path]) -> None:
    """Raise InputError if the output is an input, holds one or is within one, by any name of theirs."""
    out = Path(os.path.realpath(path))
    for source in inputs:
        real = Path(os.path.realpath(source))
        pairs = [(out, each) for each in (real, *real.parents)] + [(real, each) for each in out.parents]
        if any(a == b or (os.path.exists(a) and os.path.exists(b) and os.path.samefile(a, b)) for a, b in pairs):
            raise InputError(f"{option} {path} is, contains or is inside the input {source}; write to another place")


def nearest_existing(path: Path) -> Path:
    """Return the path or its nearest parent that exists, perhaps as a link to nothing."""
    path = path.absolute()
    return next(parent for parent in (path, *path.parents) if os.path.lexists(parent))


def check_writable(where: str, path: Path) -> None:
    """Raise InputError if `path` cannot be a folder with new files."""
    folder = nearest_existing(path)
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"{where}: {folder} is not a folder that can be written; give another place")


@dataclass(frozen=True, kw_only=True)
class Target:
    """A file or a folder that a tool writes in one go. overwrite: replace it if it exists, whatever it holds."""

    option: str
    path: Path
    overwrite: bool
    inputs: Sequence[Path] = ()
    is_folder: bool = False

    def check(self) -> None:
        """Raise InputError unless the path is free, or may be replaced, and is apart from all inputs."""
        where = f"{self.option} {self.path}"
        check_inputs(self.option, self.path, self.inputs)
        if Path.cwd().is_relative_to(os.path.realpath(self.path)):
            raise InputError(f"{where} contains the current folder; write to another place")
        check_writable(where, self.path.parent)
        self._check_free()

    def _check_free(self) -> None:
        path, where = self.path, f"{self.option} {self.path}"
        if path.is_symlink() or (path.exists() and not (path.is_dir() if self.is_folder else path.is_file())):
            raise InputError(f"{where} is a link, or not a {'folder' if self.is_folder else 'file'}; give another name")
        if path.exists() and not self.overwrite:
            raise InputError(f"{where} exists; give another name, or --overwrite to replace it")

    def write(self, content: bytes) -> None:
        """Write the content of a file. Raise InputError as `check` does."""
        with self.fill() as file:
            file.write(content)

    @contextmanager
    def fill(self) -> Iterator[Any]:
        """Yield the open file, or the path of the folder, to fill. It appears when the block ends."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_directory(self.path) if self.is_folder else atomic_file(self.path) as new:
            yield new
            self._check_free()


class _Mark(BaseModel):
    files: list[str]


@dataclass(frozen=True)
class Folder:
    """The folder of an evaluation. Without overwrite only files that its mark lists are replaced or removed."""

    path: Path
    overwrite: bool

    def check(self, names: Iterable[str]) -> None:
        """Raise InputError when the folder is of something else, or files that it does not list have these names."""
        check_writable(f"--out {self.path}", self.path)
        listed, content = self.listed(), os.listdir(self.path) if self.path.exists() else []
        foreign = [name for name in content if name != _LOCK and not name.startswith(f"{MARK}.tmp-")]
        if listed is None and foreign and not self.overwrite:
            raise InputError(f"--out {self.path} has content and no {MARK}; give a new folder, or --overwrite")
        for name in sorted({*names, *(listed or ())}):
            if self._locate(name).exists() and not self.overwrite and name not in (listed or ()):
                raise InputError(f"{self.path / name} is in the way; move it away, or give --overwrite to replace it")

    def claim(self, names: Sequence[str]) -> None:
        """List files in the mark before they are written. Raise InputError as `check` does."""
        self.check(names)
        self._store({*names, *(self.listed() or ())})

    def remove(self, names: Sequence[str]) -> None:
        """Remove files and the folders that become empty, and list them no longer."""
        for path in map(self._locate, names):
            path.unlink(missing_ok=True)
            while (path := path.parent) != self.path and path.is_dir() and not any(path.iterdir()):
                path.rmdir()
        self._store({*(self.listed() or ())} - {*names})

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder and lock it. Raise InputError if another process holds the lock."""
        self.check(())
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            file = lock(self.path / _LOCK)
        except BlockingIOError:
            raise InputError(f"--out {self.path}: another process writes it; wait, or give another --out") from None
        with file:
            yield

    def listed(self) -> list[str] | None:
        """Return the names in the mark; None without a mark."""
        with suppress(FileNotFoundError, ValidationError):
            return _Mark.model_validate_json((self.path / MARK).read_bytes()).files
        return None

    def _store(self, names: set[str]) -> None:
        atomic_write(self.path / MARK, json.dumps({"files": sorted(names)}, indent=2) + "\n")

    def _locate(self, name: str) -> Path:
        """Return a file's path. Raise InputError for a name that leads out of the folder, and where no file can be."""
        path = self.path / name
        in_folder = f"{os.path.realpath(self.path)}/{os.path.normpath(name)}"
        if os.path.realpath(path) != in_folder or (path.exists() and not path.is_file()):
            why = "is outside the folder, or a link or something else is in its way"
            raise InputError(f"{path} {why}; move that away, or remove the name from {MARK}")
        return path
