"""A forked process is what a new interpreter would be."""

import os
import signal
import subprocess
import sys

import pytest
import zygote

SEEN = """
import json, os, signal, sys, threading, numpy, torch
print(json.dumps({
    "argv": sys.argv, "name": __name__, "first": sys.path[0], "cwd": os.getcwd(), "mine": os.environ.get("MINE"),
    "threads": threading.active_count(), "torch threads": torch.get_num_threads(), "input": sys.stdin.read(),
    "signals": [str(signal.getsignal(n)) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)],
    "open": sorted(os.listdir("/proc/self/fd"))[:4],
}))
print("an error", file=sys.stderr)
sys.exit(7)
"""


def start_interpreter(arguments, **settings):
    settings |= {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    return subprocess.run([sys.executable, *arguments], **settings)


@pytest.mark.long
def test_a_forked_process_sees_what_a_new_one_sees(tmp_path):
    (tmp_path / "seen.py").write_text(SEEN)
    environment = os.environ | {"MINE": "a b", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for arguments in ([str(tmp_path / "seen.py"), "x", "--y"], ["-c", SEEN, "x"]):
        forked, new = (start(arguments, cwd=tmp_path, env=environment) for start in (zygote.run, start_interpreter))
        assert forked.returncode == new.returncode == 7
        assert (forked.stdout, forked.stderr) == (new.stdout, new.stderr)


def test_a_failure_is_a_traceback_and_a_one(tmp_path):
    done = zygote.run(["-c", "import atexit; atexit.register(print, 'the end'); 1 / 0"], cwd=tmp_path)
    assert done.returncode == 1 and done.stdout == "the end\n"
    assert done.stderr.startswith("Traceback") and done.stderr.endswith("ZeroDivisionError: division by zero\n")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_signals_reach_it_and_its_end_is_told(number):
    process = zygote.Process(["-c", "import time; print('up', flush=True); time.sleep(60)"], stdout=subprocess.PIPE)
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.05)
    assert zygote.run(["-c", ""]).returncode == 0 and process.poll() is None  # others come and go
    process.send_signal(number)
    assert process.wait(timeout=30) == process.poll() == -number
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)  # nothing of it is left


def test_two_draw_other_numbers_where_two_new_ones_would():
    code = "import random, numpy; print(random.random(), numpy.random.rand())"
    one, two = (zygote.run(["-c", code]).stdout.split() for _ in range(2))
    assert all(a != b for a, b in zip(one, two, strict=True))


def test_a_launchers_processes_are_forked(tmp_path):
    (tmp_path / "rank.py").write_text("import os, sys; print(os.environ['RANK'], 'diffusers' in sys.modules)")
    done = zygote.run(["-m", "torch.distributed.run", "--nproc_per_node=2", str(tmp_path / "rank.py")])
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 True", "1 True"]
