"""A forked process is what a new interpreter would be."""

import os
import signal
import socket
import subprocess
import sys
import time

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


def seen(run, tmp_path):
    """(exit code, output, errors) of SEEN by a file, and by -c."""
    (tmp_path / "seen.py").write_text(SEEN)
    environment = os.environ | {"MINE": "a b", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    found = []
    for arguments in ([str(tmp_path / "seen.py"), "x", "--y"], ["-c", SEEN, "x"]):
        done = run(arguments, cwd=tmp_path, env=environment)
        found.append((done.returncode, done.stdout, done.stderr))
    return found


def in_a_new_one(arguments, **settings):
    settings |= {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    return subprocess.run([sys.executable, *arguments], **settings)


@pytest.mark.long
def test_a_forked_process_sees_what_a_new_one_sees(tmp_path):
    forked, new = seen(zygote.run, tmp_path), seen(in_a_new_one, tmp_path)
    assert forked == new and forked[0][0] == 7


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
    process.send_signal(number)
    assert process.wait(timeout=30) == process.poll() == -number
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)  # nothing of it is left


def test_two_draw_other_numbers_where_two_new_ones_would():
    code = "import random, numpy; print(random.random(), numpy.random.rand())"
    one, two = (zygote.run(["-c", code]).stdout.split() for _ in range(2))
    assert all(a != b for a, b in zip(one, two, strict=True))


def test_a_launchers_processes_are_forked(tmp_path):
    (tmp_path / "rank.py").write_text("import os; print(os.environ['RANK'], os.getppid(), flush=True)")
    done = zygote.run(["-m", "torch.distributed.run", "--nproc_per_node=2", str(tmp_path / "rank.py")])
    assert done.returncode == 0, done.stderr
    (zero, parent), (one, other) = sorted(line.split() for line in done.stdout.splitlines())
    assert (zero, one) == ("0", "1") and parent == other  # the server, not the launcher, which is gone by now
    os.kill(int(parent), 0)


def test_a_process_ends_while_others_run():
    slow = zygote.Process(["-c", "import time; time.sleep(60)"])
    start = time.monotonic()
    assert zygote.run(["-c", ""]).returncode == 0 and slow.poll() is None
    slow.kill()
    assert slow.wait() == -signal.SIGKILL and time.monotonic() - start < 60


def test_who_asks_and_is_gone_harms_nobody(tmp_path):
    for sent in (b"", (100).to_bytes(8), (2).to_bytes(8) + b"{"):
        with socket.socket(socket.AF_UNIX) as asking:
            asking.connect(os.environ[zygote.ADDRESS])
            asking.sendall(sent)
    assert zygote.run(["-c", "print(1)"]).stdout == "1\n"
    missing = zygote.run(["-c", ""], cwd=tmp_path / "missing")
    assert missing.returncode == 1 and "FileNotFoundError" in missing.stderr
