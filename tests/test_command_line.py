"""What the tools read from their command lines, and how they end."""

import argparse
from pathlib import Path

import pytest

from rewardfl import command_line
from rewardfl.weights.shards import InputError


@pytest.mark.parametrize(
    ("read", "values"),
    [
        (command_line.parse_size, {"5GB": 5 * 10**9, "1.5g": 15 * 10**8, "500 MB": 5 * 10**8, "40KB": 40000, "7": 7}),
        (command_line.parse_path_and_strength, {"a:b": ("a:b", 1.0), "a:-.5": ("a", -0.5), "a:2:1e1": ("a:2", 10.0)}),
        (command_line.parse_adapter, {"run:0.5": ("run", 0.5), "run": ("run", 1.0)}),
        (command_line.parse_judge, {"arc_1=a=b": ("arc_1", Path("a=b"))}),
    ],
)
def test_options_are_read(read, values):
    assert {text: read(text) for text in values} == values


@pytest.mark.parametrize(
    ("read", "texts", "message"),
    [
        (command_line.parse_size, ["0", "-1GB", "5TB", "GB", ""], "write 5GB or 500MB"),
        (command_line.parse_adapter, ["run:1001", "run:-1e9"], "must be "),
        (command_line.parse_judge, ["Arc=a", "arc", "arc=", "reward=a"], "must be NAME=FOLDER"),
    ],
)
def test_a_mistaken_option_is_refused(read, texts, message):
    for text in texts:
        with pytest.raises(argparse.ArgumentTypeError, match=message):
            read(text)


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (InputError("a\x1b[31m\nb"), 2, r"error: a\x1b[31m\nb"),
        (ValueError("ke\x1by: wrong"), 2, r"error: ke\x1by: wrong"),
        (OSError(28, "No space left", "a.txt"), 2, "error: a.txt: No space left"),
    ],
)
def test_a_tool_ends_with_one_line(capsys, error, code, line):
    def work():
        raise error

    assert command_line.exit_code(work) == code and capsys.readouterr().err == line + "\n"
    assert command_line.exit_code(lambda: None) == 0


def test_a_long_message_is_cut():
    assert command_line.one_line("x" * 2001) == "x" * 2000 + " ..."
