"""Fixtures of all tests, and the order in which they run.

It imports nothing heavy: pytest's first process, which only hands out tests, reads it too.
"""

import contextlib
import copy
import gc
import io
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
# what tests start is this checkout's, whichever is installed
os.environ["PYTHONPATH"] = os.pathsep.join(
    str(ROOT / folder) for folder in (".", "tests", "tests/support", "assets/build")
)
os.environ["HF_HUB_OFFLINE"] = "1"  # huggingface_hub reads it when it is imported
os.environ["OMP_NUM_THREADS"] = "1"  # the suite runs several workers

import pytest  # noqa: E402


@pytest.fixture
def trusts_code(monkeypatch):
    """Allow rewards of the tests' own files, as --trust-code does."""
    from rewardfl import trust

    monkeypatch.setattr(trust, "_allowed", True)


def pytest_collection_modifyitems(items):
    """Put the files with the longest runs first: a worker takes complete files, and would wait for the last one.

    A file that launches runs has `pytestmark = pytest.mark.slow(seconds)`, which `make quick` leaves out.
    """

    def seconds(item):
        mark = item.get_closest_marker("slow")
        return mark.args[0] if mark else 0

    items.sort(key=seconds, reverse=True)


# Garbage collection over all imports takes a third of the time in which tests are collected
gc.disable()


def pytest_collection_finish():
    gc.collect()
    gc.freeze()
    gc.enable()


measured = {}


def measured_before(video):
    """Return what rewardfl.estimate.measure.measure returns, from memory if this process has measured it."""
    from rewardfl.estimate import measure

    model = (os.path.abspath(video.backbone.described_by()), video.backbone.dtype)
    key = repr((*model, video.height, video.width, video.num_frames, video.adapter))
    if key not in measured:
        measured[key] = measure.measure(video)
    return copy.deepcopy(measured[key])


@pytest.fixture(autouse=True)
def measured_once(monkeypatch):
    """Measure once what an estimate measures on the meta device: it is the same each time."""
    if report := sys.modules.get("rewardfl.estimate.report"):  # most tests do not import it
        monkeypatch.setattr(report, "measure", measured_before)


@pytest.fixture
def native_again(pipe):
    """Make torch's own attention diffusers' default again after a test that chose another one."""
    yield
    pipe.transformer.set_attention_backend("native")


@pytest.fixture
def pipe():
    from pipelines import random_pipeline

    return random_pipeline()


def run_python(arguments, timeout=280, **settings):
    """Run Python in another process, as a user does."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, **settings)


def run_tool(main, *arguments, expect=0):
    """Run a tool's main in this process as the shell would; return what it printed."""
    output, argv = io.StringIO(), sys.argv
    sys.argv = ["tool", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            code = main()
    except SystemExit as stop:  # the parser's
        code = stop.code
    finally:
        sys.argv = argv
    assert code == expect, output.getvalue()
    return output.getvalue()
