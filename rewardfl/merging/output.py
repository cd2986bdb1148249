"""Outputs of tools: which files may be replaced. No torch here.

A tool replaces only files that it can prove to be its own, and never its input. The proof:

- A folder (Folder) holds MANIFEST, which lists each file with its hash.
- A file (File) ends with a line that names the tool and the hash of the content above. A .safetensors file names the
  tool in its metadata, and a report in JSON under the key `tool`.

An edited file has another hash, so it is the user's. Merging tools write a file or a folder whole (Output).
"""

import argparse
import fcntl
import glob
import hashlib
import json
import os
import shutil
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from rewardfl import command_line
from rewardfl.files import atomic_directory, atomic_write, sha256
from rewardfl.merging import writing
from rewardfl.merging.writing import OutputFiles, TensorFile
from rewardfl.weights import shards
from rewardfl.weights.shards import InputError

MANIFEST = "rewardfl_manifest.json"  # in an output folder: the tool and its files
_LOCK = "rewardfl.lock"  # in an output folder that is filled bit by bit; the process that fills it holds the lock
LARGEST = 4 << 30  # bytes of a file that a tool writes whole, or of a manifest
_WAY_OUT = "move it away, or give another name"


def check_inputs(option: str, path: Path, inputs: Iterable[Path]) -> None:
    """Raise InputError when the output is an input, holds one or is within one."""
    for source in inputs:
        inside, outside = path.resolve(), source.resolve()
        if inside.is_relative_to(outside) or outside.is_relative_to(inside):
            raise InputError(f"{option} {path} is, contains or is inside the input {source}; write to another place")


def _check_parent(option: str, path: Path) -> None:
    """Raise InputError when the parent folder of `path` cannot be made or written."""
    folder = _nearest_existing(path.parent)
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"{option} {path}: {folder} is no folder that can be written; give another place")


def _nearest_existing(path: Path) -> Path:
    """Return the path or its nearest parent that exists, perhaps as a link to nothing."""
    path = path.absolute()
    return next(parent for parent in (path, *path.parents) if os.path.lexists(parent))


class Listing(BaseModel):
    """The content of a manifest. Of a report only the tool counts: its `files` mean something else."""

    tool: str
    files: dict[str, Any] = {}


def _listing(path: Path, tool: str) -> Listing | None:
    """Return the listing in a JSON file of this tool, of any version; None for anything else."""
    try:
        listing = Listing.model_validate_json(_content(path))
    except ValidationError:
        return None
    return listing if _same_tool(listing.tool, tool) else None


def _same_tool(tool: str, other: str) -> bool:
    return tool.split(" ")[:2] == other.split(" ")[:2]  # the third word is the version


def _content(path: Path) -> bytes:
    """Return the content of a file; b"" for a link, a device and a file too large for these tools."""
    regular = path.is_file() and not path.is_symlink()
    return path.read_bytes() if regular and path.stat().st_size <= LARGEST else b""


def _fingerprint(path: Path) -> dict[str, object]:
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


@dataclass(frozen=True, kw_only=True)
class File:
    """A file that a tool writes whole: a page, a picture or a video. tool: such as `rewardfl plot_metrics`."""

    option: str
    path: Path
    tool: str
    inputs: tuple[Path, ...] = ()

    def check(self) -> None:
        """Raise InputError unless the path is free or this tool's earlier output, and no input."""
        path = self.path
        check_inputs(self.option, path, self.inputs)
        _check_parent(self.option, path)
        if os.path.lexists(path) and (path.is_symlink() or not self._is_own()):
            raise InputError(f"{self.option} {path} is not a file as this tool wrote it; {_WAY_OUT}")

    def write(self, content: bytes) -> None:
        """Write the content with its proof. Raise InputError as `check` does."""
        self.check()
        if self.path.suffix == ".mp4":  # players pass over a box of type `free`
            content += struct.pack(">I4s", 8 + len(self._proof(b"")), b"free")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(self.path, content + self._proof(content))

    def _proof(self, content: bytes) -> bytes:
        """Return the last line, which readers of HTML, SVG, PDF, NPY and pictures ignore."""
        return f"\n<!-- {self.tool} sha256 {hashlib.sha256(content).hexdigest()} -->\n".encode()

    def _is_own(self) -> bool:
        if self.path.suffix == ".safetensors":
            try:
                return _same_tool(shards.read_header(self.path)[1].get("rewardfl", ""), self.tool)
            except InputError:
                return False
        content = _content(self.path)
        return content.endswith(self._proof(content[: -len(self._proof(b""))])) or bool(_listing(self.path, self.tool))


