"""Which interpreter make takes, and what it refuses before it makes anything."""

import os
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


@pytest.fixture
def make(tmp_path):
    """Return a call of make in an empty folder, which returns (exit code, standard error)."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("pyproject.toml", "requirements-dev.txt"):
        (tmp_path / name).touch()

    def make(*arguments, path=None):
        environment = {key: value for key, value in os.environ.items() if key not in ("PYTHON", "MAKEFLAGS")}
        environment |= {"PATH": f"{path}:{environment['PATH']}"} if path else {}
        done = subprocess.run(["make", *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True)
        return done.returncode, done.stderr

    return make


def python(path, version):
    """A Python at `path` that says it is another version and runs nothing but -c."""
    path.parent.mkdir(parents=True, exist_ok=True)
    code = f"import sys; sys.version_info = {(*version, 0, 'final', 0)}; del sys.argv[1]; exec(sys.argv.pop(1))"
    path.write_text(f'#!/bin/sh\n[ "$1" = -c ] || exit 9\nexec {sys.executable} -c "{code}" "$@"\n')
    path.chmod(0o755)
    return path


def test_an_older_interpreter_is_refused(make, tmp_path):
    old = python(tmp_path / "bin" / "python3", (3, 10))
    for code, error in (make("demo", f"PYTHON={old}"), make("test", path=old.parent)):
        assert code == 2 and "3.10" in error and "3.11" in error and "Traceback" not in error
    assert not (tmp_path / ".venv").exists()
    python(tmp_path / ".venv" / "bin" / "python", (3, 12))
    other = python(tmp_path / "other" / "python3", (3, 13))
    code, error = make("test", f"PYTHON={other}")  # another than .venv's
    assert code == 2 and "3.12" in error and "3.13" in error and str(other) in error
    assert make("interpreter", path=other.parent) == (0, "")  # .venv is there, PYTHON was not asked for
