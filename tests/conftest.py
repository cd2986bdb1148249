"""What pytest itself needs: where things are, which tests run first, and the server that forks their processes.

It imports nothing heavy: pytest's first process, which only hands out tests, reads it too.
"""

import contextlib
import io
import os
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools"), str(ROOT / "tests")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["OMP_NUM_THREADS"] = "1"  # the suite runs several workers

import pytest  # noqa: E402
import zygote  # noqa: E402


def pytest_configure(config):
    if zygote.ADDRESS not in os.environ:  # a worker has its parent's
        zygote.start()


LONGEST = ("test_distributed.py", "test_chaos.py", "test_train_reward_fl.py", "test_golden.py", "test_tiny_world.py")


def pytest_collection_modifyitems(items):
    """The longest files first: each worker takes whole files, and one that came last would be waited for."""
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


@pytest.fixture
def pipe():
    from pipelines import random_pipeline

    return random_pipeline()


def run_tool(main, *arguments, expect=0):
    """Run a merging tool's main in this process as the shell would; returns what it printed."""
    from _common import run

    output, argv = io.StringIO(), sys.argv
    sys.argv = ["tool", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output), pytest.raises(SystemExit) as stop:
            run(main)
    finally:
        sys.argv = argv
    assert stop.value.code == expect, output.getvalue()
    return output.getvalue()
