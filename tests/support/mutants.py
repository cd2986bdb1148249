"""Check that the tests see planted faults of the product: each is a change of one line, with the test that must fail.

python tests/support/mutants.py [part of a file's name ...]

tests/support/faults/ has them by room. A file's name stands on a line, and below it, indented, each of its faults:
part of a line -> its fault | test below tests/
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAILED, LIMIT = 1, 300  # pytest's exit code for failed tests; seconds

Faults = dict[str, list[tuple[str, str, str]]]


def read_faults() -> Faults:
    """Return {file: [(part, fault, test)]} of all rooms."""
    faults: Faults = {}
    for room in sorted((ROOT / "tests/support/faults").glob("*.txt")):
        rows: list[tuple[str, str, str]] = []
        for line in filter(None, room.read_text().splitlines()):
            if line.startswith(" "):
                change, _, test = line.strip().rpartition(" | ")
                part, fault = change.split(" -> ")
                rows.append((part, fault, test))
            else:
                faults[line] = rows = []
    return faults


def problems(faults: Faults) -> list[str]:
    """Return the faults of the table: a part that its file has not exactly once, a test that does not exist."""
    lines = []
    for file, rows in faults.items():
        text = (ROOT / file).read_text()
        for part, fault, test in rows:
            path, _, name = test.partition("::")
            if text.count(part) != 1 or part == fault or "\n" in part:
                lines.append(f"{file}: {part!r} must be a part of one line, once in the file")
            file_of_test = ROOT / "tests" / path
            if not file_of_test.is_file() or f"def {name.partition('[')[0]}(" not in file_of_test.read_text():
                lines.append(f"{file}: {part!r}: there is no test {test}")
    return lines


def copy_tree(folder: Path) -> None:
    """Copy the files of this checkout, with changes that are not committed, into `folder`."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    (folder / "rewardfl_tools").symlink_to("tools")  # the installed package of this name is another checkout's


def write_module(path: Path, text: str) -> None:
    """Write a module and remove its bytecode, which would serve for a text of equal size within the same second."""
    path.write_text(text)
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
        compiled.unlink()


def run_test(folder: Path, test: str) -> int:
    """Return pytest's exit code for one test, run in a fork of this process, which has the heavy imports."""
    if (child := os.fork()) == 0:
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        os.environ["PYTHONPATH"] = str(folder)
        with open(os.devnull, "w") as null:
            os.dup2(null.fileno(), 1)
            os.dup2(null.fileno(), 2)
        os._exit(int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"tests/{test}"])))
    end = time.monotonic() + LIMIT
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > end:
            os.kill(child, 9)
        time.sleep(0.05)
    return os.waitstatus_to_exitcode(ended[1])


def main(parts: list[str]) -> int:
    """Plant each fault in a copy of this checkout; print which its test sees, and return how many it does not."""
    import diffusers.loaders  # noqa: F401
    import peft  # noqa: F401
    import transformers  # noqa: F401

    faults = {file: rows for file, rows in read_faults().items() if not parts or any(part in file for part in parts)}
    if wrong := problems(faults):
        print(*wrong, sep="\n")
        return len(wrong)
    planted, missed = 0, 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        copy_tree(folder)
        for file, rows in faults.items():
            text = (folder / file).read_text()
            for part, fault, test in rows:
                write_module(folder / file, text.replace(part, fault))
                code = run_test(folder, test)
                planted, missed = planted + 1, missed + (code != FAILED)
                print(
                    "seen  " if code == FAILED else f"MISSED (exit code {code})", file, f"{part!r} -> {fault!r}", test
                )
                sys.stdout.flush()
            write_module(folder / file, text)
    print(f"{planted - missed} of {planted} faults are seen")
    return missed


if __name__ == "__main__":
    raise SystemExit(min(main(sys.argv[1:]), 1))
