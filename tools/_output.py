"""Where tools write: what may be replaced there, and what a killed run left. No torch here.

One rule holds for all: a tool replaces only what it can prove that it wrote, and never its own input. The proof:

- A folder (Folder, and the folders of those that merge) holds MANIFEST, which lists each file with its size and hash.
- A file (File) ends with a line that names the tool and the hash of what stands above it; a merged .safetensors file
  names the tool in its metadata.

What was edited since has another hash, so it is the user's.
"""

import argparse
import errno
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import stat
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from rewardfl.files import atomic_directory, atomic_write, fsync, sha256
from rewardfl.weights import shards
from rewardfl.weights.shards import Refused
from rewardfl_tools import _common, _writing
from rewardfl_tools._writing import Part

MANIFEST = "rewardfl_manifest.json"  # in an output folder: the tool, its folders and its files
LOCK = "rewardfl.lock"  # in an output folder that is filled bit by bit; whoever fills it holds this file's lock
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # of a network disk that is mounted without them
HASHED_BYTES = 16 << 20  # larger files are known by their size and time: hashing them would take as long as writing
LARGEST = 4 << 30  # bytes of a file that a tool writes whole
SECONDS_APART = 60  # by which the clocks of this host and of the disk's host may differ


@dataclass(frozen=True)
class Output:
    """What the command line says of the output; tool: the name and version that the output will carry."""

    path: Path
    report: Path | None
    force: bool
    tool: str

    @staticmethod
    def of(args: argparse.Namespace, tool: str) -> "Output":
        return Output(args.out, args.json, args.force, tool)

    @property
    def is_file(self) -> bool:
        """A .safetensors file; else a folder."""
        return self.path.suffix == ".safetensors"


# ------------------------------------------------------------------------------------------------------------
# Checks, before anything is written


def check(output: Output, inputs: list[Path]) -> None:
    """Refused when the output or the report would overwrite, hold or enter an input, or anything that is not ours.

    inputs: files and folders that are read. With --force an output is replaced that this tool wrote and that holds
    nothing else, nor anything that was edited since.
    """
    if output.path.name in ("", ".."):
        raise Refused(f"--out {output.path} has no name of its own; write the folder's name")
    check_inputs("--out", output.path, inputs)
    _check_parent("--out", output.path)
    check_replaceable(output)
    index = output.path.with_name(f"{output.path.name}.index.json")
    if output.is_file and index.exists():
        raise Refused(f"{index} is in the way: loaders would take its shards and ignore {output.path.name}; delete it")
    if output.report:
        _check_report(output, output.report, inputs)


def check_inputs(option: str, path: Path, inputs: Iterable[Path]) -> None:
    """Raise Refused when the output is an input, holds one or lies in one."""
    for source in inputs:
        if _holds(source, path) or _holds(path, source):
            raise Refused(f"{option} {path} is, holds or lies in the input {source}; write to another place")


def check_replaceable(output: Output) -> None:
    """Refused unless the output's place is free, or holds with --force nothing but an earlier output of this tool."""
    path = output.path
    if path.is_symlink():
        raise Refused(f"--out {path} is a link to {os.readlink(path)}; give the place itself, or another name")
    if not path.exists():
        for stray, why in strays(path):
            if stray.name.endswith("-old") and why is None:
                raise Refused(
                    f"{stray} is the earlier --out {path}, which a killed run had moved aside; rename it to "
                    f"{path.name}, or delete it"
                )
        return
    if output.is_file and path.is_dir():
        raise Refused(f"--out {path} is a folder")
    if not output.is_file and not path.is_dir():
        raise Refused(f"--out {path} is there, and no folder; name a folder or a .safetensors file")
    if not output.force:
        raise Refused(f"--out {path} exists; give another name, or --force to replace it")
    if why := _foreign_file(path, output.tool) if output.is_file else _foreign_folder(path, output.tool):
        raise Refused(f"--out {path} {why}; --force replaces nothing else. Move it away, or give another name")


def _foreign_file(path: Path, tool: str) -> str | None:
    """Why the file is not one that this tool wrote; None when it is."""
    try:
        written_by = shards.read_header(path)[1].get("rewardfl", "nobody")
    except Refused as error:
        return f"is not an output of this tool ({error})"
    return None if _same_tool(written_by, tool) else f"is not an output of this tool: its metadata names {written_by}"


