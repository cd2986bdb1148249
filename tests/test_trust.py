"""The permission to load code, which only a command line gives."""

import argparse

import pytest

from rewardfl import trust


@pytest.mark.parametrize("source", ["own.py", "own.rewards", "rewardfl.py", "rewardfl_tools.evaluate"])
def test_code_of_others_needs_the_option(source, monkeypatch):
    monkeypatch.setattr(trust, "_allowed", False)
    assert trust.refusal_message("x:Y", source) == f"x:Y is code of {source}; --trust-code on the command line loads it"
    monkeypatch.setattr(trust, "_allowed", True)
    assert trust.refusal_message("x:Y", source) == ""


def test_a_permission_ends_with_its_command_line(monkeypatch):
    monkeypatch.setattr(trust, "_allowed", False)
    assert trust.refusal_message("x", "rewardfl.rewards.motion") == ""
    for arguments in (["--trust-code"], []):
        parser = argparse.ArgumentParser()
        trust.add_option(parser)
        parser.parse_args(arguments)
        assert (trust.refusal_message("mine:Reward", "mine") == "") == bool(arguments)
