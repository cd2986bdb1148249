"""Files and folders that are written completely or not at all, never through a link; text for terminals. No torch."""

import errno
import fcntl
import hashlib
import io
import itertools
import os
import secrets
import shutil
import sys
import unicodedata
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO

from rewardfl.file_kinds import open_file

SAMPLES, SAMPLE_BYTES = 64, 1 << 16  # samples of a model's file, for its digest
TEMPORARY = ".tmp-" + "[0-9a-f]" * 16  # pattern of the end of temporary_path's names


class _Console(io.TextIOWrapper):
    """Standard output or error that drops its text once it cannot be written: `| head` must not end a training."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError:
            self._drop()
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError:
            self._drop()

    def _drop(self) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())


def protect_console() -> None:
    """Set the console to escape characters that its encoding lacks, and to outlive a closed or full other end."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # it was closed before the start
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif type(stream) is io.TextIOWrapper:  # not a test's capture
            stream.flush()
            by_line = stream.line_buffering
            console = _Console(stream.buffer, stream.encoding, "backslashreplace", None, by_line, write_through=True)
            setattr(sys, name, console)


def escape_control(text: str) -> str:
    """Return the text with its control characters, except line breaks, as escapes: names in files may hold them."""
    return "".join(c.encode("unicode_escape").decode() if is_control(c) and c != "\n" else c for c in text)


def is_control(character: str) -> bool:
    """Return whether a terminal would obey the character, or fail on it as on half a surrogate pair."""
    return unicodedata.category(character) in ("Cc", "Cs")


def atomic_write(path: str | Path, content: bytes | str) -> None:
    """Write `content` to `path` completely or not at all, even in a power cut."""
    with atomic_file(Path(path)) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file to fill. It becomes `path` when the block ends without an exception, and vanishes otherwise."""
    temporary = temporary_path(path)
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    fsync(path.parent)


@contextmanager
def atomic_directory(path: str | Path) -> Iterator[Path]:
    """Make a folder to fill. It becomes `path` when the block ends without an exception, and vanishes otherwise.

    It replaces a folder at `path`. Raise FileExistsError for a link or a file there. Files get the umask's mode.
    """
    path = Path(path)
    _check_free(path, Path.is_dir)
    temporary, old = temporary_path(path), temporary_path(path)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        files = [file for file in temporary.rglob("*") if not file.is_symlink()]
        for file in files:
            if file.is_file() and file.stat().st_nlink == 1:  # a hard link shares its mode with the original
                file.chmod(temporary.stat().st_mode & 0o666)  # safetensors' save_file leaves 0600
            fsync(file)
        fsync(temporary)
        _check_free(path, Path.is_dir)
        # A folder cannot be replaced in one step: a kill between these two leaves no `path`, never half of one.
        if path.exists():
            os.replace(path, old)
        os.replace(temporary, path)
        fsync(path.parent)
    finally:
        if temporary.exists():
            shutil.rmtree(temporary, ignore_errors=True)
            if old.exists():
                os.replace(old, path)
    if old.exists():
        shutil.rmtree(old)


def open_to_append(path: Path, buffering: int = -1) -> IO[bytes]:
    """Open a file that is written bit by bit, or make it. Raise FileExistsError for a link, a folder or a device."""
    _check_free(path, Path.is_file)
    return open(path, "a+b", buffering, opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, 0o666))


def lock(path: Path) -> IO[bytes]:
    """Open a file and lock it until it is closed; on a file system without locks warn. Raise BlockingIOError."""
    file = open_to_append(path)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        why = f"is on a file system without locks ({error.strerror}); let no second process write there"
        warnings.warn(f"{path.parent} {why}", stacklevel=2)
    return file


def _check_free(path: Path, is_replaceable: Callable[[Path], bool]) -> None:
    if os.path.lexists(path) and (path.is_symlink() or not is_replaceable(path)):
        raise FileExistsError(errno.EEXIST, "is a link, or of another type; move it away", str(path))


def remove(path: Path) -> None:
    """Remove a file, a link (never what it leads to), or a folder with all that is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def temporary_path(path: Path) -> Path:
    """Return a new path of the unfinished `path`: next to it, on the same file system."""
    return path.with_name(f"{path.name}.tmp-{secrets.token_hex(8)}")


def sha256(path: str | Path) -> str:
    """Return the hash of a file's content, 64 hex digits."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync(path: Path) -> None:
    """Flush the content of `path`, a file or a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest_files(files: Sequence[Path]) -> str:
    """Return a digest of weights by the files' sizes and 4 MiB spread over each: to read 57 GB would take minutes.

    Two trainings differ in all of their weights, so no sample of them agrees. A folder means all files in it.
    """
    digest = hashlib.blake2b(digest_size=16)
    folders = [sorted(filter(Path.is_file, path.rglob("*"))) if path.is_dir() else [path] for path in files]
    for file in itertools.chain.from_iterable(folders):
        with open_file(file) as content:
            size = content.seek(0, os.SEEK_END)
            digest.update(size.to_bytes(8, "little"))
            for i in range(SAMPLES):
                content.seek(max(0, size - SAMPLE_BYTES) * i // (SAMPLES - 1))
                digest.update(content.read(SAMPLE_BYTES))
    return digest.hexdigest()