def _foreign_folder(path: Path, tool: str) -> str | None:
    """What in the folder this tool did not write, or the user has changed since; None when it is all ours.

    What is missing is no reason: nothing of it can be lost. Nor is the temporary of a killed run.
    """
    manifest = _read_manifest(path / MANIFEST)
    if manifest is None or not _same_tool(manifest["tool"], tool):
        return f"is not an output of this tool: it has no {MANIFEST} that says so"

    def stop(error: OSError) -> None:
        raise error

    for place, folders, names in os.walk(path, onerror=stop):
        for name in [*folders, *names]:
            child = Path(place, name)
            known, mode = child.relative_to(path).as_posix(), child.lstat().st_mode
            if known == MANIFEST:
                continue
            if _owner(child) and _why_kept(child) is None:
                if name in folders:
                    folders.remove(name)
            elif stat.S_ISDIR(mode):
                if known not in manifest["folders"]:
                    return f"holds {known}, which this tool did not write"
            elif not stat.S_ISREG(mode) or known not in manifest["files"]:
                return f"holds {known}, which this tool did not write"
            elif _fingerprint(child, manifest["files"][known]) != manifest["files"][known]:
                return f"holds {known}, which was changed since it was written"
    return None


def _read_manifest(path: Path) -> dict | None:
    """{"tool": ..., "folders": [...], "files": {...}}; None when there is no such file."""
    if path.is_symlink() or not path.is_file() or path.stat().st_size > HASHED_BYTES:
        return None
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return None
    kinds = {"tool": str, "folders": list, "files": dict}
    fits = isinstance(found, dict) and all(isinstance(found.get(key), kind) for key, kind in kinds.items())
    return found if fits else None


def _same_tool(one: str, other: str) -> bool:
    """Whether the names agree; versions may differ."""
    return one.rpartition(" ")[0] == other.rpartition(" ")[0]


def _check_report(output: Output, path: Path, inputs: list[Path]) -> None:
    """Refused when --json would harm the base or the output, or, without --force, a file that is no earlier report."""
    for other in (*inputs, output.path):
        if _holds(other, path) or _holds(path, other):
            raise Refused(f"--json {path} is, holds or lies in {other}; write it to another place")
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise Refused(f"--json {path} is a link, a folder or a device; give the name of a file")
    if not path.parent.is_dir():
        raise Refused(f"--json {path}: there is no folder {path.parent}; make it, or write to another place")
    _check_parent("--json", path)
    if path.exists() and not output.force and not _is_report(path):
        raise Refused(f"--json {path} exists and is no earlier report; give another name, or --force to replace it")


def _is_report(path: Path) -> bool:
    if path.stat().st_size > HASHED_BYTES:
        return False
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and str(found.get("tool")).startswith("rewardfl ")


def _holds(outer: Path, inner: Path) -> bool:
    """Whether `inner` is `outer` or lies in it; by the files themselves, so that no link or mount hides it."""
    for way in (inner.resolve(), Path(os.path.abspath(inner))):
        places = (way, *way.parents)
        if outer.resolve() in places or (outer.exists() and any(p.exists() and p.samefile(outer) for p in places)):
            return True
    return False


def _check_parent(option: str, path: Path) -> None:
    """Refused when the folder that `path` goes into cannot be made or written."""
    folder = existing_parent(path)
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise Refused(f"{option} {path}: {folder} is no folder that can be written; give another place")


def existing_parent(path: Path) -> Path:
    """The nearest of the path's parents that is there, perhaps as a link to nothing."""
    return next(parent for parent in path.absolute().parents if os.path.lexists(parent))


def check_space(out: Path, nbytes: int) -> None:
    """Refused when the disk has no room for the output next to what is there."""
    free = shutil.disk_usage(existing_parent(out)).free
    if nbytes > free:
        needed = f"{_common.gigabytes(nbytes)}, the disk has {_common.gigabytes(free)} free"
        raise Refused(f"--out {out} needs {needed}")


# ------------------------------------------------------------------------------------------------------------
# One file, and a folder that is filled bit by bit


