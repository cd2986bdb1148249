"""Where tools write: a new path, or what --overwrite may replace, and never an input of the tool. No torch here."""

import fcntl
import functools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pydantic import BaseModel, ValidationError

from rewardfl.files import atomic_directory, atomic_file, atomic_write, open_to_append
from rewardfl.weights.shards import InputError

MARK = "rewardfl_files.json"  # in the folder of an evaluation: the names of the files that it may replace and remove
_LOCK = "rewardfl.lock"  # in the same folder; the process that fills it holds the lock


def check_inputs(option: str, path: Path, inputs: Iterable[Path]) -> None:
    """Raise InputError when the output is an input, holds one or is within one, by any name of theirs."""

    @functools.cache
    def identify(place: str) -> str | tuple[int, int]:
        try:
            status = os.stat(place)
        except OSError:
            return place
        return status.st_dev, status.st_ino

    def with_parents(place: str) -> set[str | tuple[int, int]]:
        return {identify(str(each)) for each in (Path(place), *Path(place).parents)}

    out = os.path.realpath(path)
    around = with_parents(out)
    for source in inputs:
        real = os.path.realpath(source)
        if identify(real) in around or identify(out) in with_parents(real):
            raise InputError(f"{option} {path} is, contains or is inside the input {source}; write to another place")


def nearest_existing(path: Path) -> Path:
    """Return the path or its nearest parent that exists, perhaps as a link to nothing."""
    path = path.absolute()
    return next(parent for parent in (path, *path.parents) if os.path.lexists(parent))


def _check_parent(option: str, path: Path) -> None:
    folder = nearest_existing(path.parent)
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"{option} {path}: {folder} is not a folder that can be written; give another place")


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
        if self.path.name in ("", ".."):
            raise InputError(f"{self.option} {self.path} is not the name of a file or folder to make; add one")
        check_inputs(self.option, self.path, self.inputs)
        if Path.cwd().is_relative_to(os.path.realpath(self.path)):
            raise InputError(f"{self.option} {self.path} contains the current folder; write to another place")
        _check_parent(self.option, self.path)
        self._check_free()

    def _check_free(self) -> None:
        path, where = self.path, f"{self.option} {self.path}"
        if not os.path.lexists(path):
            return
        if path.is_symlink() or not (path.is_dir() if self.is_folder else path.is_file()):
            raise InputError(f"{where} is a link, or not a {'folder' if self.is_folder else 'file'}; give another name")
        if not self.overwrite:
            raise InputError(f"{where} exists; give another name, or --overwrite to replace it")

    def write(self, content: bytes) -> None:
        """Write the content of a file. Raise InputError as `check` does."""
        with self.open() as file:
            file.write(content)

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """Open the file to fill; it appears when the block ends. Raise InputError if the path was taken meanwhile."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(self.path) as file:
            yield file
            self._check_free()

    @contextmanager
    def fill(self) -> Iterator[Path]:
        """Make the folder to fill; it appears when the block ends. Raise InputError if the path was taken meanwhile."""
        with atomic_directory(self.path) as folder:
            yield folder
            self._check_free()


class _Mark(BaseModel):
    files: list[str]


@dataclass(frozen=True)
class Folder:
    """The folder of an evaluation, which several runs fill. Only files that its mark lists are replaced or removed.

    overwrite: take a folder without a mark, and replace the files in the way.
    """

    path: Path
    overwrite: bool

    def check(self, names: Iterable[str]) -> None:
        """Raise InputError when the folder is of something else, or files that it does not list have these names."""
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"--out {self.path} is not a folder; give the name of a folder")
        _check_parent("--out", self.path / MARK)
        listed, content = self.listed(), os.listdir(self.path) if self.path.exists() else []
        foreign = [name for name in content if name != _LOCK and not name.startswith(f"{MARK}.tmp-")]
        if listed is None and foreign and not self.overwrite:
            raise InputError(f"--out {self.path} has content and no {MARK}; give a new folder, or --overwrite")
        for name in sorted({*names, *(listed or ())}):
            if self._locate(name).exists() and not self.overwrite and name not in (listed or ()):
                raise InputError(f"{self.path / name} is in the way; move it away, or give --overwrite to replace it")

    def claim(self, names: Iterable[str]) -> None:
        """List files in the mark before they are written. Raise InputError as `check` does."""
        names = list(names)
        self.check(names)
        self._store({*names, *(self.listed() or ())})

    def remove(self, names: Iterable[str]) -> None:
        """Remove files and the folders that become empty, and list them no longer."""
        names = set(names)
        for name in names:
            path = self._locate(name)
            path.unlink(missing_ok=True)
            while (path := path.parent) != self.path and path.is_dir() and not any(path.iterdir()):
                path.rmdir()
        self._store({*(self.listed() or ())} - names)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder and lock it. Raise InputError where another process holds the lock."""
        self.check(())
        self.path.mkdir(parents=True, exist_ok=True)
        with open_to_append(self.path / _LOCK) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(f"--out {self.path}: another process writes it; wait, or give another --out") from None
            except OSError:
                pass  # a network disk that is mounted without locks
            yield

    def listed(self) -> list[str] | None:
        """Return the names in the mark; None without a mark."""
        path = self.path / MARK
        try:
            content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
            return _Mark.model_validate_json(content).files
        except ValidationError:
            return None

    def _store(self, names: set[str]) -> None:
        atomic_write(self.path / MARK, json.dumps({"files": sorted(names)}, indent=2) + "\n")

    def _locate(self, name: str) -> Path:
        """Return a file's path. Raise InputError for a name that leads out of the folder, and where no file can be."""
        parts = Path(name).parts
        *above, path = [self.path.joinpath(*parts[: i + 1]) for i in range(len(parts))] or [self.path]
        if not parts or os.path.isabs(name) or ".." in parts or any(each.is_symlink() for each in (*above, path)):
            raise InputError(f"{self.path / name} is a link or outside the folder; remove it, or its name in {MARK}")
        for each, fits in (*((each, each.is_dir()) for each in above), (path, path.is_file())):
            if os.path.lexists(each) and not fits:
                raise InputError(f"{each} is in the way; move it away, or give another --out")
        return path