@dataclass(frozen=True)
class Folder:
    """A folder of a tool, perhaps filled in several runs. Files that the tool did not write stay as they are.

    The manifest lists a file before it is written, without a hash, and later with it.
    """

    path: Path
    tool: str

    def check(self, names: Iterable[str]) -> None:
        """Raise InputError when a file of the user's has one of these names below the folder."""
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"--out {self.path} is no folder; give the name of a folder")
        _check_parent("--out", self.path / MANIFEST)
        listed, folder = self.listed(), self.path.absolute()
        for name in names if folder.exists() else ():
            path = _nearest_existing(folder / name)
            is_above = path.is_dir() and path != folder / name and self._is_inside(path.relative_to(folder))
            if not is_above and not self._is_own(name, listed):
                raise InputError(f"{path} is in the way: it is not as this tool wrote it; {_WAY_OUT}")

    def check_whole(self) -> None:
        """Raise InputError unless the folder may be replaced: it is missing, or holds this tool's files alone."""
        if self.path.is_symlink():
            raise InputError(f"--out {self.path} is a link to {os.readlink(self.path)}; give the place itself")
        self.check(())
        if not self.path.exists():
            return
        listed = self.listed()
        if not listed:
            raise InputError(f"--out {self.path} has no {MANIFEST} of this tool; {_WAY_OUT}")
        parents = {self.path / parent for name in listed for parent in Path(name).parents}
        for path in sorted(self.path.rglob("*")):
            is_folder = path in parents and path.is_dir() and not path.is_symlink()
            is_own = path == self.path / MANIFEST or self._is_own(path.relative_to(self.path).as_posix(), listed)
            if not is_folder and not is_own:
                raise InputError(f"{path} is not as {MANIFEST} lists it; {_WAY_OUT}")

    def claim(self, names: Iterable[str]) -> None:
        """List files before they are written. Raise InputError as `check` does."""
        names = list(names)
        self.check(names)
        self._store(self.listed() | dict.fromkeys(names))

    def seal(self, names: Iterable[str]) -> None:
        """List files as they are now: later changes are the user's. Missing files leave the list."""
        listed = self.listed()
        for name in names:
            listed.pop(name, None)
            if (self.path / name).is_file():
                listed[name] = _fingerprint(self.path / name)
        self._store(listed)

    def remove(self, names: Iterable[str]) -> None:
        """Remove the files that are still as this tool wrote them, and the folders that become empty."""
        listed = self.listed()
        for name in list(names):
            path, is_own = self.path / name, self._is_own(name, listed)
            listed.pop(name, None)
            if is_own:
                path.unlink()
                while (path := path.parent) != self.path and not any(path.iterdir()):
                    path.rmdir()
        self._store(listed)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder and lock it. Raise InputError where another process holds the lock."""
        self.check(())
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / _LOCK).open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(f"--out {self.path}: another process writes it; wait, or give another --out") from None
            except OSError:
                pass  # a network disk that is mounted without locks
            yield

    def listed(self) -> dict[str, dict | None]:
        """Return the files of the manifest, {name: size and hash}. Raise InputError for another tool's."""
        path = self.path / MANIFEST
        if not os.path.lexists(path):
            return {}
        if (listing := _listing(path, self.tool)) is None:
            raise InputError(f"--out {self.path} is not an output of this tool, as {path} shows; give another --out")
        return listing.files

    def _store(self, files: Mapping[str, dict | None]) -> None:
        atomic_write(self.path / MANIFEST, json.dumps({"tool": self.tool, "files": files}, indent=2) + "\n")

    def _is_inside(self, name: Path | str) -> bool:
        """Return whether no link and no name in an edited manifest leads out of the folder."""
        path = self.path.resolve() / name
        return path.resolve() == path and path.is_relative_to(self.path.resolve())

    def _is_own(self, name: str, listed: Mapping[str, dict | None]) -> bool:
        """Return whether a file is as listed. One without a hash was claimed when no file had its name."""
        if name not in listed or not self._is_inside(name) or not (file := self.path / name).is_file():
            return False
        return listed[name] is None or _fingerprint(file) == listed[name]