@dataclass(frozen=True, kw_only=True)
class File:
    """A file that a tool writes whole, such as a page, a picture or a video. tool: such as `rewardfl plot_metrics`."""

    option: str
    path: Path
    tool: str
    inputs: tuple[Path, ...]

    def check(self) -> None:
        """Raise Refused unless the place is free or holds what this tool wrote, and is no input."""
        path, name = self.path, f"{self.option} {self.path}"
        check_inputs(self.option, path, self.inputs)
        _check_parent(self.option, path)
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise Refused(f"{name} is a link, a folder or a device; give the name of a file")
        if path.exists() and not self._is_own():
            raise Refused(f"{name} is not a file as this tool wrote it; move it away, or give another name")

    def write(self, content: bytes) -> None:
        """Write the content with its proof. Raise Refused as `check` does, and for a disk that does not take it."""
        self.check()
        if self.path.suffix == ".mp4":  # players pass over a box of type `free`
            content += struct.pack(">I4s", 8 + len(self._proof(b"")), b"free")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(self.path, content + self._proof(content))
        except OSError as error:
            words = error.strerror or error
            raise Refused(f"{self.option} {self.path} cannot be written ({words}); write to another place") from error

    def _proof(self, content: bytes) -> bytes:
        """A last line, which readers of HTML, SVG, PDF, NPY and pictures pass over."""
        return f"\n<!-- {self.tool} sha256 {hashlib.sha256(content).hexdigest()} -->\n".encode()

    def _is_own(self) -> bool:
        content = self.path.read_bytes() if self.path.stat().st_size < LARGEST else b""
        return content.endswith(self._proof(content[: -len(self._proof(b""))]))


@dataclass(frozen=True)
class Folder:
    """A folder that a tool fills bit by bit, perhaps in several runs. Files that it did not write stay as they are.

    The manifest lists a file before it is written, without a hash, and later with it.
    """

    path: Path
    tool: str

    def check(self, names: Iterable[str]) -> None:
        """Raise Refused when a file is in the way of these, names below the folder."""
        if self.path.exists() and not self.path.is_dir():
            raise Refused(f"--out {self.path} is a file; give the name of a folder")
        _check_parent("--out", self.path / MANIFEST)
        listed = self.listed()
        for name in names:
            file = self.path / name
            places = [place for place in file.parents if place != self.path and place.is_relative_to(self.path)]
            blocked = [place for place in places if place.is_symlink() or place.is_file()]
            blocked += [file] if os.path.lexists(file) and not blocked else []
            if blocked and not (name in listed and self._is_own(name, listed[name])):
                raise Refused(
                    f"{blocked[0]} is in the way: it is not as this tool wrote it; move it away, or give another --out"
                )

    def claim(self, names: Iterable[str]) -> None:
        """List files that are going to be written. Raise Refused as `check` does."""
        names = list(names)
        self.check(names)
        self._list(self.listed() | dict.fromkeys(names))

    def seal(self, names: Iterable[str]) -> None:
        """List files as they are now: later changes are the user's. Those that are not there go."""
        listed = self.listed()
        for name in names:
            listed.pop(name, None)
            if (self.path / name).is_file():
                listed[name] = _fingerprint(self.path / name)
        self._list(listed)

    def remove(self, names: Iterable[str]) -> None:
        """Remove those of the files that are as this tool wrote them, and the folders that this leaves empty."""
        listed = self.listed()
        for name in list(names):
            place = self.path / name
            if name in listed and self._is_own(name, listed.pop(name)):
                for stray in [place, *(stray for stray, why in strays(place) if why is None)]:
                    stray.unlink()
                while (place := place.parent) != self.path and not any(place.iterdir()):
                    place.rmdir()
        self._list(listed)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder, and keep other processes out of it. Raise Refused where one is at work."""
        self.check(())
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / LOCK).open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Refused(f"--out {self.path}: another process writes it; wait, or give another --out") from None
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
            yield

    def listed(self) -> dict[str, dict | None]:
        """Return the files of the manifest, {name: size and hash}. Raise Refused for another tool's."""
        path = self.path / MANIFEST
        if not os.path.lexists(path):
            return {}
        manifest = _read_manifest(path)
        if manifest is None or not _same_tool(manifest["tool"], self.tool):
            raise Refused(f"--out {self.path} is not an output of this tool, as {path} shows; give another --out")
        return manifest["files"]

    def _list(self, files: Mapping[str, dict | None]) -> None:
        content = {"tool": self.tool, "folders": [], "files": files}
        atomic_write(self.path / MANIFEST, json.dumps(content, indent=2) + "\n")

    def _is_own(self, name: str, entry: dict | None) -> bool:
        """Whether a file is as it was listed. One that is listed without a hash was claimed when nothing was there."""
        folder = self.path.resolve()
        file = folder / name
        if not file.is_relative_to(folder) or file.parent.resolve() != file.parent:
            return False  # an edited manifest, or a link, leads elsewhere
        return file.is_file() and not file.is_symlink() and (entry is None or _fingerprint(file, entry) == entry)


# ------------------------------------------------------------------------------------------------------------
# What killed runs left


