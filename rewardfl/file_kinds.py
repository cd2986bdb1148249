"""Files in zip archives, files that are not what their names promise, and paths of other systems. No torch here."""

import errno
import io
import re
import zipfile
from pathlib import Path
from typing import Literal

FileKind = Literal["torch", "safetensors", "picture", "text"]

# {type: (its first bytes, what to tell the user)}; the first that fits counts
_TYPES = {
    "pointer": (rb"version https://git-lfs", "a Git LFS pointer; run git lfs pull in its folder, or download the file"),
    "page": (
        rb"(?i)(\xef\xbb\xbf)?\s*<(!doctype|html|head|\?xml)",
        "a web page; download the file itself (log in and accept its licence)",
    ),
    "gguf": (rb"GGUF", "a GGUF file, which is quantised; give the model's safetensors file"),
    # before torch: the length in its first bytes may look like a pickle
    "safetensors": (rb"(?s).{6}\0\0\{", "a safetensors file; give it a name that ends with .safetensors"),
    "torch": (
        rb"(?s)PK\x03\x04.{26}[^/]{1,200}/(data|version|byteorder|\.)|\x80[\x02-\x05]",
        "a torch file or another pickle; give a safetensors file",
    ),
    "archive": (rb"PK\x03\x04|\x1f\x8b|7z\xbc\xaf|Rar!", "an archive; unpack it and name the file in it"),
    "picture": (rb"(?s)\x89PNG|\xff\xd8\xff|GIF8|RIFF|P[1-6]\s|....ftyp", "a picture, a video or a sound"),
    "text": (rb"[^\0-\x08\x0e-\x1f\x7f]+\Z", "a text file; get it again"),
}

# {part of a path: what to tell the user}
_FOREIGN_PATHS = {
    r"(^|/)[A-Za-z]:[\\/]|\\": "it is a Windows path: write the path that this machine has, with /",
    r"(^|/)[a-z][a-z0-9+.-]+:/": "it is an address, and nothing is downloaded: download it and name the file",
    r"(^|/)(~|\$|%\w+%)": "~ and variables are not replaced here: write the path in full",
}


def open_file(path: str | Path) -> io.BufferedReader | io.BytesIO:
    """Open a file to read, or a member of a zip archive: ARCHIVE.zip/MEMBER. Raise OSError if it cannot be read."""
    path = Path(path)
    archive = next((parent for parent in path.parents if parent.suffix == ".zip" and parent.is_file()), None)
    if archive is None:
        return path.open("rb")
    try:
        with zipfile.ZipFile(archive) as members:
            return io.BytesIO(members.read(path.relative_to(archive).as_posix()))
    except KeyError as error:
        raise FileNotFoundError(errno.ENOENT, "the archive has no such member", str(path)) from error
    except zipfile.BadZipFile as error:
        raise OSError(errno.EIO, f"the archive is damaged ({error})", str(path)) from error


def wrong_kind(path: Path, *right: FileKind) -> str:
    """Return words that complete "PATH ..." if a file is empty or of another type than `right`; else ""."""
    with open_file(path) as file:
        head = file.read(1024)
    if not head:
        return "is empty (0 bytes); get it again"
    name = next((name for name, (pattern, _) in _TYPES.items() if re.match(pattern, head)), None)
    if name is None or name in right:
        return ""
    excerpt = f" (it begins with {head[:60].decode(errors='replace')!r})" if name == "text" else ""
    return f"is {_TYPES[name][1]}{excerpt}"


def foreign_path_hint(path: str | Path) -> str:
    """Return words that complete "PATH: no such file" for a Windows path, an address, ~ or a variable; else ""."""
    hints = (hint for pattern, hint in _FOREIGN_PATHS.items() if re.search(pattern, str(path)))
    return next((f"; {hint}" for hint in hints), "")


def first_line(error: Exception) -> str:
    """Return an error's first line, without torch's advice to run the code in a file (weights_only=False)."""
    line = (str(error).splitlines() or [""])[0] or type(error).__name__
    return "it holds code, which is not run" if "weights_only" in str(error) else line