@dataclass(frozen=True, kw_only=True)
class Output:
    """A file or folder that is written whole, perhaps with a report. force: replace this tool's earlier output."""

    path: Path
    report: Path | None
    force: bool
    tool: str

    @property
    def is_file(self) -> bool:
        """Return whether the output is a .safetensors file, not a folder."""
        return self.path.suffix == ".safetensors"

    def check(self, inputs: Sequence[Path]) -> None:
        """Raise InputError when the output or the report would harm an input, each other, or a file of the user's."""
        out = self.path
        check_inputs("--out", out, inputs)
        self.check_replaceable()
        index = out.with_name(f"{out.name}.index.json")
        if self.is_file and index.exists():
            raise InputError(f"{index} is in the way: loaders would take its shards and ignore {out.name}; delete it")
        if self.report:
            File(option="--json", path=self.report, tool=self.tool, inputs=(*inputs, out)).check()

    def check_replaceable(self) -> None:
        """Raise InputError unless the path is free or, with --force, this tool's earlier output."""
        path = self.path
        if path.exists() and not self.force:
            raise InputError(f"--out {path} exists; give another name, or --force to replace what this tool wrote")
        if self.is_file:
            File(option="--out", path=path, tool=self.tool).check()
        else:
            Folder(path, self.tool).check_whole()

    def model_files(self, weights: TensorFile, max_bytes: int, config: Path | None) -> OutputFiles:
        """Return the files of a model: the one that the output is, or a folder's, with a copy of `config`."""
        if self.is_file:
            return {self.path.name: weights}
        return writing.shard(weights, max_bytes) | ({"config.json": config} if config else {})

    def finish(self, args: argparse.Namespace, files: OutputFiles, report: dict) -> None:
        """Write the files and the report. args: --dry-run (write the report alone) and --verify.

        files: by their names below the output folder, or the one of an output that is a file. Raise InputError where
        the disk has no room, and where the path has meanwhile got content that may not be replaced.
        """
        nbytes = writing.count_bytes(files)
        self._make_room(nbytes)
        if args.dry_run:
            print(f"dry run: nothing written; {command_line.format_bytes(nbytes)} would be")
        else:
            self._write(files)
            if args.verify:
                self._verify(files)
            print(command_line.one_line(f"written: {self.path}"))
        if self.report:
            self.report.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(self.report, json.dumps({"tool": self.tool} | report, indent=2) + "\n")

    def _make_room(self, nbytes: int) -> None:
        """Print which unfinished outputs lie there. Raise InputError where the disk has no room."""
        for stray in sorted(self.path.parent.glob(f"{glob.escape(self.path.name)}.tmp-*")):
            print(command_line.one_line(f"note: {stray} is of a killed run, or of one that still writes"))
        free = shutil.disk_usage(_nearest_existing(self.path.parent)).free
        if nbytes > free:
            sizes = f"{command_line.format_bytes(nbytes)}, the disk has {command_line.format_bytes(free)} free"
            raise InputError(f"--out {self.path} needs {sizes}")

    def _write(self, files: OutputFiles) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with writing.progress_bar(files, str(self.path)) as bar:
            if self.is_file:
                (weights,) = (content for content in files.values() if isinstance(content, TensorFile))
                writing.write_file(self.path, weights, bar.update, self.check_replaceable)
                return
            with atomic_directory(self.path) as new:
                writing.write_folder(new, files, bar.update)
                Folder(new, self.tool).seal(sorted(files))
                self.check_replaceable()

    def _verify(self, files: OutputFiles) -> None:
        with writing.progress_bar(files, "verifying") as bar:
            for name, content in files.items():
                if isinstance(content, TensorFile):
                    writing.verify(self.path if self.is_file else self.path / name, content, bar.update)
        print("verified: every tensor was read back and is what was to be written")