def clear_strays(output: Output, dry_run: bool) -> None:
    """Remove the temporaries of killed runs with the same --out and --json; name those that may still be written."""
    for path in (output.path, output.report):
        for stray, why in strays(path) if path else ():
            if why is not None:
                print(_common.one_line(f"note: {stray} is left alone, {why}"))
                continue
            if not dry_run and stray.is_dir():
                shutil.rmtree(stray)
            elif not dry_run:
                stray.unlink()
            print(_common.one_line(f"{'would remove' if dry_run else 'removed'} {stray}, which a killed run left"))


def strays(path: Path) -> Iterator[tuple[Path, str | None]]:
    """(temporary of `path`, why it must stay; None when the process that wrote it is dead), as files.py names them."""
    if path.parent.is_dir():
        for child in sorted(path.parent.iterdir()):
            if (owner := _owner(child)) and owner[0] == path.name:
                yield child, _why_kept(child)


def _owner(path: Path) -> tuple[str, str, int] | None:
    """(what it was to become, host, process) by a temporary's name; None for other names."""
    found = re.fullmatch(r"(.+)\.tmp-(.+)-(\d{1,9})(?:-old)?", path.name)
    return (found[1], found[2], int(found[3])) if found else None


def _why_kept(stray: Path) -> str | None:
    _, host, pid = _owner(stray)
    if stray.is_symlink() or not (stray.is_file() or stray.is_dir()):
        return "it is neither a file nor a folder"
    if host != platform.node():
        return f"it is from host {host}: delete it if no run is on there"
    if pid != os.getpid() and _may_be_writing(pid, stray):  # ours: containers count from 1
        return f"the process {pid} may be writing it"
    return None


def _may_be_writing(pid: int, stray: Path) -> bool:
    """Whether the process lives and was there at the last write; one that started later got a dead one's number."""
    if not psutil.pid_exists(pid):
        return False
    try:
        process = psutil.Process(pid)
        started, dead = process.create_time(), process.status() == psutil.STATUS_ZOMBIE
        last_write = max(path.lstat().st_mtime for path in (stray, *stray.rglob("*")))
    except (psutil.Error, FileNotFoundError):  # it may not be looked at, or is at work
        return True
    return not dead and started <= last_write + SECONDS_APART


# ------------------------------------------------------------------------------------------------------------
# Writing


@contextmanager
def folder(output: Output) -> Iterator[Path]:
    """A folder to fill, which becomes the output, with a manifest, when the block ends without an exception.

    Refused when meanwhile something came to its place that may not be replaced.
    """
    output.path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_directory(output.path) as temporary:
        yield temporary
        content = sorted(temporary.rglob("*"))
        manifest = {
            "tool": output.tool,
            "folders": [path.relative_to(temporary).as_posix() for path in content if path.is_dir()],
            "files": {path.relative_to(temporary).as_posix(): _fingerprint(path) for path in content if path.is_file()},
        }
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        check_replaceable(output)


def _fingerprint(path: Path, known: dict | None = None) -> dict[str, object]:
    """What tells whether a file is still the one that was written. known: a manifest's entry to compare with."""
    status = path.lstat()
    if known is not None and (not isinstance(known, dict) or known.get("bytes") != status.st_size):
        return {"bytes": status.st_size}
    if status.st_size <= HASHED_BYTES:
        return {"bytes": status.st_size, "sha256": sha256(path)}
    if known is None:
        fsync(path)  # a network disk may set the time when it stores the content
    return {"bytes": status.st_size, "mtime_ns": path.lstat().st_mtime_ns}


def write_file(
    output: Output, parts: list[Part], metadata: Mapping[str, str], progress: Callable[[int], object]
) -> None:
    """Write the output, a .safetensors file. Refused when something came to its place that may not be replaced."""
    output.path.parent.mkdir(parents=True, exist_ok=True)
    _writing.write_file(output.path, parts, metadata, progress, lambda: check_replaceable(output))


def write_model(
    output: Output,
    parts: list[Part],
    metadata: Mapping[str, str],
    max_bytes: int,
    progress: Callable[[int], object],
    config: Path | None,
) -> None:
    """Write a model as the output, a .safetensors file or a folder (with a copy of `config`), whole or not at all."""
    if output.is_file:
        write_file(output, parts, metadata, progress)
        return
    with folder(output) as place:
        _writing.write_folder(place, parts, metadata, max_bytes, progress)
        if config:
            (place / "config.json").write_bytes(config.read_bytes())


def write_report(output: Output, report: dict) -> None:
    """Write --json, where it is given."""
    if output.report:
        atomic_write(output.report, json.dumps({"tool": output.tool} | report, indent=2) + "\n")
