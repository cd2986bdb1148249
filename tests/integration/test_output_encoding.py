"""Output that is not UTF-8 (Windows consoles, LANG=de_DE) escapes what it lacks; no command ends in a traceback."""

import argparse
import io
import os
import subprocess
import sys

import pytest
from conftest import ROOT

from rewardfl.config import RewardFlConfig
from rewardfl.script import open_command
from rewardfl.training.arguments import parse_arguments
from rewardfl_tools import check_dataset

NAME = "没有"


def printed(encoding, main, monkeypatch, *arguments):
    """Return the exit code and what the command prints on an output of this encoding."""
    output = io.TextIOWrapper(io.BytesIO(), encoding)
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr(sys, "argv", ["x", *map(str, arguments)])
    code = main()
    output.flush()
    return code, output.buffer.getvalue().decode("ascii")


def test_tools_escape_what_the_console_lacks(tmp_path, monkeypatch):
    table = tmp_path / "metadata.csv"
    table.write_text(f"video,prompt\n{NAME}.mp4,一个人微笑\n", encoding="utf-8")
    settings = ("--config", ROOT / "configs" / "tiny_face.yaml", f"data.file_name={table}")
    code, text = printed("ascii", check_dataset.main, monkeypatch, *settings)
    assert code == 2 and r"\u6ca1\u6709.mp4" in text


@pytest.mark.parametrize("encoding", ("ascii", "latin-1"))
def test_scripts_escape_what_the_console_lacks(encoding, monkeypatch):
    def main():
        parse_arguments("")
        with open_command(argparse.Namespace(), RewardFlConfig) as command:
            print(NAME)
        return command.exit_code

    words = ("--config", ROOT / "configs" / "wan22_face_80gb.yaml", "--dry-run")
    code, text = printed(encoding, main, monkeypatch, *words)
    assert code == 0 and text == "\\u6ca1\\u6709\n"


@pytest.mark.parametrize("where", ["head", "full"])
def test_a_closed_console_ends_nothing(tmp_path, where):
    """As with `| head`, and on a full disk: the work is finished, without a traceback."""
    done = tmp_path / "done"
    code = "import sys; from rewardfl.files import protect_console; protect_console()\n"
    code += "for _ in range(999): print('x' * 999), print('x' * 999, file=sys.stderr)\n"
    code += f"open({str(done)!r}, 'w')"
    read, write = os.pipe()
    os.close(read)
    with open("/dev/full", "w") as full:
        output = full if where == "full" else write
        process = subprocess.run([sys.executable, "-c", code], stdout=output, stderr=output, cwd=ROOT, timeout=60)
    os.close(write)
    assert process.returncode == 0 and done.exists()
