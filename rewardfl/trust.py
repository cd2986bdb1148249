"""Permission to load code that a configuration or a run folder names. Only a command line gives it."""

import argparse

OPTION = "--trust-code"

_allowed = False


class _Allow(argparse.Action):
    def __call__(self, *_: object, **__: object) -> None:
        global _allowed
        _allowed = True


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add --trust-code to a command line. Without the option no code is loaded, whatever was allowed before."""
    global _allowed
    _allowed = False
    parser.add_argument(
        OPTION, action=_Allow, nargs=0, help="load rewards of other packages and files: module:Class, file.py:Class"
    )


def refusal_message(name: str, source: str) -> str:
    """Return why the reward `name` of a module or file `source` may not be loaded; "" where it may."""
    if _allowed or not source.endswith(".py") and source.partition(".")[0] == "rewardfl":
        return ""
    return f"{name} is code of {source}; {OPTION} on the command line loads it"
